"""The way of a replica's events to the Rollouter, which writes them down: a replica has no run directory. Pure.

They go with the answers to generate calls: at the end of the last call that is open, and about once a second while
there are others, as a message costs a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.profiling import profile
from rollouter.serving.pieces import Told

SHIP_EVERY_S = 1.0


class Shipping:
    """What this replica has recorded, for whoever is answered."""

    def __init__(self, replica: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._clock = clock
        self._open = 0
        self._last = clock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that is answered."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def due(self, *, at_end: bool = False) -> Told | None:
        """What goes with the answer now; None: nothing. `at_end`: of a call."""
        if not profile.on:
            return None
        now = self._clock()
        if now - self._last < SHIP_EVERY_S and not (at_end and self._open == 1):
            return None
        events = profile.drain()
        if not events:
            return None
        self._last = now
        return Told(self._replica, events)
