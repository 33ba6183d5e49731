"""Each operation's effect on the state: what is legal, what goes back where, and what a snapshot keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from asyncrl.core.failures import BugError
from asyncrl.core.ports import QueuedSample, QueueSnapshot, SampleCounts
from asyncrl.core.types import DropReason, SampleId, SampleMeta
from asyncrl.queue.operations import (
    AttachPart,
    CloseQueue,
    CommitSamples,
    CoverCheckpoint,
    DropSamples,
    LeaseGranted,
    MarkCheckpoint,
    OfferSamples,
    Operation,
    PermitsGranted,
    ReleaseLease,
    RequeueSample,
    ReturnPermits,
    RewindTraining,
    apply,
)
from asyncrl.queue.state import QueueState
from tests.fakes.queues import replay


def offer(*sample_ids: SampleId) -> OfferSamples:
    return OfferSamples(tuple(QueuedSample(SampleMeta(one, 0, 0, 1, 1, 1), None) for one in sample_ids))


def state_with(running: int = 0, ready: int = 0, *, keeps_payloads: bool = True) -> tuple[QueueState, list[SampleId]]:
    state = QueueState.begin(10, keeps_payloads=keeps_payloads)
    ids = state.next_ids(running + ready)
    return replay(state, [PermitsGranted("", ids), offer(*ids[running:])]), list(ids)


def lease(state: QueueState, *sample_ids: SampleId) -> int:
    apply(LeaseGranted("", state.last_lease + 1, sample_ids, ended=False), state)
    return state.last_lease


def test_ids_are_the_feed_order_and_epochs_follow_from_it() -> None:
    assert [str(sample_id) for sample_id in QueueState(3, keeps_payloads=True).next_ids(7)] == [
        "sample_0_1", "sample_0_2", "sample_0_3", "sample_1_4", "sample_1_5", "sample_1_6", "sample_2_7",
    ]  # fmt: skip


def test_ready_is_in_completion_order_and_a_release_restores_it() -> None:
    state, (a, b, c, d) = state_with(running=4)
    apply(offer(c, a, d, b), state)
    first, second = lease(state, c, a), lease(state, d)
    assert list(state.ready) == [b]
    replay(state, [ReleaseLease(second), ReleaseLease(first)])
    assert list(state.ready) == [c, a, d, b]


def test_commit_in_parts_then_release_the_rest() -> None:
    state, (a, b, c) = state_with(ready=3)
    lease_id = lease(state, a, b, c)
    apply(CommitSamples(lease_id, (b,)), state)
    assert state.left_of_lease(lease_id) == (a, c)
    apply(ReleaseLease(lease_id), state)
    assert state.left_of_lease(lease_id) == ()
    assert state.counts() == SampleCounts(3, ready=2, trained=1, dropped=dict.fromkeys(map(str, DropReason), 0))


RUNNING, READY, LEASED, TRAINED, NEVER = (SampleId(0, index) for index in (1, 2, 3, 4, 9))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (PermitsGranted("", (READY,)), r"feed of sample_0_2; next is sample_0_5"),
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
        (CoverCheckpoint(3), r"step 3 is on disk, but was never begun"),
        (AttachPart("trainer", 0), r"incarnation 0 of the trainer is attached already"),
        (RewindTraining(0, 0, 1, None, (READY,)), r"rewind of sample_0_2, which is READY"),
        (RewindTraining(0, 0, 1, None, (TRAINED,)), r"rewind of sample_0_4, which is TRAINED or DROPPED"),
        (RewindTraining(0, 0, 1, None, (NEVER,)), r"rewind of sample_0_9, which is never fed"),
    ],
)
def test_an_illegal_operation_says_why_and_changes_nothing(operation: Operation, message: str) -> None:
    state, (_, _, leased, trained) = state_with(running=1, ready=3)
    apply(CommitSamples(lease(state, leased, trained), (trained,)), state)
    before = state.dump()
    with pytest.raises(BugError, match=message):
        apply(operation, state)
    assert state.dump() == before


def test_a_rewind_puts_everything_back_in_completion_order() -> None:
    state, (a, b, c, d, e, f, g, h) = state_with(running=8)
    apply(offer(h, g, f, e, d, c), state)
    lease_id = lease(state, h, g, f, e)
    before = [CommitSamples(lease_id, (h,)), MarkCheckpoint(1), CommitSamples(lease_id, (e, g))]
    replay(state, [*before, DropSamples(DropReason.FILTERED, (d,)), CoverCheckpoint(1)])
    assert state.ended_for_good((h, e)) == (h,)
    state.forget_payload(g)
    apply(RewindTraining(1, 0, 1, None), state)
    assert list(state.ready) == [f, e, c], "f was leased, e was trained, c was READY"
    assert state.next_ids(2) == (g, SampleId(0, 9)), "g has no payload any more"
    assert (len(state.running), state.trained, state.num_dropped) == (2, 1, 1)
    assert state.name_of_state(d) == state.name_of_state(h) == "TRAINED or DROPPED"
    assert {a, b} == state.running


def test_a_rewind_undoes_a_shutdown_and_opens_the_queue() -> None:
    state, (a, b, c, d) = state_with(running=1, ready=3)
    apply(CommitSamples(lease(state, b), (b,)), state)
    lease(state, c)
    replay(state, [MarkCheckpoint(1), CloseQueue(), RewindTraining(1, 0, 1, None)])
    assert not state.closed
    assert list(state.ready) == [c, d]
    assert (state.counts().dropped["shutdown"], state.trained) == (0, 1)
    assert state.next_ids(1) == (a,)


def test_a_rewind_behind_a_covered_checkpoint_feeds_its_samples_again() -> None:
    state, (a, b, c) = state_with(ready=3)
    commit = CommitSamples(lease(state, a, b), (b, a))
    replay(state, [commit, MarkCheckpoint(1), CoverCheckpoint(1), DropSamples(DropReason.FAILED, (c,))])
    assert state.ended_for_good([a, b, c, SampleId(0, 4)]) == (a, b, c)
    with pytest.raises(BugError, match="rewind of 3 covered samples; fewer have been trained"):
        apply(RewindTraining(0, 0, 1, None, (a, b, c)), state)
    apply(RewindTraining(0, 0, 1, None, (a, b)), state)
    assert state.next_ids(3) == (a, b, SampleId(0, 4))
    assert (state.trained, state.fed) == (0, 1)


def test_a_replaced_part_gives_back_what_it_held() -> None:
    state, (a, b, c, d) = state_with(running=2, ready=2)
    lease(state, c)
    lease(state, d)
    replay(state, [AttachPart("rollouter", 1), AttachPart("trainer", 1), RequeueSample(c)])
    assert state.next_ids(4) == (a, b, c, SampleId(0, 5))
    assert list(state.ready) == [d]


def test_a_closed_queue_feeds_nothing() -> None:
    state, _ = state_with(running=1, ready=2)
    apply(CloseQueue(), state)
    assert state.counts().dropped["shutdown"] == 3
    with pytest.raises(BugError, match="closed"):
        apply(PermitsGranted("", state.next_ids(1)), state)


def test_a_snapshot_survives_json_and_feeds_the_outstanding_first() -> None:
    state, (_a, b, c, d, _e) = state_with(running=2, ready=3)
    replay(state, [CommitSamples(lease(state, c, d), (d,)), DropSamples(DropReason.OVERLONG, (b,))])
    raw = json.loads(json.dumps(asdict(state.snapshot())))
    snapshot = QueueSnapshot(
        next_index=raw["next_index"],
        outstanding=tuple(SampleId(*pair) for pair in raw["outstanding"]),
        counts=SampleCounts(**raw["counts"]),
        version=raw["version"],
    )
    again = QueueState.begin(10, snapshot, keeps_payloads=True)
    assert again.fed == 2, "one trained, one dropped"
    assert [sample_id.index for sample_id in again.next_ids(4)] == [1, 3, 5, 6]


@pytest.mark.parametrize("change", [{"next_index": 9}, {"outstanding": ()}, {"outstanding": (SampleId(0, 2),) * 3}])
def test_an_inconsistent_snapshot_is_refused(change: dict[str, object]) -> None:
    state, _ = state_with(running=2, ready=1)
    with pytest.raises(BugError, match="snapshot is inconsistent"):
        QueueState.begin(10, replace(state.snapshot(), **change), keeps_payloads=True)  # type: ignore[arg-type]


def test_a_lost_sample_stops_the_next_operation() -> None:
    state, (a, b) = state_with(running=2)
    state.running.discard(a)
    with pytest.raises(BugError, match="sample counts are inconsistent: fed 2, running 0, ready 1"):
        apply(offer(b), state)


@pytest.mark.parametrize("keeps_payloads", [False, True])
def test_a_dump_gives_the_same_state(keeps_payloads: bool) -> None:
    state, (a, b, c, d, *_) = state_with(running=2, ready=4, keeps_payloads=keeps_payloads)
    lease_id = lease(state, c, d)
    steps: list[Callable[[], Operation]] = [
        lambda: CommitSamples(lease_id, (c,)),
        lambda: MarkCheckpoint(1),
        lambda: DropSamples(DropReason.FAILED, (a,)),
        lambda: AttachPart("rollouter", 2),
        lambda: PermitsGranted("request", state.next_ids(2)),
        lambda: CloseQueue(),
        lambda: RewindTraining(1, 0, 3, 9),
        lambda: AttachPart("trainer", 2),
    ]
    for step in steps:
        apply(step(), state)
        dump = state.dump()
        again = QueueState.load(json.loads(json.dumps(dump)), 10, keeps_payloads=keeps_payloads)
        assert json.dumps(again.dump()) == json.dumps(dump)
    assert b in state.running or b in state.returned
