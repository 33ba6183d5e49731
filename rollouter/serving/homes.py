"""Which replica a sample's conversations live on, so that its next turns find their KV cache. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

MAX_HOMES = 100_000
"""Samples remembered; the one that was asked for least recently is forgotten first."""


def household(session: str) -> str:
    """`sample_0_7/3`, the fourth conversation of a sample, lives with the others: they share a prompt."""
    return session.partition("/")[0]


class Homes:
    """Replicas by session."""

    def __init__(self, max_homes: int = MAX_HOMES) -> None:
        self._max_homes = max_homes
        self._homes: OrderedDict[str, str] = OrderedDict()

    def find(self, session: str, available: Container[str]) -> str | None:
        """Its replica, if that is there; None: it has no home, or has lost it."""
        name = household(session)
        if (home := self._homes.get(name)) is None or home not in available:
            return None
        self._homes.move_to_end(name)
        return home

    def settle(self, session: str, replica: str) -> None:
        """It lives there from now on. A session without a name lives nowhere."""
        if not session:
            return
        name = household(session)
        self._homes[name] = replica
        self._homes.move_to_end(name)
        while len(self._homes) > self._max_homes:
            self._homes.popitem(last=False)
