"""Threads that read and write the files of records: one of each kind for each event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]

MAX_BATCH = 16
"""Maximum number of jobs whose results return to the loop together; the first result waits for the others."""


class FileThread:
    """A thread for blocking work of one event loop; it ends with the loop and with the process.

    A hop into a thread pool and back takes longer than reading a small record. Here jobs queue up, the thread takes
    several at a time, and their results return to the loop together. Because Python runs one thread at a time, one
    thread for each kind of work is enough.
    """

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(asyncio.get_running_loop(), self._jobs.end)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, or raise its error. A queued job whose caller is cancelled is not begun, and
        it frees its memory at once, even while the disk hangs."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.put(function, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._jobs.remove(future)
            raise


class _Jobs:
    """The jobs that are not begun, in their order."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}
        self._changed = threading.Condition()
        self._ended = False

    def put(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        with self._changed:
            self._waiting[future] = function
            self._changed.notify()

    def remove(self, future: asyncio.Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)

    def end(self) -> None:
        """Have the thread end after the jobs that wait."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self) -> list[_Job]:
        """Wait for jobs, and return up to `MAX_BATCH`. Return none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return [(self._waiting.pop(future), future) for future in list(islice(self._waiting, MAX_BATCH))]


_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, FileThread]] = weakref.WeakKeyDictionary()


def file_thread(name: str) -> FileThread:
    """Return the thread of this name of the running event loop."""
    threads = _threads.setdefault(asyncio.get_running_loop(), {})
    if name not in threads:
        threads[name] = FileThread(f"skip-{name}")
    return threads[name]


def _work(queue: _Jobs) -> None:
    while jobs := queue.take():
        done = [(future, *_outcome(function)) for function, future in jobs if not future.cancelled()]
        if done:
            with suppress(RuntimeError):  # the loop is closed
                done[0][0].get_loop().call_soon_threadsafe(_set_results, done)
        del jobs, done  # frees the results while the thread waits


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
