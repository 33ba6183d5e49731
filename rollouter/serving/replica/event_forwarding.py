"""Forwards a replica's profiler events to the Rollouter, which writes them: a replica has no run directory.

Events are sent with the answers to generate calls: about once a second, because a message costs a millisecond, and when
the last open call ends. If a consumer stops reading before Ray has accepted a batch of events, the next answer contains
them. If Ray has accepted them already, they are lost. Each batch contains the number of events sent so far, so the
Rollouter can count the missing ones (`Profiler.ingest`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from asyncrl.profiling import profile
from rollouter.serving.client import EventBatch

FORWARD_EVERY_S = 1.0
MAX_UNSENT = 10_000
"""Maximum number of events that wait for another answer; further ones are lost and counted (`profiler.dropped`)."""

Item = TypeVar("Item")


class EventForwarder:
    """The events that this replica has recorded and not sent yet."""

    def __init__(self, replica: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica = replica
        self._clock = clock
        self._open_calls = 0
        self._last = clock()
        self._num_sent = 0
        self._unsent: list[Mapping[str, Any]] = []

    async def attach(self, answer: AsyncGenerator[Item, None]) -> AsyncGenerator[Item | EventBatch, None]:
        """Yield the items of a call's answer, with batches of events between and after them."""
        self._open_calls += 1
        try:
            async with aclosing(answer) as items:
                async for item in items:
                    yield item
                    if (batch := self._due()) is not None:
                        with self._returned_on_failure(batch):
                            yield batch
            if (batch := self._due(at_end=True)) is not None:
                with self._returned_on_failure(batch):
                    yield batch
        finally:
            self._open_calls -= 1

    def take_all(self) -> Sequence[Mapping[str, Any]]:
        """Return all events, to be sent with the answer to another call."""
        unsent, self._unsent = self._unsent, []
        events = [*unsent, *profile.drain()]
        self._num_sent += len(events)
        return events

    def _due(self, *, at_end: bool = False) -> EventBatch | None:
        """Return the events to send now, if any. `at_end` says that a call has ended."""
        if not profile.enabled:
            return None
        now = self._clock()
        is_last_call = at_end and self._open_calls == 1
        if now - self._last < FORWARD_EVERY_S and not self._unsent and not is_last_call:
            return None
        events = self.take_all()
        if not events:
            return None
        self._last = now
        return EventBatch(self._replica, events, self._num_sent)

    @contextmanager
    def _returned_on_failure(self, batch: EventBatch) -> Iterator[None]:
        """Keep the events if Ray does not request the next item, which means that Ray has not accepted them. Events
        that Ray has accepted may still be lost."""
        try:
            yield
        except BaseException:
            room = max(0, MAX_UNSENT - len(self._unsent))
            self._num_sent -= len(batch.events)
            self._unsent += batch.events[:room]
            profile.count_lost(max(0, len(batch.events) - room))
            raise
