"""What one request spent its time on, from moments that its replica and its engine have noted. Pure.

    asked ─ gate ─▶ admitted ─▶ queued ─ queue ─▶ scheduled ─ prefill ─▶ first token ─ decode ─▶ last token ─▶ ended
                                └──────────── less what the engine stood still for a weight sync ────────────┘

All moments are seconds of one monotonic clock: vLLM's engine core is a process of the same machine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

MAX_PAUSES = 1_000
"""More than there are in the time that a call may take."""


class Phases(NamedTuple):
    """Seconds, without overlap: they add up to at most the whole request."""

    gate_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    paused_s: float


@dataclass(slots=True)
class Moments:
    """Of one request; 0: it has not come to that."""

    asked: float
    admitted: float = 0.0
    """Past the gate."""
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    """Always known in the end, and so is `asked`."""


class Pauses:
    """When the engine stood still. The newest are remembered."""

    def __init__(self) -> None:
        self._windows: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)
        self._since: float | None = None

    def begin(self, now: float) -> None:
        self._since = now

    def end(self, now: float) -> None:
        """Of the pause that has begun, if one has."""
        if self._since is not None:
            self._windows.append((self._since, now))
            self._since = None

    def overlap(self, start: float, end: float) -> float:
        """Seconds between `start` and `end` in which it stood still; a pause that is not over counts up to `end`."""
        total = 0.0
        if self._since is not None:
            total += max(0.0, end - max(start, self._since))
        for begun, over in reversed(self._windows):
            if over <= start:
                break
            total += max(0.0, min(end, over) - max(start, begun))
        return total


def phases(moments: Moments, pauses: Pauses) -> Phases:
    """Of a request that has ended, complete or not: it may have come to its end in any phase.

    Moments out of order (0, or of a clock that is none of this machine's) are moved to where they may be.
    """
    ended = max(moments.asked, moments.ended)
    admitted = _within(moments.admitted or ended, moments.asked, ended)
    queued = _within(moments.queued or admitted, admitted, ended)
    scheduled = _within(moments.scheduled or ended, queued, ended)
    first = _within(moments.first_token or ended, scheduled, ended)
    # Behind the last token there is nothing but the way out; without one, it stood in an earlier phase to its end.
    last = _within(moments.last_token or ended, first, ended)
    stood = [pauses.overlap(*span) for span in ((queued, scheduled), (scheduled, first), (first, last))]
    return Phases(
        gate_s=admitted - moments.asked,
        queued_s=max(0.0, scheduled - queued - stood[0]),
        prefill_s=max(0.0, first - scheduled - stood[1]),
        decode_s=max(0.0, last - first - stood[2]),
        paused_s=sum(stood),
    )


def _within(moment: float, low: float, high: float) -> float:
    return min(max(moment, low), high)
