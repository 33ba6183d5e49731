"""The queue on one event loop: what unblocks whom, eviction, the end of the stream, cancellation, a state machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.core.failures import BugError, FencedError
from asyncrl.core.ports import Admission, Lease
from asyncrl.core.staleness import Pacing, StaleAction
from asyncrl.core.types import DropReason, Provenance, SampleId, SampleMeta
from asyncrl.queue.operations import ReturnPermits
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions, SampleQueue
from tests.fakes.queues import CalledBy, MemoryLog

pytestmark = pytest.mark.asyncio


def make_queue(
    size: int = 4,
    threshold: float = 0.0,
    total: int | None = None,
    max_staleness: int | None = None,
    stale_action: StaleAction = "drop",
) -> LocalSampleQueue:
    return LocalSampleQueue(QueueOptions(100, Pacing(size, threshold, total), max_staleness, stale_action))


def meta(sample_id: SampleId, version: int = 0) -> SampleMeta:
    return SampleMeta(sample_id, version, version, 1, 1, 1)


async def admit(queue: SampleQueue, count: int) -> tuple[SampleId, ...]:
    ids = (await queue.admit(count, timeout_s=0)).sample_ids
    assert len(ids) == count
    return ids


async def fill(queue: SampleQueue, count: int, version: int = 0) -> tuple[SampleId, ...]:
    ids = await admit(queue, count)
    for sample_id in ids:
        await queue.offer(meta(sample_id, version), f"payload {sample_id.index}")
    return ids


def indices(lease: Lease) -> list[int]:
    return [queued.meta.sample_id.index for queued in lease.samples]


async def unblocked_by(wait: Awaitable[Any], act: Callable[[], Awaitable[None]]) -> Any:
    """The answer of `wait`, which must not come before `act`."""
    answers: list[Any] = []

    async def waiter() -> None:
        answers.append(await wait)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
            assert not answers
            await act()
    return answers[0]


# ------------------------------------------------------------------------------------------------ in feed order


def ordered(size: int = 4, total: int | None = None, **options: Any) -> LocalSampleQueue:
    return LocalSampleQueue(QueueOptions(100, Pacing(size, 1, total), in_feed_order=True, **options))


async def test_in_feed_order_a_straggler_holds_up_those_behind_it() -> None:
    queue = ordered()
    one, two, three, four = await admit(queue, 4)
    for sample_id in (four, two, three):
        await queue.offer(meta(sample_id), None)
    assert (await queue.lease(2, trainer_version=0, timeout_s=0)).samples == ()
    lease = await unblocked_by(queue.lease(2, trainer_version=0, timeout_s=5), lambda: queue.offer(meta(one), None))
    assert indices(lease) == [1, 2]
    assert indices(await queue.lease(2, trainer_version=0, timeout_s=0)) == [3, 4]


async def test_in_feed_order_a_dropped_straggler_holds_up_nothing() -> None:
    queue = ordered()
    one, two, three, _ = await admit(queue, 4)
    for sample_id in (two, three):
        await queue.offer(meta(sample_id), None)
    lease = await unblocked_by(
        queue.lease(2, trainer_version=0, timeout_s=5), lambda: queue.drop(one, DropReason.FAILED)
    )
    assert indices(lease) == [2, 3]


async def test_in_feed_order_what_is_made_again_comes_back_to_its_place() -> None:
    queue = ordered()
    one, *_ = await fill(queue, 4)
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    await queue.requeue(one)
    await queue.release(lease.lease_id)
    assert (await queue.lease(1, trainer_version=0, timeout_s=0)).samples == ()
    assert await admit(queue, 1) == (one,)
    await queue.offer(meta(one), None)
    assert indices(await queue.lease(4, trainer_version=0, timeout_s=0)) == [1, 2, 3, 4]


async def test_in_feed_order_the_last_lease_is_smaller_too() -> None:
    queue = ordered(total=3)
    await fill(queue, 3)
    lease = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert (indices(lease), lease.ended) == ([1, 2, 3], True)


async def test_in_feed_order_what_will_never_be_fed_again_holds_up_nothing() -> None:
    """A run that is resumed with fewer steps, of whose samples in flight none is needed any more."""
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


async def test_what_another_run_has_recorded_may_be_newer_than_the_trainer() -> None:
    queue = make_queue(max_staleness=0)
    one, two = await admit(queue, 2)
    await queue.offer(meta(one, 9)._replace(provenance=Provenance.REPLAYED), None)
    assert indices(await queue.lease(1, trainer_version=0, timeout_s=0)) == [1]
    await queue.offer(meta(two, 9), None)
    with pytest.raises(BugError, match="version 9, but the trainer is at version 0"):
        await queue.lease(1, trainer_version=0, timeout_s=0)


async def test_books_count_what_came_out_of_records() -> None:
    queue = make_queue()
    ids = await admit(queue, 3)
    for sample_id, provenance in zip(ids, Provenance, strict=True):
        await queue.offer(meta(sample_id)._replace(provenance=provenance), None)
    counts = (await queue.status()).counts
    assert (counts.ready, counts.replayed, counts.substituted) == (3, 2, 1)
    again = LocalSampleQueue(QueueOptions(100, Pacing(4, 0)), await queue.mark(1))
    assert (await again.status()).counts.replayed == 2


async def test_it_is_a_sample_queue() -> None:
    queue: SampleQueue = make_queue()
    assert (await queue.status()).counts.fed == 0


async def test_leases_go_out_in_completion_order_with_their_payloads() -> None:
    queue = make_queue()
    a, b, c, _d = await admit(queue, 4)
    for sample_id in (c, a, b):
        await queue.offer(meta(sample_id), f"payload {sample_id.index}")
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    assert [(queued.meta.sample_id, queued.payload) for queued in lease.samples] == [(c, "payload 3"), (a, "payload 1")]
    assert not lease.ended
    assert (await queue.lease(2, trainer_version=0, timeout_s=0)) == Lease(0, (), ended=False)


@pytest.mark.parametrize("way", ["applied version", "drop", "eviction", "return"])
async def test_what_frees_a_permit(way: str) -> None:
    queue = make_queue(size=2, max_staleness=0)
    first, second = await admit(queue, 2)
    await queue.offer(meta(first), None)

    async def act() -> None:
        if way == "applied version":
            await queue.set_applied_version(1)
        elif way == "drop":
            await queue.drop(second, DropReason.FAILED)
        elif way == "eviction":
            await queue.lease(1, trainer_version=1, timeout_s=0)
        else:
            await queue.call(ReturnPermits("", (second,)))

    admission = await unblocked_by(queue.admit(1, timeout_s=60), act)
    assert [sample_id.index for sample_id in admission.sample_ids] == [2 if way == "return" else 3]


@pytest.mark.parametrize("way", ["offer", "release", "close"])
async def test_what_unblocks_a_lease(way: str) -> None:
    queue = make_queue(size=3)
    first, second, third = await admit(queue, 3)
    await queue.offer(meta(first), None)
    await queue.offer(meta(second), None)
    held = await queue.lease(1, trainer_version=0, timeout_s=0)

    async def act() -> None:
        if way == "offer":
            await queue.offer(meta(third), None)
        elif way == "release":
            await queue.release(held.lease_id)
        else:
            await queue.close()

    lease = await unblocked_by(queue.lease(2, trainer_version=0, timeout_s=60), act)
    expected = {"offer": [2, 3], "release": [1, 2], "close": []}
    assert indices(lease) == expected[way]
    assert lease.ended == (way == "close")


async def test_a_wait_that_runs_out_says_nothing_yet() -> None:
    queue = make_queue(size=1)
    await admit(queue, 1)
    assert await queue.admit(1, timeout_s=0.01) == Admission((), closed=False)
    assert await queue.lease(1, trainer_version=0, timeout_s=0.01) == Lease(0, (), ended=False)
    assert (await queue.status()).waiting == {}


async def test_status_names_what_is_waited_on() -> None:
    queue = make_queue(size=1)
    await admit(queue, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: queue.admit(1, timeout_s=60))
        tasks.start_soon(lambda: queue.admit(1, timeout_s=60))
        tasks.start_soon(lambda: queue.lease(1, trainer_version=0, timeout_s=60))
        await anyio.wait_all_tasks_blocked()
        assert (await queue.status()).waiting == {"permit": 2, "samples": 1}
        tasks.cancel_scope.cancel()
    assert (await queue.status()).waiting == {}


async def test_a_cancelled_waiter_takes_no_permit_with_it() -> None:
    """Cancelled in the same turn of the loop in which its permit came free: it has its answer, or the next one does."""
    queue = make_queue(size=1)
    (first,) = await admit(queue, 1)
    scope = anyio.CancelScope()
    got: list[SampleId] = []

    async def waiter() -> None:
        with scope:
            got.extend((await queue.admit(1, timeout_s=60)).sample_ids)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter)
        await anyio.wait_all_tasks_blocked()
        await queue.drop(first, DropReason.FAILED)
        scope.cancel()
    assert (await queue.status()).counts.running == len(got)
    got.extend((await queue.admit(1, timeout_s=0)).sample_ids)
    assert [sample_id.index for sample_id in got] == [2]


async def test_every_waiter_gets_what_there_is() -> None:
    """Ten wait, permits come one by one: none is lost between them."""
    queue = make_queue(size=1)
    await admit(queue, 1)
    got: list[int] = []

    async def waiter() -> None:
        admission = await queue.admit(1, timeout_s=60)
        got.extend(sample_id.index for sample_id in admission.sample_ids)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
            for version in range(1, 11):
                await queue.set_applied_version(version)
    assert sorted(got) == list(range(2, 12))


@pytest.mark.parametrize(("action", "out"), [("drop", [2]), ("mask", [1, 2]), ("keep", [1, 2])])
async def test_beyond_the_bound(action: StaleAction, out: list[int]) -> None:
    queue = make_queue(size=4, max_staleness=1, stale_action=action)
    old, new = await admit(queue, 2)
    await queue.offer(meta(old, version=0), None)
    await queue.offer(meta(new, version=1), None)
    lease = await queue.lease(len(out), trainer_version=2, timeout_s=0)
    assert indices(lease) == out
    assert (await queue.status()).counts.dropped["stale"] == 2 - len(out)


async def test_a_sample_that_arrives_too_old_is_evicted_while_the_lease_waits() -> None:
    queue = make_queue(size=2, max_staleness=0, total=2)
    first, second = await admit(queue, 2)
    await queue.offer(meta(first, version=1), None)

    async def replace() -> None:
        await queue.offer(meta(second, version=0), None)
        third = (await queue.admit(1, timeout_s=5)).sample_ids[0]
        await queue.offer(meta(third, version=1), None)

    lease = await unblocked_by(queue.lease(2, trainer_version=1, timeout_s=60), replace)
    assert indices(lease) == [1, 3]


async def test_a_released_sample_is_judged_again() -> None:
    queue = make_queue(size=2, max_staleness=1)
    await fill(queue, 2)
    lease = await queue.lease(2, trainer_version=1, timeout_s=0)
    await queue.lease(1, trainer_version=2, timeout_s=0)
    await queue.release(lease.lease_id)
    assert (await queue.lease(2, trainer_version=2, timeout_s=0)).samples == ()
    assert (await queue.status()).counts.dropped["stale"] == 2


async def test_the_total_ends_the_stream_with_a_smaller_lease() -> None:
    queue = make_queue(size=4, threshold=1, total=5)
    assert len((await queue.admit(16, timeout_s=0)).sample_ids) == 5
    for index in range(1, 6):
        await queue.offer(meta(SampleId(0, index)), None)
    first = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert (indices(first), first.ended) == ([1, 2, 3, 4], False)
    last = await queue.lease(4, trainer_version=0, timeout_s=0)
    assert (indices(last), last.ended) == ([5], True)
    assert await queue.admit(1, timeout_s=0) == Admission((), closed=False), "a drop would still be replaced"
    await queue.drop(SampleId(0, 5), DropReason.FILTERED)
    assert [sample_id.index for sample_id in await admit(queue, 1)] == [6]


async def test_a_full_last_lease_is_followed_by_an_empty_one_that_says_so() -> None:
    queue = make_queue(size=2, total=2)
    await fill(queue, 2)
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    assert not lease.ended
    await queue.commit(lease.lease_id, [queued.meta.sample_id for queued in lease.samples])
    assert await queue.lease(2, trainer_version=1, timeout_s=60) == Lease(0, (), ended=True)
    assert (await queue.status()).ended


async def test_the_end_waits_for_what_runs() -> None:
    queue = make_queue(size=4, total=2)
    (first, second) = await admit(queue, 2)
    await queue.offer(meta(first), None)

    async def finish() -> None:
        await queue.offer(meta(second), None)

    lease = await unblocked_by(queue.lease(3, trainer_version=0, timeout_s=60), finish)
    assert (indices(lease), lease.ended) == ([1, 2], True)


async def test_after_close_work_in_flight_may_report_in() -> None:
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


async def test_a_rewind_opens_a_closed_queue_for_another_rollouter_than_was_generating_then() -> None:
    """What that one is still at was given back, and its offers would be illegal: it has to be replaced."""
    queue = make_queue(size=3)
    old, new = CalledBy(queue, "rollouter", 1), CalledBy(queue, "rollouter", 2)
    await queue.attach("rollouter", 1)
    first, second, third = (await old.admit(3, timeout_s=0)).sample_ids
    await old.offer(meta(first), None)
    await queue.close()
    await old.offer(meta(second), None)
    assert (await queue.status()).closed
    await queue.rewind(0, version=0, lineage=1, total_samples=None)
    assert not (await queue.status()).closed
    with pytest.raises(FencedError, match="incarnation 1 of the rollouter was replaced by incarnation 2"):
        await old.offer(meta(third), None)
    with pytest.raises(FencedError):
        await old.admit(1, timeout_s=60)
    await queue.attach("rollouter", 2)
    assert (await new.admit(3, timeout_s=0)).sample_ids == (first, second, third)


@pytest.mark.parametrize("why", ["it had nothing to do", "it came behind the end"])
async def test_a_rewind_opens_a_closed_queue_for_the_same_rollouter(why: str) -> None:
    queue = make_queue(size=2)
    caller = CalledBy(queue, "rollouter", 1)
    await queue.attach("rollouter", 1)
    for sample_id in (ids := (await caller.admit(2, timeout_s=0)).sample_ids):
        if why == "it had nothing to do":
            await caller.offer(meta(sample_id), None)
    await queue.close()
    if why == "it came behind the end":
        caller = CalledBy(queue, "rollouter", 2)
        await queue.attach("rollouter", 2)
    await queue.rewind(0, version=0, lineage=1, total_samples=None)
    assert (await caller.admit(2, timeout_s=0)).sample_ids == ids


async def test_without_a_journal_payloads_die_with_their_rollouter() -> None:
    """They were in its memory: were they handed out, each would be lost on its own."""
    queue = make_queue(size=4)
    first, second, third, fourth = await admit(queue, 4)
    for sample_id in (third, first, second):
        await queue.offer(meta(sample_id), f"payload {sample_id.index}")
    lease = await queue.lease(1, trainer_version=0, timeout_s=0)
    await queue.attach("rollouter", 2)
    status = await queue.status()
    assert (status.counts.ready, status.counts.running, status.counts.leased, status.payload_bytes) == (0, 0, 1, 1)
    assert await queue.lease(1, trainer_version=0, timeout_s=0.01) == Lease(0, (), ended=False)
    assert await admit(queue, 3) == (first, second, fourth)
    await queue.commit(lease.lease_id, [third])  # the Trainer had it already
    assert (await queue.status()).counts.trained == 1


async def test_a_restored_queue_feeds_the_outstanding_first() -> None:
    queue = make_queue(size=4, threshold=1)
    ids = await fill(queue, 3)
    lease = await queue.lease(2, trainer_version=0, timeout_s=0)
    await queue.commit(lease.lease_id, ids[:1])
    await queue.set_applied_version(1)
    again = LocalSampleQueue(QueueOptions(100, Pacing(4, 1)), await queue.mark(1))
    status = await again.status()
    assert (status.version, status.counts.fed, status.counts.trained) == (1, 1, 1)
    assert [sample_id.index for sample_id in await admit(again, 4)] == [2, 3, 4, 5]


async def test_what_makes_no_sense_is_a_bug() -> None:
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


class QueueMachine(RuleBasedStateMachine):
    """The queue as its callers use it: waits that park, are answered, run out or are cancelled, in any interleaving."""

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
        self.trainer = self.applied = 0
        self.running: dict[SampleId, int] = {}
        self.leased: dict[int, list[SampleId]] = {}
        self.trained: list[SampleId] = []
        self.parked: list[tuple[asyncio.Task[None], anyio.CancelScope]] = []

    def do(self, action: Awaitable[Any]) -> Any:
        async def settled() -> Any:
            result = await action
            ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
            while ready:  # noqa: ASYNC110  # exactly until the loop has nothing left to run
                await asyncio.sleep(0)
            return result

        result = self.runner.run(settled())
        for task, _ in self.parked:
            if task.done():
                task.result()  # it may have failed
        self.parked = [call for call in self.parked if not call[0].done()]
        return result

    def took(self, answer: Admission | Lease) -> None:
        if isinstance(answer, Admission):
            assert not set(answer.sample_ids) & (self.running.keys() | set(self.trained)), "no id twice"
            self.running |= dict.fromkeys(answer.sample_ids, self.applied)
        elif answer.samples:
            bound = self.options.max_staleness
            assert bound is None or all(self.trainer - queued.meta.oldest_version <= bound for queued in answer.samples)
            held = self.leased[answer.lease_id] = [queued.meta.sample_id for queued in answer.samples]
            if self.options.in_feed_order:
                assert held == sorted(held)
                assert all(sample_id > held[-1] for sample_id in self.running), "nothing before it is still to come"

    def park(self, call: Awaitable[Admission | Lease]) -> None:
        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                self.took(await call)

        async def start() -> None:
            scope = anyio.CancelScope()
            self.parked.append((asyncio.ensure_future(wait(scope)), scope))

        self.do(start())

    @rule(count=st.integers(1, 3))
    def admit(self, count: int) -> None:
        self.park(self.queue.admit(count, timeout_s=60))

    @rule(count=st.integers(1, 3))
    def lease(self, count: int) -> None:
        self.park(self.queue.lease(count, trainer_version=self.trainer, timeout_s=60))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        self.do(self.queue.offer(meta(sample_id, self.running.pop(sample_id)), None))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), way=st.sampled_from(["drop", "return"]))
    def give_up(self, data: st.DataObject, way: str) -> None:
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[sample_id]
        drop = self.queue.drop(sample_id, DropReason.FAILED) if way == "drop" else None
        self.do(drop or self.queue.call(ReturnPermits("", (sample_id,))))

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), commits=st.booleans())
    def settle(self, data: st.DataObject, commits: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leased)))
        held = self.leased.pop(lease_id)
        part = held[: data.draw(st.integers(0, len(held)))] if commits else []
        self.do(self.queue.commit(lease_id, part))
        self.trained += part
        self.do(self.queue.release(lease_id))

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), offers=st.booleans(), turns=st.integers(0, 4))
    def cancel(self, data: st.DataObject, offers: bool, turns: int) -> None:
        """Cancel a parked call while what might answer it is under way: so many turns of the loop after it happened."""
        scope = self.parked[data.draw(st.integers(0, len(self.parked) - 1))][1]
        sample_id = next(iter(self.running), None)

        async def race() -> None:
            if sample_id is not None:
                version = self.running.pop(sample_id)
                if offers:
                    await self.queue.offer(meta(sample_id, version), None)
                else:
                    await self.queue.drop(sample_id, DropReason.FAILED)
            for _ in range(turns):
                await asyncio.sleep(0)
            scope.cancel()

        self.do(race())

    @rule(applies=st.booleans())
    def publish(self, applies: bool) -> None:
        """A Trainer that publishes does not wait for a lease at that time: those parked are cancelled."""

        async def cancel_all() -> None:
            for _, scope in self.parked:
                scope.cancel()

        self.do(cancel_all())
        self.trainer += 1
        if applies:
            self.applied = self.trainer
            self.do(self.queue.set_applied_version(self.applied))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        counts = self.runner.run(self.queue.status()).counts
        assert counts.running == len(self.running), "every permit is somebody's"
        assert counts.leased == sum(map(len, self.leased.values()))
        assert counts.trained == len(self.trained) == len(set(self.trained))
        assert counts.fed - counts.num_dropped <= self.options.pacing.limit(self.applied)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        """Whoever is parked would be told "nothing yet" if it asked now: no wake-up was lost."""
        if not hasattr(self, "queue") or not self.parked:
            return
        status = self.runner.run(self.queue.status())
        permits = self.options.pacing.permits(status.counts.fed, status.counts.num_dropped, self.applied)
        assert not (permits and status.waiting.get("permit"))

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.do(self.queue.close())
            assert not self.parked, "close tells everybody"
            self.runner.close()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
