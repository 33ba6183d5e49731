"""The operations of the sample queue as values; each defines its effect on the state. Pure.

    caller ─▶ operation.perform(queue) ─record─▶ operation.apply(state) ─▶ QueueState      live
                                          └─to_row─▶ journal ─from_row─▶ apply ─▶ the same state     after a crash

`perform` decides which part of the operation still has to happen (a call may be repeated or late) and what the
caller receives. `apply` changes the state; if the change is illegal, it raises `BugError` and changes nothing. A row
records only effects, so replaying rows needs neither pacing nor a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop
from itertools import islice
from typing import Any

from asyncrl.core.failures import AsyncRLError, BugError, FencedError
from asyncrl.core.ports import Admission, Lease, PartName, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.core.types import DropReason, Provenance, SampleId
from asyncrl.queue.core import WAIT, Operation, ParkingOperation, QueueCore
from asyncrl.queue.state import (
    REMEMBERED_REQUESTS,
    GrantedLease,
    LeasedSample,
    QueueState,
    ReversibleEnd,
)

# ------------------------------------------------------------------------------------------------ the Rollouter's calls


@dataclass(frozen=True, slots=True)
class AdmitSamples(ParkingOperation):
    """Wait for permits, also when every sample is fed, because a drop admits a replacement; answered with an
    `Admission`."""

    max_samples: int
    waits_on = "permit"

    def perform(self, queue: QueueCore, *, retried: bool) -> Any:
        if self.max_samples < 1:
            raise BugError(f"admit of {self.max_samples} samples: ask for at least one")
        if self.request_id and (answered := queue.state.admissions.get(self.request_id)) is not None:
            return Admission(answered, closed=False)
        if queue.state.closed:
            return Admission((), closed=True)
        sample_ids = queue.state.next_ids(min(self.max_samples, queue.permits))
        if not sample_ids:
            return WAIT
        queue.record(PermitsGranted(self.request_id, sample_ids))
        return Admission(sample_ids, closed=False)

    def timed_out(self) -> Admission:
        return Admission((), closed=False)

    def undo(self, answer: Admission) -> Operation | None:
        return ReturnPermits(self.request_id, answer.sample_ids) if answer.sample_ids else None


@dataclass(frozen=True, slots=True)
class PermitsGranted(Operation):
    """Samples begin to run: → RUNNING."""

    request_id: str
    sample_ids: tuple[SampleId, ...]

    def apply(self, state: QueueState) -> None:
        if state.closed:
            raise BugError("the queue is closed; no sample can be fed")
        if (expected := state.next_ids(len(self.sample_ids))) != self.sample_ids:
            raise BugError(f"illegal transition: feed of {_names(self.sample_ids)}; next is {_names(expected)}")
        for sample_id in self.sample_ids:
            if sample_id.index == state.next_index:
                state.next_index += 1
            else:
                heappop(state.returned)
        state.running.update(self.sample_ids)
        state.fed += len(self.sample_ids)
        _remember(state.admissions, self.request_id, self.sample_ids)


@dataclass(frozen=True, slots=True)
class ReturnPermits(Operation):
    """RUNNING → to be fed again, before all others, because the grant did not reach its caller."""

    request_id: str
    sample_ids: tuple[SampleId, ...]

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state = queue.state
        running = tuple(sample_id for sample_id in self.sample_ids if not state.is_late(sample_id))
        happened = retried and self.request_id not in state.admissions
        if running and not happened:
            queue.record(replace(self, sample_ids=running))

    def apply(self, state: QueueState) -> None:
        state.require("return", self.sample_ids, state.running.__contains__)
        for sample_id in self.sample_ids:
            state.requeue(sample_id)
        state.admissions.pop(self.request_id, None)


@dataclass(frozen=True, slots=True)
class AwaitSurplus(ParkingOperation):
    """Wait until the value of `has_surplus` differs from `known`; answered with the new value."""

    known: bool

    def perform(self, queue: QueueCore, *, retried: bool) -> Any:
        return WAIT if queue.has_surplus == self.known else not self.known

    def timed_out(self) -> bool:
        return self.known


@dataclass(frozen=True, slots=True)
class OfferSamples(Operation):
    """RUNNING → READY, in this order of completion; answered with one error, or None, per sample."""

    samples: tuple[QueuedSample, ...]

    def perform(self, queue: QueueCore, *, retried: bool) -> list[AsyncRLError | None]:
        state = queue.state
        accepted: dict[SampleId, QueuedSample] = {}
        errors: list[AsyncRLError | None] = []
        for sample in self.samples:
            sample_id = sample.meta.sample_id
            error: AsyncRLError | None = None
            lost = queue.regenerating.get(sample_id)
            if retried and lost is not None and sample.payload == lost.payload:
                pass  # the offer was accepted, and the sample was requeued later because its payload was damaged
            elif sample_id not in accepted and sample_id in state.running:
                accepted[sample_id] = sample
            elif not state.is_late(sample_id) and not (retried and state.was_fed(sample_id)):
                error = state.illegal("offer", sample_id)
            errors.append(error)
        if accepted:
            for sample_id in accepted:
                queue.regenerating.pop(sample_id, None)
            queue.record(OfferSamples(tuple(accepted.values())))
            queue.unchecked.extend(accepted)
        return errors

    def apply(self, state: QueueState) -> None:
        state.require("offer", [sample.meta.sample_id for sample in self.samples], state.running.__contains__)
        for sample in self.samples:
            sample_id, provenance = sample.meta.sample_id, sample.meta.provenance
            state.running.remove(sample_id)
            state.completions += 1
            state.ready[sample_id] = state.completions
            state.keep_payload(sample)
            state.replayed += provenance is not Provenance.GENERATED
            state.substituted += provenance is Provenance.SUBSTITUTED


@dataclass(frozen=True, slots=True)
class SetAppliedVersion(Operation):
    """Every replica serves `version` now, which opens the staleness gate. A version of an older lineage is ignored."""

    version: int
    lineage: int

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state = queue.state
        if self.lineage > state.lineage:
            raise BugError(f"version {self.version} of lineage {self.lineage} applied in lineage {state.lineage}")
        happened = self.version == state.version or (retried and self.version < state.version)
        if self.lineage == state.lineage and not happened:
            queue.record(self)

    def apply(self, state: QueueState) -> None:
        if self.version < state.version:
            raise BugError(f"version {self.version} applied after version {state.version}: versions only grow")
        state.version = self.version


# ------------------------------------------------------------------------------------------------ the Trainer's calls


@dataclass(frozen=True, slots=True)
class LeaseSamples(ParkingOperation):
    """Wait for READY samples; answered with a full `Lease`, or with a smaller or empty one if the stream has ended.

    `ended` is true only if the lease has fewer samples than requested. It does not consider samples that the caller
    still holds: if the caller releases or drops them, more samples may follow.
    """

    num_samples: int
    trainer_version: int
    waits_on = "samples"

    def perform(self, queue: QueueCore, *, retried: bool) -> Any:
        state = queue.state
        if self.num_samples < 1:
            raise BugError(f"lease of {self.num_samples} samples: ask for at least one")
        if self.request_id and (granted := state.leases.get(self.request_id)) is not None:
            left = [one for one in granted.sample_ids if state.is_leased(one, granted.lease_id)]
            return Lease(granted.lease_id, tuple(state.entries[one] for one in left), granted.ended)
        if state.closed:
            return Lease(0, (), ended=True)
        if stale := queue.find_stale(self.trainer_version):
            queue.record(DropSamples(DropReason.STALE, stale))
        last = queue.no_more_to_come
        ready = state.ready_in_feed_order(skip_missing=last) if queue.options.in_feed_order else state.ready
        ended = len(ready) < self.num_samples
        if ended and not last:
            return WAIT
        sample_ids = tuple(islice(ready, self.num_samples))
        if not sample_ids:
            return Lease(0, (), ended)
        lease_id = state.last_lease + 1
        queue.record(LeaseGranted(self.request_id, lease_id, sample_ids, ended))
        return Lease(lease_id, tuple(state.entries[sample_id] for sample_id in sample_ids), ended)

    def timed_out(self) -> Lease:
        return Lease(0, (), ended=False)

    def undo(self, answer: Lease) -> Operation | None:
        return ReleaseLease(answer.lease_id) if answer.samples else None


@dataclass(frozen=True, slots=True)
class LeaseGranted(Operation):
    """READY → LEASED."""

    request_id: str
    lease_id: int
    sample_ids: tuple[SampleId, ...]
    ended: bool

    def apply(self, state: QueueState) -> None:
        if self.lease_id != state.last_lease + 1:
            raise BugError(f"illegal transition: lease {self.lease_id}; next is {state.last_lease + 1}")
        state.require("lease", self.sample_ids, state.ready.__contains__)
        state.last_lease = self.lease_id
        for sample_id in self.sample_ids:
            state.leased[sample_id] = LeasedSample(self.lease_id, state.ready.pop(sample_id))
        _remember(state.leases, self.request_id, GrantedLease(self.lease_id, self.sample_ids, self.ended))


@dataclass(frozen=True, slots=True)
class CommitSamples(Operation):
    """LEASED → TRAINED. Has no effect on a closed queue: commit before closing it."""

    lease_id: int
    sample_ids: tuple[SampleId, ...]
    """Empty for a step of a later pass, which only trains further tokens of the lease."""
    trained_tokens: int = 0
    """Tokens that the run has trained, including this step's."""

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state, sample_ids = queue.state, self.sample_ids
        if retried:
            sample_ids = tuple(one for one in sample_ids if state.is_leased(one, self.lease_id))
        has_tokens = self.trained_tokens > state.trained_tokens and not state.closed
        if has_tokens or not all(map(state.is_late, sample_ids)):
            queue.record(replace(self, sample_ids=sample_ids))

    def apply(self, state: QueueState) -> None:
        attempted = f"commit under lease {self.lease_id}"
        state.require(attempted, self.sample_ids, lambda sample_id: state.is_leased(sample_id, self.lease_id))
        for sample_id in self.sample_ids:
            state.num_commits += 1
            state.reversible[sample_id] = ReversibleEnd(state.num_commits, state.remove_live(sample_id))
            state.trained += 1
            state.forget_payload_unless_reversible(sample_id)
        state.trained_tokens = max(state.trained_tokens, self.trained_tokens)


