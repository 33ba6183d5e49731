"""The whole Rollouter with fake parts, and those parts of its actor that need no Ray."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import RolloutConfig
from asyncrl.core.failures import BugError, ConfigError, DeadlineError, FencedError, InfraError
from asyncrl.core.ports import GenerateRequest, GenerationEvent, WeightsVersion
from asyncrl.core.records import ApplyRecord, RunRecord, ValidationRecord
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import SampleMeta
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from rollouter import actor as actor_module
from rollouter.actor import RolloutActor
from rollouter.loading import RolloutTask, load_task
from rollouter.rollouter import Rollouter
from rollouter.weight_updates import RolloutStart
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeFeed, FakeScorer, ListPrompts, ListSink, MemoryPayloads, MemoryTurns, make_prompt


class RollouterRig:
    """A Rollouter between a real queue and fake parts; the test plays the Trainer."""

    def __init__(
        self,
        fleet: FakeFleet | None = None,
        *,
        val_before_train: bool = True,
        validated: WeightsVersion | None = None,
        queue: type[LocalSampleQueue] = LocalSampleQueue,
    ) -> None:
        config = Config(
            rollout=RolloutConfig(n=2, response_length=8, max_model_len=16),
        )
        prompts = ListPrompts([make_prompt(1, 2, 3), make_prompt(4, 5)])
        self.queue = queue(QueueOptions(2, Pacing(samples_per_version=4, staleness_threshold=1)))
        self.feed = FakeFeed()
        self.fleet = fleet or FakeFleet()
        self.sink = ListSink()
        self.send, self.records = anyio.create_memory_object_stream[RunRecord](math.inf)
        self.rollouter = Rollouter(
            config,
            RolloutTask(prompts, prompts, FakeScorer(), decode=str),
            queue=self.queue,
            payloads=MemoryPayloads(),
            turns=MemoryTurns(),
            feed=self.feed,
            fleet=self.fleet,
            sink=self.sink,
            start=RolloutStart(val_before_train, validated),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the Rollouter during the block. Then it ends, because the queue is closed or because it was stopped."""
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(self.rollouter.run)
                yield
                await self.queue.close()

    async def fails(self, error: type[Exception], match: str) -> None:
        """Let the answer for `sample_0_2` fail the run, and check that no call is left in flight."""

        async def release() -> None:
            await self.fleet.until_in_flight("sample_0_1", "sample_0_2", "val_0_0")
            self.fleet.release("sample_0_2")

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(release)
                with pytest.raises(error, match=match):
                    await self.rollouter.run()
        assert {"sample_0_1", "val_0_0"} <= set(self.fleet.cancelled)
        assert self.fleet.calls == {}

    async def train(self, version: int, *, validate: bool = False) -> None:
        """Lease and commit 4 samples, and publish a version."""
        lease = await self.queue.lease(4, trainer_version=version - 1, timeout_s=10)
        assert len(lease.samples) == 4
        await self.queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
        await self.feed.publish(version, step=version, validate=validate)


async def test_a_run_from_first_prompt_to_last_validation() -> None:
    rig = RollouterRig()
    async with rig.running():
        for version in range(1, 4):
            await rig.train(version, validate=version == 3)
    records = [(type(record), record.version) for record in rig.sink.records]
    assert records[0] == (ValidationRecord, 0)
    assert records[-2:] == [(ApplyRecord, 3), (ValidationRecord, 3)]
    counts = (await rig.queue.status()).counts
    assert (counts.trained, counts.running, counts.ready, counts.leased) == (12, 0, 0, 0)
    status = rig.rollouter.status()
    assert status["version"] == 3
    assert status["samples_done"] >= 12
    assert status["in_flight"] == 0
    assert status["val_generated_tokens"] == 2 * 5
    assert rig.fleet.version == 3


async def test_generation_continues_while_a_version_is_validated() -> None:
    rig = RollouterRig(FakeFleet(hold=True))
    async with rig.running():
        training = [f"sample_{(index - 1) // 2}_{index}" for index in range(1, 9)]
        await rig.fleet.until_in_flight("val_0_0", "val_0_1", *training)
        rig.fleet.release(*training[:4])
        await rig.train(1)
        assert rig.sink.records == []
        rig.fleet.release("val_0_0", "val_0_1")
        await rig.sink.until(2)
    assert [type(record) for record in rig.sink.records] == [ValidationRecord, ApplyRecord]
    assert set(rig.fleet.cancelled) >= set(training[4:])


async def test_a_failure_is_one_typed_error_and_ends_all_calls() -> None:
    rig = RollouterRig(FakeFleet(hold=True))
    rig.fleet.fail("sample_0_2", InfraError("gone", "cause"))
    await rig.fails(InfraError, "gone")


async def test_an_untyped_error_is_a_bug_error_with_its_traceback() -> None:
    rig = RollouterRig()
    rig.fleet.fail("sample_0_1", ZeroDivisionError("oops"))
    with anyio.fail_after(20), pytest.raises(BugError, match="ZeroDivisionError: oops") as caught:
        await rig.rollouter.run()
    assert "engine.py" in caught.value.cause


