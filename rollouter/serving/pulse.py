"""Whether an engine lives, from what its replica sees of it. Pure.

An engine that has requests makes tokens; one that has none answers when it is pinged. In a pause it need not.
"""

from __future__ import annotations


class Pulse:
    """How long an engine has shown no sign of life."""

    def __init__(self, limit_s: float, longest_s: float) -> None:
        """
        Args:
            limit_s: one that shows none for so long hangs.
            longest_s: most that one look adds: what lies further apart says that who looks has stood still himself.
        """
        self._limit_s = limit_s
        self._longest_s = longest_s
        self._tokens = -1
        self._still_s = 0.0

    def look(self, passed_s: float, *, tokens: int, busy: bool, paused: bool, answered: bool, pinged: bool) -> bool:
        """Whether it hangs.

        Args:
            passed_s: since the last look.
            tokens: it has made since its start.
            busy: it has requests.
            paused: it was told to stand still.
            answered: a ping was answered since the last look.
            pinged: one is not answered yet.
        """
        moved = tokens != self._tokens
        self._tokens = tokens
        if moved or paused or answered or not (busy or pinged):
            self._still_s = 0.0
        else:
            self._still_s += min(passed_s, self._longest_s)
        return self._still_s >= self._limit_s
