"""Blocking work beside an event loop, in a thread of its own, that costs little where there is much of it.

A hop into a thread pool and back takes longer than reading a small record does. Here jobs wait in a line, and the
thread takes all that have come while it was at work; their results go back to the loop together. Python runs one thread
at a time, so there is one for each kind of work: more would only keep the loop waiting.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Line = SimpleQueue["_Job | None"]

MAX_TOGETHER = 16
"""Jobs whose results go back together: the first one's wait for the others."""


class Lane:
    """A line of jobs of one event loop, and the thread that does them. It ends with the loop, and with the process,
    whatever it is at."""

    def __init__(self, name: str) -> None:
        self._jobs: _Line = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(asyncio.get_running_loop(), self._jobs.put, None)

    async def run(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises. A job whose caller is cancelled is not begun; one that is, goes on."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, future))
        return await future


_lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Lane]] = weakref.WeakKeyDictionary()


def lane(name: str) -> Lane:
    """Of the running event loop; its thread ends with that."""
    lanes = _lanes.setdefault(asyncio.get_running_loop(), {})
    if name not in lanes:
        lanes[name] = Lane(f"skip-{name}")
    return lanes[name]


def _work(line: _Line) -> None:
    job: _Job | None
    while (job := line.get()) is not None:
        jobs = [job]
        with suppress(Empty):
            while len(jobs) < MAX_TOGETHER and (job := line.get_nowait()) is not None:
                jobs.append(job)
        done = [(future, *_outcome(function)) for function, future in jobs if not future.cancelled()]
        if done:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                done[0][0].get_loop().call_soon_threadsafe(_tell, done)
        if job is None:
            return
        del job, jobs, done  # the next one may be long in coming


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
        return None, error


def _tell(done: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in done:
        if future.done():  # cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
