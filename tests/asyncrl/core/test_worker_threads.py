"""On a loop that never ends, anyio's worker threads outlive the calls that started them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
from anyio import to_thread

from asyncrl.core.worker_threads import CHECKED_ANYIO, keep_worker_threads

CALLS = 5


@pytest.fixture
def endless() -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine on a loop that runs as Ray's do."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    async def cancel_all() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def used_threads(*, keep: bool) -> int:
    """Return the number of threads that calls have used, each of them in a task of its own."""
    used: set[threading.Thread] = set()
    for _ in range(CALLS):
        if keep:
            keep_worker_threads()
        used.add(await asyncio.create_task(to_thread.run_sync(threading.current_thread)))
    return len(used)


@pytest.mark.parametrize(("keep", "threads"), [(False, CALLS), (True, 1)])
def test_calls_of_different_tasks_share_a_thread(endless: Callable[[Any], Any], keep: bool, threads: int) -> None:
    assert version("anyio") == CHECKED_ANYIO, (
        f"anyio {version('anyio')} was not checked: see whether these tests pass, and change CHECKED_ANYIO"
    )
    assert endless(used_threads(keep=keep)) == threads


def test_a_loop_with_a_main_task_keeps_that_one() -> None:
    async def main() -> int:
        keep_worker_threads()
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
