"""How busy generation is, and what came out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class BusyMeter:
    """Splits the time since `start()` into busy (at least one task inside) and idle. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._since: float | None = None
        self._busy_s = 0.0
        self._idle_s = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._settle()
        self._since = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._settle()
        self._inside += 1
        try:
            yield
        finally:
            self._settle()
            self._inside -= 1

    @property
    def inside(self) -> int:
        """Tasks that are busy now."""
        return self._inside

    @property
    def busy_s(self) -> float:
        self._settle()
        return self._busy_s

    @property
    def idle_s(self) -> float:
        self._settle()
        return self._idle_s

    def _settle(self) -> None:
        """Book the time since the last change."""
        if self._since is None:
            return
        now = self._clock()
        if self._inside:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now


@dataclass(slots=True)
class PumpCounts:
    """Cumulative, of this process."""

    samples_done: int = 0
    """Generated, scored and offered to the queue."""
    generated_tokens: int = 0
    """Response tokens of turns completed here, of dropped samples too, and of samples that are not complete yet."""
    surplus_tokens: int = 0
    """Made for samples and trajectories that were over-sampled and do not count; the last second of those that were cut
    may be missing."""
    generate_s: float = 0.0
    """Sum over samples, from dispatch to the last token of the group."""
    max_generate_s: float = 0.0
    reward_s: float = 0.0
    """Sum over samples."""
