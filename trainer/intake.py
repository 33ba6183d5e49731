"""Samples for a turn of the loop: leased, fetched, checked. What cannot be trained on is dropped and replaced, and what
is lost is made anew."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from asyncrl.failures import AsyncRLError, DataError, InfraError
from asyncrl.ports import Lease, PayloadStore, SampleQueue
from asyncrl.profiling import profile
from asyncrl.types import DropReason, SampleId
from asyncrl.waits import WaitBoard
from trainer.notes import note_drop
from trainer.rows import RowRules, TrainSample, UnusableRowError, prepare

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""A payload that is lost so often, and was made anew in between, says that none gets through. Many that are lost at
once do not: a process or a file takes all of its samples along."""


@dataclass(slots=True)
class Turn:
    """What one turn of the loop trains on."""

    samples: list[TrainSample] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    wait_s: float = 0.0
    ended: bool = False
    """No sample will come after these."""


class Intake:
    """The loop's side of the queue. Everything on one event loop, one `fill` at a time."""

    def __init__(
        self,
        queue: SampleQueue,
        payloads: PayloadStore,
        rules: RowRules,
        *,
        max_consecutive_filtered: int | None,
        max_consecutive_unusable: int,
        call_s: float,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            max_consecutive_filtered: so many `filtered` samples in a row are an error; None: no limit.
            max_consecutive_unusable: so many samples in a row that `rows.check_row` refuses are an error.
            call_s: longest single wait for samples; after it the queue is asked again.
        """
        self._queue = queue
        self._payloads = payloads
        self._rules = rules
        self._max_consecutive_filtered = max_consecutive_filtered
        self._num_filtered = 0
        """Filtered samples since the last one that was not."""
        self._max_consecutive_unusable = max_consecutive_unusable
        self._num_unusable = 0
        """Unusable samples since the last one that was not."""
        self._losses: Counter[SampleId] = Counter()
        """How often the payload of a sample was lost that has not arrived since."""
        self._kinds: set[str] = set()
        """Of unusable samples, each told once."""
        self._call_s = call_s
        self._waits = waits
        self._clock = clock
        self._stopping = False
        self._wait_scope: anyio.CancelScope | None = None

    def stop(self) -> None:
        """No more waiting: `fill` returns with what it has."""
        self._stopping = True
        if self._wait_scope is not None:
            self._wait_scope.cancel()

    async def fill(self, turn: Turn, num_samples: int, *, trainer_version: int) -> None:
        """Lease until `turn` has `num_samples`, the stream ends or `stop` is called.

        Raises:
            DataError: too many samples in a row that were filtered, or that cannot be used (`rows.check_row`).
            InfraError: one sample's payload was lost `MAX_LOSSES` times.
        """
        started = self._clock()
        with self._waits.waiting("samples"), profile.span("trainer.wait_samples") as span:
            while len(turn.samples) < num_samples and not self._stopping:
                lease = await self._lease(num_samples - len(turn.samples), trainer_version)
                if lease is None:
                    continue
                num_replaced = await self._take(turn, lease, trainer_version)
                # Others come in their place even behind the end of the stream.
                if lease.ended and num_replaced == 0:
                    turn.ended = True
                    break
            span.add(samples=len(turn.samples))
        turn.wait_s = self._clock() - started

    async def release(self, turn: Turn) -> None:
        """Give back what is not committed."""
        for lease_id in turn.leases:
            await self._queue.release(lease_id)

    async def release_after_failure(self, turn: Turn) -> None:
        """Shielded: a cancelled run still gives back what it holds; the queue's own deadline bounds it."""
        with anyio.CancelScope(shield=True):
            try:
                await self.release(turn)
            except AsyncRLError:
                logger.exception(
                    "leases %s could not be released; the failure before this one is what counts", turn.leases
                )

    async def _lease(self, num_samples: int, trainer_version: int) -> Lease | None:
        """One ask; None if stop() came first. A cancelled ask leaves nothing leased."""
        lease = None
        with anyio.CancelScope() as self._wait_scope:
            lease = await self._queue.lease(num_samples, trainer_version=trainer_version, timeout_s=self._call_s)
        self._wait_scope = None
        return lease

    async def _take(self, turn: Turn, lease: Lease, trainer_version: int) -> int:
        """Fetch and prepare a lease's samples into `turn`; returns how many were lost or had nothing to train on."""
        if not lease.samples:
            return 0
        turn.leases.append(lease.lease_id)
        num_replaced = 0
        with profile.span("trainer.fetch", samples=len(lease.samples)):
            samples = await self._payloads.get([queued.payload for queued in lease.samples])
        for queued, sample in zip(lease.samples, samples, strict=True):
            # A sample is milliseconds of work here, a lease may be a second: between two, others get their answers.
            await anyio.lowlevel.checkpoint()
            if sample is None:
                num_replaced += 1
                await self._queue.redo(queued.meta.sample_id)
                self._count_lost(queued.meta.sample_id)
                continue
            self._losses.pop(sample.sample_id, None)
            try:
                prepared = prepare(sample, lease_id=lease.lease_id, trainer_version=trainer_version, rules=self._rules)
            except UnusableRowError as error:
                num_replaced += 1
                await self._queue.drop(sample.sample_id, DropReason.FAILED)
                note_drop(sample.sample_id, DropReason.FAILED, queued.meta.response_tokens)
                self._judge(error)
                continue
            self._num_unusable = 0
            profile.note("sample.leased", sample=str(sample.sample_id), staleness=prepared.staleness)
            if prepared.untrainable is None:
                turn.samples.append(prepared)
                self._num_filtered = 0
            else:
                num_replaced += 1
                await self._queue.drop(prepared.sample_id, prepared.untrainable)
                note_drop(prepared.sample_id, prepared.untrainable, prepared.response_tokens)
                self._count(prepared)
        return num_replaced

    def _judge(self, error: UnusableRowError) -> None:
        """One bad sample is nothing; nothing but bad samples is the end.

        Raises:
            DataError: so many came in a row that none can be expected to get through.
        """
        self._num_unusable += 1
        if self._num_unusable >= self._max_consecutive_unusable:
            raise DataError(
                f"{self._num_unusable} samples in a row could not be trained on, so none seems to get through. The "
                f"last one, {error.message}",
                error.cause,
            )
        if error.kind not in self._kinds:
            self._kinds.add(error.kind)
            logger.warning("%s It was dropped as failed, and so will be others with %s.", error.message, error.kind)

    def _count_lost(self, sample_id: SampleId) -> None:
        """A lost payload costs its generation. If it is lost again and again, generation is of no use.

        Raises:
            InfraError: it was lost too often.
        """
        self._losses[sample_id] += 1
        if (losses := self._losses[sample_id]) >= MAX_LOSSES:
            raise InfraError(
                f"the payload of {sample_id} was lost or damaged {losses} times, and made anew in between, so what is "
                "generated does not reach the Trainer. The log names each cause; look at the disk of the run "
                "directory, and whether this machine sees it as the Rollouter's does"
            )

    def _count(self, dropped: TrainSample) -> None:
        if dropped.untrainable is not DropReason.FILTERED:
            return
        self._num_filtered += 1
        limit = self._max_consecutive_filtered
        if limit is not None and self._num_filtered >= limit:
            raise DataError(
                f"{self._num_filtered} samples in a row were filtered (algorithm.filter_groups.max_consecutive = "
                f"{limit}), the last one {dropped.sample_id} with rewards "
                f"{', '.join(f'{reward:g}' for reward in dropped.rewards[:8])}: the task is too hard or too easy for "
                "this model, so there is nothing to train on. Take other data, check reward.function, raise rollout.n "
                "or that limit, or set algorithm.filter_groups.enable=false"
            )
