"""No silent stall: a run in which nothing moves says why, and stops. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from asyncrl.chain import render
from asyncrl.failures import InfraError
from asyncrl.run_state import RunState
from asyncrl.telemetry.state_file import STALL_FILE
from asyncrl.why import explain


class StallError(InfraError):
    """Nothing moved for `timeouts.watchdog_s`."""


class Watchdog:
    """Watches whether a run moves: samples, versions, steps, tokens, replicas, restarts.

    What has a deadline of its own counts as moving until that has passed: a call to the ranks, the start or the restart
    of a part. If it hangs, its deadline ends it with a better message.
    """

    def __init__(self, limit_s: float, *, start_s: float = 600.0, gap_s: float = 10.0) -> None:
        """
        Args:
            limit_s: `timeouts.watchdog_s`.
            start_s: `timeouts.start_s`: by then a part that is being restarted, or a replica that starts, is up.
            gap_s: most that one look adds to a standstill. When looks are further apart it was the driver that stood
                still, stopped by a signal or with its machine, and nobody could have been seen moving.
        """
        self._limit_s = limit_s
        self._start_s = start_s
        self._gap_s = gap_s
        self._progress: Progress | None = None
        self._seen_s: float | None = None
        self._still_s = 0.0

    def observe(self, now_s: float, state: RunState) -> None:
        """Take note of `state` at `now_s` (monotonic).

        Raises:
            StallError: nothing has moved for longer than the limit. The message has the chain of waits; the caller puts
                the whole state beside it, with `telemetry.state_file.write_stall`.
        """
        found = progress(state)
        gap_s = 0.0 if self._seen_s is None else min(now_s - self._seen_s, self._gap_s)
        moved = found.is_beyond(self._progress) or is_bounded(state, self._start_s)
        self._progress, self._seen_s = found, now_s
        self._still_s = 0.0 if moved else self._still_s + gap_s
        if self._still_s > self._limit_s:
            raise StallError(
                f"nothing moved for {self._still_s:.0f} s (timeouts.watchdog_s={self._limit_s:g}): "
                f"{render(explain(state, state.written_at))}. All that is known is in {STALL_FILE} in the run directory"
            )


class Progress(NamedTuple):
    """Everything that changes when a run moves."""

    run: Hashable
    replicas: frozenset[Hashable]

    def is_beyond(self, before: Progress | None) -> bool:
        """Something has moved since. That a dead replica is forgotten is no movement."""
        return before is None or self.run != before.run or not self.replicas <= before.replicas


def progress(state: RunState) -> Progress:
    queue = state.queue
    run = (
        state.phase,
        repr(queue.books if queue else state.books),
        (queue.lineage, queue.version) if queue else None,
        state.published,
        (state.lineage, state.version, state.step),
        state.generated_tokens,
        tuple((restart.part, restart.incarnation, restart.recovered_at) for restart in state.restarts),
        tuple(sorted(state.restarting)),
    )
    # Not the phase: a replica that fails to fetch again and again changes that, and nothing else.
    replicas = frozenset(
        (report.replica, report.lineage, report.version, report.generated_tokens) for report in state.replicas
    )
    return Progress(run, replicas)


def is_bounded(state: RunState, start_s: float) -> bool:
    """Something that is under way ends by itself: its own deadline has not passed."""
    begun = [*state.restarting.values(), *(r.phase_since for r in state.replicas if r.phase == "starting")]
    return (
        state.phase == "starting"
        or any(wait.bounded for waits in state.waits.values() for wait in waits)
        or any(state.written_at - since < start_s for since in begun)
    )
