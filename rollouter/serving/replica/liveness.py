"""Decides whether an engine hangs. Pure.

An engine that has requests makes tokens; one that has none answers pings. During a pause it need do neither.
"""

from __future__ import annotations


class EngineLiveness:
    """How long an engine has shown no sign of life."""

    def __init__(self, limit_s: float, max_step_s: float) -> None:
        """
        Args:
            limit_s: An engine without a sign for so long hangs.
            max_step_s: Most that one observation adds: a longer gap means that the observer itself stood still.
        """
        self._limit_s = limit_s
        self._max_step_s = max_step_s
        self._tokens = -1
        self._silent_s = 0.0

    def observe(
        self, passed_s: float, *, tokens: int, busy: bool, paused: bool, ping_answered: bool, ping_open: bool
    ) -> bool:
        """Return whether the engine hangs.

        Args:
            passed_s: Since the last observation.
            tokens: Generated since the engine's start.
            busy: It has requests.
            ping_answered: Since the last observation.
        """
        progressed = tokens != self._tokens
        self._tokens = tokens
        if progressed or paused or ping_answered or not (busy or ping_open):
            self._silent_s = 0.0
        else:
            self._silent_s += min(passed_s, self._max_step_s)
        return self._silent_s >= self._limit_s
