"""Stale, lost and unusable samples in the train loop, and a resumed loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import DataError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.types import SampleId, Span
from asyncrl.storage.checkpoint_manifest import Progress
from tests.fakes.trainer_parts import feed, make_sample
from tests.fakes.trainer_rig import RULES, TrainerRig

# ------------------------------------------------------------------------------------------------ staleness


async def test_staleness_counts_from_the_version_at_lease() -> None:
    rig = TrainerRig()

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, spans=[Span(0, (sample_id.index - 1) // 4)])

    await feed(rig.queue, 4, make)
    rig.actor.on_publish = lambda version: feed(rig.queue, 4, make) if version == 1 else None
    records = await rig.run()
    assert [record.staleness for record in records] == [(0, 0), (1, 1), (1, 1), (2, 2)]
    assert records[3].metrics["staleness/max"] == 2.0


async def test_after_a_rewind_tokens_of_newer_versions_have_no_staleness() -> None:
    rig = TrainerRig(rules=replace(RULES, mask_beyond=0, rewound=True), lineage=2)
    spans = {1: [Span(0, 3)], 2: [Span(0, 0), Span(2, 3)]}
    await feed(rig.queue, 2, lambda sample_id: make_sample(sample_id, spans=spans[sample_id.index]))
    await rig.queue.rewind(0, version=0, lineage=2, total_samples=2)
    [record] = await rig.run()
    assert (record.staleness, record.lineage) == ((0, 0), 2)
    assert record.metrics["tokens/trained"] == 16, "no token is too old"


async def test_stale_tokens_are_masked() -> None:
    rig = TrainerRig(rules=replace(RULES, mask_beyond=1), total_steps=3)

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, spans=[Span(0, 0), Span(3, int(sample_id.index > 4))])

    records = await rig.run(6, make)
    assert [record.metrics["tokens/trained"] for record in records] == [16, 16, 4]
    assert rig.actor.batches[2]["loss_mask"][0].tolist() == [False, False, False, True]


async def test_a_fully_masked_sample_is_replaced() -> None:
    rig = TrainerRig(rules=replace(RULES, mask_beyond=0), total_steps=2)

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, spans=[Span(0, 1 if sample_id.index in (1, 4, 6) else 0)])

    rig.loop.progress.version = 1
    rig.loop.progress.trained_samples = 2
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        await feed(rig.queue, 4, make)
        await feed(rig.queue, 2, make)
        with anyio.fail_after(5):
            while not rig.records:
                await anyio.lowlevel.checkpoint()
        rig.loop.stop()
    assert rig.actor.steps == [[1, 4]]
    counts = await rig.counts()
    assert counts.trained == 2
    assert counts.dropped["stale"] >= 2


async def test_a_lost_payload_is_generated_again_while_others_train() -> None:
    rig = TrainerRig(total_steps=2)
    fed = await feed(rig.queue, 4)
    rig.payloads.lost = {fed[1]}
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while not rig.records:  # the third sample took its place
            await anyio.lowlevel.checkpoint()
        rig.payloads.lost = set()
        assert await feed(rig.queue, 1) == [fed[1]], "the sample is generated again under the same id"
    assert rig.actor.steps == [[1, 3], [4, 2]]
    counts = await rig.counts()
    assert (counts.fed, counts.trained, counts.num_dropped) == (4, 4, 0)


async def test_many_payloads_lost_at_once_are_generated_again() -> None:
    """The loss of a process or a file loses all samples in it at once."""
    rig = TrainerRig(total_steps=10)
    rig.payloads.lost = set(await feed(rig.queue, 20))
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while (await rig.counts()).fed:  # each sample is requeued once
            await anyio.lowlevel.checkpoint()
        rig.payloads.lost = set()
        await feed(rig.queue, 20)
    counts = await rig.counts()
    assert (counts.fed, counts.trained, counts.num_dropped) == (20, 20, 0)


async def test_a_payload_lost_repeatedly_is_an_error() -> None:
    rig = TrainerRig(total_steps=2)
    rig.payloads.lost = {SampleId(0, index) for index in range(1, 5)}

    async def keep_feeding() -> None:
        while True:
            await feed(rig.queue, 1)

    async with anyio.create_task_group() as group:
        group.start_soon(keep_feeding)
        with pytest.raises(InfraError, match=r"the payload of sample_0_\d was lost or damaged 3 times"):
            await rig.run()
        group.cancel_scope.cancel()
    counts = await rig.counts()
    assert (counts.trained, counts.leased) == (0, 0)


def broken(sample_id: SampleId, kind: str) -> Any:
    sample = make_sample(sample_id)
    if kind == "reward":
        rows = [replace(row, reward=math.nan) for row in sample.rows]
    else:
        rows = [replace(row, response_ids=row.response_ids - 100) for row in sample.rows]
    return replace(sample, rows=tuple(rows))


async def test_an_unusable_sample_is_dropped_and_logged_once_per_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = {1: "reward", 2: "tokens", 4: "reward", 5: "reward", 6: "tokens"}
    rig = TrainerRig(total_steps=2)

    def make(sample_id: SampleId) -> Any:
        kind = kinds.get(sample_id.index)
        return make_sample(sample_id) if kind is None else broken(sample_id, kind)

    await rig.run_while_feeding(9, make)
    assert rig.actor.steps == [[3, 7], [8, 9]]
    counts = await rig.counts()
    assert (counts.dropped["failed"], counts.trained, counts.leased) == (5, 4, 0)
    messages = [record.message for record in caplog.records if record.name == "trainer.batches"]
    assert len(messages) == 2
    assert "sample_0_1 cannot be trained on: a reward of nan" in messages[0]
    assert "token id" in messages[1]


async def test_a_sample_dropped_at_the_end_of_the_stream_is_replaced() -> None:
    rig = TrainerRig(total_steps=100, total_samples=3, samples_per_lease=4, samples_per_version=4)
    await rig.run_while_feeding(
        4, lambda sample_id: make_sample(sample_id, (0.0, math.nan if sample_id.index == 3 else 1.0))
    )
    assert rig.actor.steps == [[1, 2], [4]]
    assert (await rig.counts()).trained == 3


async def test_only_unusable_samples_stop_the_run() -> None:
    rig = TrainerRig()
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run_while_feeding(20, lambda sample_id: broken(sample_id, "reward"))
    [error] = caught.value.exceptions
    assert isinstance(error, DataError)
    assert "4 samples in a row could not be trained on" in str(error)
    assert "sample_0_4 cannot be trained on: a reward of nan" in str(error)


async def test_groups_of_equal_rewards_are_replaced() -> None:
    rig = TrainerRig(rules=replace(RULES, group_filter="equal_rewards"), total_steps=1)

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, (1.0, 1.0) if sample_id.index in (1, 3) else (0.0, 1.0))

    await rig.run_while_feeding(4, make)
    assert rig.actor.steps == [[2, 4]]
    counts = await rig.counts()
    assert (counts.dropped["filtered"], counts.trained) == (2, 2)


async def test_too_many_filtered_samples_in_a_row_stop_the_run() -> None:
    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, (1.0, 1.0) if sample_id.index != 3 else (0.0, 1.0))

    rig = TrainerRig(rules=replace(RULES, group_filter="equal_rewards"), max_consecutive_filtered=3)
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run_while_feeding(20, make)
    assert isinstance(caught.value.exceptions[0], DataError)
    message = str(caught.value.exceptions[0])
    assert "3 samples in a row were filtered (algorithm.filter_groups.max_consecutive = 3)" in message
    assert "sample_0_6 with rewards 1, 1" in message
    counts = await rig.counts()
    assert (counts.leased, counts.trained) == (0, 0)


async def test_a_queue_that_is_closed_before_any_trainable_sample_ends_the_run() -> None:
    rig = TrainerRig(rules=replace(RULES, mask_beyond=0))
    rig.loop.progress.version = 1
    await feed(rig.queue, 3)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while (await rig.counts()).dropped["stale"] < 2:  # a lease of two; the third sample is READY
            await anyio.lowlevel.checkpoint()
        await rig.queue.close()
    assert rig.records == []
    assert (await rig.counts()).dropped["shutdown"] == 1


# ------------------------------------------------------------------------------------------------ resume


async def run_in_two_parts(stop_after: int, **changes: Any) -> tuple[TrainerRig, TrainerRig]:
    first = TrainerRig(**changes)
    first.actor.on_step = lambda step: first.loop.stop() if step == stop_after else None
    await first.run(16)
    [(progress, snapshot)] = first.checkpoints.saved
    second = TrainerRig(progress=progress, restore=snapshot, **changes)
    await second.run_while_feeding(2 * second.settings.total_steps - snapshot.counts.trained)
    return first, second


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5, 6, 7])
async def test_a_resumed_run_continues_step_version_and_feed_index(stop_after: int) -> None:
    first, second = await run_in_two_parts(stop_after, total_steps=10, samples_per_lease=4, samples_per_version=8)
    records = [*first.records, *second.records]
    assert [record.step for record in records] == list(range(1, 11))
    assert [record.version for record in records] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    trained = [index for rig in (first, second) for step in rig.actor.steps for index in step]
    assert sorted(trained) == list(range(1, 21))
    counts = await second.counts()
    assert (counts.fed, counts.trained) == (20, 20)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
async def test_a_resume_in_the_middle_of_a_version_does_not_wait_for_missing_permits(stop_after: int) -> None:
    """With on-policy pacing exactly `samples_per_version` samples may exist before the next version is applied."""
    settings: dict[str, Any] = {"total_steps": 8, "samples_per_lease": 4, "samples_per_version": 8}
    snapshot = QueueSnapshot(
        next_index=9,
        outstanding=tuple(SampleId(0, index) for index in range(2 * stop_after + 1, 9)),
        counts=SampleCounts(fed=8, trained=2 * stop_after, ready=8 - 2 * stop_after),
        version=0,
    )
    progress = Progress(step=stop_after, trained_samples=2 * stop_after)
    rig = TrainerRig(progress=progress, restore=snapshot, staleness_threshold=0, **settings)
    rig.actor.on_publish = lambda version: rig.queue.set_applied_version(version)
    await rig.run_while_feeding(16 - 2 * stop_after)
    assert [record.step for record in rig.records] == list(range(stop_after + 1, 9))
