"""The queue through crashes, repeated calls and rewinds: examples and a state machine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.failures import BugError, FencedError
from asyncrl.core.ports import Admission, Lease, QueuedSample
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import DropReason, SampleId, SampleMeta
from asyncrl.queue.core import Operation
from asyncrl.queue.journal_reader import UNREADABLE, SampleHistories
from asyncrl.queue.operation_rows import from_row, surviving_marks, to_row, trained_since
from asyncrl.queue.operations import (
    AdmitSamples,
    AttachPart,
    CloseQueue,
    CommitSamples,
    CoverCheckpoint,
    DropSamples,
    LeaseGranted,
    LeaseSamples,
    MarkCheckpoint,
    OfferSamples,
    PermitsGranted,
    ReleaseLease,
    RequeueSample,
    ReturnPermits,
    RewindTraining,
    SetAppliedVersion,
)
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueCaller, QueueOptions
from asyncrl.queue.state import QueueState
from asyncrl.storage.checkpoint_manifest import NO_REWINDS
from asyncrl.storage.sample_bytes import FileRef
from asyncrl.storage.segments import segment_name
from tests.fakes import hostile
from tests.fakes.queues import CalledBy, MemoryLog, fill, meta, payload, rebuilt, train

PROMPTS = 5
MAX_STALENESS = 3
TOKENS = 10
"""Trained tokens per sample."""


def make_queue(log: MemoryLog, size: int = 4, threshold: float = 0.0, total: int | None = None) -> LocalSampleQueue:
    return LocalSampleQueue(QueueOptions(PROMPTS, Pacing(size, threshold, total)), journal=log)


def a_state() -> QueueState:
    """Return a state in which every field has a value."""
    state = QueueState(PROMPTS, keeps_payloads=True, total_samples=20)
    ids = state.next_ids(6)
    operations = (
        AttachPart("rollouter", 1), PermitsGranted("a", ids),
        OfferSamples(tuple(QueuedSample(meta(one), FileRef("1-1.safetensors", 0)) for one in ids[:5])),
        LeaseGranted("b", 1, ids[:4], ended=False), CommitSamples(1, ids[:2], 20),
        DropSamples(DropReason.STALE, ids[2:3]),
        MarkCheckpoint(1), SetAppliedVersion(1, 0), RewindTraining(1, 1, 1, 20, trained_tokens=20),
    )  # fmt: skip
    for operation in operations:
        operation.apply(state)
    return state


@settings(max_examples=300, deadline=None)
@given(hostile.damaged(a_state().dump()))
def test_a_damaged_state_is_refused_or_has_numbers_as_counts(raw: Any) -> None:
    try:
        state = QueueState.load(json.loads(hostile.dumps(raw)), PROMPTS, keeps_payloads=True)
    except UNREADABLE:
        return
    counts = state.counts()
    numbers = (counts.fed, counts.trained, counts.replayed, counts.num_dropped, state.trained_tokens, state.version)
    assert all(isinstance(each, int) for each in numbers)


# ------------------------------------------------------------------------------------------------ rows

IDS = st.integers(1, 10**6).map(QueueState(PROMPTS, keeps_payloads=True).id_of)
ID_TUPLES = st.lists(IDS, max_size=4).map(tuple)
NUMBERS = st.integers(0, 10**9)
SAMPLES = st.builds(
    QueuedSample,
    st.builds(SampleMeta, IDS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.one_of(st.none(), st.builds(FileRef, st.builds(segment_name, st.integers(1, 99), st.integers(1, 99)), NUMBERS)),
)
OPERATIONS: list[st.SearchStrategy[Any]] = [
    st.builds(PermitsGranted, st.text(), ID_TUPLES),
    st.builds(ReturnPermits, st.text(), ID_TUPLES),
    st.builds(OfferSamples, st.lists(SAMPLES, max_size=3).map(tuple)),
    st.builds(DropSamples, st.sampled_from(DropReason), ID_TUPLES),
    st.builds(LeaseGranted, st.text(), NUMBERS, ID_TUPLES, st.booleans()),
    st.builds(CommitSamples, NUMBERS, ID_TUPLES, NUMBERS),
    st.builds(ReleaseLease, NUMBERS),
    st.builds(RequeueSample, IDS),
    st.builds(SetAppliedVersion, NUMBERS, NUMBERS),
    st.just(CloseQueue()),
    st.builds(MarkCheckpoint, NUMBERS),
    st.builds(CoverCheckpoint, NUMBERS, NUMBERS),
    st.builds(AttachPart, st.text(), NUMBERS),
    st.builds(RewindTraining, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS, ID_TUPLES, NUMBERS),
]


@given(st.one_of(OPERATIONS))
def test_every_operation_is_read_back_unchanged_from_its_journal_row(operation: Operation) -> None:
    row = to_row(operation)
    back = from_row(row, PROMPTS)
    assert back == operation
    if isinstance(back, OfferSamples):
        assert all(sample.payload is None or isinstance(sample.payload, FileRef) for sample in back.samples)


async def test_calls_of_a_replaced_part_are_refused_even_if_they_are_parked() -> None:
    queue = make_queue(MemoryLog())
    old, new = CalledBy(queue, "rollouter"), CalledBy(queue, "rollouter", 2)
    ids = (await old.admit(4, timeout_s=0)).sample_ids
    await old.offer(meta(ids[1]), payload(ids[1]))

    async def parked() -> None:
        with pytest.raises(FencedError):
            await old.admit(1, timeout_s=60)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parked)
            await anyio.wait_all_tasks_blocked()
            await queue.attach("rollouter", 2)
    for call in (
        old.offer(meta(ids[0]), payload(ids[0])),
        old.drop(ids[0], DropReason.FAILED),
        old.call(ReturnPermits("", ids)),
        old.set_applied_version(3),
        old.close(),
        queue.attach("rollouter", 1),
    ):
        with pytest.raises(FencedError):
            await call
    assert (await new.admit(4, timeout_s=0)).sample_ids == (ids[0], ids[2], ids[3])
    lease = await CalledBy(queue, "trainer").lease(1, trainer_version=0, timeout_s=0)
    await queue.attach("trainer", 2)
    for call in (
        CalledBy(queue, "trainer").commit(lease.lease_id, ids[1:2]),
        CalledBy(queue, "trainer").requeue(ids[1]),
    ):
        with pytest.raises(FencedError, match="incarnation 1 of the trainer was replaced by incarnation 2"):
            await call


async def test_a_rewind_sets_version_and_total_and_begins_a_lineage() -> None:
    queue = make_queue(MemoryLog(), size=4, total=12)
    await fill(queue, 4)
    await train(queue, 3)
    assert (await queue.mark(1)).seq == 8
    await queue.set_applied_version(1)
    await queue.rewind(1, version=0, lineage=1, total_samples=8)
    status = await queue.status()
    assert (status.lineage, status.version, status.total_samples, status.paced_to) == (1, 0, 8, 4)
    await queue.set_applied_version(5, lineage=0)
    assert (await queue.status()).version == 0, "a version of an older lineage is ignored"
    with pytest.raises(BugError, match="lineage 2 applied in lineage 1"):
        await queue.set_applied_version(1, lineage=2)
    with pytest.raises(FencedError, match="lineage 1 has begun"):
        await queue.rewind(1, version=0, lineage=0, total_samples=8)
    with pytest.raises(BugError, match="rewind into lineage 1 out of lineage 1"):
        await queue.rewind(1, version=7, lineage=1, total_samples=8)
    with pytest.raises(BugError, match="step 9, whose sample counts were never marked"):
        await queue.rewind(9, version=0, lineage=2, total_samples=8)


async def test_trained_tokens_are_those_of_the_steps_in_the_surviving_model() -> None:
    queue = make_queue(MemoryLog(), size=8)
    await fill(queue, 4)
    lease = await queue.lease(4, trainer_version=0, timeout_s=0)
    one, two, *rest = [queued.meta.sample_id for queued in lease.samples]
    await queue.commit(lease.lease_id, [one, two], trained_tokens=20)
    await queue.mark(1)
    await queue.commit(lease.lease_id, rest, trained_tokens=45)
    later_pass = CommitSamples(lease.lease_id, (), 60)
    for retried in (False, True):
        await queue.call(later_pass, caller=QueueCaller("trainer", 1, retried))
    assert ((await queue.status()).trained_tokens, queue.state.trained) == (60, 4)
    await queue.rewind(1, version=0, lineage=1, total_samples=None, trained_tokens=20)
    assert ((await queue.status()).trained_tokens, queue.state.trained) == (20, 2)
    await queue.close()
    await queue.commit(lease.lease_id, rest, trained_tokens=45)
    assert queue.state.trained_tokens == 20, "a closed queue ignores commits"


async def test_a_repeated_offer_does_not_complete_a_requeued_sample() -> None:
    """The first answer was lost, and the payload was found damaged before the call was repeated."""
    queue = make_queue(MemoryLog())
    (first,) = await fill(queue, 1)
    await queue.requeue(first)
    assert (await queue.admit(1, timeout_s=0)).sample_ids == (first,)
    repeated = CalledBy(queue, "driver", 0, retried=True)
    await repeated.offer(meta(first), payload(first))
    assert (await queue.status()).counts.running == 1
    anew = FileRef("1-anew.safetensors", 0)
    await repeated.offer(meta(first), anew)
    assert [each.payload for each in (await queue.lease(1, trainer_version=0, timeout_s=0)).samples] == [anew]


async def test_a_file_is_idle_once_no_sample_in_it_is_needed() -> None:
    queue = make_queue(MemoryLog(), size=8)
    await fill(queue, 6)  # three files have two samples each
    await queue.drop(SampleId(0, 2), DropReason.FILTERED)
    await queue.drop(SampleId(0, 5), DropReason.FILTERED)
    assert queue.state.take_idle_files() == {"1-3.safetensors"}
    assert queue.state.take_idle_files() == set()
    assert await train(queue, 4) == [1, 3, 4, 6]
    assert queue.state.take_idle_files() == set(), "a rewind could need the files"
    await queue.mark(1)
    await queue.cover(1, 1)
    assert queue.state.take_idle_files() == {"1-1.safetensors", "1-2.safetensors"}
    await queue.cover(1, 1)
    await queue.cover(0, 0)
    assert not queue.state.is_file_needed("1-1.safetensors")


async def test_without_a_journal_a_rewind_feeds_trained_samples_again() -> None:
    queue = LocalSampleQueue(QueueOptions(PROMPTS, Pacing(8, 0)))
    await fill(queue, 4)
    await train(queue, 1)
    await queue.mark(1)
    await train(queue, 2)
    assert (await queue.status()).payload_bytes == 100, "payloads are not kept for a rewind"
    await queue.rewind(1, version=0, lineage=1, total_samples=None)
    status = await queue.status()
    assert (status.counts.trained, status.counts.ready, status.journal_seq) == (1, 1, 0)
    assert [i.index for i in (await queue.admit(2, timeout_s=0)).sample_ids] == [2, 3]


async def test_a_run_that_lost_its_journal_continues_from_the_snapshot() -> None:
    queue = make_queue(MemoryLog())
    await fill(queue, 4)
    await train(queue, 2)
    await queue.set_applied_version(1)
    again = LocalSampleQueue(QueueOptions(PROMPTS, Pacing(8, 0)), await queue.mark(5), MemoryLog())
    status = await again.status()
    assert (status.version, status.counts.fed, status.counts.trained) == (1, 2, 2)
    await again.attach("rollouter", 2)
    await again.rewind(5, version=0, lineage=1, total_samples=None)
    assert [i.index for i in (await again.admit(3, timeout_s=0)).sample_ids] == [3, 4, 5]
    await again.offer(meta(SampleId(0, 3)), payload(SampleId(0, 3)))
    assert await train(again, 1) == [3]
    await again.rewind(5, version=0, lineage=2, total_samples=None)
    assert await train(again, 1) == [3], "the mark of the checkpoint is known now"


ONE, TWO, THREE = (SampleId(0, index) for index in (1, 2, 3))
LINE = [
    CommitSamples(1, (ONE,)),
    MarkCheckpoint(1),
    CommitSamples(2, (TWO, THREE)),
    DropSamples(DropReason.STALE, (THREE,)),
]
FROM_TEN = [
    RewindTraining(10, 0, 1, None),
    *LINE,
    MarkCheckpoint(11),
    RewindTraining(10, 0, 2, None),
    RewindTraining(10, 0, 3, None),
]
ABANDONED = [
    *(CommitSamples(1, (ONE,)), MarkCheckpoint(1), CommitSamples(2, (TWO,)), MarkCheckpoint(2)),
    *(RewindTraining(1, 0, 1, None), CommitSamples(3, (TWO, THREE))),
]
AGAIN = [*ABANDONED, MarkCheckpoint(2), RewindTraining(2, 0, 2, None)]


@pytest.mark.parametrize(
    ("step", "operations", "from_start", "expected"),
    [
        (0, LINE, True, (ONE, TWO)),
        (1, LINE, True, (TWO,)),
        (1, [*LINE, MarkCheckpoint(1)], True, ()),
        (2, LINE, True, None),
        (0, LINE, False, None),
        (10, FROM_TEN, False, (ONE, TWO)),
        (10, [*LINE, *FROM_TEN], False, None),
        (9, FROM_TEN, False, None),
        (2, ABANDONED, True, None),
        (1, ABANDONED, True, (TWO, THREE)),
        (2, AGAIN, True, ()),
        (0, AGAIN, True, (ONE, TWO, THREE)),
    ],
)
def test_samples_trained_since_a_step_follow_its_newest_surviving_mark(
    step: int, operations: list[Operation], from_start: bool, expected: tuple[SampleId, ...] | None
) -> None:
    assert trained_since(step, operations, from_start=from_start) == expected


def test_marks_that_a_rewind_abandoned_do_not_survive() -> None:
    assert surviving_marks(enumerate(ABANDONED, 1)) == {1: 2}
    assert surviving_marks(enumerate(AGAIN, 1)) == {1: 2, 2: 7}


async def test_only_a_checkpoint_of_the_surviving_lineage_is_confirmed() -> None:
    queue = make_queue(MemoryLog())
    await fill(queue, 3)
    await train(queue, 1)
    await queue.mark(1)
    await train(queue, 1)
    await queue.mark(2)
    await CalledBy(queue, "trainer").confirm(2)
    await queue.attach("trainer", 2)
    with pytest.raises(FencedError, match="incarnation 1 of the trainer was replaced"):
        await CalledBy(queue, "trainer").confirm(2)
    await queue.rewind(1, version=0, lineage=1, total_samples=None)
    with pytest.raises(FencedError, match="gone back to before step 2"):
        await queue.confirm(2)
    await train(queue, 1)
    await queue.mark(2)
    await CalledBy(queue, "trainer", 2).confirm(2)
    assert (queue.state.history, queue.state.lineage) == (NO_REWINDS.after_rewind(1), 1)


# ------------------------------------------------------------------------------------------------ the state machine


class CrashMachine(RuleBasedStateMachine):
    """The queue when calls may be repeated, the queue may die at any time, and training may go back to any checkpoint.

    The model has the state of every sample, their completion order, and the checkpoints.
    """

    @initialize(size=st.integers(1, 4), threshold=st.sampled_from([0.0, 1.0]), total=st.sampled_from([None, 9]))
    def begin(self, size: int, threshold: float, total: int | None) -> None:
        self.runner = asyncio.Runner()
        self.options = QueueOptions(PROMPTS, Pacing(size, threshold, total), max_staleness=MAX_STALENESS)
        self.log = MemoryLog()
        self.queue = LocalSampleQueue(self.options, journal=self.log)
        self.run(self.queue.attach("rollouter", 1))
        self.requests = 0
        self.step = self.version = self.lineage = 0
        self.incarnation = {"rollouter": 1, "trainer": 1}
        self.next_index = 1
        self.waiting: set[SampleId] = set()
        """Samples that will be fed again."""
        self.running: set[SampleId] = set()
        self.ready: set[SampleId] = set()
        self.leases: dict[int, list[SampleId]] = {}
        self.trained: list[SampleId] = []
        self.gone: set[SampleId] = set()
        """Samples that were dropped for a reason other than a shutdown."""
        self.completed: dict[SampleId, int] = {}
        """Position in completion order of each offered sample."""
        self.made: dict[SampleId, int] = {}
        """The version that generated each sample."""
        self.checkpoints: dict[int, tuple[int, int]] = {0: (0, 0)}
        """Number of trained samples and version of each checkpoint, by step."""
        self.covered = 0
        """Number of trained samples that checkpoints cover, whose payloads are deleted."""

    def run(self, call: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await call

        return self.runner.run(awaited())

    def call(self, make: Callable[[CalledBy], Awaitable[Any]], part: str, *, twice: bool, dies: bool) -> Any:
        """Make a call. If `twice`, repeat it as after a lost answer; if the queue `dies`, its next process gets the
        repeated call."""
        answer = self.run(make(CalledBy(self.queue, part, self.incarnation[part])))
        if twice:
            if dies:
                self.crash()
            before, recorded = self.queue.state.dump(), len(self.log.operations)
            again = CalledBy(self.queue, part, self.incarnation[part], retried=True)
            assert self.run(make(again)) == answer
            assert self.queue.state.dump() == before
            assert len(self.log.operations) == recorded
        return answer

    @rule()
    def crash(self) -> None:
        before = self.queue.state.dump()
        rows = [to_row(operation) for operation in self.log.operations]
        history = [from_row(row, PROMPTS) for row in rows]
        self.queue = rebuilt(self.options, history, self.log)
        assert self.queue.state.dump() == before
        assert QueueState.load(json.loads(json.dumps(before)), PROMPTS, keeps_payloads=True).dump() == before

    @rule(count=st.integers(1, 4), twice=st.booleans(), dies=st.booleans())
    def admit(self, count: int, twice: bool, dies: bool) -> None:
        self.requests += 1
        request = AdmitSamples(count, request_id=str(self.requests))
        admission: Admission = self.call(
            lambda queue: queue.call(request, timeout_s=0), "rollouter", twice=twice, dies=dies
        )
        ids = admission.sample_ids
        fresh = (SampleId((index - 1) // PROMPTS, index) for index in itertools.count(self.next_index))
        expected = itertools.chain(sorted(self.waiting), fresh)
        assert ids == tuple(itertools.islice(expected, len(ids))), "samples that are fed again come first"
        self.waiting -= set(ids)
        self.running |= set(ids)
        self.next_index = max([self.next_index, *(sample_id.index + 1 for sample_id in ids)])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["offer", "drop", "offer"]), twice=st.booleans(), dies=st.booleans())
    def finish(self, data: st.DataObject, how: str, twice: bool, dies: bool) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(sample_id)
        made = meta(sample_id, self.version)
        if how == "offer":
            self.ready.add(sample_id)
            self.completed[sample_id], self.made[sample_id] = len(self.log.operations), self.version
            self.call(lambda queue: queue.offer(made, payload(sample_id)), "rollouter", twice=twice, dies=dies)
        else:
            self.gone.add(sample_id)
            self.call(lambda queue: queue.drop(sample_id, DropReason.FAILED), "rollouter", twice=twice, dies=dies)

    @rule(count=st.integers(1, 3), twice=st.booleans(), dies=st.booleans())
    def lease(self, count: int, twice: bool, dies: bool) -> None:
        self.requests += 1
        request = LeaseSamples(count, self.version, request_id=str(self.requests))
        lease: Lease = self.call(lambda queue: queue.call(request, timeout_s=0), "trainer", twice=twice, dies=dies)
        stale = {sample_id for sample_id in self.ready if self.version - self.made[sample_id] > MAX_STALENESS}
        self.ready -= stale
        self.gone |= stale
        held = [queued.meta.sample_id for queued in lease.samples]
        assert held == self.in_completion_order()[: len(held)]
        assert [queued.payload for queued in lease.samples] == list(map(payload, held))
        assert len(held) in (0, count) or (lease.ended and not self.running)
        if held:
            self.ready -= set(held)
            self.leases[lease.lease_id] = held

    def in_completion_order(self) -> list[SampleId]:
        return sorted(self.ready, key=self.completed.__getitem__)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["commit", "requeue"]), twice=st.booleans(), dies=st.booleans())
    def settle(self, data: st.DataObject, how: str, twice: bool, dies: bool) -> None:
        """Commit or requeue a part of a lease, and release the rest."""
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        held = self.leases.pop(lease_id)
        number = data.draw(st.integers(0, len(held)))
        part, rest = held[:number], held[number:]
        if how == "commit":
            self.trained += part
            tokens = TOKENS * len(self.trained)
            self.call(
                lambda queue: queue.commit(lease_id, part, trained_tokens=tokens), "trainer", twice=twice, dies=dies
            )
        else:
            self.waiting |= set(part)
            for sample_id in part:
                self.call(lambda queue, i=sample_id: queue.requeue(i), "trainer", twice=twice, dies=dies)
        self.ready |= set(rest)
        self.call(lambda queue: queue.release(lease_id), "trainer", twice=twice, dies=dies)

    @rule(twice=st.booleans(), dies=st.booleans())
    def publish(self, twice: bool, dies: bool) -> None:
        self.version += 1
        version, lineage = self.version, self.lineage
        self.call(
            lambda queue: queue.set_applied_version(version, lineage=lineage), "rollouter", twice=twice, dies=dies
        )

    @rule(covers=st.booleans(), keep=st.integers(1, 3))
    def checkpoint(self, covers: bool, keep: int) -> None:
        """Begin a checkpoint. If it is written (`covers`), the newest `keep` are kept, and the log may forget what
        happened before them."""
        self.step += 1
        snapshot = self.run(self.queue.mark(self.step))
        assert snapshot.counts.trained == len(self.trained)
        self.checkpoints[self.step] = (len(self.trained), self.version)
        if covers:
            self.covered = len(self.trained)
            self.checkpoints = dict(sorted(self.checkpoints.items())[-keep:])
            oldest = min(self.checkpoints)
            self.call(lambda queue: queue.cover(self.step, oldest), "trainer", twice=True, dies=False)

    @rule(part=st.sampled_from(["rollouter", "trainer"]))
    def replace(self, part: str) -> None:
        """Replace a part: the queue takes back the samples that the old incarnation held."""
        self.incarnation[part] += 1
        for _ in range(2):
            self.run(self.queue.attach(part, self.incarnation[part]))  # type: ignore[arg-type]
        if part == "rollouter":
            self.waiting |= self.running
            self.running.clear()
        else:
            self.ready.update(*self.leases.values())
            self.leases.clear()

    @rule(data=st.data(), closes=st.booleans(), launches=st.booleans())
    def go_back(self, data: st.DataObject, closes: bool, launches: bool) -> None:
        """Go back to any checkpoint, covered or not. If `closes`, the queue is closed first: a new launch (`launches`)
        then begins with a new Rollouter, and the same launch must replace a Rollouter that was still generating."""
        self.replace("trainer")
        if closes:
            self.call(lambda queue: queue.close(), "trainer", twice=True, dies=True)
            if launches:
                self.replace("rollouter")
        self.step = data.draw(st.sampled_from(sorted(self.checkpoints)))
        count, self.version = self.checkpoints[self.step]
        self.checkpoints = {step: known for step, known in self.checkpoints.items() if step <= self.step}
        # The payloads of covered samples were deleted.
        self.waiting |= set(self.trained[count : self.covered])
        self.ready |= set(self.trained[max(count, self.covered) :])
        self.covered = min(self.covered, count)
        del self.trained[count:]
        self.lineage += 1
        for _ in range(2):
            total = self.options.pacing.total_samples
            back = self.queue.rewind(
                self.step,
                version=self.version,
                lineage=self.lineage,
                total_samples=total,
                trained_tokens=TOKENS * count,
            )
            self.run(back)
        if closes and self.running:
            with pytest.raises(FencedError):
                self.run(CalledBy(self.queue, "rollouter", self.incarnation["rollouter"]).admit(1, timeout_s=0))
            self.waiting |= self.running
            self.running.clear()
            self.replace("rollouter")

    @precondition(lambda self: self.trained or self.gone)
    @rule(data=st.data())
    def try_to_change_an_ended_sample(self, data: st.DataObject) -> None:
        sample_id = data.draw(st.sampled_from(sorted({*self.trained, *self.gone})))
        before = self.queue.state.dump()
        for attempt in (
            self.queue.offer(meta(sample_id), payload(sample_id)),
            self.queue.drop(sample_id, DropReason.FAILED),
            self.queue.requeue(sample_id),
        ):
            with pytest.raises(BugError, match="illegal transition"):
                self.run(attempt)
        assert self.queue.state.dump() == before

    @invariant()
    def every_sample_is_in_its_state(self) -> None:
        if not hasattr(self, "queue"):
            return
        state = self.queue.state
        leased = set().union(*self.leases.values())
        assert state.running == self.running
        assert list(state.ready) == self.in_completion_order()
        assert set(state.leased) == leased
        assert set(state.returned) == self.waiting
        assert (state.trained, state.num_dropped) == (len(self.trained), len(self.gone))
        assert state.trained_tokens == TOKENS * len(self.trained)
        assert state.fed == sum(map(len, (self.running, self.ready, leased, self.trained, self.gone)))
        assert state.next_index == self.next_index
        assert set(state.entries) == {*self.ready, *leased, *self.trained[self.covered :]}

    def teardown(self) -> None:
        """Check that the sample histories agree with the model."""
        if not hasattr(self, "queue"):
            return
        self.runner.close()
        histories = SampleHistories(QueueState.begin(PROMPTS, keeps_payloads=True))
        for operation in self.log.operations:
            histories.add(1.0, operation)
        records = {record.sample_id: record for record in histories.records()}
        assert {i for i, record in records.items() if record.state == "trained"} == set(self.trained)
        assert {i for i, record in records.items() if record.state == "dropped"} == self.gone
        assert all(record.reason for record in records.values() if record.state == "dropped")


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
