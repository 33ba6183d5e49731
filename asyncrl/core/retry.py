"""The budget of restarts of a failed part. Pure."""

from __future__ import annotations

from collections import deque

from asyncrl.core.failures import DiskFullError, InfraError


class RestartBudget:
    """Limits the restarts of one part: at most `max_restarts` within any `window_s` seconds, and at most that many in a
    row without progress of the run. A failure that recurs at the same step is not accidental, however much time passes
    in between.
    """

    def __init__(self, part: str, max_restarts: int, window_s: float) -> None:
        """`part`: the part's name in messages, such as `Rollouter`."""
        self._part = part
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._failed_at: deque[float] = deque()
        self._excused = 0
        """Number of coming failures that do not count."""
        self._furthest = -1
        self._without_progress = 0
        """Failures since the run last made progress."""

    def reached(self, step: int) -> None:
        """Record that the run has completed this step, possibly again after a rewind."""
        if step > self._furthest:
            self._furthest, self._without_progress = step, 0

    def excuse(self, failures: int) -> None:
        """Do not count this many failures, reported already or about to be: the part did not cause them."""
        for _ in range(failures):
            if self._failed_at:
                self._failed_at.popleft()
                self._without_progress = max(0, self._without_progress - 1)
            else:
                self._excused += 1

    def spend(self, now_s: float, error: InfraError) -> int:
        """Charge the failure `error` at `now_s`, which never decreases. Return the number of restarts spent so far.

        Raises:
            InfraError: the budget is spent. `error` itself is raised if a restart would fail the same way.
        """
        if isinstance(error, DiskFullError):
            raise error
        if self._max_restarts == 0:
            raise self._spent("failed", error)
        if self._excused:
            self._excused -= 1
            return len(self._failed_at)
        self._failed_at.append(now_s)
        while self._failed_at[0] <= now_s - self._window_s:
            self._failed_at.popleft()
        if (failures := len(self._failed_at)) > self._max_restarts:
            raise self._spent(f"failed {failures} times within {self._window_s:g} s", error)
        self._without_progress += 1
        if self._without_progress > self._max_restarts:
            where = f"and the run did not get past step {self._furthest}" if self._furthest >= 0 else "before any step"
            raise self._spent(f"failed {self._without_progress} times in a row {where}", error)
        return failures

    def _spent(self, how: str, error: InfraError) -> InfraError:
        return InfraError(
            f"the {self._part} {how} (recovery.max_restarts={self._max_restarts})"
            f"{'; the last time' if self._max_restarts else ''}: {error.message}",
            error.cause,
        )