@dataclass(frozen=True, slots=True)
class ReleaseLease(Operation):
    """LEASED → READY for the uncommitted samples of the lease, at their places in completion order."""

    lease_id: int

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        if left := queue.state.left_of_lease(self.lease_id):
            queue.record(self)
            queue.unchecked.extend(left)

    def apply(self, state: QueueState) -> None:
        state.release(state.left_of_lease(self.lease_id))


@dataclass(frozen=True, slots=True)
class RequeueSample(Operation):
    """READY or LEASED → to be fed again, under the same id, because its payload is lost or damaged."""

    sample_id: SampleId

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state, sample_id = queue.state, self.sample_id
        happened = retried and not self._is_legal(state)
        if not state.is_late(sample_id) and not happened:
            entry = state.entries.get(sample_id)
            queue.record(self)
            if entry is not None:
                queue.regenerating[sample_id] = entry

    def apply(self, state: QueueState) -> None:
        if not self._is_legal(state):
            raise state.illegal("requeue", self.sample_id)
        state.requeue(self.sample_id)

    def _is_legal(self, state: QueueState) -> bool:
        return self.sample_id in state.ready or self.sample_id in state.leased


@dataclass(frozen=True, slots=True)
class MarkCheckpoint(Operation):
    """The checkpoint of `step` begins; answered with the sample counts that it has to contain."""

    step: int

    def perform(self, queue: QueueCore, *, retried: bool) -> QueueSnapshot:
        queue.record(self)
        return replace(queue.state.snapshot(), seq=queue.seq)

    def apply(self, state: QueueState) -> None:
        state.marks[self.step] = state.num_commits
        if self.step == state.covered_step:
            state.covered_step = -1


