"""Decides whether an engine hangs. Pure.

An engine with requests must sample tokens, and an engine without requests must answer pings. During a pause, neither is
required.
"""

from __future__ import annotations


class EngineLiveness:
    """Measures for how long an engine has shown no sign of life."""

    def __init__(self, limit_s: float, max_step_s: float) -> None:
        """Begin to measure.

        Args:
            limit_s: An engine without a sign of life for this time hangs.
            max_step_s: The maximum time that one observation adds. A longer gap means that the observer was blocked.
        """
        self.limit_s = limit_s
        self._max_step_s = max_step_s
        self._tokens = -1
        self._silent_s = 0.0

    def observe(
        self, passed_s: float, *, tokens: int, busy: bool, paused: bool, ping_answered: bool, ping_open: bool
    ) -> bool:
        """Return whether the engine hangs.

        Args:
            passed_s: Time since the last observation.
            tokens: Number of tokens generated since the engine's start.
            busy: Whether the engine has requests.
            ping_answered: Whether the engine has answered a ping since the last observation.
        """
        progressed = tokens != self._tokens
        self._tokens = tokens
        if progressed or paused or ping_answered or not (busy or ping_open):
            self._silent_s = 0.0
        else:
            self._silent_s += min(passed_s, self._max_step_s)
        return self._silent_s >= self.limit_s
