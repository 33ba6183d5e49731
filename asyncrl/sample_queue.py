"""The sample queue on one event loop, without Ray: the ledger, its pacing and bound, and whoever waits on them.

    admit  waits for a permit:   unblocked by set_applied_version, drop, an eviction, unfeed, redo, rewind, close, and
                                 by the attachment of a newer Rollouter
    lease  waits for samples:    unblocked by offer, release, drop, rewind, close, and by the attachment of a newer
                                 Trainer

Every transition runs without an await between reading and changing the state, and a grant is the last thing a waiter
decides. So a waiter that is cancelled or runs out of time has either its grant or none was made.

With a journal, memory goes first: a transition is made, appended, and seen by everybody; whoever made it is answered
once it is durable. Nobody is ever told of what a crash could take, because what follows from it is durable even later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import anyio

from asyncrl.eviction import Eviction
from asyncrl.failures import AsyncRLError, BugError, FencedError
from asyncrl.history import TransitionLog
from asyncrl.ports import Admission, Lease, PartName, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.profiling import profile
from asyncrl.recovery import QueueState
from asyncrl.staleness import Pacing, StaleAction
from asyncrl.transitions import (
    Admitted,
    Applied,
    Attached,
    Closed,
    Committed,
    Covered,
    Dropped,
    Finished,
    Leased,
    Marked,
    Redone,
    Released,
    Rewound,
    Transition,
    Unfed,
)
from asyncrl.types import DropReason, SampleId, SampleMeta
from asyncrl.waits import WaitBoard


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What the queue needs to know of the run."""

    prompts_per_epoch: int
    pacing: Pacing
    max_staleness: int | None = None
    """Bound on `trainer version at lease - oldest version of any token`; None: none."""
    stale_action: StaleAction = "drop"
    """`drop` evicts at lease; `mask` and `keep` hand the sample out and leave the rest to the Trainer."""
    in_feed_order: bool = False
    """Samples are leased in the order in which they were fed, whatever the order in which they completed."""


class Caller(NamedTuple):
    """Who calls, and whether it has called before."""

    part: str = "driver"
    incarnation: int = 0
    """0: it is never fenced."""
    ask: str = ""
    """Its own name for a call that may park, by which an answer that was lost on its way is given again."""
    again: bool = False
    """The queue's process died over this call: what has happened already is not a bug, and nothing happens."""
    step: int | None = None
    """The optimizer step that it knew to be under way: what the queue records meanwhile is of that step."""


ANYBODY = Caller()


