"""The queue on one event loop: eviction, the end of the stream, and a state machine of parked and cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.failures import BugError
from asyncrl.core.ports import Admission, Lease
from asyncrl.core.staleness import Pacing, StaleAction
from asyncrl.core.types import DropReason, Provenance, SampleId
from asyncrl.queue.operations import ReturnPermits
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from tests.fakes.queues import MemoryLog, admit, fill, meta, payload, train


def make_queue(size: int = 4, threshold: float = 0.0, total: int | None = None, **options: Any) -> LocalSampleQueue:
    return LocalSampleQueue(QueueOptions(100, Pacing(size, threshold, total), **options))


def indices(lease: Lease) -> list[int]:
    return [queued.meta.sample_id.index for queued in lease.samples]


async def test_samples_that_are_never_fed_again_delay_no_lease_in_feed_order() -> None:
    """A run that is resumed with fewer steps no longer needs the samples that were in flight."""
    options = QueueOptions(100, Pacing(8, 1, 8), in_feed_order=True)
    queue = LocalSampleQueue(options, journal=MemoryLog())
    ids = await admit(queue, 8)
    for sample_id in (*ids[:2], *ids[4:]):
        await queue.offer(meta(sample_id), None)
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    await queue.commit(lease.lease_id, ids[:2])
    await queue.mark(1)
    await queue.attach("rollouter", 2)
    assert (await queue.lease(4, trainer_version=0, timeout_s=0)).samples == ()
    await queue.rewind(1, version=0, lineage=1, total_samples=6)
    assert (await queue.admit(8, timeout_s=0)).sample_ids == ()
    lease = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert indices(lease) == [5, 6, 7, 8]


async def test_a_sample_that_finished_ones_wait_for_in_feed_order_is_fed_again_at_once() -> None:
    """Training has gone back, so more samples are admitted than the version permits, and it cannot continue without
    the sample whose payload is damaged.
    """
    queue = LocalSampleQueue(QueueOptions(100, Pacing(2, 0, 8), in_feed_order=True), journal=MemoryLog())
    one, two = await fill(queue, 2)
    await train(queue, 2)
    await queue.set_applied_version(1)
    await fill(queue, 2, version=1)
    await queue.rewind(0, version=0, lineage=1, total_samples=8)
    for sample_id in (one, two):
        await queue.requeue(sample_id)
    for sample_id in (one, two):
        assert (await queue.admit(8, timeout_s=0)).sample_ids == (sample_id,)
    assert (await queue.admit(8, timeout_s=0)).sample_ids == ()
    for sample_id in (one, two):
        await queue.offer(meta(sample_id), payload(sample_id))
    assert indices(await queue.lease(4, trainer_version=0, timeout_s=0)) == [1, 2, 3, 4]


async def test_a_replayed_sample_may_be_newer_than_the_trainer() -> None:
    queue = make_queue(max_staleness=0)
    one, two = await admit(queue, 2)
    await queue.offer(meta(one, 9)._replace(provenance=Provenance.REPLAYED), None)
    assert indices(await queue.lease(1, trainer_version=0, timeout_s=0)) == [1]
    await queue.offer(meta(two, 9), None)
    with pytest.raises(BugError, match="version 9, but the trainer is at version 0"):
        await queue.lease(1, trainer_version=0, timeout_s=0)


async def test_replayed_samples_are_counted() -> None:
    queue = make_queue()
    ids = await admit(queue, 3)
    for sample_id, provenance in zip(ids, Provenance, strict=True):
        await queue.offer(meta(sample_id)._replace(provenance=provenance), None)
    counts = (await queue.status()).counts
    assert (counts.ready, counts.replayed, counts.substituted) == (3, 2, 1)
    again = LocalSampleQueue(QueueOptions(100, Pacing(4, 0)), await queue.mark(1))
    assert (await again.status()).counts.replayed == 2


async def test_a_wait_that_times_out_has_an_empty_answer() -> None:
    queue = make_queue(size=1)
    await admit(queue, 1)
    assert await queue.admit(1, timeout_s=0.01) == Admission((), closed=False)
    assert await queue.lease(1, trainer_version=0, timeout_s=0.01) == Lease(0, (), ended=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: queue.admit(1, timeout_s=60))
        tasks.start_soon(lambda: queue.admit(1, timeout_s=60))
        tasks.start_soon(lambda: queue.lease(1, trainer_version=0, timeout_s=60))
        await anyio.wait_all_tasks_blocked()
        assert (await queue.status()).waiting == {"permit": 2, "samples": 1}
        tasks.cancel_scope.cancel()
    assert (await queue.status()).waiting == {}


@pytest.mark.parametrize(("action", "out"), [("drop", [2]), ("mask", [1, 2]), ("keep", [1, 2])])
async def test_the_stale_action_applies_beyond_the_bound(action: StaleAction, out: list[int]) -> None:
    queue = make_queue(size=4, max_staleness=1, stale_action=action)
    old, new = await admit(queue, 2)
    await queue.offer(meta(old, version=0), None)
    await queue.offer(meta(new, version=1), None)
    lease = await queue.lease(len(out), trainer_version=2, timeout_s=0)
    assert indices(lease) == out
    assert (await queue.status()).counts.dropped["stale"] == 2 - len(out)


@pytest.mark.parametrize("in_feed_order", [False, True])
async def test_the_total_ends_the_stream_with_a_smaller_lease(in_feed_order: bool) -> None:
    queue = make_queue(size=4, threshold=1, total=5, in_feed_order=in_feed_order)
    ids = await fill(queue, 5)
    first = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert (indices(first), first.ended) == ([1, 2, 3, 4], False)
    last = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert (indices(last), last.ended) == ([5], True)
    assert await queue.admit(1, timeout_s=0) == Admission((), closed=False), "a dropped sample would still be replaced"
    await queue.drop(ids[4], DropReason.FILTERED)
    assert [sample_id.index for sample_id in await fill(queue, 1)] == [6]
    full = await queue.lease(1, trainer_version=0, timeout_s=0)
    assert (indices(full), full.ended) == ([6], False), "an empty lease follows a full one"
    assert await queue.lease(1, trainer_version=1, timeout_s=60) == Lease(0, (), ended=True)
    assert (await queue.status()).ended


async def test_calls_for_samples_in_flight_are_legal_after_close() -> None:
    queue = make_queue(size=3)
    running, ready, leased = await admit(queue, 3)
    await queue.offer(meta(leased), None)
    await queue.offer(meta(ready), None)
    lease = await queue.lease(1, trainer_version=0, timeout_s=0)
    await queue.close()
    await queue.offer(meta(running), None)
    await queue.drop(ready, DropReason.FAILED)
    await queue.commit(lease.lease_id, [leased])
    await queue.release(lease.lease_id)
    await queue.call(ReturnPermits("", (running,)))
    await queue.close()
    assert await queue.admit(1, timeout_s=60) == Admission((), closed=True)
    assert await queue.lease(1, trainer_version=0, timeout_s=60) == Lease(0, (), ended=True)
    counts = (await queue.status()).counts
    assert (counts.fed, counts.dropped["shutdown"], counts.trained) == (3, 3, 0)
    with pytest.raises(BugError, match="never fed"):
        await queue.offer(meta(SampleId(0, 50)), None)


async def test_without_a_journal_ready_samples_are_fed_again_to_a_new_rollouter() -> None:
    """The payloads were in the memory of the old Rollouter."""
    queue = make_queue(size=4)
    first, second, third, fourth = await admit(queue, 4)
    for sample_id in (third, first, second):
        await queue.offer(meta(sample_id), f"payload {sample_id.index}")
    lease = await queue.lease(1, trainer_version=0, timeout_s=0)
    await queue.attach("rollouter", 2)
    status = await queue.status()
    assert (status.counts.ready, status.counts.running, status.counts.leased, status.payload_bytes) == (0, 0, 1, 100)
    assert await queue.lease(1, trainer_version=0, timeout_s=0.01) == Lease(0, (), ended=False)
    assert await admit(queue, 3) == (first, second, fourth)
    await queue.commit(lease.lease_id, [third])  # the Trainer already had its payload
    assert (await queue.status()).counts.trained == 1


async def test_impossible_versions_and_numbers_raise_a_bug_error() -> None:
    queue = make_queue()
    await fill(queue, 1, version=3)
    with pytest.raises(BugError, match="version 3, but the trainer is at version 2"):
        await queue.lease(1, trainer_version=2, timeout_s=0)
    await queue.set_applied_version(2)
    with pytest.raises(BugError, match="version 1 applied after version 2"):
        await queue.set_applied_version(1)
    with pytest.raises(BugError, match="at least one"):
        await queue.admit(0, timeout_s=0)
    with pytest.raises(BugError, match="at least one"):
        await queue.lease(0, trainer_version=3, timeout_s=0)


class ParkedCall(NamedTuple):
    task: asyncio.Task[None]
    scope: anyio.CancelScope
    num_samples: int
    """Number of samples that a lease waits for; 0 if the call waits for a permit."""


class QueueMachine(RuleBasedStateMachine):
    """The queue as its callers use it: calls are parked, answered and cancelled in any interleaving."""

    @initialize(
        size=st.integers(1, 3),
        threshold=st.sampled_from([0.0, 0.5, 1.0]),
        bound=st.sampled_from([None, 0, 1]),
        total=st.sampled_from([None, 7]),
        in_feed_order=st.booleans(),
    )
    def begin(self, size: int, threshold: float, bound: int | None, total: int | None, in_feed_order: bool) -> None:
        self.runner = asyncio.Runner()
        self.options = QueueOptions(100, Pacing(size, threshold, total), bound, in_feed_order=in_feed_order)
        self.queue = LocalSampleQueue(self.options)
        self.trainer = self.applied = self.completions = 0
        self.closed = False
        self.running: dict[SampleId, int] = {}
        """The version with which each sample is generated."""
        self.waiting: set[SampleId] = set()
        """Samples that will be fed again."""
        self.completed: dict[SampleId, tuple[int, int]] = {}
        """Position in completion order and version of each offered sample."""
        self.ready: set[SampleId] = set()
        self.leased: dict[int, list[SampleId]] = {}
        self.trained: list[SampleId] = []
        self.parked: list[ParkedCall] = []

    def do(self, action: Awaitable[Any]) -> Any:
        async def settled() -> Any:
            result = await action
            ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
            while ready:  # noqa: ASYNC110  # exactly until the loop has nothing left to run
                await asyncio.sleep(0)
            return result

        result = self.runner.run(settled())
        for call in self.parked:
            if call.task.done():
                call.task.result()  # raise the error of a call that failed
        self.parked = [call for call in self.parked if not call.task.done()]
        return result

    def is_stale(self, sample_id: SampleId) -> bool:
        bound = self.options.max_staleness
        return bound is not None and self.trainer - self.completed[sample_id][1] > bound

    def available(self) -> list[SampleId]:
        """Return the samples that a lease may take, in its order."""
        fresh = [sample_id for sample_id in self.ready if not self.is_stale(sample_id)]
        if not self.options.in_feed_order:
            return sorted(fresh, key=self.completed.__getitem__)
        missing = min([*self.running, *self.waiting], default=None)
        return sorted(sample_id for sample_id in fresh if missing is None or sample_id < missing)

    def check_answer(self, answer: Admission | Lease, num_samples: int) -> None:
        if isinstance(answer, Admission):
            assert not set(answer.sample_ids) & (self.running.keys() | self.ready | set(self.trained)), "no id twice"
            self.waiting -= set(answer.sample_ids)
            self.running |= dict.fromkeys(answer.sample_ids, self.applied)
            return
        held = [queued.meta.sample_id for queued in answer.samples]
        assert held == self.available()[: len(held)]
        assert [queued.payload for queued in answer.samples] == [f"payload {sample_id.index}" for sample_id in held]
        assert answer.ended == (len(held) < num_samples), (
            "the answer to a parked lease is full, unless it is the last one"
        )
        assert not answer.ended or self.closed or not self.running
        if held:
            self.leased[answer.lease_id] = held
            self.ready -= set(held)

    def park(self, call: Awaitable[Admission | Lease], num_samples: int = 0) -> None:
        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                self.check_answer(await call, num_samples)

        async def start() -> None:
            scope = anyio.CancelScope()
            self.parked.append(ParkedCall(asyncio.ensure_future(wait(scope)), scope, num_samples))

        self.do(start())

    @rule(count=st.integers(1, 3))
    def admit(self, count: int) -> None:
        self.park(self.queue.admit(count, timeout_s=60))

    @rule(count=st.integers(1, 3))
    def lease(self, count: int) -> None:
        self.park(self.queue.lease(count, trainer_version=self.trainer, timeout_s=60), count)

    def offering(self, sample_id: SampleId) -> Awaitable[None]:
        version = self.running.pop(sample_id)
        self.completions += 1
        self.completed[sample_id] = (self.completions, version)
        self.ready.add(sample_id)
        return self.queue.offer(meta(sample_id, version), f"payload {sample_id.index}")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        self.do(self.offering(data.draw(st.sampled_from(sorted(self.running)))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), drops=st.booleans())
    def give_up(self, data: st.DataObject, drops: bool) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[sample_id]
        if drops:
            self.do(self.queue.drop(sample_id, DropReason.FAILED))
        else:
            self.waiting.add(sample_id)
            self.do(self.queue.call(ReturnPermits("", (sample_id,))))

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), way=st.sampled_from(["commit", "requeue", "release"]))
    def settle(self, data: st.DataObject, way: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leased)))
        held = self.leased.pop(lease_id)
        number = 0 if way == "release" else data.draw(st.integers(0, len(held)))
        part, rest = held[:number], held[number:]
        if way == "commit":
            self.trained += part
            self.do(self.queue.commit(lease_id, part))
        for sample_id in part if way == "requeue" else ():
            self.waiting.add(sample_id)
            self.do(self.queue.requeue(sample_id))
        self.ready |= set(rest)
        self.do(self.queue.release(lease_id))

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), offers=st.booleans(), turns=st.integers(0, 4))
    def cancel(self, data: st.DataObject, offers: bool, turns: int) -> None:
        """Cancel a parked call `turns` event-loop iterations after an operation that may answer it."""
        scope = self.parked[data.draw(st.integers(0, len(self.parked) - 1))].scope
        sample_id = next(iter(self.running), None)

        async def race() -> None:
            if sample_id is not None and offers:
                await self.offering(sample_id)
            elif sample_id is not None:
                del self.running[sample_id]
                await self.queue.drop(sample_id, DropReason.FAILED)
            for _ in range(turns):
                await asyncio.sleep(0)
            scope.cancel()

        self.do(race())

    @rule(applies=st.booleans())
    def publish(self, applies: bool) -> None:
        """Publish a version, after all parked calls are cancelled: a Trainer that publishes has no parked lease."""

        async def cancel_all() -> None:
            for call in self.parked:
                call.scope.cancel()

        self.do(cancel_all())
        self.trainer += 1
        if applies:
            self.applied = self.trainer
            self.do(self.queue.set_applied_version(self.applied))

    @invariant()
    def every_sample_is_in_its_state(self) -> None:
        if not hasattr(self, "queue"):
            return
        state = self.queue.state
        evicted = self.ready - set(state.ready)
        assert all(map(self.is_stale, evicted))
        self.ready -= evicted
        assert list(state.ready) == sorted(self.ready, key=self.completed.__getitem__)
        assert state.running == self.running.keys()
        assert set(state.leased) == set().union(*self.leased.values())
        assert state.trained == len(self.trained) == len(set(self.trained))
        assert state.fed - state.num_dropped <= self.options.pacing.limit(self.applied)

    @invariant()
    def no_call_stays_parked_that_could_be_answered(self) -> None:
        if not hasattr(self, "queue") or not self.parked:
            return
        state = self.queue.state
        permits = self.options.pacing.permits(state.fed, state.num_dropped, self.applied)
        leases = [call.num_samples for call in self.parked if call.num_samples]
        assert len(self.available()) < min(leases, default=1_000)
        assert not permits or len(leases) == len(self.parked)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.closed = True
            self.do(self.queue.close())
            assert not self.parked, "closing the queue answers every call"
            self.runner.close()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
