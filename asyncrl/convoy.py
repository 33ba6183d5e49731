"""Calls that share a trip: what is handed in while one batch is on its way leaves together in the next.

A lone item leaves at once; no timer, no background task. Under load the batches grow until the trips keep up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from asyncrl.failures import AsyncRLError, BugError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Passenger(Generic[Item, Result]):
    item: Item
    weight: int
    left: bool = False
    arrived: bool = False
    outcome: Result | AsyncRLError | None = None


class Convoy(Generic[Item, Result]):
    """`send` carries a batch and returns one result, or error, an item. One batch is under way at a time. No
    cancellation reaches it, so its deadline is its own.

    `max_weight` bounds a batch; an item heavier than that travels alone.

        join    waits for the trip under way, again until its item has arrived; if there is none, it carries the next
    """

    def __init__(
        self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Result | AsyncRLError]]], max_weight: int
    ) -> None:
        self._send = send
        self._max_weight = max_weight
        self._trip: anyio.Event | None = None
        self._waiting: deque[_Passenger[Item, Result]] = deque()

    async def join(self, item: Item, weight: int = 1) -> Result:
        """The result of `item`, or its error raised.

        A caller cancelled before its item left takes it back; afterwards the item arrives without it.
        """
        passenger: _Passenger[Item, Result] = _Passenger(item, weight)
        self._waiting.append(passenger)
        try:
            while not passenger.arrived:
                if self._trip is None:
                    await self._carry()
                else:
                    await self._trip.wait()
        finally:
            if not passenger.left:
                self._waiting.remove(passenger)
        if isinstance(passenger.outcome, AsyncRLError):
            raise passenger.outcome
        return passenger.outcome  # type: ignore[return-value]

    async def _carry(self) -> None:
        """Make one trip with the front of the line."""
        self._trip = trip = anyio.Event()
        try:
            # What other tasks hand in during this turn of the loop still comes along.
            await anyio.lowlevel.checkpoint()
            await self._travel(self._board())
        finally:
            self._trip = None
            trip.set()

    def _board(self) -> list[_Passenger[Item, Result]]:
        batch = [self._waiting.popleft()]
        weight = batch[0].weight
        while self._waiting and weight + self._waiting[0].weight <= self._max_weight:
            batch.append(self._waiting.popleft())
            weight += batch[-1].weight
        return batch

    async def _travel(self, batch: Sequence[_Passenger[Item, Result]]) -> None:
        for passenger in batch:
            passenger.left = True
        outcomes: Sequence[Result | AsyncRLError] = [BugError("the call broke off")] * len(batch)
        try:
            # Shielded: the outcome belongs to everybody in the batch, not only to the caller who happens to carry it.
            with anyio.CancelScope(shield=True):
                outcomes = await self._send([passenger.item for passenger in batch])
        except AsyncRLError as error:
            outcomes = [error] * len(batch)
        finally:
            # In any case, an error of another kind included, which is the carrier's to raise: nobody is left waiting.
            for passenger, outcome in zip(batch, outcomes, strict=True):
                passenger.arrived, passenger.outcome = True, outcome
