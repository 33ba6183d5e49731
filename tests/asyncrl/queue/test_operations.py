"""Illegal operations and inconsistent states. The state machine in `test_state` tests the legal ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.core.failures import BugError
from asyncrl.core.ports import QueuedSample
from asyncrl.core.types import DropReason, SampleId
from asyncrl.queue.core import Operation, apply
from asyncrl.queue.operations import (
    AttachPart,
    CloseQueue,
    CommitSamples,
    CoverCheckpoint,
    DropSamples,
    LeaseGranted,
    OfferSamples,
    PermitsGranted,
    ReleaseLease,
    RequeueSample,
    ReturnPermits,
    RewindTraining,
)
from asyncrl.queue.state import QueueState
from tests.fakes.queues import meta, replay


def offer(*sample_ids: SampleId) -> OfferSamples:
    return OfferSamples(tuple(QueuedSample(meta(one), None) for one in sample_ids))


def state_with(running: int, ready: int = 0) -> QueueState:
    state = QueueState.begin(10, keeps_payloads=True)
    ids = state.next_ids(running + ready)
    return replay(state, [PermitsGranted("", ids), offer(*ids[running:])])


def test_indices_are_the_feed_order_and_determine_epochs() -> None:
    assert [str(sample_id) for sample_id in QueueState(3, keeps_payloads=True).next_ids(7)] == [
        "sample_0_1", "sample_0_2", "sample_0_3", "sample_1_4", "sample_1_5", "sample_1_6", "sample_2_7",
    ]  # fmt: skip


RUNNING, READY, LEASED, TRAINED, DROPPED, NEVER = (SampleId(0, index) for index in (1, 2, 3, 4, 5, 9))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (PermitsGranted("", (READY,)), r"feed of sample_0_2; next is sample_0_6"),
        (offer(READY), r"offer of sample_0_2, which is READY"),
        (offer(RUNNING, LEASED), r"offer of sample_0_3, which is LEASED \(lease 1\)"),
        (offer(TRAINED), r"offer of sample_0_4, which is TRAINED or DROPPED"),
        (offer(NEVER), r"offer of sample_0_9, which is never fed"),
        (DropSamples(DropReason.FAILED, (RUNNING, TRAINED)), r"drop \(failed\) of sample_0_4"),
        (LeaseGranted("", 2, (READY, RUNNING), False), r"lease of sample_0_1, which is RUNNING"),
        (LeaseGranted("", 2, (READY, READY), False), r"lease names a sample twice: sample_0_2"),
        (LeaseGranted("", 1, (READY,), False), r"lease 1; next is 2"),
        (CommitSamples(1, (LEASED, READY)), r"commit under lease 1 of sample_0_2"),
        (CommitSamples(1, (LEASED, LEASED)), r"names a sample twice: sample_0_3"),
        (CommitSamples(2, (LEASED,)), r"commit under lease 2 of sample_0_3"),
        (ReleaseLease(2), r"lease 2 was never granted; the last one is 1"),
        (ReturnPermits("", (READY,)), r"return of sample_0_2, which is READY"),
        (RequeueSample(RUNNING), r"requeue of sample_0_1, which is RUNNING"),
        (RequeueSample(TRAINED), r"requeue of sample_0_4, which is TRAINED or DROPPED"),
        (CoverCheckpoint(3, 3), r"step 3 is on disk, but was never begun"),
        (AttachPart("trainer", 0), r"incarnation 0 of the trainer is or was attached already"),
        (RewindTraining(0, 0, 1, None, (READY,)), r"rewind of sample_0_2, which is READY"),
        (RewindTraining(0, 0, 1, None, (TRAINED,)), r"rewind of sample_0_4, which is TRAINED or DROPPED"),
        (RewindTraining(0, 0, 1, None, (NEVER,)), r"rewind of sample_0_9, which is never fed"),
        (RewindTraining(0, 0, 1, None, (DROPPED,)), r"rewind of 1 covered samples; fewer have been trained"),
    ],
)
def test_an_illegal_operation_raises_the_reason_and_changes_nothing(operation: Operation, message: str) -> None:
    state = state_with(running=1, ready=4)
    granted = LeaseGranted("", 1, (LEASED, TRAINED), False)
    replay(state, [granted, CommitSamples(1, (TRAINED,)), DropSamples(DropReason.FAILED, (DROPPED,))])
    before = state.dump()
    with pytest.raises(BugError, match=message):
        apply(operation, state)
    assert state.dump() == before


def test_a_closed_queue_grants_no_permits() -> None:
    state = state_with(running=1, ready=2)
    apply(CloseQueue(), state)
    assert state.counts().dropped["shutdown"] == 3
    with pytest.raises(BugError, match="closed"):
        apply(PermitsGranted("", state.next_ids(1)), state)


@pytest.mark.parametrize("change", [{"next_index": 9}, {"outstanding": ()}, {"outstanding": (SampleId(0, 2),) * 3}])
def test_an_inconsistent_snapshot_is_refused(change: dict[str, object]) -> None:
    state = state_with(running=2, ready=1)
    with pytest.raises(BugError, match="snapshot is inconsistent"):
        QueueState.begin(10, replace(state.snapshot(), **change), keeps_payloads=True)  # type: ignore[arg-type]


def test_inconsistent_counts_stop_the_next_operation() -> None:
    state = state_with(running=2)
    state.running.discard(RUNNING)
    with pytest.raises(BugError, match="sample counts are inconsistent: fed 2, running 0, ready 1"):
        apply(offer(SampleId(0, 2)), state)
