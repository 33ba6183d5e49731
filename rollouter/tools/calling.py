"""Methods of tools, run where they belong: async ones on the event loop, others in threads that hold nobody up."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.failures import UserCodeError

RELEASE_S = 10.0
"""Longest that a `release` takes, and that it waits for a thread which is still at work on what it releases."""

Late = Callable[[Any], Coroutine[Any, Any, None]]


class CallTimeoutError(Exception):
    """It did not return within its deadline. Not the `TimeoutError` that a tool may raise itself."""


class Jobs:
    """Threads at work for one owner."""

    def __init__(self) -> None:
        self._running: set[_Job] = set()

    def add(self, job: _Job) -> None:
        self._running.add(job)

    def discard(self, job: _Job) -> None:
        self._running.discard(job)

    @property
    def at_work(self) -> bool:
        return bool(self._running)

    async def ended(self) -> None:
        """Wait until none is at work."""
        while self._running:
            await next(iter(self._running)).done.wait()


class _Job:
    """A sync method in a thread. It goes on if its caller is gone."""

    def __init__(self, function: Callable[[], Any], late: Late | None) -> None:
        self.function = function
        self.late = late
        self.done = anyio.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        # Without a deadline until the box closes: a thread's result must not be lost to a cancellation.
        self.scope = anyio.CancelScope(shield=True)


class Caller:
    """Calls methods of tools; sync ones in threads watched by tasks of `group`."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._jobs: set[_Job] = set()
        self._closing = False
        # Calls are bounded by their tools' limits; an abandoned thread must not take a place for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)
        self._starts = anyio.Semaphore(1)

    def close(self) -> None:
        """Threads still at work have `RELEASE_S` to end, as have those that begin yet, and are left behind then."""
        self._closing = True
        for job in self._jobs:
            job.scope.deadline = anyio.current_time() + RELEASE_S

    def later(self, function: Late, state: Any) -> None:
        """Call it besides; the box is not left before it has returned."""
        self._group.start_soon(function, state)

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any],
        timeout_s: float,
        jobs: Jobs,
        late: Late | None = None,
    ) -> Any:
        """What `method` returns.

        Args:
            kwargs: The row's.
            timeout_s: Its deadline.
            jobs: Knows of the thread, if it needs one, until that ends.
            late: Given the result of a thread whose caller does not wait any more: what it made has to be given back.

        Raises:
            CallTimeoutError: it did not return in time.
            UserCodeError: it does not take `kwargs`.
            BaseException: what it raises.
        """
        if kwargs:
            _fits(method, args, kwargs)
        bound = partial(method, *args, **kwargs)
        with anyio.move_on_after(timeout_s):
            if inspect.iscoroutinefunction(method):
                return await _own(bound())
            result = await self._in_thread(bound, jobs, late)
            return await _own(result) if inspect.isawaitable(result) else result
        raise CallTimeoutError

    async def _in_thread(self, function: Callable[[], Any], jobs: Jobs, late: Late | None) -> Any:
        job = _Job(function, late)
        if self._closing:
            job.scope.deadline = anyio.current_time() + RELEASE_S
        self._jobs.add(job)
        jobs.add(job)
        self._group.start_soon(self._work, job, jobs)
        try:
            await job.done.wait()
        except anyio.get_cancelled_exc_class():
            if job.done.is_set() and late is not None and job.error is None:
                with anyio.CancelScope(shield=True):
                    await late(job.result)
            job.abandoned = True
            raise
        if job.error is not None:
            raise job.error
        return job.result

    async def _work(self, job: _Job, jobs: Jobs) -> None:
        try:
            with job.scope:
                try:
                    # To start a thread takes milliseconds where all cores are busy, and the loop waits for it: of many
                    # at once, one in each of its rounds.
                    await self._starts.acquire()
                    asyncio.get_running_loop().call_soon(self._starts.release)
                    job.result = await to_thread.run_sync(job.function, abandon_on_cancel=True, limiter=self._unbounded)
                except anyio.get_cancelled_exc_class():
                    raise
                except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
                    job.error = error
                else:
                    if job.abandoned and job.late is not None:
                        jobs.discard(job)  # `late` may wait for those that are still at work
                        await job.late(job.result)
            if job.scope.cancelled_caught:
                job.error = CallTimeoutError()
        finally:
            self._jobs.discard(job)
            jobs.discard(job)
            job.done.set()


async def _own(awaitable: Awaitable[Any]) -> Any:
    """Wait for a tool's coroutine. One that is cancelled from inside has failed; its caller has not been cancelled."""
    task = asyncio.current_task()
    assert task is not None
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from error


def _fits(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(method, "__qualname__", repr(method))
        raise UserCodeError(f"{name} cannot be called with the row's tools_kwargs: {error}") from error
    except ValueError:
        return  # it does not tell its parameters
