"""The sample queue: its port, as Rollouter, Trainer and Supervisor call it, and the queue itself on one event loop.

Every method of the port sends one operation (`asyncrl.queue.operations`), which defines its decision and its effect.

    admit  waits for a permit:   unblocked by set_applied_version, drop, an eviction, returned permits, requeue, rewind,
                                 close, and by the attachment of a newer Rollouter
    lease  waits for samples:    unblocked by offer, release, drop, rewind, close, and by the attachment of a newer
                                 Trainer

An operation reads and changes the state without an await in between, and a call that has its grant waits no longer. So
a call that is cancelled or times out either receives its grant, or none was made. With a journal, an
operation is first applied in memory and appended, which makes it visible to all callers; its own caller receives the
answer once the operation is durable. No caller acts on an effect that a crash could undo, because operations become
durable in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import anyio

from asyncrl.core.failures import BugError, FencedError
from asyncrl.core.ports import Admission, Lease, PartName, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.core.types import DropReason, SampleId, SampleMeta
from asyncrl.queue.core import WAIT, Operation, ParkingOperation, QueueCore, QueueLog, QueueOptions
from asyncrl.queue.operations import (
    AdmitSamples,
    AttachPart,
    AwaitSurplus,
    CloseQueue,
    CommitSamples,
    ConfirmCheckpoint,
    CoverCheckpoint,
    DropSamples,
    LeaseSamples,
    MarkCheckpoint,
    OfferSamples,
    ReadStatus,
    ReleaseLease,
    RequeueSample,
    RewindTraining,
    SetAppliedVersion,
)
from asyncrl.queue.state import QueueState

__all__ = ["ANY_CALLER", "LocalSampleQueue", "QueueCaller", "QueueOptions", "SampleQueue"]


class SampleQueue(ABC):
    """The port of the sample queue. Illegal transitions raise `BugError`, calls of a replaced part `FencedError`."""

    @abstractmethod
    async def call(self, operation: Operation, *, timeout_s: float | None = None) -> Any:
        """Send the operation to the queue and return its answer; one that may park waits up to `timeout_s`."""

    # The Rollouter's calls

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        """Wait for permits and feed up to `max_samples` samples: fresh RUNNING ids in feed order."""
        return await self.call(AdmitSamples(max_samples), timeout_s=timeout_s)

    async def has_surplus(self, known: bool, *, timeout_s: float) -> bool:
        """Return whether running samples are surplus (over-sampling), because all that may be trained under the
        applied version are done. Waits while the answer equals `known`."""
        return await self.call(AwaitSurplus(known), timeout_s=timeout_s)

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """Make a RUNNING sample READY. This never waits, because the permit has reserved its place. It is ignored once
        the queue is closed."""
        [error] = await self.call(OfferSamples((QueuedSample(meta, payload),)))
        if error is not None:
            raise error

    async def set_applied_version(self, version: int, *, lineage: int = 0) -> None:
        """Record that every replica serves `version`, which opens the staleness gate. A version of an older lineage is
        ignored."""
        await self.call(SetAppliedVersion(version, lineage))

    # The Trainer's calls

    async def lease(self, num_samples: int, *, trainer_version: int, timeout_s: float) -> Lease:
        """Wait for `num_samples` READY samples and lease them; samples that are too stale are dropped first, if
        configured."""
        return await self.call(LeaseSamples(num_samples, trainer_version), timeout_s=timeout_s)

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId], *, trained_tokens: int = 0) -> None:
        """Make these samples of the lease TRAINED, because their gradient is in an optimizer step.

        A step of a later pass commits no samples. `trained_tokens`: tokens that the run has trained so far, including
        the step's; a value below an earlier one is ignored.
        """
        await self.call(CommitSamples(lease_id, tuple(sample_ids), trained_tokens))

    async def release(self, lease_id: int) -> None:
        """Make the uncommitted samples of the lease READY again."""
        await self.call(ReleaseLease(lease_id))

    async def requeue(self, sample_id: SampleId) -> None:
        """Feed a READY or LEASED sample again, under the same id, because its payload is lost or damaged."""
        await self.call(RequeueSample(sample_id))

    async def mark(self, step: int) -> QueueSnapshot:
        """Begin the checkpoint of `step` and return its sample counts; a `rewind` to `step` returns to this point."""
        return await self.call(MarkCheckpoint(step))

    async def confirm(self, step: int) -> None:
        """Check that the checkpoint of `step`, which is written, may be renamed into place.

        Raises:
            FencedError: a rewind to before its mark abandoned the checkpoint, or the caller was replaced. Then the
                checkpoint must not become the run's newest.
        """
        await self.call(ConfirmCheckpoint(step))

    async def cover(self, step: int, oldest_kept: int) -> None:
        """Record that the checkpoint of `step` is on disk; payloads of samples that ended before it may be deleted.

        `oldest_kept`: step of the oldest checkpoint that training can still go back to. Of samples that ended before
        it, the journal may forget everything but their counts."""
        await self.call(CoverCheckpoint(step, oldest_kept))

    # Calls of either side

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        """Drop a sample in any live state."""
        await self.call(DropSamples(reason, (sample_id,)))

    async def close(self) -> None:
        """End the run: all live samples become DROPPED(shutdown), and parked calls are answered."""
        await self.call(CloseQueue())

    async def status(self) -> QueueStatus:
        return await self.call(ReadStatus())

    # The Supervisor's calls; both are idempotent: a second call with the same numbers changes nothing

    async def attach(self, part: PartName, incarnation: int) -> None:
        """Begin a new incarnation of a part; calls of older ones raise `FencedError` from now on.

        The samples that the old one held are given back. Those of a Rollouter, which are RUNNING, are fed again before
        all others, and so are READY ones if payloads die with their process. Those of a Trainer, which are LEASED,
        become READY.
        """
        await self.call(AttachPart(part, incarnation))

    async def rewind(
        self, step: int, *, version: int, lineage: int, total_samples: int | None, trained_tokens: int = 0
    ) -> None:
        """Return to the Trainer's checkpoint of `step` (0: to the start), which contains `version` and has trained
        `trained_tokens`.

        Samples that are leased, or were trained after that checkpoint's mark, become READY again at their places in
        completion order; those without a payload are fed again. Dropped samples stay dropped, except for `shutdown`.
        The staleness gate returns to `version`. A closed queue is open again; a Rollouter that was generating when
        it was closed is refused from now on.

        Raises:
            FencedError: a later lineage has begun since.
            BugError: that step was never marked, or the lineage is not new.
        """
        await self.call(RewindTraining(step, version, lineage, total_samples, trained_tokens=trained_tokens))


class QueueCaller(NamedTuple):
    """The part of the run that makes a call, and whether the call is repeated."""

    part: str = "driver"
    incarnation: int = 0
    """0: the caller is never fenced."""
    retried: bool = False
    """The queue's process died during this call, so effects that have already happened are ignored."""
    step: int | None = None
    """The optimizer step that was in progress in the caller; profiling events of the queue belong to it."""


