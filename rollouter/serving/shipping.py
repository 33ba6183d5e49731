"""The way of a replica's events to the Rollouter, which writes them down: a replica has no run directory. Pure but for
the process's `profile`.

They go with the answers to generate calls: at the end of the last call that is open, and about once a second while
there are others, as a message costs a millisecond. What a caller who has turned away did not fetch goes with the next
answer if Ray had not taken it. If it had, it is lost; as each message says how many events this replica has sent, the
Rollouter counts what does not come (`Profiler.take`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from asyncrl.profiling import profile
from rollouter.serving.pieces import Told

SHIP_EVERY_S = 1.0
MAX_UNSENT = 10_000
"""Events that wait for another answer; more are lost, and counted (`profiler.dropped`)."""

News = TypeVar("News")


class Shipping:
    """What this replica has recorded, for whoever is answered."""

    def __init__(self, replica: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._clock = clock
        self._open = 0
        self._last = clock()
        self._sent = 0
        """Events, in all."""
        self._unsent: list[Mapping[str, Any]] = []

    async def along(self, answer: AsyncGenerator[News, None]) -> AsyncGenerator[News | Told, None]:
        """A call's answer, with events in between and behind it."""
        self._open += 1
        try:
            async with aclosing(answer) as told:
                async for news in told:
                    yield news
                    if (events := self._due()) is not None:
                        with self._sending(events):
                            yield events
            if (events := self._due(at_end=True)) is not None:
                with self._sending(events):
                    yield events
        finally:
            self._open -= 1

    def all(self) -> Sequence[Mapping[str, Any]]:
        """What there is to tell, for an answer that is given anyhow."""
        unsent, self._unsent = self._unsent, []
        events = [*unsent, *profile.drain()]
        self._sent += len(events)
        return events

    def _due(self, *, at_end: bool = False) -> Told | None:
        """What goes with the answer now; None: nothing. `at_end`: of a call."""
        if not profile.on:
            return None
        now = self._clock()
        last_call = at_end and self._open == 1
        if now - self._last < SHIP_EVERY_S and not self._unsent and not last_call:
            return None
        events = self.all()
        if not events:
            return None
        self._last = now
        return Told(self._replica, events, self._sent)

    @contextmanager
    def _sending(self, told: Told) -> Iterator[None]:
        """If Ray does not come back for what follows, it has not taken it. If it does, the caller may yet not fetch
        it."""
        try:
            yield
        except BaseException:
            self._put_back(told.events)
            raise

    def _put_back(self, events: Sequence[Mapping[str, Any]]) -> None:
        room = max(0, MAX_UNSENT - len(self._unsent))
        self._sent -= len(events)
        self._unsent += events[:room]
        profile.lose(max(0, len(events) - room))
