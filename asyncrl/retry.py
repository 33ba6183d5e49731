"""How often what failed may be tried again. Pure."""

from __future__ import annotations

from collections import deque

from asyncrl.failures import DiskFullError, InfraError


class RestartBudget:
    """Restarts of one part: at most `max_restarts` within any `window_s` seconds."""

    def __init__(self, part: str, max_restarts: int, window_s: float) -> None:
        """`part`: as people are to read it, `Rollouter`."""
        self._part = part
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._failed_at: deque[float] = deque()

    def spend(self, now_s: float, error: InfraError) -> int:
        """The part failed with `error` at `now_s`, not before the last time. Returns how many of its restarts are
        spent now.

        Raises:
            InfraError: it may not be restarted. `error` itself if it never may, or if a restart would meet it again.
        """
        if self._max_restarts == 0 or isinstance(error, DiskFullError):
            raise error
        self._failed_at.append(now_s)
        while self._failed_at[0] <= now_s - self._window_s:
            self._failed_at.popleft()
        if (failures := len(self._failed_at)) > self._max_restarts:
            raise InfraError(
                f"the {self._part} failed {failures} times within {self._window_s:g} s "
                f"(recovery.max_restarts={self._max_restarts}); the last time: {error.message}",
                error.cause,
            )
        return failures
