"""How many calls of a tool run at once, and how many begin in a second, over all trajectories."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class Gate:
    """Places for calls, first come, first served; calls begin at least `1 / max_per_s` seconds apart."""

    def __init__(self, *, max_concurrency: int, max_per_s: float | None) -> None:
        self._places = anyio.CapacityLimiter(max_concurrency)
        self._interval_s = 0.0 if max_per_s is None else 1.0 / max_per_s
        self._turnstile = anyio.Lock()
        self._next_start = float("-inf")

    @asynccontextmanager
    async def place(self, *, paced: bool = True) -> AsyncIterator[None]:
        """A place, once it is free. `paced`: and once the rate allows another call."""
        async with self._places:
            if paced and self._interval_s:
                # Only the first in line waits for the clock: whoever is cancelled in the line uses no turn up.
                async with self._turnstile:
                    await anyio.sleep_until(self._next_start)
                    self._next_start = anyio.current_time() + self._interval_s
            yield
