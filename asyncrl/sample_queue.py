"""The sample queue on one event loop, without Ray: the ledger, its pacing and bound, and whoever waits on them.

    admit  waits for a permit:   unblocked by set_applied_version, drop, an eviction, unfeed, end_stream, close
    lease  waits for samples:    unblocked by offer, release, drop, end_stream, close

Every transition runs without an await between reading and writing the ledger, and a grant is the last thing a waiter
does before it returns. So a waiter that is cancelled or runs out of time has either its grant or none was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import anyio

from asyncrl.failures import AsyncRLError, BugError
from asyncrl.ledger import Ledger
from asyncrl.ports import Admission, Lease, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.staleness import Pacing, StaleAction, judge
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


class LocalSampleQueue:
    """`ports.SampleQueue` in one process. Payloads are kept as they are until their sample ends."""

    def __init__(self, options: QueueOptions, restore: QueueSnapshot | None = None) -> None:
        self._options = options
        self._ledger = (
            Ledger(options.prompts_per_epoch) if restore is None else Ledger.restore(restore, options.prompts_per_epoch)
        )
        self._version = 0 if restore is None else restore.version
        self._stream_ended = False
        self._entries: dict[SampleId, QueuedSample] = {}
        self._judged_for: int | None = None
        self._unjudged: list[SampleId] = []
        lock = anyio.Lock()
        self._permits = anyio.Condition(lock)
        self._samples = anyio.Condition(lock)
        self._waits = WaitBoard()

    # -------------------------------------------------------------------------------------------- the Rollouter's side

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        """See `ports.SampleQueue`. Not `closed` when the run's total is under way: a drop would admit a replacement."""
        if max_samples < 1:
            raise BugError(f"admit of {max_samples} samples: ask for at least one")
        async with self._permits:
            if (admission := self._grant(max_samples)) is not None:
                return admission
            with anyio.move_on_after(timeout_s), self._waits.waiting("permit"):
                while True:
                    await self._permits.wait()
                    if (admission := self._grant(max_samples)) is not None:
                        return admission
        return Admission((), closed=False)

    async def unfeed(self, sample_ids: Sequence[SampleId]) -> None:
        """Take back an admission whose answer never arrived; the ids are admitted again, first."""
        async with self._permits:
            for sample_id in sample_ids:
                self._ledger.unfeed(sample_id)
            self._permits.notify_all()

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """RUNNING → READY. After `close()` the sample is let go: it already counts as DROPPED(shutdown)."""
        async with self._samples:
            self._take_in(QueuedSample(meta, payload))
            self._samples.notify_all()

    async def offer_many(self, samples: Sequence[QueuedSample]) -> list[AsyncRLError | None]:
        """`offer` for each, on its own: one error, or None, a sample."""
        errors: list[AsyncRLError | None] = []
        async with self._samples:
            for sample in samples:
                try:
                    self._take_in(sample)
                except BugError as error:
                    errors.append(error)
                else:
                    errors.append(None)
            self._samples.notify_all()
        return errors

    async def set_applied_version(self, version: int) -> None:
        """Open the staleness gate up to `version`. Raises `BugError` if that is older than what was applied before."""
        async with self._permits:
            if version < self._version:
                raise BugError(f"version {version} applied after version {self._version}: versions only grow")
            self._version = version
            self._permits.notify_all()

    # -------------------------------------------------------------------------------------------- the Trainer's side

    async def lease(self, num_samples: int, *, trainer_version: int, timeout_s: float) -> Lease:
        """See `ports.SampleQueue`. READY samples go out in the order in which they completed.

        `ended` comes with fewer samples than asked for, down to none, never with a full lease. It does not count what
        the caller still holds: a sample it releases or drops afterwards may bring more.
        """
        if num_samples < 1:
            raise BugError(f"lease of {num_samples} samples: ask for at least one")
        async with self._samples:
            if (lease := self._hand_out(num_samples, trainer_version)) is not None:
                return lease
            with anyio.move_on_after(timeout_s), self._waits.waiting("samples"):
                while True:
                    await self._samples.wait()
                    if (lease := self._hand_out(num_samples, trainer_version)) is not None:
                        return lease
        return Lease(0, (), ended=False)

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        """LEASED → TRAINED. After `close()` it changes nothing: commit before you close."""
        async with self._samples:
            self._ledger.commit(lease_id, sample_ids)
            for sample_id in sample_ids:
                self._entries.pop(sample_id, None)

    async def release(self, lease_id: int) -> None:
        """LEASED → READY for what is not committed; nothing to do is fine."""
        async with self._samples:
            self._unjudged.extend(self._ledger.release(lease_id))
            self._samples.notify_all()

    # -------------------------------------------------------------------------------------------- either side

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        """Any live state → DROPPED; its permit is free again. After `close()` it changes nothing."""
        async with self._permits:
            self._ledger.drop(sample_id, reason)
            self._entries.pop(sample_id, None)
            self._notify_both()

    async def end_stream(self) -> None:
        """Nothing is admitted any more; what runs may still finish and be leased."""
        async with self._permits:
            self._stream_ended = True
            self._notify_both()

    async def close(self) -> None:
        """Everything live becomes DROPPED(shutdown); whoever waits is told. Work in flight may still report in."""
        async with self._permits:
            self._ledger.close()
            self._entries.clear()
            self._notify_both()

    async def snapshot(self) -> QueueSnapshot:
        return self._ledger.snapshot(self._version)

    async def status(self) -> QueueStatus:
        return QueueStatus(
            books=self._ledger.books(),
            version=self._version,
            ended=self._ledger.num_ready == 0 and self._no_more_to_come(),
            waiting={wait.edge: wait.count for wait in self._waits.snapshot()},
        )

    # -------------------------------------------------------------------------------------------- inside, never awaits

    def _grant(self, max_samples: int) -> Admission | None:
        """As many as the permits allow, or None if that is none yet."""
        if self._stream_ended or self._ledger.closed:
            return Admission((), closed=True)
        permits = self._options.pacing.permits(self._ledger.fed, self._ledger.num_dropped, self._version)
        sample_ids = tuple(self._ledger.feed() for _ in range(min(max_samples, permits)))
        return Admission(sample_ids, closed=False) if sample_ids else None

    def _take_in(self, sample: QueuedSample) -> None:
        sample_id = sample.meta.sample_id
        if self._ledger.finish(sample_id):
            self._entries[sample_id] = sample
            self._unjudged.append(sample_id)

    def _hand_out(self, num_samples: int, trainer_version: int) -> Lease | None:
        """A full lease; a smaller or empty one if the stream has ended; None if more samples may come."""
        if self._ledger.closed:
            return Lease(0, (), ended=True)
        self._evict(trainer_version)
        ended = self._ledger.num_ready < num_samples
        if ended and not self._no_more_to_come():
            return None
        sample_ids = tuple(islice(self._ledger.ready(), num_samples))
        lease_id = self._ledger.lease(sample_ids) if sample_ids else 0
        return Lease(lease_id, tuple(self._entries[sample_id] for sample_id in sample_ids), ended)

    def _evict(self, trainer_version: int) -> None:
        """READY samples beyond the bound → DROPPED(stale), if so configured. Each is judged once per version."""
        bound = self._options.max_staleness
        suspects = self._unjudged if trainer_version == self._judged_for else list(self._entries)
        self._unjudged, self._judged_for = [], trainer_version
        evicted = False
        for sample_id in suspects:
            entry = self._entries.get(sample_id)
            if entry is None or not self._ledger.is_ready(sample_id):
                continue
            verdict = judge(
                trainer_version,
                entry.meta.oldest_version,
                max_staleness=bound,
                stale_action=self._options.stale_action,
            )
            if verdict == "drop":
                self._ledger.drop(sample_id, DropReason.STALE)
                del self._entries[sample_id]
                evicted = True
        if evicted:
            self._permits.notify_all()

    def _no_more_to_come(self) -> bool:
        """Nothing runs, and nothing will be admitted unless a leased sample is given up."""
        if self._ledger.closed:
            return True
        exhausted = self._stream_ended or self._options.pacing.is_complete(self._ledger.fed, self._ledger.num_dropped)
        return exhausted and self._ledger.num_running == 0

    def _notify_both(self) -> None:
        self._permits.notify_all()
        self._samples.notify_all()
