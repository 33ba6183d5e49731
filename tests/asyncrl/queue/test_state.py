"""The queue over crashes, duplicates and rewinds, and a state machine whose queue is rebuilt at any time."""

from __future__ import annotations

import asyncio
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
from asyncrl.queue.journal_reader import SampleHistories
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
    Operation,
    PermitsGranted,
    ReleaseLease,
    RequeueSample,
    ReturnPermits,
    RewindTraining,
    SetAppliedVersion,
)
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions, SampleQueue
from asyncrl.queue.state import QueueState
from asyncrl.storage.checkpoint_manifest import NO_REWINDS
from asyncrl.storage.sample_bytes import FileRef
from tests.fakes.queues import CalledBy, MemoryLog, rebuilt

PROMPTS = 5


def make_queue(log: MemoryLog, size: int = 4, threshold: float = 0.0, total: int | None = None) -> LocalSampleQueue:
    return LocalSampleQueue(QueueOptions(PROMPTS, Pacing(size, threshold, total)), journal=log)


def meta(sample_id: SampleId, version: int = 0) -> SampleMeta:
    return SampleMeta(sample_id, version, version, 2, 8, 100)


def payload(sample_id: SampleId) -> FileRef:
    return FileRef(f"1-{sample_id.index % 3 + 1}.safetensors", sample_id.index)


async def fill(queue: LocalSampleQueue, count: int) -> tuple[SampleId, ...]:
    ids = (await queue.admit(count, timeout_s=0)).sample_ids
    assert len(ids) == count
    for sample_id in ids:
        await queue.offer(meta(sample_id), payload(sample_id))
    return ids


async def train(queue: LocalSampleQueue, count: int, version: int = 0) -> list[int]:
    lease = await queue.lease(count, trainer_version=version, timeout_s=0)
    await queue.commit(lease.lease_id, [queued.meta.sample_id for queued in lease.samples])
    return [queued.meta.sample_id.index for queued in lease.samples]


# ------------------------------------------------------------------------------------------------ rows