async def test_stop_ends_the_run_at_once() -> None:
    rig = RollouterRig(FakeFleet(hold=True))
    async with rig.running():
        await rig.fleet.until_in_flight("sample_0_1", "val_0_0")
        rig.rollouter.stop()
    assert rig.fleet.calls == {}
    with anyio.fail_after(20):
        stopped_before = RollouterRig()
        stopped_before.rollouter.stop()
        await stopped_before.rollouter.run()
    assert stopped_before.fleet.sessions == []


class FleetFailingOnCancel(FakeFleet):
    """A fleet whose calls fail when they are cancelled."""

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        try:
            async for event in super().generate(requests, session=session):
                yield event
        except anyio.get_cancelled_exc_class() as error:
            raise InfraError("the connection was closed") from error


class FencedQueue(LocalSampleQueue):
    async def offer(self, meta: SampleMeta, payload: Any, **options: Any) -> None:
        raise FencedError("rollouter 1 was replaced by rollouter 2")


async def test_a_replaced_incarnation_ends_with_only_a_fenced_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = RollouterRig(FleetFailingOnCancel(hold=True), queue=FencedQueue)
    await rig.fails(FencedError, "replaced by rollouter 2")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_restarted_rollouter_starts_at_the_newest_version_and_repeats_no_validation() -> None:
    rig = RollouterRig(val_before_train=True, validated=WeightsVersion(0, 2))
    rig.fleet.version = 2
    await rig.queue.set_applied_version(2)
    await rig.feed.publish(2, validate=True)
    async with rig.running():
        await rig.train(3)
    assert [(type(record), record.version) for record in rig.sink.records] == [(ApplyRecord, 3)]
    status = rig.rollouter.status()
    assert (status["version"], status["lineage"]) == (3, 0)
    assert status["crash_isolation"]["crashes"] == 0


# ------------------------------------------------------------------------------------------------ the actor


async def test_prepare_counts_prompts_and_a_run_without_prepare_is_a_bug(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(6)]
    rows.append({"prompt": "1" * 100})
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = Config(
        data=DataConfig(
            train_files=(str(path),),
            val_files=(str(path),),
            max_val_samples=2,
            max_prompt_length=32,
            cache_dir=str(tmp_path / "cache"),
        )
    )
    actor = RolloutActor(config)
    assert await actor.status() == {"incarnation": 1, "pid": os.getpid(), "node_id": ""}
    with pytest.raises(BugError, match="before prepare"):
        await actor.begin_run(None, None, RolloutStart(validate_first=False))
    actor._report("tokenizing data.train_files: 3 of 4 rows")
    assert (await actor.status())["loading"] == "tokenizing data.train_files: 3 of 4 rows"
    counts = await actor.prepare(str(tmp_path / "run"))
    assert "loading" not in await actor.status()
    assert counts == {
        "num_prompts": 6, "num_val_prompts": 2, "num_filtered": 1, "num_val_filtered": 0, "call_format": "",
    }  # fmt: skip
    profile.note("sample.ready")
    profile.flush()
    assert (tmp_path / "run" / "events" / "step_000000" / "rollouter.jsonl").exists()


async def test_prepare_returns_the_parser_that_auto_finds(tmp_path: Path) -> None:
    files = ["data.max_train_samples=1", "data.val_files=[]", f"data.cache_dir={tmp_path / 'cache'}"]
    config = load_config("calculator", ["rollout.multi_turn.format=auto", *files])
    prepared = await RolloutActor(config).prepare(str(tmp_path / "run"))
    assert prepared["call_format"] == "hermes"


def test_a_bad_reward_function_fails_before_data_is_read(tmp_path: Path) -> None:
    config = Config(
        data=DataConfig(train_files=(str(tmp_path / "nowhere.jsonl"),)), reward=RewardConfig(function="exact_mach")
    )
    with pytest.raises(ConfigError, match=r"reward\.function"):
        load_task(config, tmp_path)


class StartingLink:
    """A link to a worker, which may have died since it loaded."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.started = self.killed = False

    async def start(self, *, has_engines: bool) -> None:
        if self.error is not None:
            raise self.error
        self.started = has_engines

    async def kill(self) -> None:
        self.killed = True


async def test_a_worker_that_died_before_its_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, dead, alive, another = (
        RolloutActor(Config()),
        StartingLink(InfraError("died")),
        StartingLink(),
        StartingLink(),
    )

    async def start_link(config: Config, place: int, *, has_engines: bool) -> StartingLink:
        assert place == 0
        await another.start(has_engines=has_engines)
        return another

    monkeypatch.setattr(actor_module, "start_link", start_link)
    actor._links = [dead, alive]  # type: ignore[list-item]
    for place in range(2):
        await actor._start_worker(place, True)
    assert actor._links == [another, alive] and dead.killed and another.started and alive.started
    actor._links = [StartingLink(ConfigError("a reward fails"))]  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a reward fails"):
        await actor._start_worker(0, True)


async def test_a_serve_that_does_not_answer_where_agents_reach_the_run_is_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(actor_module, "endpoint_url", lambda app: hung.wait(30))
    try:
        with anyio.fail_after(10), pytest.raises(DeadlineError, match=r"within 0\.1 s \(timeouts\.call_s\)"):
            await actor_module._find_endpoint(Config.model_validate({"timeouts": {"call_s": 0.1}}), "run")
    finally:
        hung.set()
