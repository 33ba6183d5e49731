"""Concurrent tasks whose first failure is raised alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

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

    The first failure cancels the other calls, and is raised without an exception group around it.
    """
    results: dict[int, Any] = {}

    async def call(number: int, item: Item) -> None:
        results[number] = await function(item)

    async with task_group() as group:
        for number, item in enumerate(items):
            group.start_soon(call, number, item)
    return [results[number] for number in range(len(results))]