class LocalSampleQueue:
    """`ports.SampleQueue` and `ports.QueueControl` in one process.

    Payloads are kept as they are until their sample ends; with a journal, until a checkpoint covers it.

    Args:
        restore: the books of the checkpoint that a run without a journal goes on from.
        journal: takes every transition; its errors are raised by every method.
        state: what was rebuilt from the journal; `restore` does not count then.
    """

    def __init__(
        self,
        options: QueueOptions,
        restore: QueueSnapshot | None = None,
        journal: TransitionLog | None = None,
        *,
        state: QueueState | None = None,
    ) -> None:
        self._journal = journal
        self._seq = 0 if journal is None else journal.durable
        self._state = state or QueueState.begin(
            options.prompts_per_epoch,
            restore,
            keeps_payloads=journal is not None,
            total_samples=options.pacing.total_samples,
        )
        self._ledger = self._state.ledger
        self._pacing = replace(options.pacing, total_samples=self._state.total_samples)
        self._given_up: dict[SampleId, QueuedSample] = {}
        """What was lost or damaged, and is being made again."""
        self._eviction = Eviction(self._state, options.max_staleness, options.stale_action)
        self._in_feed_order = options.in_feed_order
        lock = anyio.Lock()
        self._permits = anyio.Condition(lock)
        self._samples = anyio.Condition(lock)
        self._waits = WaitBoard()

    @property
    def state(self) -> QueueState:
        """To be read only."""
        return self._state

    # -------------------------------------------------------------------------------------------- the Rollouter's side

    async def admit(self, max_samples: int, *, timeout_s: float, caller: Caller = ANYBODY) -> Admission:
        """See `ports.SampleQueue`. Not `closed` when the run's total is under way: a drop would admit a replacement."""
        if max_samples < 1:
            raise BugError(f"admit of {max_samples} samples: ask for at least one")
        admission = Admission((), closed=False)
        async with self._permits:
            if (granted := self._grant(max_samples, caller)) is None:
                with anyio.move_on_after(timeout_s), self._waits.waiting("permit"):
                    while granted is None:
                        await self._permits.wait()
                        granted = self._grant(max_samples, caller)
            admission = granted or admission
        await self._flushed()
        return admission

    async def enough(self, known: bool, *, timeout_s: float, caller: Caller = ANYBODY) -> bool:
        """See `ports.SampleQueue`. Unblocked by offer, drop, an eviction, a version, rewind, close and attachments."""
        async with self._samples:
            self._check(caller)
            with anyio.move_on_after(timeout_s):
                while self._has_surplus() is known:
                    await self._samples.wait()
                    self._check(caller)
            return self._has_surplus()

    def _has_surplus(self) -> bool:
        ledger = self._ledger
        running = ledger.num_running
        return running > 0 and self._pacing.is_enough(
            ledger.fed, ledger.num_dropped, self._state.version, running=running
        )

    async def unfeed(self, sample_ids: Sequence[SampleId], *, caller: Caller = ANYBODY) -> None:
        """Take back an admission whose answer never arrived; the ids are admitted again, first."""
        async with self._permits:
            self._check(caller)
            given_back = caller.again and self._state.admission(caller.ask) is None
            running = tuple(sample_id for sample_id in sample_ids if not self._ledger.is_late(sample_id))
            if running and not given_back:
                self._do(Unfed(caller.ask, running))
                self._permits.notify_all()
        await self._flushed()

    async def offer(self, meta: SampleMeta, payload: Any, *, caller: Caller = ANYBODY) -> None:
        """RUNNING → READY. After `close()` the sample is let go: it already counts as DROPPED(shutdown)."""
        [error] = await self.offer_many([QueuedSample(meta, payload)], caller=caller)
        if error is not None:
            raise error

    async def offer_many(
        self, samples: Sequence[QueuedSample], *, caller: Caller = ANYBODY
    ) -> list[AsyncRLError | None]:
        """`offer` for each, on its own: one error, or None, a sample."""
        async with self._samples:
            self._check(caller)
            taken: dict[SampleId, QueuedSample] = {}
            errors: list[AsyncRLError | None] = []
            for sample in samples:
                sample_id = sample.meta.sample_id
                error: AsyncRLError | None = None
                given_up = self._given_up.get(sample_id)
                if caller.again and given_up is not None and sample.payload == given_up.payload:
                    pass  # it was taken, and found damaged: this is not what it was fed again for
                elif sample_id not in taken and self._ledger.is_running(sample_id):
                    taken[sample_id] = sample
                elif not self._ledger.is_late(sample_id) and not (caller.again and self._ledger.was_fed(sample_id)):
                    error = self._ledger.illegal(sample_id, "finish")
                errors.append(error)
            if taken:
                for sample_id in taken:
                    self._given_up.pop(sample_id, None)
                self._do(Finished(tuple(taken.values())))
                self._eviction.came(taken)
                self._samples.notify_all()
        await self._flushed()
        return errors

    async def set_applied_version(self, version: int, *, lineage: int = 0, caller: Caller = ANYBODY) -> None:
        """Open the staleness gate up to `version`. Of an older lineage, nothing happens.

        Raises:
            BugError: it is older than what was applied before, or of a lineage to come.
        """
        async with self._permits:
            self._check(caller)
            if lineage > self._state.lineage:
                raise BugError(f"version {version} of lineage {lineage} applied in lineage {self._state.lineage}")
            outdone = caller.again and version <= self._state.version
            if lineage == self._state.lineage and version != self._state.version and not outdone:
                self._do(Applied(version))
                self._notify_both()
        await self._flushed()

    # -------------------------------------------------------------------------------------------- the Trainer's side

    async def lease(
        self, num_samples: int, *, trainer_version: int, timeout_s: float, caller: Caller = ANYBODY
    ) -> Lease:
        """See `ports.SampleQueue`. READY samples go out in the order in which they completed, or were fed
        (`QueueOptions.in_feed_order`).

        `ended` comes with fewer samples than asked for, down to none, never with a full lease. It does not count what
        the caller still holds: a sample it releases or drops afterwards may bring more.
        """
        if num_samples < 1:
            raise BugError(f"lease of {num_samples} samples: ask for at least one")
        lease = Lease(0, (), ended=False)
        async with self._samples:
            if (granted := self._hand_out(num_samples, trainer_version, caller)) is None:
                with anyio.move_on_after(timeout_s), self._waits.waiting("samples"):
                    while granted is None:
                        await self._samples.wait()
                        granted = self._hand_out(num_samples, trainer_version, caller)
            lease = granted or lease
        await self._flushed()
        return lease

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId], *, caller: Caller = ANYBODY) -> None:
        """LEASED → TRAINED. After `close()` it changes nothing: commit before you close."""
        async with self._samples:
            self._check(caller)
            held = tuple(sample_ids)
            if caller.again:
                held = tuple(sample_id for sample_id in held if self._ledger.is_leased(sample_id, lease_id))
            if held and not all(self._ledger.is_late(sample_id) for sample_id in held):
                self._do(Committed(lease_id, held))
        await self._flushed()

    async def release(self, lease_id: int, *, caller: Caller = ANYBODY) -> None:
        """LEASED → READY for what is not committed; nothing to do is fine."""
        async with self._samples:
            self._check(caller)
            held = self._ledger.held(lease_id)
            if held:
                self._do(Released(lease_id))
                self._eviction.came(held)
                self._samples.notify_all()
        await self._flushed()

    async def redo(self, sample_id: SampleId, *, caller: Caller = ANYBODY) -> None:
        """READY or LEASED → to be fed again. After `close()` it changes nothing."""
        async with self._permits:
            self._check(caller)
            there = self._ledger.is_ready(sample_id) or self._ledger.is_leased(sample_id)
            if not self._ledger.is_late(sample_id) and (there or not caller.again):
                if (entry := self._state.entry(sample_id)) is not None:
                    self._given_up[sample_id] = entry
                self._do(Redone(sample_id))
                self._notify_both()
        await self._flushed()

    async def mark(self, step: int, *, caller: Caller = ANYBODY) -> QueueSnapshot:
        """See `ports.SampleQueue`."""
        async with self._permits:
            self._check(caller)
            self._do(Marked(step))
            snapshot = replace(self._state.snapshot(), seq=self._seq)
        await self._flushed()
        return snapshot

    async def confirm(self, step: int, *, caller: Caller = ANYBODY) -> None:
        """See `ports.SampleQueue`."""
        self._check(caller)
        if not self._state.has_mark(step):
            raise FencedError(f"training has gone back behind step {step}: its checkpoint is of another future")
        await self._flushed()

    async def covered(self, step: int, *, caller: Caller = ANYBODY) -> None:
        """See `ports.SampleQueue`. Of a step that a later checkpoint has outdone, nothing happens."""
        async with self._permits:
            self._check(caller)
            if self._state.is_covering(step):
                self._do(Covered(step))
        await self._flushed()

    # -------------------------------------------------------------------------------------------- either side

    async def drop(self, sample_id: SampleId, reason: DropReason, *, caller: Caller = ANYBODY) -> None:
        """Any live state → DROPPED; its permit is free again. After `close()` it changes nothing."""
        async with self._permits:
            self._check(caller)
            happened = caller.again and self._ledger.was_fed(sample_id) and not self._ledger.is_live(sample_id)
            if not self._ledger.is_late(sample_id) and not happened:
                self._do(Dropped(reason, (sample_id,)))
                self._notify_both()
        await self._flushed()

    async def close(self, *, caller: Caller = ANYBODY) -> None:
        """Everything live becomes DROPPED(shutdown); whoever waits is told. Work in flight may still report in."""
        async with self._permits:
            self._check(caller)
            if not self._ledger.closed:
                self._do(Closed())
                self._notify_both()
        await self._flushed()

    async def status(self) -> QueueStatus:
        state, journal = self._state, self._journal
        if journal is not None:
            await journal.flushed(0)
        return QueueStatus(
            books=state.books(),
            version=state.version,
            ended=self._ledger.num_ready == 0 and self._no_more_to_come(),
            waiting={wait.edge: wait.count for wait in self._waits.snapshot()},
            lineage=state.lineage,
            paced_to=self._pacing.limit(state.version),
            total_samples=state.total_samples,
            journal_seq=0 if journal is None else journal.durable,
            payload_bytes=state.payload_bytes,
            closed=self._ledger.closed,
        )

    # -------------------------------------------------------------------------------------------- the supervisor's side

    async def attach(self, part: PartName, incarnation: int) -> None:
        """See `ports.QueueControl`."""
        async with self._permits:
            newest = self._state.incarnations.get(part, 0)
            if incarnation < newest:
                raise FencedError(f"incarnation {incarnation} of the {part} comes after incarnation {newest} began")
            if incarnation > newest:
                self._do(Attached(part, incarnation))
                self._eviction.judge_all()
                self._notify_both()
        await self._flushed()

    async def rewind(self, step: int, *, version: int, lineage: int, total_samples: int | None) -> None:
        """See `ports.QueueControl`. A rewind after `close()` opens the queue again.

        Raises:
            FencedError: training has gone back since, in a later lineage.
            BugError: that step was never marked, or the lineage is not a new one.
        """
        if self._is_rewound(step, version, lineage, total_samples):
            await self._flushed()
            return
        ended: tuple[SampleId, ...] = ()
        if not self._state.has_mark(step):
            since = None if self._journal is None else await self._journal.trained_since(step)
            if since is None:
                raise BugError(f"training goes back to its checkpoint of step {step}, whose books were never marked")
            ended = since
        async with self._permits:
            if not self._is_rewound(step, version, lineage, total_samples):
                again = self._ledger.covered(ended)
                self._do(Rewound(step, version, lineage, total_samples, again))
                self._pacing = replace(self._pacing, total_samples=total_samples)
                self._eviction.judge_all()
                self._notify_both()
        await self._flushed()

    def _is_rewound(self, step: int, version: int, lineage: int, total_samples: int | None) -> bool:
        """This very rewind has happened."""
        if lineage < self._state.lineage:
            raise FencedError(f"a rewind into lineage {lineage} comes after lineage {self._state.lineage} began")
        last = self._state.last_rewind
        asked = (step, version, lineage, total_samples)
        return last is not None and (last.step, last.version, last.lineage, last.total_samples) == asked

    # -------------------------------------------------------------------------------------------- inside

    def _do(self, transition: Transition) -> None:
        """The only way in which anything changes. It raises `BugError`, and changes nothing, if that is illegal."""
        self._state.apply(transition)
        if self._journal is not None:
            self._seq = self._journal.append(transition)
            self._journal.snapshot_if_due(self._state.num_entries, self._state.dump)

    async def _flushed(self) -> None:
        """Until all that has happened is durable. Shielded: whoever is cancelled here has its grant already."""
        if self._journal is None:
            return
        if self._journal.durable >= self._seq:
            await self._journal.flushed(0)  # a failed one raises
        else:
            with anyio.CancelScope(shield=True):
                await self._journal.flushed(self._seq)

    def _check(self, caller: Caller) -> None:
        if caller.incarnation and caller.incarnation < (heard_from := self._state.heard_from(caller.part)):
            raise FencedError(
                f"incarnation {caller.incarnation} of the {caller.part} was replaced by incarnation {heard_from}: "
                "what it does does not count any more"
            )

    def _grant(self, max_samples: int, caller: Caller) -> Admission | None:
        """As many as the permits allow, or None if that is none yet."""
        self._check(caller)
        if caller.ask and (answered := self._state.admission(caller.ask)) is not None:
            return Admission(answered, closed=False)
        if self._ledger.closed:
            return Admission((), closed=True)
        ledger = self._ledger
        permits = self._pacing.permits(ledger.fed, ledger.num_dropped, self._state.version, running=ledger.num_running)
        sample_ids = self._ledger.next_ids(min(max_samples, permits))
        if not sample_ids:
            return None
        self._do(Admitted(caller.ask, sample_ids))
        return Admission(sample_ids, closed=False)

    def _hand_out(self, num_samples: int, trainer_version: int, caller: Caller) -> Lease | None:
        """A full lease; a smaller or empty one if the stream has ended; None if more samples may come."""
        self._check(caller)
        if caller.ask and (answered := self._state.lease(caller.ask)) is not None:
            held = self._queued(answered.sample_ids, answered.lease_id)
            return Lease(answered.lease_id, held, answered.ended)
        if self._ledger.closed:
            return Lease(0, (), ended=True)
        self._evict(trainer_version)
        over = self._no_more_to_come()
        ready = self._ledger.ready_in_feed_order(to_the_end=over) if self._in_feed_order else self._ledger.ready()
        ended = len(ready) < num_samples
        if ended and not over:
            return None
        sample_ids = tuple(islice(ready, num_samples))
        if not sample_ids:
            return Lease(0, (), ended)
        lease_id = self._ledger.last_lease + 1
        self._do(Leased(caller.ask, lease_id, sample_ids, ended))
        return Lease(lease_id, self._queued(sample_ids, lease_id), ended)

    def _queued(self, sample_ids: Sequence[SampleId], lease_id: int) -> tuple[QueuedSample, ...]:
        """The entries of those that are still held under the lease."""
        held = (self._state.entry(sample_id) for sample_id in sample_ids if self._ledger.is_leased(sample_id, lease_id))
        return tuple(entry for entry in held if entry is not None)

    def _evict(self, trainer_version: int) -> None:
        """READY samples beyond the bound → DROPPED(stale), if so configured."""
        if stale := self._eviction.stale(trainer_version):
            for sample_id in stale:
                if (entry := self._state.entry(sample_id)) is not None:
                    tokens = entry.meta.response_tokens
                    profile.note("sample.dropped", sample=str(sample_id), reason=str(DropReason.STALE), tokens=tokens)
            self._do(Dropped(DropReason.STALE, stale))
            self._notify_both()

    def _no_more_to_come(self) -> bool:
        """Nothing runs, and nothing will be admitted unless a leased sample is given up."""
        if self._ledger.closed:
            return True
        ledger = self._ledger
        if not self._pacing.is_complete(ledger.fed, ledger.num_dropped):
            return False
        # Of more than the run needs, what is still running is waited for by nobody.
        return ledger.num_running == 0 or self._pacing.is_done(
            ledger.fed, ledger.num_dropped, running=ledger.num_running
        )

    def _notify_both(self) -> None:
        self._permits.notify_all()
        self._samples.notify_all()
