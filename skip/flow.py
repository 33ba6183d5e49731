"""The wrapper that a role puts around a stage.

    which step?  extract_step(call), or the one of set_step
       not among `steps` ───────▶ run
       a record that may be served ──▶ its result
       else ────────────────────▶ run, then record

An async function never waits for the disk on its event loop: one thread reads records and another writes them. What
takes longer than `FILES_LIMIT_S` is given up: the stage runs as if there were no record, or is not recorded.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from asyncrl.profiling import profile

if TYPE_CHECKING:
    from skip.role import BaseSkip, Call

Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]
_Jobs = SimpleQueue["_Job | None"]

FILES_LIMIT_S = 60.0
"""Longest that an async stage waits for the files of its record."""
MAX_BATCH = 16
"""Jobs whose results return to the loop together: the first one's wait for the others."""


class Waiting(Protocol):
    """The type of `WaitBoard.waiting`."""

    def __call__(self, edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]: ...


def no_wait_board(edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]:
    """A `Waiting` that reports nothing."""
    return nullcontext()


def wrap(
    role: BaseSkip,
    function: Callable[..., Any],
    make_call: Callable[[tuple[Any, ...], Mapping[str, Any]], Call],
) -> Callable[..., Any]:
    """Return `function`, plain or async, with `role` around it. It raises what both of them raise."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            call, step = make_call(args, kwargs), role.current_step()
            with profile.span("skip.read", role=role.role) as span:
                lookup = await in_file_thread("read", role, lambda: role.look_up(call, step))
                span.add(found=int(lookup is not None and lookup.served is not None))
            if lookup is None:
                role.count("late")
                return await function(*args, **kwargs)
            if lookup.served is not None:
                role.count_served(lookup.served)
                return lookup.served.result
            result = await function(*args, **kwargs)
            if (request := lookup.request) is not None:
                with profile.span("skip.write", role=role.role):
                    written = await in_file_thread("write", role, lambda: role.write_record(request, result))
                role.count("late" if written is None else "recorded" if written else "unrecorded")
            return result

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with profile.span("skip.read", role=role.role) as span:
            lookup = role.look_up(make_call(args, kwargs), role.current_step())
            span.add(found=int(lookup.served is not None))
        if lookup.served is not None:
            role.count_served(lookup.served)
            return lookup.served.result
        result = function(*args, **kwargs)
        if lookup.request is not None:
            with profile.span("skip.write", role=role.role):
                written = role.write_record(lookup.request, result)
            role.count("recorded" if written else "unrecorded")
        return result

    return run


async def in_file_thread(name: str, role: BaseSkip, function: Callable[[], Result]) -> Result | None:
    """Return `function`'s result, from the thread for `read` or `write`; None: not in time. Raises what it raises."""
    with role.waiting("records", limit_s=FILES_LIMIT_S), anyio.move_on_after(FILES_LIMIT_S):
        return await file_thread(name).run(function)
    message = f"{role.files.root}: a record takes longer than {FILES_LIMIT_S:g} s to {name}, and is given up"
    role.warn_once(f"late {name}", message)
    return None


class FileThread:
    """A thread for blocking work of one event loop; it ends with the loop and with the process.

    A hop into a thread pool and back takes longer than reading a small record. Here jobs queue up, the thread takes
    several at a time, and their results return to the loop together. As Python runs one thread at a time, there is one
    for each kind of work.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(asyncio.get_running_loop(), self._jobs.put, None)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Return or raise what `function` does. A queued job whose caller is cancelled is not begun."""
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
