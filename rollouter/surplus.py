"""Over-sampled generation: cut in the engines as soon as enough is done, and gone on with when there is room again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from asyncrl.ports import SampleQueue


class SurplusError(Exception):
    """Generation of a sample was cut: enough others are done."""


class Surplus:
    """Whether what is running now is surplus, as the queue says. One event loop's."""

    def __init__(self, queue: SampleQueue, *, call_s: float) -> None:
        self._queue = queue
        self._call_s = call_s
        self._now = False
        self._over = anyio.Event()
        self._running: set[anyio.CancelScope] = set()

    async def watch(self) -> None:
        """Follow the queue for ever."""
        while True:
            self._now = await self._queue.enough(self._now, timeout_s=self._call_s)
            if self._now:
                for scope in self._running:
                    scope.cancel()
            else:
                self._over.set()
                self._over = anyio.Event()

    @contextmanager
    def abortable(self) -> Iterator[anyio.CancelScope]:
        """What is inside, in one task, is cancelled when it becomes surplus; the scope tells whether it was.

        Raises:
            SurplusError: it was.
        """
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            if self._now:
                scope.cancel()
            try:
                yield scope
            finally:
                self._running.discard(scope)
        if scope.cancelled_caught:
            raise SurplusError

    async def over(self) -> None:
        """Wait until there is room again."""
        while self._now:
            await self._over.wait()
