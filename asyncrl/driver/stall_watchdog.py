"""The watchdog: a run without progress fails with an explanation instead of stalling silently. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.core.failures import InfraError
from asyncrl.observe.status.run_status import RunState
from asyncrl.observe.status.why import STALL_FILE, explain, render_chain


class StallError(InfraError):
    """The run made no progress for `timeouts.watchdog_s`."""


@dataclass(eq=False)
class Watchdog:
    """Watches the progress of a run: samples, versions, steps, tokens, replicas, restarts.

    Operations that have a deadline (a call to the ranks, the start or restart of a part) count as progress: if one
    hangs, its deadline ends it with a more specific message.
    """

    limit_s: float
    """`timeouts.watchdog_s`."""
    start_s: float = 600.0
    """`timeouts.start_s`, within which a restarted part or a starting replica is up."""
    gap_s: float = 10.0
    """Maximum that one observation adds to the time without progress. If observations are further apart, the driver
    itself was suspended and could not observe progress."""
    _progress: ProgressMarks | None = field(default=None, init=False)
    _observed_s: float | None = field(default=None, init=False)
    _stalled_s: float = field(default=0.0, init=False)

    def observe(self, now_s: float, state: RunState) -> None:
        """Process `state` at `now_s` (monotonic).

        Raises:
            StallError: there was no progress for longer than the limit. The message contains the chain of waits; the
                caller writes the whole state with `why.write_stall`.
        """
        progress = progress_of(state)
        gap_s = 0.0 if self._observed_s is None else min(now_s - self._observed_s, self.gap_s)
        moves = progress.is_beyond(self._progress) or has_deadline(state, self.start_s)
        self._progress, self._observed_s = progress, now_s
        self._stalled_s = 0.0 if moves else self._stalled_s + gap_s
        if self._stalled_s > self.limit_s:
            raise StallError(
                f"no progress for {self._stalled_s:.0f} s (timeouts.watchdog_s={self.limit_s:g}): "
                f"{render_chain(explain(state, state.written_at))}. "
                f"{STALL_FILE} in the run directory has the whole state"
            )


class ProgressMarks(NamedTuple):
    """The values that change while a run progresses."""

    run: Hashable
    replicas: frozenset[Hashable]

    def is_beyond(self, before: ProgressMarks | None) -> bool:
        """Whether any value has changed since `before`; a replica that disappeared does not count."""
        return before is None or self.run != before.run or not self.replicas <= before.replicas


def progress_of(state: RunState) -> ProgressMarks:
    queue = state.queue
    run = (
        state.phase,
        repr(queue.counts if queue else state.counts),
        (queue.lineage, queue.version) if queue else None,
        state.published,
        (state.lineage, state.version, state.step),
        state.generated_tokens,
        tuple((restart.part, restart.incarnation, restart.recovered_at) for restart in state.restarts),
        tuple(sorted(state.restarting)),
    )
    # The replica's phase is left out, because it also changes while fetching weights fails repeatedly.
    replicas = frozenset(
        (report.replica, report.lineage, report.version, report.generated_tokens) for report in state.replicas
    )
    return ProgressMarks(run, replicas)


def has_deadline(state: RunState, start_s: float) -> bool:
    """Whether an operation is in progress whose own deadline has not passed."""
    started_at = [*state.restarting.values(), *(r.phase_since for r in state.replicas if r.phase == "starting")]
    return (
        state.phase == "starting"
        or any(wait.bounded for waits in state.waits.values() for wait in waits)
        or any(state.written_at - since < start_s for since in started_at)
    )
