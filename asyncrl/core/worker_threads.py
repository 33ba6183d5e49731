"""Keeps anyio's worker threads cheap on an event loop that never ends, such as that of a Ray actor.

anyio ends its worker threads together with the task that `run_until_complete` runs. Ray's loops have no such task: they
`run_forever`. On such a loop, each call of `anyio.to_thread.run_sync` searches all tasks of the loop in vain, and a new
thread ends with the call that started it. With 600 tasks a call then takes 340 µs of CPU instead of 80 µs, and 380 µs
if each call is a task of its own.

anyio has no public name for this. `tests/asyncrl/core/test_worker_threads.py` fails on a version other than
`CHECKED_ANYIO`.
"""

from __future__ import annotations

import asyncio

from anyio._backends._asyncio import _root_task, find_root_task

CHECKED_ANYIO = "4.16.0"
"""The version of anyio with which the tests have passed."""


def keep_worker_threads() -> None:
    """Let the worker threads of the running event loop live as long as the loop. Further calls change nothing."""
    find_root_task()  # remembers the main task of a loop that has one
    root = _root_task.get(None)
    if root is None or root.done():
        _root_task.set(asyncio.get_running_loop().create_task(_never_ends(), name="worker threads"))


async def _never_ends() -> None:
    await asyncio.Event().wait()
