"""A role in this process: it has the calls of a group, one thread for them, and typed failures."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.failures import BugError, ConfigError, DataError, InfraError
from asyncrl.core.ports import Publication, WeightBucket, WeightsProbe
from tests.fakes.inline_group import InlineGroup
from tests.fakes.losses import Likelihood
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB
from tests.fakes.trainer_parts import CopyingPublisher, CopyingUpload
from trainer.engines.base import EngineSpec
from trainer.workers.rank import Rank, as_typed_error
from trainer.workers.worker import TrainingWorker

BATCH = make_batch([3, 5, 1, 4, 2], [4, 2, 6, 1, 5], vocab=VOCAB)


@pytest.fixture
async def publisher() -> CopyingPublisher:
    return CopyingPublisher()


@pytest.fixture
async def group(spec: EngineSpec, publisher: CopyingPublisher) -> AsyncIterator[InlineGroup]:
    group = await InlineGroup.start(spec, publisher=publisher)
    await group.plan(10)
    await group.set_loss_fn(Likelihood())
    yield group
    await group.close()


async def test_reset_restores_the_model_files(group: InlineGroup) -> None:
    before = await group.infer_batch(BATCH)
    await group.train_batch(BATCH)
    await group.forward_backward(BATCH)
    assert set(await group.optim_step()) == {"grad_norm", "lr"}
    assert await group.step() == 2
    await group.reset()
    assert await group.step() == 0
    torch.testing.assert_close((await group.infer_batch(BATCH))["log_probs"], before["log_probs"])


async def test_published_weights_are_the_trained_ones(group: InlineGroup, publisher: CopyingPublisher) -> None:
    await group.publish(1, 0, validate=False)
    await group.train_batch(BATCH)
    publication = (await group.publish(2, 1, validate=True)).publication
    assert (publication.version, publication.step, publication.validate) == (2, 1, True)
    first, second = publisher.published[1], publisher.published[2]
    assert first.keys() == second.keys()
    assert all(np.abs(first[name] - second[name]).max() > 0 for name in first)
    with pytest.raises(BugError, match="twice"):
        await group.publish(2, 1, validate=False)


async def test_a_probe_has_the_log_probs_of_the_published_weights_at_temperature_one(
    spec: EngineSpec, publisher: CopyingPublisher
) -> None:
    group = await InlineGroup.start(replace(spec, temperature=0.5), publisher=publisher)
    await group.plan(10)
    await group.set_loss_fn(Likelihood())
    assert (await group.publish(1, 0, validate=False, probe=True)).publication.probe is None
    await group.train_batch(BATCH)
    probe = (await group.publish(2, 1, validate=False, probe=True)).publication.probe
    assert probe is not None
    model = AutoModelForCausalLM.from_pretrained(spec.model.path)
    model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in publisher.published[2].items()}, strict=False
    )
    for ids, log_probs in zip(probe.token_ids, probe.log_probs, strict=True):
        row = torch.tensor([ids])
        with torch.no_grad():
            table = model(row).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(log_probs), table.gather(-1, row[0, 1:, None])[:, 0])
    lengths = (BATCH["prompt_lens"] + BATCH["response_lens"])[: len(probe.token_ids)]
    assert [len(ids) for ids in probe.token_ids] == (lengths - 1).tolist(), "an engine can continue every text"
    await group.close()


async def test_every_weight_is_collected_even_if_a_bucket_cannot_be_sent(
    group: InlineGroup, publisher: CopyingPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks would wait for one that stops."""
    collected: list[str] = []
    weights = TrainingWorker.weights

    def counted(self: TrainingWorker, dtype: Any) -> Iterator[Any]:
        for name, array in weights(self, dtype):
            collected.append(name)
            yield name, array

    monkeypatch.setattr(TrainingWorker, "weights", counted)
    monkeypatch.setattr(publisher, "begin", lambda version: FullUpload(publisher, version))
    with pytest.raises(InfraError, match="no room"):
        await group.publish(1, 0, validate=False)
    assert not publisher.published
    monkeypatch.undo()
    await group.publish(2, 0, validate=False)
    assert collected == list(publisher.published[2])


async def test_publishing_needs_a_publisher(spec: EngineSpec) -> None:
    group = await InlineGroup.start(spec)
    with pytest.raises(BugError, match="without a publisher"):
        await group.publish(1, 0, validate=False)
    await group.close()


async def test_failures_are_typed_and_leave_the_group_usable(group: InlineGroup) -> None:
    with pytest.raises(DataError, match="lacks loss_mask"):
        await group.train_batch(BATCH.exclude("loss_mask"))
    with pytest.raises(BugError, match=r"actor\.to failed: TypeError") as caught:
        await group.call("to")
    assert "Traceback" in caught.value.cause
    assert (await group.train_batch(BATCH))["loss"] > 0


