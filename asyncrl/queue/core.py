"""The queue that operations act on, and what an operation is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self

from asyncrl.core.failures import BugError
from asyncrl.core.ports import QueuedSample
from asyncrl.core.staleness import Pacing, StaleAction, action_for_staleness
from asyncrl.core.types import DropReason, Provenance, SampleId
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from asyncrl.queue.state import QueueState

if TYPE_CHECKING:  # `asyncrl status` reads operations, and the schema takes half a second to load
    from asyncrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The settings that the queue's decisions depend on."""

    prompts_per_epoch: int
    pacing: Pacing
    max_staleness: int | None = None
    """Maximum of `trainer version at lease - oldest version of any token`; None: no bound."""
    stale_action: StaleAction = "drop"
    """`drop` evicts at lease; with `mask` and `keep` the sample is leased, and the Trainer handles its stale tokens."""
    in_feed_order: bool = False
    """Samples are leased in the order in which they were fed, whatever the order in which they completed."""

    @classmethod
    def from_config(cls, config: Config, prompts_per_epoch: int, *, total_samples: int | None) -> Self:
        """Return the options of a run. `total_samples`: see `Pacing`."""
        mode = config.async_training
        pacing = Pacing(
            config.samples_per_version,
            mode.staleness_threshold,
            total_samples=total_samples,
            over_sample=config.rollout.over_sample.samples,
        )
        return cls(prompts_per_epoch, pacing, mode.max_staleness, mode.stale_action, in_feed_order=mode.deterministic)


class QueueLog(Protocol):
    """Records a queue's operations. After a failure, every call raises it."""

    @property
    def durable(self) -> int:
        """Number of the last durable operation."""

    def append(self, operation: Operation) -> int:
        """Record the operation, in order; return its number, from 1, without waiting."""

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        """Store `dump()`, which has about `size` entries, if rebuilding the state would otherwise take long.

        The queue calls this after each `append`."""

    async def flushed(self, seq: int) -> None:
        """Return once that operation, and all before it, are durable."""

    def forget_before(self, step: int) -> None:
        """Allow the log to delete operations before the mark of the checkpoint of `step`, which is the oldest one that
        training can still go back to."""

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        """Return `operation_rows.trained_since` over the operations that the log has."""


class QueueCore:
    """The state, the options and the log on which operations are performed.

    Staleness is checked once per READY sample and version of the Trainer.
    """

    def __init__(self, options: QueueOptions, state: QueueState, log: QueueLog | None) -> None:
        self.options = options
        self.state = state
        self.log = log
        self.seq = 0 if log is None else log.durable
        self.pacing = replace(options.pacing, total_samples=state.total_samples)
        self.num_recorded = 0
        """Number of operations that this process recorded."""
        self.regenerating: dict[SampleId, QueuedSample] = {}
        """Requeued samples that are generated again."""
        self.waits = WaitBoard()
        self.checked_for: int | None = None
        self.unchecked: list[SampleId] = []

    def record(self, operation: Operation) -> None:
        """Apply and log an operation; nothing else changes the state. If it is illegal, raise `BugError` and change
        nothing."""
        apply(operation, self.state)
        self.num_recorded += 1
        if self.log is not None:
            self.seq = self.log.append(operation)
            self.log.snapshot_if_due(len(self.state.entries), self.state.dump)

    @property
    def permits(self) -> int:
        """Number of samples that may be fed now.

        After a rewind, more samples may be READY than the version permits. If they wait in feed order for a sample that
        has to be fed again, that sample needs no permit: the version that would permit it may need the READY ones.
        """
        state = self.state
        permits = self.pacing.permits(state.fed, state.num_dropped, state.version, running=len(state.running))
        if permits or not self.options.in_feed_order or not (state.returned and state.ready):
            return permits
        is_needed = state.returned[0] < max(state.ready) and not self.pacing.is_complete(state.fed, state.num_dropped)
        return 1 if is_needed else 0

    @property
    def has_surplus(self) -> bool:
        state = self.state
        running = len(state.running)
        return running > 0 and self.pacing.is_enough(state.fed, state.num_dropped, state.version, running=running)

    @property
    def no_more_to_come(self) -> bool:
        """Whether no sample runs, and none will be admitted unless a leased sample is given up."""
        state, running = self.state, len(self.state.running)
        if state.closed:
            return True
        if not self.pacing.is_complete(state.fed, state.num_dropped):
            return False
        # Surplus samples do not count.
        return running == 0 or self.pacing.is_done(state.fed, state.num_dropped, running=running)

    def find_stale(self, trainer_version: int) -> tuple[SampleId, ...]:
        """Return the READY samples beyond the staleness bound, if configured. Raises the `BugError` of `staleness`."""
        state = self.state
        suspects = self.unchecked if trainer_version == self.checked_for else state.ready
        stale = tuple(
            dict.fromkeys(one for one in suspects if one in state.ready and self._is_stale(one, trainer_version))
        )
        self.unchecked, self.checked_for = [], trainer_version
        for sample_id in stale:
            tokens = state.entries[sample_id].meta.response_tokens
            profile.note("sample.dropped", sample=str(sample_id), reason=str(DropReason.STALE), tokens=tokens)
        return stale

    def _is_stale(self, sample_id: SampleId, trainer_version: int) -> bool:
        meta = self.state.entries[sample_id].meta
        action = action_for_staleness(
            trainer_version,
            meta.oldest_version,
            max_staleness=self.options.max_staleness,
            stale_action=self.options.stale_action,
            allows_newer=self.state.lineage > 0 or meta.provenance is not Provenance.GENERATED,
        )
        return action == "drop"


class _Wait:
    """The type of `WAIT`."""


WAIT: Final = _Wait()
"""The answer of an operation that has to wait for another one."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call to the queue."""

    def perform(self, queue: QueueCore, *, retried: bool) -> Any:
        """Decide what to record, record it, and return the answer, or `WAIT`.

        Args:
            retried: the queue's process died during this call, so effects that have already happened are ignored
                instead of raising `BugError`.
        """
        raise NotImplementedError

    def apply(self, state: QueueState) -> None:
        """Change the state; raise `BugError`, and change nothing, if that is illegal."""
        raise BugError(f"{type(self).__name__} changes no state")


@dataclass(frozen=True, slots=True)
class ParkingOperation(Operation):
    """A call that may wait for other calls."""

    waits_on: ClassVar[str] = ""
    """What a parked call waits on, as `core.waits` names it."""
    request_id: str = field(default="", kw_only=True)
    """Identifies this call, so that a lost answer can be repeated, and the call can be abandoned."""

    def timed_out(self) -> Any:
        """Return the answer of a call whose time is up."""
        raise NotImplementedError

    def undo(self, answer: Any) -> Operation | None:
        """Return the operation that gives back the grant of a cancelled caller; None: nothing was granted."""
        return None


def apply(operation: Operation, state: QueueState) -> None:
    """Apply a recorded operation and check the sample counts."""
    operation.apply(state)
    state.check_counts()
