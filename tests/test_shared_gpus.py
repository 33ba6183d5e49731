"""Engines and ranks use the same GPUs in turns, with `placement: colocated` and `trainer.lend_after_s`. A whole run in
one process, in which vLLM's engine and Ray are replaced where the project calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.compose import load_config
from tests.fakes.one_run import CollectedRecords, OneEngine, run
from trainer.workers.worker import TrainingWorker

RUN = (
    "trainer.total_training_steps=2", "trainer.ppo_mini_batch_size=1", "trainer.device=cpu", "trainer.save_last=false",
    "weight_sync.max_mismatch_kl=null", "rollout.n=2", "data.val_files=[]",
)  # fmt: skip
SLEEP = ["pause wait", "sleep 1"]
TRAIN = ["train", "probe", "collect"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the calls of the ranks in the order in which they begin."""
    found: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return method(*args, **kwargs)

        return call

    names = {"train": "train_batch", "collect": "weights", "probe": "probe"}
    for name, method in {**names, "checkpoint": "save_checkpoint", "offload": "offload"}.items():
        monkeypatch.setattr(TrainingWorker, method, noted(name, getattr(TrainingWorker, method)))
    return found


async def train(directory: Path, calls: list[str], *overrides: str) -> tuple[CollectedRecords, CollectedRecords]:
    with anyio.fail_after(120):
        return await run(load_config(None, [*RUN, *overrides], mode="sync"), directory, calls=calls)


async def test_the_calls_of_a_step_are_in_the_order_that_vllm_prescribes(tmp_path: Path, calls: list[str]) -> None:
    _, steps = await train(tmp_path, calls, "placement=colocated", "trainer.save_last=true")
    assert [step.step for step in steps] == [1, 2]
    assert calls == [
        "offload",  # what the start of the Trainer has loaded, before the engines start
        *SLEEP, *TRAIN, "offload", "wake weights", "load 1", "wake kv_cache", "resume",
        *SLEEP, *TRAIN, "checkpoint", "offload", "wake weights", "load 2", "wake kv_cache", "resume",
    ]  # fmt: skip


async def test_gpus_are_lent_in_a_long_wait_and_taken_back_for_the_step(tmp_path: Path, calls: list[str]) -> None:
    """The run's own engine answers the second sample only once the other one has been woken in this wait."""
    num_answered = 0

    def prepare(own: OneEngine) -> None:
        original = own.add_request

        async def add_request(*args: Any, **kwargs: Any) -> Any:
            request = await original(*args, **kwargs)

            async def get() -> Any:
                nonlocal num_answered
                while num_answered >= 2 and "wake weights" not in calls:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                num_answered += 1
                return await ended()

            request.get, ended = get, request.get
            return request

        own.add_request = add_request  # type: ignore[method-assign]

    changes = ("trainer.lend_after_s=0.1", "trainer.total_training_steps=4", "rollout.max_concurrent_samples=1")
    config = load_config(None, [*RUN, *changes, "async_training.staleness_threshold=2"])
    with anyio.fail_after(120):
        _, steps = await run(config, tmp_path, calls=calls, prepare=prepare)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    sleep = ["pause keep", "pause abort", "sleep 1"]
    expected = [
        "offload",  # what the start of the Trainer has loaded, before the engines start
        *sleep, *TRAIN,
        "offload", "wake weights", "load 1", "wake kv_cache", "resume",
        *sleep, *TRAIN,
    ]  # fmt: skip
    assert calls[: len(expected)] == expected
    rest = calls[len(expected) :]  # on a busy machine, another wait is long, too
    asleep = True
    for call in rest:
        asleep = call == "sleep 1" or (asleep and call != "wake weights")
        assert asleep or call not in TRAIN
    assert [call for call in rest if call in TRAIN] == 2 * TRAIN


async def test_with_gpus_of_their_own_no_engine_sleeps(tmp_path: Path, calls: list[str]) -> None:
    await train(tmp_path, calls)
    of_engine = [call for call in calls if call not in TRAIN]
    assert of_engine == ["pause wait", "load 1", "resume", "pause wait", "load 2", "resume"]
