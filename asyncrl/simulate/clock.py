"""Simulated time: processes that sleep, wait and compute, in the order of a heap. Pure and deterministic.

A process is a generator. It yields a number of seconds to sleep, or a `Signal` to wait for. `yield from` composes
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from typing import Any

from asyncrl.core.failures import BugError

Process = Generator["float | Signal", None, None]


class Timer:
    """A call at a time, which may be cancelled."""

    __slots__ = ("cancelled", "function")

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.cancelled = False


class Signal:
    """Wakes every process that waits for it, each time it fires."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._waiting: list[Process] = []

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            self._clock.after(0.0, lambda process=process: self._clock.advance(process))  # type: ignore[misc]

    def wait(self, process: Process) -> None:
        self._waiting.append(process)


class SimulatedClock:
    """The simulated time in seconds, from 0, and what happens next. Calls at the same time run in the order in which
    they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._scheduled = 0

    def after(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Call `function` in `delay_s` seconds. Raises `BugError` if that is not a time from now on."""
        if not 0 <= delay_s < float("inf"):
            raise BugError(f"a simulated call {delay_s} s from now: time only moves forward")
        timer = Timer(function)
        self._scheduled += 1
        heappush(self._heap, (self.now + delay_s, self._scheduled, timer))
        return timer

    def start(self, process: Process) -> None:
        """Run a process until its first wait."""
        self.advance(process)

    def advance(self, process: Process) -> None:
        """Continue a process whose wait has ended."""
        try:
            waits_for: Any = next(process)
        except StopIteration:
            return
        if isinstance(waits_for, Signal):
            waits_for.wait(process)
        else:
            self.after(waits_for, lambda: self.advance(process))

    @property
    def has_more(self) -> bool:
        """Whether anything is scheduled."""
        return bool(self._heap)

    def join(self, processes: Sequence[Process]) -> Process:
        """Run processes at the same time until all have ended."""
        left, ended = len(processes), Signal(self)

        def watched(process: Process) -> Process:
            nonlocal left
            yield from process
            left -= 1
            ended.fire()

        for process in processes:
            self.start(watched(process))
        while left:
            yield ended

    def run(self, until: Callable[[], bool]) -> bool:
        """Let time pass until the condition holds; return False if nothing is left to happen before."""
        while not until():
            if not self._heap:
                return False
            at, _, timer = heappop(self._heap)
            if not timer.cancelled:
                self.now = at
                timer.function()
        return True