@dataclass(frozen=True, slots=True)
class ConfirmCheckpoint(Operation):
    """The checkpoint of `step` is written and about to be renamed into place."""

    step: int

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        if not queue.state.has_mark(self.step):
            raise FencedError(f"training has gone back to before step {self.step}: its checkpoint is abandoned")


@dataclass(frozen=True, slots=True)
class CoverCheckpoint(Operation):
    """The checkpoint of `step` is on disk. Ignored if a later checkpoint has been covered."""

    step: int
    oldest_kept: int
    """Step of the oldest checkpoint that training can still go back to."""

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        if self.step in queue.state.marks and self.step != queue.state.covered_step:
            queue.record(self)
            if queue.log is not None:
                queue.log.forget_before(self.oldest_kept)

    def apply(self, state: QueueState) -> None:
        if (mark := state.marks.get(self.step)) is None:
            raise BugError(f"the checkpoint of step {self.step} is on disk, but was never begun")
        for sample_id in [one for one, end in state.reversible.items() if 0 < end.number <= mark]:
            del state.reversible[sample_id]
            state.forget_payload(sample_id)
        state.marks = {step: kept for step, kept in state.marks.items() if kept >= mark and step >= self.step}
        state.covered_step = self.step


# ------------------------------------------------------------------------------------------------ calls of either side


