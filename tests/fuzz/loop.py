"""An event loop that never waits: time is virtual, and a seeded random choice picks what runs next.

    ready callbacks ─▶ in random order        nothing ready ─▶ the clock jumps to the next timer
    nothing ready and no timer ─▶ DeadlockError, which shows where every task waits

asyncio runs the callbacks of a loop in the order in which they become ready. Between the parts of a real run, which are
separate processes, there is no such order, so this loop runs ready callbacks in any order.

The same seed gives the same run, in any process: tasks and cancel scopes, of which anyio keeps sets, hash by their
number here and not by their address. Code that runs here must not depend on the order of sets of strings, or of
other objects that hash by their address.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import traceback
from asyncio import base_events
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import anyio
import anyio.lowlevel
from anyio._backends import _asyncio as backend
from anyio._core import _eventloop

T = TypeVar("T")

MAX_VIRTUAL_S = 100_000.0
MAX_TURNS = 2_000_000
"""Maximum number of callbacks in a run; a run with more is a livelock."""
SPIN_TURNS = 10_000
"""After so many callbacks without a pause, time passes anyway, so that a busy wait meets its deadline."""


class ScheduleError(AssertionError):
    """A run that does not end. The message shows where every task waits."""


class DeadlockError(ScheduleError):
    """Nothing is ready and no timer is set, and the main task has not ended."""


class LivelockError(ScheduleError):
    """The run exceeds its limits."""


class ThreadError(AssertionError):
    """Code asks for a thread, whose schedule the seed cannot determine."""


class _NumberedTask(asyncio.Task[Any]):
    def __init__(self, number: int, coroutine: Any, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        """Return the name only. anyio includes it in the reason of every cancellation."""
        return f"<Task {self.get_name()}>"


class VirtualLoop(base_events.BaseEventLoop):
    """The event loop that the module describes. `time()` begins at 0."""

    def __init__(self, seed: int, *, max_virtual_s: float = MAX_VIRTUAL_S, max_turns: int = MAX_TURNS) -> None:
        super().__init__()
        self._now_s = 0.0
        self._max_virtual_s = max_virtual_s
        self._max_turns = max_turns
        self._random = random.Random(seed).random
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap of the timers by time; the number of a timer decides between equal times."""
        self.turns = 0
        """Number of callbacks that have run."""
        self._turns_at_pause = 0
        self._numbers = itertools.count()
        self._broken: BaseException | None = None
        """The exception of a callback, for which no task waits."""
        self.set_task_factory(self._make_task)
        self.failure: BaseException | None = None
        """The first failure; later ones are consequences of ending a broken run."""
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Run as many callbacks as are ready now, or those of the next timer if none is."""
        if self._broken is not None:
            (error, self._broken) = (self._broken, None)
            raise error
        ready, timers, draw = self._ready, self._timers, self._random
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if self.turns > self._max_turns:
            raise self._failed(LivelockError, f"{self._max_turns} callbacks without an end")
        if not (ready or self._stopping) or (timers and self.turns - self._turns_at_pause >= SPIN_TURNS):
            self._pause()
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        number = len(ready)
        self.turns += number
        for _ in range(number):
            place = int(draw() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            handle = ready.pop()
            if not handle.cancelled():
                handle._run()

    def _pause(self) -> None:
        """Advance the clock to the next timer."""
        self._turns_at_pause = self.turns
        if not self._timers:
            raise self._failed(DeadlockError, "nothing is ready and no timer is set")
        self._now_s = max(self._now_s, self._timers[0][0])
        if self._now_s > self._max_virtual_s:
            raise self._failed(LivelockError, f"{self._max_virtual_s:g} virtual seconds without an end")

    def _make_task(self, _: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(next(self._numbers), coroutine, loop=self, **options)

    def _failed(self, kind: type[ScheduleError], what: str) -> ScheduleError:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        error = kind(f"{what}, at {self._now_s:.3f} s\n" + "\n".join(map(describe, tasks)))
        self.failure = self.failure or error
        # Ending the tasks may also take time.
        self._max_turns, self._max_virtual_s = self.turns + SPIN_TURNS, self._now_s + 1000.0
        return error

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Only the context of a failed callback has a handle; others report exceptions that were never retrieved.
        if "handle" in context:
            self.failure = self.failure or context.get("exception")
            self._broken = self.failure

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        raise ThreadError(f"run_in_executor({_name(func)}) under a virtual clock, called by\n{_caller()}")


def run(
    main: Callable[[], Awaitable[T]],
    seed: int,
    *,
    max_virtual_s: float = MAX_VIRTUAL_S,
    max_turns: int = MAX_TURNS,
) -> T:
    """`anyio.run` on a `VirtualLoop`.

    Raises:
        DeadlockError, LivelockError: If `main` does not end.
        ThreadError: Code asks for a thread.
    """
    loop = VirtualLoop(seed, max_virtual_s=max_virtual_s, max_turns=max_turns)

    async def with_quick_lookups() -> T:
        with _quick_lookups(loop):
            return await main()

    try:
        with _no_threads(), _numbered_scopes():
            return anyio.run(with_quick_lookups, backend_options={"loop_factory": lambda: loop})
    except BaseException as error:
        if loop.failure is not None and error is not loop.failure:
            raise loop.failure from error
        raise


@contextmanager
def _no_threads() -> Iterator[None]:
    async def run_sync(func: Callable[..., Any], *_: Any, **__: Any) -> Any:
        raise ThreadError(f"anyio.to_thread({_name(func)}) under a virtual clock, called by\n{_caller()}")

    real = backend.AsyncIOBackend.__dict__["run_sync_in_worker_thread"]
    backend.AsyncIOBackend.run_sync_in_worker_thread = staticmethod(run_sync)  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.AsyncIOBackend.run_sync_in_worker_thread = real  # type: ignore[method-assign]


@contextmanager
def _numbered_scopes() -> Iterator[None]:
    numbers = itertools.count()

    class NumberedScope(backend.CancelScope):
        def __new__(cls, **_: Any) -> NumberedScope:
            scope = object.__new__(cls)
            scope._number = next(numbers)
            return scope

        def __hash__(self) -> int:
            return self._number

    # A plain dictionary takes less time than one of weak references, and the tasks of a run are few.
    real, states = backend.CancelScope, backend._task_states
    backend.CancelScope, backend._task_states = NumberedScope, {}  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        backend.CancelScope, backend._task_states = real, states  # type: ignore[misc]


@contextmanager
def _quick_lookups(loop: VirtualLoop) -> Iterator[None]:
    """Let anyio find the loop and its task without system calls; it looks for them several times in each callback."""
    tasks = asyncio.tasks._current_tasks  # type: ignore[attr-defined]
    with (
        patch.object(backend, "current_task", lambda: tasks.get(loop)),
        patch.object(backend, "get_running_loop", lambda: loop),
        patch.object(_eventloop, "current_async_library", lambda: "asyncio"),
    ):
        yield


def describe(task: asyncio.Task[Any]) -> str:
    """Describe a task and where it waits, the innermost frame last."""
    lines = [f"  task {task.get_name()}:"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}")
                break
        else:
            break
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return "\n".join(lines)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", repr(func))


def _caller() -> str:
    return "".join(traceback.format_stack()[:-2][-4:])