class Slow(Likelihood):
    """A loss that blocks until `let_go` is set, and records its threads."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, scores: Any, tokens: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.let_go.wait(30)
        return super().__call__(scores, tokens)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("engine")}


def assert_ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)
    assert not threads & engine_threads()


async def test_a_failed_start_leaves_no_thread(spec: EngineSpec) -> None:
    before = engine_threads()
    wrong = replace(spec, engine=spec.engine.model_copy(update={"strategy": "lokal"}))
    with pytest.raises(ConfigError, match="is not built in; did you mean 'local'"):
        await InlineGroup.start(wrong)
    assert_ended(engine_threads() - before)


async def test_close_raises_a_failed_checkpoint(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine_threads()
    group = await InlineGroup.start(spec)

    def disk_is_full() -> None:
        raise InfraError("no space left on device")

    monkeypatch.setattr(group._rank._workers["actor"].engine, "finish_save", disk_is_full)
    with pytest.raises(InfraError, match="no space left on device"):
        await group.close()
    assert_ended(engine_threads() - before)


async def test_a_worker_that_fails_to_close_does_not_prevent_closing_others(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, closed = Rank(), []
    assert (await rank.load({"actor": spec, "critic": spec, "ref": spec})).error is None
    for role, worker in rank._workers.items():

        def close(role: str = role) -> None:
            closed.append(role)
            if role != "ref":
                raise InfraError(f"{role} not written")

        monkeypatch.setattr(worker, "close", close)
    answer = await rank.close()
    assert isinstance(answer.error, InfraError)
    assert answer.error.message == "actor not written"
    assert closed == ["actor", "critic", "ref"]


class Races(CopyingPublisher):
    """A publisher that sets `raced` if a loss was computed during a publication."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = anyio.Event()
        self.computes = threading.Event()
        self.raced = False

    def begin(self, version: int) -> CopyingUpload:
        return RacingUpload(self, version)


class RacingUpload(CopyingUpload):
    publisher: Races

    async def publish(self, step: int, *, validate: bool, probe: WeightsProbe | None = None) -> Publication:
        self.publisher.begun.set()
        self.publisher.raced = await anyio.to_thread.run_sync(self.publisher.computes.wait, 0.3)
        return await super().publish(step, validate=validate)


class SlowUpload(CopyingUpload):
    """Stores no bucket before `let_go` is set."""

    def __init__(self, publisher: CopyingPublisher, version: int) -> None:
        super().__init__(publisher, version)
        self.begun, self.let_go = anyio.Event(), anyio.Event()

    async def put(self, bucket: WeightBucket) -> int:
        self.begun.set()
        await self.let_go.wait()
        return await super().put(bucket)


class FullUpload(CopyingUpload):
    """Has no room after the first bucket."""

    async def put(self, bucket: WeightBucket) -> int:
        if self.buckets:
            raise InfraError("no room")
        return await super().put(bucket)


class Signals(Likelihood):
    def __init__(self, computes: threading.Event) -> None:
        self.computes = computes

    def __call__(self, scores: Any, tokens: Any) -> Any:
        self.computes.set()
        return super().__call__(scores, tokens)


async def test_no_step_runs_while_weights_are_published(spec: EngineSpec) -> None:
    """The published tensors may be the live weights."""
    publisher = Races()
    group = await InlineGroup.start(spec, publisher=publisher)
    await group.set_loss_fn(Signals(publisher.computes))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(group.publish, 1, 0, validate=False))
            await publisher.begun.wait()
            tasks.start_soon(group.train_batch, BATCH)
            tasks.start_soon(group.republish)
    assert publisher.computes.is_set()
    assert not publisher.raced
    assert publisher.offers == [1, 1], "republish publishes the new version again"
    await group.close()


async def test_republish_runs_during_a_step(group: InlineGroup, publisher: CopyingPublisher) -> None:
    await group.publish(1, 0, validate=False)
    slow = Slow()
    await group.set_loss_fn(slow)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.train_batch, BATCH)
            await anyio.to_thread.run_sync(slow.begun.wait)
            await group.republish()
            assert publisher.offers == [1, 1]
            slow.let_go.set()


async def test_republish_runs_while_a_version_is_collected(
    group: InlineGroup, publisher: CopyingPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that start after a restart of the store need not wait for it."""
    await group.publish(1, 0, validate=False)
    upload = SlowUpload(publisher, 2)
    monkeypatch.setattr(publisher, "begin", lambda version: upload)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(group.publish, 2, 1, validate=False))
            await upload.begun.wait()
            await group.republish()
            assert publisher.offers == [1, 1]
            upload.let_go.set()
    assert publisher.offers == [1, 1, 2]


async def test_a_cancelled_step_is_waited_for(group: InlineGroup) -> None:
    """The next call uses the model after the step."""
    slow = Slow()
    await group.set_loss_fn(slow)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.train_batch, BATCH)
            await anyio.to_thread.run_sync(slow.begun.wait)
            tasks.cancel_scope.cancel()
            threading.Timer(0.05, slow.let_go.set).start()
        assert slow.let_go.is_set()
        assert await group.step() == 1
        await group.train_batch(BATCH)
    assert len(slow.threads) == 1


async def test_training_continues_while_files_are_written(
    group: InlineGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, waited_for = threading.Event(), threading.Event()

    def wait_for_files() -> None:
        waited_for.set()
        assert written.wait(30)

    monkeypatch.setattr(group._rank._workers["actor"].engine, "wait_for_files", wait_for_files)
    await group.save_checkpoint(tmp_path)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.finish_checkpoint)
            await anyio.to_thread.run_sync(waited_for.wait)
            await group.train_batch(BATCH)
            written.set()
    assert (tmp_path / "engine.json").exists()
    assert await group.step() == 1
    await group.load_checkpoint(tmp_path)
    assert await group.step() == 0


def test_an_out_of_memory_error_names_the_keys_to_change() -> None:
    error = as_typed_error(torch.OutOfMemoryError("CUDA out of memory"), "actor.train_batch")
    assert type(error) is InfraError
    assert "lower ppo_max_token_len" in error.message


def test_a_worker_computes_with_the_threads_it_is_given(spec: EngineSpec) -> None:
    before = torch.get_num_threads()
    try:
        TrainingWorker(spec).set_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
