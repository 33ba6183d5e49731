"""A simulated engine: all its sequences decode together, each step gives each of them a token. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from asyncrl.simulate.clock import Process, Signal, SimulatedClock, Timer
from asyncrl.simulate.trace import EngineTrace, interpolated


class SimulatedRequest:
    """One turn, which engines sample."""

    __slots__ = ("engine", "finish", "limit", "oldest_version", "on_end", "sampled", "tokens", "version")

    def __init__(self, tokens: float, on_end: Callable[[SimulatedRequest], None], *, limit: int) -> None:
        self.tokens = tokens
        """Tokens still to sample when the request enters the engine."""
        self.sampled = 0.0
        """Tokens that other engines have sampled before."""
        self.limit = limit
        """The most tokens that it may have, as its caller knows before it ends."""
        self.on_end = on_end
        self.engine: SimulatedEngine | None = None
        self.finish = 0.0
        """Value of the replica's progress at which it ends; 0 while it waits."""
        self.oldest_version = -1
        """Version that sampled its first token; -1: none has been sampled."""
        self.version = -1
        """Version that sampled its last token."""


class SimulatedEngine:
    """One engine. `progress` counts the tokens that a sequence that was always in it would have."""

    def __init__(
        self, clock: SimulatedClock, trace: EngineTrace, *, max_num_seqs: int, name: str, version: int = 0
    ) -> None:
        self._clock = clock
        self._trace = trace
        self._max_num_seqs = max_num_seqs
        self.name = name
        self.version = version
        self.since_s = clock.now
        """When it began to serve."""
        self.busy_s = 0.0
        """Time with a sequence to decode, pauses excluded."""
        self.tokens = 0.0
        self.emptied = Signal(clock)
        """Fires when the last request leaves the engine."""
        self.on_busy: Callable[[], None] = lambda: None
        """Called when the engine begins or stops decoding."""
        self.on_end: Callable[[SimulatedRequest], None] = lambda request: request.on_end(request)
        """Called with each request that has all its tokens."""
        self._step_s: dict[int, float] = {}
        self._factor = 1.0
        self._progress = 0.0
        self._updated = 0.0
        self._computes_at = 0.0
        """When the engine has computed all prompts and decodes again."""
        self._paused = False
        self._gate_open = True
        self._held: list[tuple[list[SimulatedRequest], float]] = []
        self._entering = 0
        """Requests that have no token yet."""
        self._waiting: deque[SimulatedRequest] = deque()
        self._active: list[tuple[float, int, SimulatedRequest]] = []
        self._aborted = 0
        """Requests in `_active` that were aborted."""
        self._number = 0
        self._timer: Timer | None = None
        self._was_busy = False

    @property
    def num_active(self) -> int:
        return len(self._active) - self._aborted

    @property
    def is_busy(self) -> bool:
        return self.num_active > 0 and not self._paused

    @property
    def is_empty(self) -> bool:
        return not self.num_active and not self._waiting and not self._entering

    def submit(self, requests: Iterable[SimulatedRequest], *, prompt_tokens: float = 0.0) -> None:
        """Take requests, for which `prompt_tokens` have to be computed first."""
        batch = list(requests)
        for request in batch:
            request.engine, request.finish = self, 0.0
        if not self._gate_open:
            self._held.append((batch, prompt_tokens))
        else:
            self._arrive(batch, prompt_tokens)

    def abort(self, request: SimulatedRequest) -> float:
        """Remove a request; return the tokens that it has sampled here. One that has just ended is ignored."""
        if request.engine is not self:
            return 0.0
        request.engine = None
        if not request.finish:  # it has not arrived, or waits
            if request in self._waiting:
                self._waiting.remove(request)
                self._schedule()
            return 0.0
        self.account()
        self._aborted += 1
        request.version = self.version
        left = request.finish - self._progress
        self._schedule()
        return max(0.0, request.tokens - left)

    def set_factor(self, factor: float) -> None:
        """Multiply the time of a decoding step by `factor` from now on."""
        if factor != self._factor:
            self.account()
            self._factor = factor
            self._schedule()

    def load(self, version: int, *, drains: bool, recomputes: bool, pause_s: float) -> Process:
        """Serve `version` after a pause.

        Args:
            drains: requests in the engine end first, and no other enters.
            recomputes: their contexts are computed again under the new weights.
        """
        self._gate_open = False
        if drains:
            while not self.is_empty:
                yield self.emptied
        self.account()
        self._paused = True
        self._schedule()
        yield pause_s
        self.account()
        self.version = version
        if recomputes and (speed := self._trace.prefill_tokens_per_s):
            contexts = self.num_active * self._trace.prompt_tokens + sum(
                request.tokens - (finish - self._progress)
                for finish, _, request in self._active
                if request.engine is self
            )
            self._computes_at = self._clock.now + contexts / speed
        self._paused, self._gate_open = False, True
        held, self._held = self._held, []
        for batch, prompt_tokens in held:
            self._arrive(batch, prompt_tokens)
        self._schedule()

    def account(self) -> None:
        """Count the time and the tokens since the last change."""
        now, count = self._clock.now, self.num_active
        if count and not self._paused:
            since = max(self._updated, min(self._computes_at, now))
            steps = (now - since) / self._seconds_per_step(count)
            self._progress += steps
            self.tokens += steps * count
            self.busy_s += now - self._updated
        self._updated = now

    # -------------------------------------------------------------------------------------------- decoding

    def _arrive(self, batch: list[SimulatedRequest], prompt_tokens: float) -> None:
        self._entering += len(batch)
        self._clock.after(self._trace.request_s, lambda: self._enter(batch, prompt_tokens))

    def _enter(self, batch: list[SimulatedRequest], prompt_tokens: float) -> None:
        self._entering -= len(batch)
        self.account()
        if prompt_tokens and (speed := self._trace.prefill_tokens_per_s):
            self._computes_at = max(self._computes_at, self._clock.now) + prompt_tokens / speed
        self._waiting.extend(request for request in batch if request.engine is self)
        self._schedule()

    def _seconds_per_step(self, count: int) -> float:
        step_s = self._step_s.get(count)
        if step_s is None:
            step_s = self._step_s[count] = interpolated(self._trace.step_s, count)
        return step_s * self._factor

    def _schedule(self) -> None:
        """Admit waiting requests, and schedule the next end of one. The time is accounted for already."""
        while self._waiting and not self._paused and self.num_active < self._max_num_seqs:
            request = self._waiting.popleft()
            if request.engine is self:
                self._number += 1
                request.finish = self._progress + request.tokens
                request.version = self.version
                if request.oldest_version < 0:
                    request.oldest_version = self.version
                heappush(self._active, (request.finish, self._number, request))
        if self._aborted > 64 and self._aborted * 2 > len(self._active):
            self._active = [entry for entry in self._active if entry[2].engine is self]
            heapify(self._active)
            self._aborted = 0
        while self._active and self._active[0][2].engine is not self:
            heappop(self._active)
            self._aborted -= 1
        if self._timer is not None:
            self._timer.cancelled = True
            self._timer = None
        if self._active and not self._paused:
            left = max(0.0, self._active[0][0] - self._progress)
            starts = max(self._computes_at, self._clock.now) - self._clock.now
            delay_s = starts + left * self._seconds_per_step(self.num_active)
            self._timer = self._clock.after(delay_s, self._end_next)
        if self.is_busy != self._was_busy:
            self._was_busy = self.is_busy
            self.on_busy()
        if self.is_empty:
            self.emptied.fire()

    def _end_next(self) -> None:
        self.account()
        self._progress = max(self._progress, self._active[0][0])
        ended: list[SimulatedRequest] = []
        while self._active and self._active[0][0] <= self._progress + 1e-9:
            request = heappop(self._active)[2]
            if request.engine is not self:
                self._aborted -= 1
                continue
            request.engine = None
            request.version = self.version
            ended.append(request)
        self._schedule()
        for request in ended:
            self.on_end(request)
