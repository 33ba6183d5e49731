"""How often what failed may be tried again. Pure."""

from __future__ import annotations

from collections import deque

from asyncrl.failures import DiskFullError, InfraError


class RestartBudget:
    """Restarts of one part: at most `max_restarts` within any `window_s` seconds, and at most so many in a row in which
    the run gets no further: what fails at the same place for ever is no bad luck, however slowly it gets there.
    """

    def __init__(self, part: str, max_restarts: int, window_s: float) -> None:
        """`part`: as people are to read it, `Rollouter`."""
        self._part = part
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._failed_at: deque[float] = deque()
        self._excused = 0
        """Failures to come that do not count."""
        self._furthest = -1
        self._in_vain = 0
        """Failures since the run was further than ever before."""

    def reached(self, step: int) -> None:
        """The run has taken this step. It may have been there before, and gone back since."""
        if step > self._furthest:
            self._furthest, self._in_vain = step, 0

    def excuse(self, failures: int) -> None:
        """So many of its failures, or of those that are about to be told, were not the part's own."""
        for _ in range(failures):
            if self._failed_at:
                self._failed_at.popleft()
                self._in_vain = max(0, self._in_vain - 1)
            else:
                self._excused += 1

    def spend(self, now_s: float, error: InfraError) -> int:
        """The part failed with `error` at `now_s`, not before the last time. Returns how many of its restarts are
        spent now.

        Raises:
            InfraError: it may not be restarted. `error` itself if a restart would meet it again.
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
        self._in_vain += 1
        if self._in_vain > self._max_restarts:
            where = f"and the run did not get past step {self._furthest}" if self._furthest >= 0 else "before any step"
            raise self._spent(f"failed {self._in_vain} times in a row {where}", error)
        return failures

    def _spent(self, how: str, error: InfraError) -> InfraError:
        return InfraError(
            f"the {self._part} {how} (recovery.max_restarts={self._max_restarts})"
            f"{'; the last time' if self._max_restarts else ''}: {error.message}",
            error.cause,
        )