IDS = st.integers(1, 10**6).map(QueueState(PROMPTS, keeps_payloads=True).id_of)
ID_TUPLES = st.lists(IDS, max_size=4).map(tuple)
NUMBERS = st.integers(0, 10**9)
SAMPLES = st.builds(
    QueuedSample,
    st.builds(SampleMeta, IDS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.one_of(st.none(), st.builds(FileRef, st.text(min_size=1, max_size=8), NUMBERS)),
)
TRANSITIONS: list[st.SearchStrategy[Any]] = [
    st.builds(PermitsGranted, st.text(), ID_TUPLES),
    st.builds(ReturnPermits, st.text(), ID_TUPLES),
    st.builds(OfferSamples, st.lists(SAMPLES, max_size=3).map(tuple)),
    st.builds(DropSamples, st.sampled_from(DropReason), ID_TUPLES),
    st.builds(LeaseGranted, st.text(), NUMBERS, ID_TUPLES, st.booleans()),
    st.builds(CommitSamples, NUMBERS, ID_TUPLES),
    st.builds(ReleaseLease, NUMBERS),
    st.builds(RequeueSample, IDS),
    st.builds(SetAppliedVersion, NUMBERS, NUMBERS),
    st.just(CloseQueue()),
    st.builds(MarkCheckpoint, NUMBERS),
    st.builds(CoverCheckpoint, NUMBERS),
    st.builds(AttachPart, st.text(), NUMBERS),
    st.builds(RewindTraining, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS, ID_TUPLES),
]


@given(st.one_of(TRANSITIONS))
def test_every_transition_survives_its_row(transition: Operation) -> None:
    row = to_row(transition)
    back = from_row(row, PROMPTS)
    assert back == transition
    if isinstance(back, OfferSamples):
        assert all(sample.payload is None or isinstance(sample.payload, FileRef) for sample in back.samples)


# ------------------------------------------------------------------------------------------------ the supervisor


async def test_it_is_both_ports() -> None:
    queue = make_queue(MemoryLog())
    for port in (queue,):
        as_queue: SampleQueue = port
        assert as_queue is port


async def test_a_new_rollouter_gets_what_the_old_one_ran_and_fences_it() -> None:
    queue = make_queue(MemoryLog())
    ids = (await CalledBy(queue, "rollouter").admit(4, timeout_s=0)).sample_ids
    await CalledBy(queue, "rollouter").offer(meta(ids[1]), payload(ids[1]))
    parked: list[type[BaseException]] = []

    async def old_one() -> None:
        try:
            await CalledBy(queue, "rollouter").admit(1, timeout_s=60)
        except FencedError as error:
            parked.append(type(error))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(old_one)
            await anyio.wait_all_tasks_blocked()
            await queue.attach("rollouter", 2)
            await queue.attach("rollouter", 2)
    assert parked == [FencedError], "it is told at once, not when its wait runs out"
    old: list[Callable[[], Awaitable[Any]]] = [
        lambda: CalledBy(queue, "rollouter").offer(meta(ids[0]), payload(ids[0])),
        lambda: CalledBy(queue, "rollouter").drop(ids[0], DropReason.FAILED),
        lambda: CalledBy(queue, "rollouter").call(ReturnPermits("", ids)),
        lambda: CalledBy(queue, "rollouter").set_applied_version(3),
        lambda: CalledBy(queue, "rollouter").close(),
        lambda: queue.attach("rollouter", 1),
    ]
    for call in old:
        with pytest.raises(FencedError):
            await call()
    admission = await CalledBy(queue, "rollouter", 2).admit(4, timeout_s=0)
    assert admission.sample_ids == (ids[0], ids[2], ids[3])


async def test_a_new_trainer_finds_everything_ready_again() -> None:
    queue = make_queue(MemoryLog())
    await fill(queue, 3)
    lease = await CalledBy(queue, "trainer").lease(3, trainer_version=0, timeout_s=0)
    await queue.attach("trainer", 2)
    ids = [queued.meta.sample_id for queued in lease.samples]
    for call in (CalledBy(queue, "trainer").commit(lease.lease_id, ids), CalledBy(queue, "trainer").requeue(ids[0])):
        with pytest.raises(FencedError, match="incarnation 1 of the trainer was replaced by incarnation 2"):
            await call
    assert await train(queue, 3) == [1, 2, 3]


async def test_a_rewind_gives_back_payloads_gate_and_total() -> None:
    queue = make_queue(MemoryLog(), size=4, total=12)
    await fill(queue, 4)
    assert await train(queue, 3) == [1, 2, 3]
    snapshot = await queue.mark(1)
    assert (snapshot.counts.trained, snapshot.seq) == (3, 8)
    await queue.covered(1)
    await queue.set_applied_version(1)
    await fill(queue, 4)
    assert await train(queue, 4, version=1) == [4, 5, 6, 7]
    await queue.rewind(1, version=0, lineage=1, total_samples=8)
    await queue.rewind(1, version=0, lineage=1, total_samples=8)
    status = await queue.status()
    assert (status.lineage, status.version, status.total_samples, status.paced_to) == (1, 0, 8, 4)
    assert (status.counts.trained, status.counts.ready, status.payload_bytes) == (3, 5, 500)
    await queue.set_applied_version(5, lineage=0)
    assert (await queue.status()).version == 0, "of the weights that are gone"
    with pytest.raises(BugError, match="lineage 2 applied in lineage 1"):
        await queue.set_applied_version(1, lineage=2)
    with pytest.raises(FencedError, match="after lineage 1 began"):
        await queue.rewind(1, version=0, lineage=0, total_samples=8)
    with pytest.raises(BugError, match="rewind into lineage 1 out of lineage 1"):
        await queue.rewind(1, version=7, lineage=1, total_samples=8)
    with pytest.raises(BugError, match="step 9, whose sample counts were never marked"):
        await queue.rewind(9, version=0, lineage=2, total_samples=8)
    lease = await queue.lease(5, trainer_version=0, timeout_s=0)
    assert [queued.meta.sample_id.index for queued in lease.samples] == [4, 5, 6, 7, 8]
    assert lease.samples[1].payload == payload(SampleId(0, 5))


async def test_versions_above_the_trainers_are_fresh_after_a_rewind() -> None:
    log = MemoryLog()
    queue = LocalSampleQueue(QueueOptions(PROMPTS, Pacing(4, 0), max_staleness=0), journal=log)
    (sample_id,) = (await queue.admit(1, timeout_s=0)).sample_ids
    await queue.offer(meta(sample_id, version=2), payload(sample_id))
    with pytest.raises(BugError, match="version 2, but the trainer is at version 0"):
        await queue.lease(1, trainer_version=0, timeout_s=0)
    await queue.rewind(0, version=0, lineage=1, total_samples=None)
    assert await train(queue, 1) == [1]


async def test_a_lease_parked_over_a_rewind_gets_what_it_gave_back() -> None:
    queue = make_queue(MemoryLog())
    await fill(queue, 2)
    await train(queue, 2)
    answers: list[Lease] = []

    async def wait() -> None:
        answers.append(await queue.lease(2, trainer_version=0, timeout_s=60))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await queue.rewind(0, version=0, lineage=1, total_samples=None)
    assert len(answers[0].samples) == 2


async def test_requeue_feeds_it_again_and_forgets_the_payload() -> None:
    queue = make_queue(MemoryLog())
    ids = await fill(queue, 4)
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    await queue.requeue(ids[1])
    await queue.requeue(ids[3])
    assert (await queue.admit(4, timeout_s=0)).sample_ids == (ids[1], ids[3])
    assert (await queue.status()).payload_bytes == 200
    await queue.commit(lease.lease_id, [ids[0]])
    with pytest.raises(BugError, match="requeue of sample_0_1, which is TRAINED"):
        await queue.requeue(ids[0])


async def test_an_offer_that_is_repeated_is_not_what_the_sample_was_fed_again_for() -> None:
    """The queue's answer to it was lost, and by the time it comes again its payload has been found damaged."""
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


async def test_files_are_idle_once_nothing_in_them_is_needed() -> None:
    queue = make_queue(MemoryLog(), size=8)
    await fill(queue, 6)  # two in each of three files
    await queue.drop(SampleId(0, 2), DropReason.FILTERED)
    await queue.drop(SampleId(0, 5), DropReason.FILTERED)
    assert queue.state.take_idle_files() == {"1-3.safetensors"}
    assert queue.state.take_idle_files() == set()
    assert await train(queue, 4) == [1, 3, 4, 6]
    assert queue.state.take_idle_files() == set(), "a rewind could need them"
    await queue.mark(1)
    await queue.covered(1)
    assert queue.state.take_idle_files() == {"1-1.safetensors", "1-2.safetensors"}
    await queue.covered(1)
    await queue.covered(0)
    assert not queue.state.is_file_needed("1-1.safetensors")


async def test_without_a_journal_a_rewind_feeds_again_what_was_trained() -> None:
    queue = LocalSampleQueue(QueueOptions(PROMPTS, Pacing(8, 0)))
    await fill(queue, 4)
    await train(queue, 1)
    await queue.mark(1)
    await train(queue, 2)
    assert (await queue.status()).payload_bytes == 100, "payloads are not kept for it"
    await queue.rewind(1, version=0, lineage=1, total_samples=None)
    status = await queue.status()
    assert (status.counts.trained, status.counts.ready, status.journal_seq) == (1, 1, 0)
    assert [i.index for i in (await queue.admit(2, timeout_s=0)).sample_ids] == [2, 3]


async def test_a_run_that_lost_its_journal_goes_on_from_the_snapshot() -> None:
    queue = make_queue(MemoryLog())
    await fill(queue, 4)
    await train(queue, 2)
    snapshot = await queue.mark(5)
    again = LocalSampleQueue(QueueOptions(PROMPTS, Pacing(8, 0)), snapshot, MemoryLog())
    await again.attach("rollouter", 2)
    await again.rewind(5, version=0, lineage=1, total_samples=None)
    assert [i.index for i in (await again.admit(3, timeout_s=0)).sample_ids] == [3, 4, 5]
    await again.offer(meta(SampleId(0, 3)), payload(SampleId(0, 3)))
    assert await train(again, 1) == [3]
    await again.rewind(5, version=0, lineage=2, total_samples=None)
    assert await train(again, 1) == [3], "its mark is known now"


def test_what_was_trained_since_a_step_is_read_from_its_newest_mark() -> None:
    one, two, three = (SampleId(0, index) for index in (1, 2, 3))
    history = [
        CommitSamples(1, (one,)),
        MarkCheckpoint(1),
        CommitSamples(2, (two, three)),
        DropSamples(DropReason.STALE, (three,)),
    ]
    assert trained_since(0, history) == (one, two)
    assert trained_since(1, history) == (two,)
    assert trained_since(1, [*history, MarkCheckpoint(1)]) == ()
    assert trained_since(2, history) is None
    assert trained_since(0, history, from_start=False) is None
    from_ten = [
        RewindTraining(10, 0, 1, None),
        *history,
        MarkCheckpoint(11),
        RewindTraining(10, 0, 2, None),
        RewindTraining(10, 0, 3, None),
    ]
    assert trained_since(10, from_ten, from_start=False) == (one, two), "of the checkpoint that they begin at"
    assert trained_since(10, [*history, *from_ten], from_start=False) is None
    assert trained_since(9, from_ten, from_start=False) is None


def test_marks_that_training_went_back_behind_do_not_count() -> None:
    one, two, three = (SampleId(0, index) for index in (1, 2, 3))
    history = [
        *(CommitSamples(1, (one,)), MarkCheckpoint(1), CommitSamples(2, (two,)), MarkCheckpoint(2)),
        *(RewindTraining(1, 0, 1, None), CommitSamples(3, (two, three))),
    ]
    assert surviving_marks(enumerate(history, 1)) == {1: 2}
    assert trained_since(2, history) is None, "it is another future"
    assert trained_since(1, history) == (two, three)
    again = [*history, MarkCheckpoint(2), RewindTraining(2, 0, 2, None)]
    assert surviving_marks(enumerate(again, 1)) == {1: 2, 2: 7}
    assert (trained_since(2, again), trained_since(0, again)) == ((), (one, two, three))


async def test_only_a_checkpoint_of_the_surviving_line_may_get_its_name() -> None:
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


# ------------------------------------------------------------------------------------------------ everything at once


class CrashMachine(RuleBasedStateMachine):
    """Any call may be made twice, the queue may die at any time, and training may go back to any checkpoint.

    The model is what the Trainer knows: the samples in its weights, in order, and the checkpoints of them.
    """

    @initialize(size=st.integers(1, 4), threshold=st.sampled_from([0.0, 1.0]), total=st.sampled_from([None, 9]))
    def begin(self, size: int, threshold: float, total: int | None) -> None:
        self.runner = asyncio.Runner()
        self.options = QueueOptions(PROMPTS, Pacing(size, threshold, total), max_staleness=3)
        self.log = MemoryLog()
        self.queue = LocalSampleQueue(self.options, journal=self.log)
        self.runner.run(_do(self.queue.attach("rollouter", 1)))
        self.requests = 0
        self.step = self.version = self.lineage = 0
        self.incarnation = {"rollouter": 1, "trainer": 1}
        self.running: set[SampleId] = set()
        self.leases: dict[int, list[SampleId]] = {}
        self.trained: list[SampleId] = []
        self.gone: set[SampleId] = set()
        self.checkpoints: dict[int, tuple[int, int]] = {0: (0, 0)}
        """By step: samples trained by then, and the version."""

    def call(self, make: Callable[[CalledBy], Awaitable[Any]], part: str, *, twice: bool, dies: bool) -> Any:
        """Make the call; if its answer is lost, make it again, of another process of the queue if that `dies`."""
        answer = self.runner.run(_do(make(CalledBy(self.queue, part, self.incarnation[part]))))
        if twice:
            if dies:
                self.crash()
            before, transitions = self.queue.state.dump(), len(self.log.operations)
            again = CalledBy(self.queue, part, self.incarnation[part], retried=True)
            assert self.runner.run(_do(make(again))) == answer
            assert self.queue.state.dump() == before
            assert len(self.log.operations) == transitions
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
        request = AdmitSamples(count, str(self.requests))
        admission: Admission = self.call(
            lambda queue: queue.call(request, timeout_s=0), "rollouter", twice=twice, dies=dies
        )
        ids = set(admission.sample_ids)
        assert not ids & (self.running | set(self.trained) | self.gone)
        self.running |= ids

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["offer", "drop", "offer"]), twice=st.booleans(), dies=st.booleans())
    def finish(self, data: st.DataObject, how: str, twice: bool, dies: bool) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(sample_id)
        made = meta(sample_id, self.version)
        if how == "offer":
            self.call(lambda queue: queue.offer(made, payload(sample_id)), "rollouter", twice=twice, dies=dies)
        else:
            self.gone.add(sample_id)
            self.call(
                lambda queue: queue.drop(sample_id, DropReason.FAILED),
                "rollouter",
                twice=twice,
                dies=dies,
            )

    @rule(count=st.integers(1, 3), twice=st.booleans(), dies=st.booleans())
    def lease(self, count: int, twice: bool, dies: bool) -> None:
        self.requests += 1
        request = LeaseSamples(count, self.version, str(self.requests))
        lease: Lease = self.call(
            lambda queue: queue.call(request, timeout_s=0),
            "trainer",
            twice=twice,
            dies=dies,
        )
        self.note_stale()
        if lease.samples:
            self.leases[lease.lease_id] = [queued.meta.sample_id for queued in lease.samples]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["commit", "redo"]), twice=st.booleans(), dies=st.booleans())
    def settle(self, data: st.DataObject, how: str, twice: bool, dies: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        held = self.leases.pop(lease_id)
        part = held[: data.draw(st.integers(0, len(held)))]
        if how == "commit":
            self.trained += part
            self.call(lambda queue: queue.commit(lease_id, part), "trainer", twice=twice, dies=dies)
        else:
            for sample_id in part:
                self.call(lambda queue, i=sample_id: queue.requeue(i), "trainer", twice=twice, dies=dies)
        self.call(lambda queue: queue.release(lease_id), "trainer", twice=twice, dies=dies)

    @rule(twice=st.booleans(), dies=st.booleans())
    def publish(self, twice: bool, dies: bool) -> None:
        self.version += 1
        self.call(
            lambda queue: queue.set_applied_version(self.version, lineage=self.lineage),
            "rollouter",
            twice=twice,
            dies=dies,
        )

    @rule(covers=st.booleans())
    def checkpoint(self, covers: bool) -> None:
        self.step += 1
        snapshot = self.runner.run(_do(self.queue.mark(self.step)))
        assert snapshot.counts.trained == len(self.trained)
        self.checkpoints[self.step] = (len(self.trained), self.version)
        if covers:
            self.call(lambda queue: queue.covered(self.step), "trainer", twice=True, dies=False)

    @rule(part=st.sampled_from(["rollouter", "trainer"]))
    def replace(self, part: str) -> None:
        self.incarnation[part] += 1
        for _ in range(2):
            self.runner.run(_do(self.queue.attach(part, self.incarnation[part])))  # type: ignore[arg-type]
        if part == "rollouter":
            self.running.clear()
        else:
            self.leases.clear()

    @rule(data=st.data(), closes=st.booleans(), launches=st.booleans())
    def go_back(self, data: st.DataObject, closes: bool, launches: bool) -> None:
        """To any checkpoint, covered or not; or from behind the end, in a whole new launch or in this one."""
        self.replace("trainer")
        if closes:
            self.call(lambda queue: queue.close(), "trainer", twice=True, dies=True)
            if launches:
                self.replace("rollouter")
        self.step = data.draw(st.sampled_from(sorted(self.checkpoints)))
        count, self.version = self.checkpoints[self.step]
        self.checkpoints = {step: known for step, known in self.checkpoints.items() if step <= self.step}
        del self.trained[count:]
        self.lineage += 1
        for _ in range(2):
            total = self.options.pacing.total_samples
            back = self.queue.rewind(self.step, version=self.version, lineage=self.lineage, total_samples=total)
            self.runner.run(_do(back))
        if closes and self.running:
            with pytest.raises(FencedError):
                self.admit(count=1, twice=False, dies=False)
            self.replace("rollouter")

    def note_stale(self) -> None:
        for operation in self.log.operations:
            if isinstance(operation, DropSamples):
                self.gone |= set(operation.sample_ids)

    @precondition(lambda self: self.trained or self.gone)
    @rule(data=st.data())
    def try_to_offer_or_drop_what_has_ended(self, data: st.DataObject) -> None:
        sample_id = data.draw(st.sampled_from(sorted({*self.trained, *self.gone})))
        before = self.queue.state.dump()
        for attempt in (
            self.queue.offer(meta(sample_id), payload(sample_id)),
            self.queue.drop(sample_id, DropReason.FAILED),
            self.queue.requeue(sample_id),
        ):
            with pytest.raises(BugError, match="illegal transition"):
                self.runner.run(_do(attempt))
        assert self.queue.state.dump() == before

    @invariant()
    def every_sample_is_where_it_should_be(self) -> None:
        if not hasattr(self, "queue"):
            return
        state = self.queue.state
        counts = state.counts()
        assert counts.fed == counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
        assert counts.running == len(self.running)
        assert counts.leased == sum(map(len, self.leases.values()))
        assert counts.trained == len(self.trained) == len(set(self.trained))
        assert counts.num_dropped == len(self.gone)
        live = set(state.snapshot().outstanding)
        assert live.isdisjoint(self.trained)
        assert live.isdisjoint(self.gone)
        assert list(state.ready.values()) == sorted(state.ready.values()), "completion order"

    def teardown(self) -> None:
        """What people can read of it agrees."""
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


async def _do(action: Awaitable[Any]) -> Any:
    return await action


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