@dataclass(frozen=True, slots=True)
class DropSamples(Operation):
    """Any live state → DROPPED; the permits are free again."""

    reason: DropReason
    sample_ids: tuple[SampleId, ...]

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state = queue.state
        left = tuple(
            one
            for one in self.sample_ids
            if not state.is_late(one) and not (retried and state.was_fed(one) and not state.is_live(one))
        )
        if left:
            queue.record(replace(self, sample_ids=left))

    def apply(self, state: QueueState) -> None:
        state.require(f"drop ({self.reason})", self.sample_ids, state.is_live)
        for sample_id in self.sample_ids:
            state.drop(sample_id, self.reason)


@dataclass(frozen=True, slots=True)
class CloseQueue(Operation):
    """All live samples → DROPPED(shutdown). Idempotent."""

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        if not queue.state.closed:
            queue.record(self)

    def apply(self, state: QueueState) -> None:
        if state.running:
            state.interrupted_rollouter = state.incarnations.get("rollouter", 0)
        for sample_id in state.live():
            state.drop(sample_id, DropReason.SHUTDOWN)
        state.closed = True
        for sample_id in list(state.entries):
            state.forget_payload_unless_reversible(sample_id)


# ----------------------------------------------------------------------------------------------- the Supervisor's calls


@dataclass(frozen=True, slots=True)
class AttachPart(Operation):
    """A new incarnation of a part begins; samples that the old one was generating are fed again, leased ones are
    READY."""

    part: PartName
    incarnation: int

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        newest = queue.state.incarnations.get(self.part, 0)
        if self.incarnation < newest:
            raise FencedError(
                f"incarnation {self.incarnation} of the {self.part} is refused: incarnation {newest} has begun"
            )
        if self.incarnation > newest:
            queue.record(self)
            queue.checked_for = None

    def apply(self, state: QueueState) -> None:
        if self.incarnation <= state.incarnations.get(self.part, 0):
            raise BugError(f"incarnation {self.incarnation} of the {self.part} is or was attached already")
        state.incarnations[self.part] = self.incarnation
        if self.part == "rollouter":
            # Without a journal, payloads were in the memory of the dead process.
            for sample_id in (*state.running, *(() if state.keeps_payloads else state.ready)):
                state.requeue(sample_id)
            state.admissions.clear()
        elif self.part == "trainer":
            state.release(tuple(state.leased))
            state.leases.clear()


