"""No silent stall: a run in which nothing moves says what each part waits on, and stops. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from asyncrl.failures import InfraError
from asyncrl.waits import Wait


class StallError(InfraError):
    """Nothing moved for `timeouts.watchdog_s`."""


class Watchdog:
    """Watches a fingerprint of the run's progress.

    A call that has a deadline of its own counts as moving until that has passed: a long step, a pass over a large lease
    or the writing of a checkpoint is no stall, and if it hangs, its deadline ends it with a better message.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._progress: Hashable = None
        self._since_s: float | None = None

    def observe(self, now_s: float, progress: Hashable, waits: Mapping[str, Sequence[Wait]]) -> None:
        """Take note of `progress` at `now_s`.

        Raises:
            StallError: it has been the same for longer than the limit, and nothing in `waits` is within its own
                deadline; the message has `waits`, by part.
        """
        bounded = any(wait.bounded for edges in waits.values() for wait in edges)
        if self._since_s is None or progress != self._progress or bounded:
            self._progress, self._since_s = progress, now_s
        elif now_s - self._since_s > self._limit_s:
            raise StallError(
                f"nothing moved for {now_s - self._since_s:.0f} s (timeouts.watchdog_s={self._limit_s:g}). "
                + describe(waits)
            )


def describe(waits: Mapping[str, Sequence[Wait]]) -> str:
    """What every part waits on, the longest wait first."""
    told = []
    for part, edges in waits.items():
        listed = ", ".join(
            f"{wait.edge} for {wait.since_s:.0f} s" + (f" ({wait.count} tasks)" if wait.count > 1 else "")
            for wait in edges
        )
        told.append(f"The {part} waits on {listed}." if listed else f"The {part} waits on nothing it knows of.")
    return " ".join(told)
