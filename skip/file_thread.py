"""Threads that read and write the files of records: one of each kind for each event loop."""

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
_Jobs = SimpleQueue["_Job | None"]

MAX_BATCH = 16
"""Maximum number of jobs whose results return to the loop together; the first result waits for the others."""


class FileThread:
    """A thread for blocking work of one event loop; it ends with the loop and with the process.

    A hop into a thread pool and back takes longer than reading a small record. Here jobs queue up, the thread takes
    several at a time, and their results return to the loop together. Because Python runs one thread at a time, one
    thread for each kind of work is enough.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(asyncio.get_running_loop(), self._jobs.put, None)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, or raise its error. A queued job whose caller is cancelled is not begun."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, future))
        return await future


_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, FileThread]] = weakref.WeakKeyDictionary()


def file_thread(name: str) -> FileThread:
    """Return the thread of this name of the running event loop."""
    threads = _threads.setdefault(asyncio.get_running_loop(), {})
    if name not in threads:
        threads[name] = FileThread(f"skip-{name}")
    return threads[name]


def _work(queue: _Jobs) -> None:
    job: _Job | None
    while (job := queue.get()) is not None:
        jobs = [job]
        with suppress(Empty):
            while len(jobs) < MAX_BATCH and (job := queue.get_nowait()) is not None:
                jobs.append(job)
        done = [(future, *_outcome(function)) for function, future in jobs if not future.cancelled()]
        if done:
            with suppress(RuntimeError):  # the loop is closed
                done[0][0].get_loop().call_soon_threadsafe(_set_results, done)
        if job is None:
            return
        del job, jobs, done  # frees the results while the thread waits


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001  raised in the caller
        return None, error


def _set_results(done: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in done:
        if future.done():  # cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
