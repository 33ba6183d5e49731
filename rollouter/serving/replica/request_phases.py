"""Records the event `request`: how long a request spent in each phase on this replica.

    received ─ gate ─▶ admitted ─▶ queued ─ queue ─▶ scheduled ─ prefill ─▶ first token ─ decode ─▶ last token ─▶ ended
                                   └──────────── less the pauses of the engine for weight syncs ───────────┘

All times are seconds of one monotonic clock, because vLLM's engine core is a process of the same machine. Pure, except
for the use of `profile`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.profiling import profile
from rollouter.requests import parse_request_id

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollouter.serving.replica.generation import RunningRequest
    from rollouter.serving.replica.health import ReplicaHealth

MAX_PAUSES = 1_000
"""Number of pauses that are kept. A call is too short to see more of them."""


class RequestPhases(NamedTuple):
    """The duration of each phase in seconds. Phases do not overlap, and their sum is at most the request's duration."""

    gate_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    paused_s: float


@dataclass(slots=True)
class RequestMoments:
    """The time at which one request reached each point; 0 if it did not reach the point."""

    received: float
    admitted: float = 0.0
    """The request passed the gate."""
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0


class EnginePauses:
    """The times at which the engine was paused. Only the newest `MAX_PAUSES` are kept."""

    def __init__(self) -> None:
        self._windows: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)
        self._since: float | None = None

    def begin(self, now: float) -> None:
        self._since = now

    def end(self, now: float) -> None:
        """End the current pause, if any."""
        if self._since is not None:
            self._windows.append((self._since, now))
            self._since = None

    def overlap(self, start: float, end: float) -> float:
        """Return the paused seconds between `start` and `end`; an open pause counts up to `end`."""
        total = 0.0
        if self._since is not None:
            total += max(0.0, end - max(start, self._since))
        for begun, over in reversed(self._windows):
            if over <= start:
                break
            total += max(0.0, min(end, over) - max(start, begun))
        return total


def request_phases(moments: RequestMoments, pauses: EnginePauses) -> RequestPhases:
    """Return the phases of a request, which may have ended in any of them.

    Times out of order, such as 0 or those of another machine's clock, are moved into range.
    """
    ended = max(moments.received, moments.ended)
    admitted = _clamp(moments.admitted or ended, moments.received, ended)
    queued = _clamp(moments.queued or admitted, admitted, ended)
    scheduled = _clamp(moments.scheduled or ended, queued, ended)
    first = _clamp(moments.first_token or ended, scheduled, ended)
    last = _clamp(moments.last_token or ended, first, ended)
    paused = [pauses.overlap(*span) for span in ((queued, scheduled), (scheduled, first), (first, last))]
    return RequestPhases(
        gate_s=admitted - moments.received,
        queued_s=max(0.0, scheduled - queued - paused[0]),
        prefill_s=max(0.0, first - scheduled - paused[1]),
        decode_s=max(0.0, last - first - paused[2]),
        paused_s=sum(paused),
    )


def _clamp(moment: float, low: float, high: float) -> float:
    return min(max(moment, low), high)


class RequestRecorder:
    """Records the event `request` of one request."""

    def __init__(self, run: RunningRequest, llm: AsyncLLM, health: ReplicaHealth, pauses: EnginePauses) -> None:
        self._run = run
        self._llm = llm
        self._health = health
        self._pauses = pauses
        self._moments = RequestMoments(time.monotonic())
        self._fields: dict[str, Any] = {}

    def note_admitted(self, prompt_tokens: int) -> None:
        """Record that the request has passed the gate."""
        if profile.records("request"):
            self._moments.admitted = time.monotonic()
            self._fields = {
                "version": self._health.weights_version.version,
                "prompt_tokens": prompt_tokens,
                "in_flight": self._llm.output_processor.get_num_unfinished_requests(),
            }

    def record(self, error: BaseException | None) -> None:
        """Record the event. `error` is the exception that ended the request, if any."""
        if not profile.records("request"):
            return
        run, moments = self._run, self._moments
        moments.ended = time.monotonic()
        stats = run.stats
        if stats is not None:
            moments.queued, moments.scheduled = stats.queued_ts, stats.scheduled_ts
            moments.first_token, moments.last_token = stats.first_token_ts, stats.last_token_ts
        spent = request_phases(moments, self._pauses)._asdict()
        if stats is None and moments.admitted:
            # Without the engine's statistics only the gate is known.
            spent = {"gate_s": spent["gate_s"]}
        duration_s = moments.ended - moments.received
        profile.record(
            "request",
            time.time() - duration_s,
            duration_s,
            **self._fields,
            replica=self._health.replica,
            request=run.request_id,
            **parse_request_id(run.request_id)._asdict(),
            response_tokens=run.num_tokens,
            finish_reason=str(run.finish_reason),
            error=None if error is None or isinstance(error, asyncio.CancelledError) else type(error).__name__,
            **{name: round(seconds, 6) for name, seconds in spent.items()},
        )