ANY_CALLER = QueueCaller()


class LocalSampleQueue(SampleQueue):
    """The queue in one process. It holds each payload value until its sample ends; with a journal, until a
    checkpoint covers it.

    Args:
        restore: the sample counts of the checkpoint that a run without a journal resumes from.
        journal: records every operation; its errors are raised by every call.
        state: the state rebuilt from the journal; `restore` is ignored then.
    """

    def __init__(
        self,
        options: QueueOptions,
        restore: QueueSnapshot | None = None,
        journal: QueueLog | None = None,
        *,
        state: QueueState | None = None,
    ) -> None:
        state = state or QueueState.begin(
            options.prompts_per_epoch,
            restore,
            keeps_payloads=journal is not None,
            total_samples=options.pacing.total_samples,
        )
        self._core = QueueCore(options, state, journal)
        self._changed = anyio.Condition()

    @property
    def state(self) -> QueueState:
        """The queue's state, which callers must not change."""
        return self._core.state

    async def call(
        self, operation: Operation, *, timeout_s: float | None = None, caller: QueueCaller = ANY_CALLER
    ) -> Any:
        """See `SampleQueue`. The calls of a part that was replaced raise `FencedError`, parked ones too."""
        if isinstance(operation, ReadStatus):
            if self._core.log is not None:
                await self._core.log.flushed(0)  # raises if the log has failed
            return operation.perform(self._core, retried=False)
        if isinstance(operation, RewindTraining) and operation.lineage > self.state.lineage:
            operation = await self._with_trained_since(operation)
        async with self._changed:
            answer = self._perform(operation, caller)
            if answer is WAIT:
                assert isinstance(operation, ParkingOperation)
                with anyio.move_on_after(timeout_s), self._core.waits.waiting(operation.waits_on):
                    while answer is WAIT:
                        await self._changed.wait()
                        answer = self._perform(operation, caller)
                if answer is WAIT:
                    answer = operation.timed_out()
        await self._flushed()
        return answer

    def _perform(self, operation: Operation, caller: QueueCaller) -> Any:
        oldest = self.state.oldest_accepted_incarnation(caller.part)
        if caller.incarnation and caller.incarnation < oldest:
            raise FencedError(
                f"incarnation {caller.incarnation} of the {caller.part} was replaced by incarnation {oldest}: "
                "its calls are refused"
            )
        before = self._core.num_recorded
        try:
            return operation.perform(self._core, retried=caller.retried)
        finally:
            if self._core.num_recorded > before:
                self._changed.notify_all()

    async def _with_trained_since(self, rewind: RewindTraining) -> RewindTraining:
        """Return the operation with `trained_since` read from the log, if the state has forgotten these samples."""
        log = self._core.log
        if self.state.has_mark(rewind.step):
            return rewind
        since = None if log is None else await log.trained_since(rewind.step)
        if since is None:
            raise BugError(
                f"training goes back to its checkpoint of step {rewind.step}, whose sample counts were never marked, "
                "or are older than those of every checkpoint that was kept"
            )
        return replace(rewind, trained_since=since)

    async def _flushed(self) -> None:
        """Wait until all applied operations are durable. Shielded: a caller that is cancelled here keeps its grant."""
        log = self._core.log
        if log is None:
            return
        if log.durable >= self._core.seq:
            await log.flushed(0)  # raises if the log has failed
        else:
            with anyio.CancelScope(shield=True):
                await log.flushed(self._core.seq)