@dataclass(frozen=True, slots=True)
class RewindTraining(Operation):
    """Training continues from the checkpoint of `step`, and a closed queue is open again.

    Samples that are LEASED, TRAINED since that step or DROPPED(shutdown) → READY, at their places in completion order;
    those without a payload, and the samples in `trained_since`, → to be fed again.
    """

    step: int
    version: int
    lineage: int
    total_samples: int | None
    trained_since: tuple[SampleId, ...] = ()
    """Samples TRAINED since that step and covered by later checkpoints, which are abandoned."""
    trained_tokens: int = 0
    """Tokens that the run had trained at that step."""

    def perform(self, queue: QueueCore, *, retried: bool) -> None:
        state = queue.state
        if self.lineage < state.lineage:
            raise FencedError(f"a rewind into lineage {self.lineage} is refused: lineage {state.lineage} has begun")
        if state.last_rewind == self._identity():
            return
        queue.record(replace(self, trained_since=state.ended_for_good(self.trained_since)))
        queue.pacing = replace(queue.pacing, total_samples=self.total_samples)
        queue.checked_for = None

    def apply(self, state: QueueState) -> None:
        again = self.trained_since
        if self.lineage <= state.lineage:
            raise BugError(f"illegal transition: rewind into lineage {self.lineage} out of lineage {state.lineage}")
        state.require("rewind", again, set(state.ended_for_good(again)).__contains__)
        if len(again) > state.trained - sum(end.number > 0 for end in state.reversible.values()):
            raise BugError(f"illegal transition: rewind of {len(again)} covered samples; fewer have been trained")
        # Without a mark, the state remembers only samples that ended after the step; `trained_since` names the others.
        mark = state.marks.get(self.step, 0)
        state.closed = False
        state.release(tuple(state.leased))
        undone = {one: end for one, end in state.reversible.items() if end.number == 0 or end.number > mark}
        completed = {sample_id: end.completion for sample_id, end in undone.items() if end.completion}
        for sample_id, end in undone.items():
            del state.reversible[sample_id]
            if end.number:
                state.trained -= 1
            else:
                state.dropped[DropReason.SHUTDOWN] -= 1
            if not end.completion:
                state.return_to_feed(sample_id)
        state.make_ready(completed)
        for sample_id in [sample_id for sample_id in state.ready if sample_id not in state.entries]:
            state.requeue(sample_id)
        for sample_id in again:
            state.trained -= 1
            state.return_to_feed(sample_id)
        state.marks = {step: at for step, at in state.marks.items() if step < self.step} | {self.step: mark}
        state.history = state.history.after_rewind(self.step, self.lineage)
        state.version, state.total_samples = self.version, self.total_samples
        state.trained_tokens = self.trained_tokens
        state.leases.clear()
        state.last_rewind = self._identity()

    def _identity(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in ("step", "version", "lineage", "total_samples")}


@dataclass(frozen=True, slots=True)
class ReadStatus(Operation):
    """Answered with a `QueueStatus`; the queue's process adds what it knows about itself."""

    def perform(self, queue: QueueCore, *, retried: bool) -> QueueStatus:
        state = queue.state
        return QueueStatus(
            counts=state.counts(),
            version=state.version,
            ended=not state.ready and queue.no_more_to_come,
            waiting={wait.edge: wait.count for wait in queue.waits.snapshot() if wait.edge},
            lineage=state.lineage,
            paced_to=queue.pacing.limit(state.version),
            total_samples=state.total_samples,
            journal_seq=0 if queue.log is None else queue.log.durable,
            payload_bytes=state.payload_bytes,
            closed=state.closed,
            trained_tokens=state.trained_tokens,
        )


def _remember(answers: dict[str, Any], request_id: str, answer: Any) -> None:
    if not request_id:
        return
    answers[request_id] = answer
    if len(answers) > REMEMBERED_REQUESTS:
        del answers[next(iter(answers))]


def _names(sample_ids: Sequence[SampleId]) -> str:
    return ", ".join(map(str, sample_ids)) or "nothing"
