"""Limits generation to a number of slots, and interrupts samples that over-sampling has made surplus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import anyio

from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import SampleQueue

GenerationSlot = ExitStack
"""One sample's slot in generation. The first exit frees it; further exits have no effect."""


class GenerationSlots:
    """The slots of one Rollouter."""

    def __init__(self, num_slots: int, waits: WaitBoard) -> None:
        self._slots = anyio.Semaphore(num_slots)
        self._waits = waits

    async def wait_for_free(self) -> int:
        """Wait for a free slot, and return the number of free slots."""
        with self._waits.waiting("slot"):
            while True:
                await self._slots.acquire()
                self._slots.release()
                # Releasing may have passed the slot on to a task that waits in `acquire`.
                if self._slots.value:
                    return self._slots.value

    def try_acquire(self) -> GenerationSlot | None:
        if not self._slots.value:
            return None
        self._slots.acquire_nowait()
        return self._acquired()

    async def acquire(self) -> GenerationSlot:
        with self._waits.waiting("slot"), profile.span("sample.slot"):
            await self._slots.acquire()
        return self._acquired()

    def _acquired(self) -> GenerationSlot:
        slot = GenerationSlot()
        slot.callback(self._slots.release)
        return slot


class SurplusError(Exception):
    """Generation of a sample was interrupted, because enough other samples are done."""


class SurplusMonitor:
    """Interrupts running samples while the queue has enough other samples. Belongs to one event loop."""

    def __init__(self, queue: SampleQueue, *, call_s: float) -> None:
        self._queue = queue
        self._call_s = call_s
        self._has_surplus = False
        self._ended = anyio.Event()
        self._running: set[anyio.CancelScope] = set()

    async def watch(self) -> None:
        """Follow the queue until cancelled."""
        while True:
            self._has_surplus = await self._queue.has_surplus(self._has_surplus, timeout_s=self._call_s)
            if self._has_surplus:
                for scope in self._running:
                    scope.cancel()
            else:
                self._ended.set()
                self._ended = anyio.Event()

    @contextmanager
    def abortable(self) -> Iterator[anyio.CancelScope]:
        """Cancel the block, which must stay in one task, when it becomes surplus. Yield its cancel scope.

        Raises:
            SurplusError: the block was cancelled as surplus.
        """
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            if self._has_surplus:
                scope.cancel()
            try:
                yield scope
            finally:
                self._running.discard(scope)
        if scope.cancelled_caught:
            raise SurplusError

    async def wait_for_room(self) -> None:
        """Wait until the queue has no surplus."""
        while self._has_surplus:
            await self._ended.wait()


class BusyMeter:
    """Splits the time since `start()` into busy (at least one task inside) and idle. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._since: float | None = None
        self._busy_s = 0.0
        self._idle_s = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._update()
        self._since = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._update()
        self._inside += 1
        try:
            yield
        finally:
            self._update()
            self._inside -= 1

    @property
    def inside(self) -> int:
        """The number of tasks that are busy now."""
        return self._inside

    @property
    def busy_s(self) -> float:
        self._update()
        return self._busy_s

    @property
    def idle_s(self) -> float:
        self._update()
        return self._idle_s

    def _update(self) -> None:
        if self._since is None:
            return
        now = self._clock()
        if self._inside:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now
