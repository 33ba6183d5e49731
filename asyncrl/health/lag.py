"""How late an event loop runs what is due: something that blocks it holds up everything else of its process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from asyncrl.profiling import Profiler, profile

EVERY_S = 0.1
STALL_S = 0.1
"""A standstill that is longer is recorded as the event `loop.stall`."""
WINDOW_S = 10.0


class LagMonitor:
    """Of one event loop. `start` and `stop` it there; `worst_s` may be asked from any thread.

    It is a chain of timers and no task: nothing can fail unseen in it, and a loop that ends simply leaves it behind.
    """

    def __init__(self, part: str, *, clock: Callable[[], float] = time.monotonic, profiler: Profiler = profile) -> None:
        """`part`: whose loop it is, for events."""
        self._part = part
        self._clock = clock
        self._profiler = profiler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._late: deque[tuple[float, float]] = deque()
        """When, and how late; falling: what a later and longer standstill outlasts is not in it."""

    def start(self) -> None:
        """Watch the running loop from now on. Nothing happens if it is watched already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.stop()
            self._loop = loop
            self._wait(loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None
        self._late.clear()

    def worst_s(self) -> float | None:
        """Longest standstill in the last `WINDOW_S`, one that goes on included; None: no loop is watched."""
        if self._timer is None:
            return None
        now_s = self._clock()
        known = max((late_s for at_s, late_s in tuple(self._late) if now_s - at_s <= WINDOW_S), default=0.0)
        return max(known, now_s - self._due_s)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = self._clock() + EVERY_S
        self._timer = loop.call_later(EVERY_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = self._clock()
        late_s = max(0.0, now_s - self._due_s)
        while self._late and self._late[-1][1] <= late_s:
            self._late.pop()
        self._late.append((now_s, late_s))
        while now_s - self._late[0][0] > WINDOW_S:
            self._late.popleft()
        if late_s > STALL_S:
            self._profiler.took("loop.stall", late_s, part=self._part)
        self._wait(loop)
