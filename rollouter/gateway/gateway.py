"""Which trajectory a key belongs to."""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rollouter.gateway.errors import closed, unknown_key
from rollouter.gateway.responses import Answer
from rollouter.gateway.session import Session

_KEY = re.compile(r"asyncrl-(\d+)-[A-Za-z0-9_-]{43}")
REMEMBERED = 10_000
"""Keys of trajectories that are over, so that late requests are told so."""


def incarnation_of(key: str) -> int | None:
    """Of the Rollouter that gave the key; None: it is no trajectory's key."""
    match = _KEY.fullmatch(key)
    return int(match[1]) if match else None


class Gateway:
    """The sessions of one Rollouter."""

    def __init__(self, incarnation: int = 1) -> None:
        self._incarnation = incarnation
        self._sessions: dict[str, Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def open(self, session: Session) -> str:
        """The key with which requests are the session's. It says which Rollouter to ask, and nothing else."""
        key = f"asyncrl-{self._incarnation}-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Requests with `key` are refused from now on."""
        self._sessions.pop(key).close()
        self._over[key] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> Answer:
        """What a request gets, refusals included. `path`: what stands behind `/v1/`."""
        session = self._sessions.get(key)
        if session is not None:
            return await session.answer(path, body)
        refusal = closed() if key in self._over else unknown_key()
        return Answer(refusal.status, refusal.body)
