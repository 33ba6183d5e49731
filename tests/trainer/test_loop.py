"""The loop on a real queue and fake parts: order of events, ends of every kind, books."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.failures import DivergenceError, InfraError
from asyncrl.manifest import Progress
from asyncrl.telemetry.registry import describe
from asyncrl.types import SampleId
from tests.fakes.trainer_parts import feed, make_sample
from tests.fakes.trainer_rig import Rig
from trainer.loop import LoopSettings


async def test_a_run_from_the_first_lease_to_the_last_checkpoint() -> None:
    rig = Rig()
    await feed(rig.queue, 8)
    records = await rig.run()
    assert [(record.step, record.version) for record in records] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [[sample_id.index for sample_id in step] for step in rig.worker.steps] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    # version, its step, the step of the weights in it, validate
    assert rig.publisher.published == [(1, 1, 1, False), (2, 2, 2, False), (3, 3, 3, False), (4, 4, 4, True)]
    [(progress, snapshot)] = rig.checkpoints.saved
    assert progress == Progress(step=4, version=4, published_step=4, leases=4, trained_samples=8, trained_tokens=64)
    assert (snapshot.books.trained, snapshot.outstanding) == (8, ())
    assert (await rig.queue.admit(1, timeout_s=0.1)).closed


async def test_records_carry_registered_metrics_and_what_was_trained() -> None:
    rig = Rig(total_steps=1)

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, (1.0, 1.0, 1.0, 1.0) if sample_id.index == 1 else (0.0, 0.0, 0.0, 2.0))

    def take_time(step: int) -> None:
        rig.clock.now_s += 3.0

    rig.worker.on_step = take_time
    await feed(rig.queue, 2, make)
    [record] = await rig.run()
    for name in record.metrics:
        describe(name)
    assert record.rewards == (1.0, 0.5)
    assert record.staleness == (0, 0)
    expected = {
        "reward/mean": 0.75,
        "reward/std": np.std([1, 1, 1, 1, 0, 0, 0, 2]),
        "response_tokens/mean": 4.0,
        "response_tokens/max": 4.0,
        "advantages/zero_share": 0.5,
        "tokens/trained": 32.0,
        "timing/update_s": 3.0,
        "timing/step_s": 3.0,
        "time/monotonic_s": 3.0,
        "actor/loss": 0.5,
    }
    assert {name: record.metrics[name] for name in expected} == pytest.approx(expected)


async def test_advantages_are_those_of_the_group() -> None:
    rig = Rig(total_steps=1)
    await feed(rig.queue, 2, lambda sample_id: make_sample(sample_id, (0.0, 1.0, float(sample_id.index))))
    await rig.run()
    for index, rows in ((1, rig.worker.rows[0][:3]), (2, rig.worker.rows[0][3:])):
        rewards = np.array([0.0, 1.0, index])
        expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
        np.testing.assert_allclose([row.advantages[0] for row in rows], expected, rtol=1e-5)
        assert all((row.advantages == row.advantages[0]).all() for row in rows)


async def test_a_lease_of_several_mini_batches_and_a_version_of_several_leases() -> None:
    rig = Rig(total_steps=10, samples_per_lease=4, samples_per_version=8)
    await feed(rig.queue, 20)
    records = await rig.run()
    assert [record.version for record in records] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    # five leases of two steps
    assert rig.loop.progress.leases == 5
    assert [step for _, step, _, _ in rig.publisher.published] == [4, 8, 10]


@pytest.mark.parametrize(
    ("test_freq", "expected"), [(-1, [10]), (1, [2, 4, 6, 8, 10]), (3, [4, 6, 10]), (4, [4, 8, 10]), (10, [10])]
)
async def test_validation_is_asked_of_the_first_version_at_or_after_each_multiple(
    test_freq: int, expected: list[int]
) -> None:
    rig = Rig(total_steps=10, samples_per_version=4, test_freq=test_freq)
    await feed(rig.queue, 20)
    await rig.run()
    assert [step for _, step, _, validate in rig.publisher.published if validate] == expected


async def test_without_a_validation_set_none_is_asked_for() -> None:
    rig = Rig(has_validation=False, test_freq=1)
    await feed(rig.queue, 8)
    await rig.run()
    assert not any(validate for *_, validate in rig.publisher.published)


async def test_checkpoints_come_between_leases_every_save_freq_steps() -> None:
    rig = Rig(total_steps=9, samples_per_lease=4, samples_per_version=4, save_freq=3)
    await feed(rig.queue, 18)
    await rig.run()
    assert [progress.step for progress, _ in rig.checkpoints.saved] == [4, 6, 9]
    assert all(snapshot.books.leased == 0 for _, snapshot in rig.checkpoints.saved)


async def test_no_last_checkpoint_when_none_is_wanted() -> None:
    rig = Rig(save_last=False)
    await feed(rig.queue, 8)
    await rig.run()
    assert rig.checkpoints.saved == []


# ------------------------------------------------------------------------------------------------ the stream ends


async def test_an_ended_stream_trains_what_is_there() -> None:
    rig = Rig(total_steps=100, samples_per_lease=4, samples_per_version=4)
    await feed(rig.queue, 7)
    await rig.queue.end_stream()
    records = await rig.run()
    assert [len(record.rewards) for record in records] == [2, 2, 2, 1]
    assert rig.publisher.published == [(1, 2, 2, False), (2, 4, 4, True)]
    assert (await rig.books()).trained == 7


async def test_a_stream_that_ends_right_after_a_publication_still_has_its_last_version_validated() -> None:
    rig = Rig(total_steps=100)
    await feed(rig.queue, 4)
    rig.publisher.on_publish = lambda version: rig.queue.end_stream() if version == 2 else None
    await rig.run()
    assert rig.publisher.published == [(1, 1, 1, False), (2, 2, 2, False), (3, 2, 2, True)]


async def test_an_empty_stream() -> None:
    rig = Rig()
    await rig.queue.end_stream()
    assert await rig.run() == []
    assert rig.publisher.published == []
    assert rig.checkpoints.saved == []


# ------------------------------------------------------------------------------------------------ stop


async def test_stop_finishes_the_step_releases_the_rest_and_saves() -> None:
    rig = Rig(total_steps=8, samples_per_lease=6, samples_per_version=6)
    rig.worker.on_step = lambda step: rig.loop.stop() if step == 2 else None
    await feed(rig.queue, 16)
    records = await rig.run()
    assert [record.step for record in records] == [1, 2]
    assert rig.publisher.published == []
    [(progress, snapshot)] = rig.checkpoints.saved
    assert (progress.step, progress.trained_samples) == (2, 4)
    assert snapshot.books.leased == 0
    assert [sample_id.index for sample_id in snapshot.outstanding] == list(range(5, 17))
    books = await rig.books()
    assert (books.trained, books.dropped["shutdown"]) == (4, 12)


async def test_stop_ends_a_wait_for_samples_at_once_and_leaves_nothing_leased() -> None:
    rig = Rig(call_s=1000.0)
    await feed(rig.queue, 3)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while (await rig.queue.status()).waiting.get("samples") != 1:
            await anyio.lowlevel.checkpoint()
        [wait] = rig.loop.waits.snapshot()
        assert wait.edge == "samples"
        rig.loop.stop()
    assert [record.step for record in rig.records] == [1]
    [(_, snapshot)] = rig.checkpoints.saved
    assert [sample_id.index for sample_id in snapshot.outstanding] == [3]


async def test_stop_before_the_run() -> None:
    rig = Rig()
    await feed(rig.queue, 8)
    rig.loop.stop()
    assert await rig.run() == []
    assert rig.checkpoints.saved == []


# ------------------------------------------------------------------------------------------------ failure


def diverge(step: int) -> None:
    if step == 2:
        raise DivergenceError("nan")


async def test_a_failed_step_gives_back_its_lease_and_is_raised() -> None:
    rig = Rig(total_steps=8, samples_per_lease=6, samples_per_version=6)
    rig.worker.on_step = diverge
    await feed(rig.queue, 6)
    with pytest.raises(DivergenceError):
        await rig.run()
    books = await rig.books()
    assert (books.trained, books.leased, books.ready) == (2, 0, 4)
    assert rig.checkpoints.saved == []


async def test_a_failed_publication_is_raised() -> None:
    async def fail() -> None:
        raise InfraError("no room")

    rig = Rig()
    rig.publisher.on_publish = lambda version: fail()
    await feed(rig.queue, 2)
    with pytest.raises(InfraError, match="no room"):
        await rig.run()
    assert (await rig.books()).trained == 2


async def test_a_queue_that_is_gone_does_not_hide_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(lease_id: int) -> None:
        raise InfraError("the queue is gone")

    rig = Rig()
    rig.worker.on_step = lambda step: diverge(2)
    monkeypatch.setattr(rig.queue, "release", gone)
    await feed(rig.queue, 2)
    with pytest.raises(DivergenceError):
        await rig.run()


async def test_a_cancelled_run_commits_the_step_it_was_in_and_gives_back_the_rest() -> None:
    rig = Rig(samples_per_lease=4, samples_per_version=4)
    await feed(rig.queue, 4)
    scope = anyio.CancelScope()
    rig.worker.on_step = lambda step: anyio.from_thread.run_sync(scope.cancel)
    with scope:
        await rig.run()
    assert scope.cancelled_caught
    books = await rig.books()
    assert (books.trained, books.leased, books.ready) == (2, 0, 2)


async def test_closing_the_stream_of_records_gives_back_the_lease() -> None:
    rig = Rig(samples_per_lease=4, samples_per_version=4)
    await feed(rig.queue, 4)
    records = rig.loop.run()
    await anext(records)
    await records.aclose()
    books = await rig.books()
    assert (books.trained, books.leased, books.ready) == (2, 0, 2)


def test_settings_from_the_configuration() -> None:
    config = Config.model_validate(
        {
            "trainer": {"ppo_mini_batch_size": 4, "test_freq": 5, "save_freq": 6, "save_last": False},
            "async_training": {
                "require_batches": 3,
                "trigger_parameter_sync_step": 2,
                "max_staleness": 7,
                "stale_action": "mask",
            },
            "data": {"val_files": ["val.jsonl"]},
            "timeouts": {"call_s": 8},
        }
    )
    expected = LoopSettings(
        total_steps=9,
        mini_batch_samples=4,
        samples_per_lease=12,
        samples_per_version=24,
        mask_beyond=7,
        has_validation=True,
        test_freq=5,
        save_freq=6,
        save_last=False,
        weights_dtype="float32",
        call_s=8.0,
    )
    assert LoopSettings.of(config, total_steps=9) == expected
    dropping = config.model_copy(
        update={"async_training": config.async_training.model_copy(update={"stale_action": "drop"})}
    )
    assert LoopSettings.of(dropping, total_steps=9).mask_beyond is None
