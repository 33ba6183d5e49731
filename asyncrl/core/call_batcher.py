"""Batches calls: items that are submitted while one batch is being sent are sent together in the next.

A single item is sent at once; there is no timer and no background task. Under load, batches grow until sending keeps
up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from asyncrl.core.failures import AsyncRLError, BugError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _QueuedItem(Generic[Item, Result]):
    item: Item
    weight: int
    sent: bool = False
    done: bool = False
    outcome: Result | AsyncRLError | None = None


class CallBatcher(Generic[Item, Result]):
    """Sends submitted items in batches, one batch at a time.

    Args:
        send: sends a batch and returns one result, or error, per item. It is never cancelled, so it must have a
            deadline.
        max_weight: maximum weight of a batch; a heavier item is sent alone.
    """

    def __init__(
        self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Result | AsyncRLError]]], max_weight: int
    ) -> None:
        self._send = send
        self._max_weight = max_weight
        self._sending: anyio.Event | None = None
        self._queue: deque[_QueuedItem[Item, Result]] = deque()

    async def submit(self, item: Item, weight: int = 1) -> Result:
        """Return the result of `item`, or raise its error.

        A caller that is cancelled before its item is sent withdraws the item. One that is cancelled later ignores the
        result.
        """
        entry: _QueuedItem[Item, Result] = _QueuedItem(item, weight)
        self._queue.append(entry)
        try:
            while not entry.done:
                if self._sending is None:
                    await self._send_next()
                else:
                    await self._sending.wait()
        finally:
            if not entry.sent:
                self._queue.remove(entry)
        if isinstance(entry.outcome, AsyncRLError):
            raise entry.outcome
        return entry.outcome  # type: ignore[return-value]

    async def _send_next(self) -> None:
        """Send one batch from the front of the queue."""
        self._sending = sending = anyio.Event()
        try:
            # Items that other tasks submit during this iteration of the event loop are in the batch, too.
            await anyio.lowlevel.checkpoint()
            batch = [self._queue.popleft()]
            weight = batch[0].weight
            while self._queue and weight + self._queue[0].weight <= self._max_weight:
                batch.append(self._queue.popleft())
                weight += batch[-1].weight
            await self._send_batch(batch)
        finally:
            self._sending = None
            sending.set()

    async def _send_batch(self, batch: Sequence[_QueuedItem[Item, Result]]) -> None:
        for entry in batch:
            entry.sent = True
        outcomes: Sequence[Result | AsyncRLError] = [BugError("the call ended without an answer")] * len(batch)
        try:
            # Shielded: the outcome belongs to every caller in the batch, not only to the one whose task sends it.
            with anyio.CancelScope(shield=True):
                outcomes = await self._send([entry.item for entry in batch])
        except AsyncRLError as error:
            outcomes = [error] * len(batch)
        finally:
            # No caller may be left waiting, even after an error of another class, which the sending caller raises.
            for entry, outcome in zip(batch, outcomes, strict=True):
                entry.done, entry.outcome = True, outcome
