"""Concurrent tasks whose first failure is raised alone, calls on threads that can be left behind, and the reaction of a
command to Ctrl-C and SIGTERM."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from asyncrl.core.failures import first_failure

Item = TypeVar("Item")
Result = TypeVar("Result")


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """A task group of anyio whose first failure is raised without an exception group around it."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def gather(function: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """Call `function` with all items at once and return the results in order.

    The first failure cancels the other calls, and is raised without an exception group around it. The first call runs
    in the caller's task, and a single item starts neither a task nor a task group.
    """
    items = list(items)
    if len(items) == 1:
        return [await function(items[0])]
    results: dict[int, Any] = {}

    async def call(number: int, item: Item) -> None:
        results[number] = await function(item)

    async with task_group() as group:
        for number, item in enumerate(items[1:], start=1):
            group.start_soon(call, number, item)
        for item in items[:1]:
            await call(0, item)
    return [results[number] for number in range(len(results))]


REPEATED_S = 1.0
"""`timeout` sends SIGTERM to its command and then to the group of both: a second SIGTERM within this time is the first
one."""


class Interrupts:
    """Handles SIGINT and SIGTERM: the first requests an orderly stop, the second cancels `scope`."""

    def __init__(self, on_received: Callable[[], None] | None = None) -> None:
        """`on_received` is called at the first signal, before anything else."""
        self._on_received = on_received
        self.scope = anyio.CancelScope()
        self.on_first: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Requests an orderly stop; None: the first signal already cancels `scope`."""
        self.received = False

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Handle signals until cancelled."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async with anyio.create_task_group() as group:
                terminated_at = -math.inf
                async for number in signals:
                    if number == signal.SIGTERM:
                        before, terminated_at = terminated_at, anyio.current_time()
                        if terminated_at - before < REPEATED_S:
                            continue
                    is_first, self.received = not self.received, True
                    if is_first and self._on_received is not None:
                        self._on_received()
                    if is_first and self.on_first is not None:
                        group.start_soon(self.on_first)
                    else:
                        self.scope.cancel()


def in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call the function on a new daemon thread, which does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised again by `result`, in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return future
