"""Execution of tool methods: worker threads, deadlines and rate limits, and one tool as one trajectory uses it.

capacity, rate ─▶ create, once ─▶ repeat calls that records have answered ─▶ execute ─▶ outcome
                                                                  at the end ─▶ calc_reward ─▶ release
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from numbers import Real
from typing import Any, get_args

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.core.failures import BugError, ConfigError, UserCodeError
from asyncrl.core.trajectory import CallStatus
from asyncrl.profiling import profile
from rollouter.drop_policy import ToolFailedError
from rollouter.tools.base import BadArgumentsError, BaseTool, ToolContext, ToolError, ToolResponse
from rollouter.tools.loading import LoadedTool, parse_arguments, shorten
from skip.stages import ToolOutcome

logger = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Deadline of a `release`, and how long it waits for a thread that still uses the state."""

OnLateResult = Callable[[Any], Coroutine[Any, Any, None]]


class CallTimeoutError(Exception):
    """A method did not return within its deadline. Not the `TimeoutError` that a tool may raise itself."""


class ThreadCall:
    """A sync method in a worker thread, which continues if its caller has been cancelled."""

    def __init__(self, function: Callable[[], Any], on_late_result: OnLateResult | None) -> None:
        self.function = function
        self.on_late_result = on_late_result
        self.done = anyio.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        # Without a deadline until the toolbox closes: a cancellation must not lose a thread's result.
        self.scope = anyio.CancelScope(shield=True)


class MethodCaller:
    """Calls methods of tools: async ones on the event loop, sync ones in threads that tasks of `group` supervise."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._threads: set[ThreadCall] = set()
        self._closing = False
        # Calls are bounded by their tools' limits; an abandoned thread must not occupy capacity for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)
        self._starts = anyio.Semaphore(1)

    def close(self) -> None:
        """Give running threads, and those that start later, `RELEASE_S` to end; then abandon them."""
        self._closing = True
        for thread in self._threads:
            thread.scope.deadline = anyio.current_time() + RELEASE_S

    def call_later(self, function: OnLateResult, state: Any) -> None:
        """Run `function` in the background; the toolbox waits for it before it closes."""
        self._group.start_soon(function, state)

    async def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any],
        timeout_s: float,
        threads: set[ThreadCall],
        on_late_result: OnLateResult | None = None,
    ) -> Any:
        """Call `method` with a deadline and return its result.

        Args:
            kwargs: Keyword arguments from the row.
            timeout_s: The deadline.
            threads: Contains the thread, if the method needs one, until it ends.
            on_late_result: Gets the result of a thread whose caller no longer waits, to release it.

        Raises:
            CallTimeoutError: it did not return in time.
            UserCodeError: its signature does not take `kwargs`.
            BaseException: what the method raises.
        """
        if kwargs:
            _check_kwargs(method, args, kwargs)
        bound = partial(method, *args, **kwargs)
        with anyio.move_on_after(timeout_s):
            if inspect.iscoroutinefunction(method):
                return await _await_tool(bound())
            result = await self._in_thread(ThreadCall(bound, on_late_result), threads)
            return await _await_tool(result) if inspect.isawaitable(result) else result
        raise CallTimeoutError

    async def _in_thread(self, thread: ThreadCall, threads: set[ThreadCall]) -> Any:
        if self._closing:
            thread.scope.deadline = anyio.current_time() + RELEASE_S
        self._threads.add(thread)
        threads.add(thread)
        self._group.start_soon(self._supervise, thread, threads)
        try:
            await thread.done.wait()
        except anyio.get_cancelled_exc_class():
            if thread.done.is_set() and thread.on_late_result is not None and thread.error is None:
                with anyio.CancelScope(shield=True):
                    await thread.on_late_result(thread.result)
            thread.abandoned = True
            raise
        if thread.error is not None:
            raise thread.error
        return thread.result

    async def _supervise(self, thread: ThreadCall, threads: set[ThreadCall]) -> None:
        try:
            with thread.scope:
                try:
                    # On busy cores, starting a thread takes milliseconds of the event loop: start one per iteration.
                    await self._starts.acquire()
                    asyncio.get_running_loop().call_soon(self._starts.release)
                    thread.result = await to_thread.run_sync(
                        thread.function, abandon_on_cancel=True, limiter=self._unbounded
                    )
                except anyio.get_cancelled_exc_class():
                    raise
                except BaseException as error:  # noqa: BLE001  raised by the caller
                    thread.error = error
                else:
                    if thread.abandoned and thread.on_late_result is not None:
                        threads.discard(thread)  # `on_late_result` may wait for the other threads
                        await thread.on_late_result(thread.result)
            if thread.scope.cancelled_caught:
                thread.error = CallTimeoutError()
        finally:
            self._threads.discard(thread)
            threads.discard(thread)
            thread.done.set()


async def _await_tool(awaitable: Awaitable[Any]) -> Any:
    """Await a tool's coroutine. One that is cancelled from inside has failed, without cancelling its caller."""
    task = asyncio.current_task()
    assert task is not None
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from error


def _check_kwargs(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(method, "__qualname__", repr(method))
        raise UserCodeError(f"{name} cannot be called with the row's tools_kwargs: {error}") from error
    except ValueError:
        return  # it has no signature to inspect


class CallLimiter:
    """Limits concurrent calls, first come, first served; calls start at least `1 / max_per_s` seconds apart."""

    def __init__(self, *, max_concurrency: int, max_per_s: float | None) -> None:
        self._capacity = anyio.CapacityLimiter(max_concurrency)
        self._interval_s = 0.0 if max_per_s is None else 1.0 / max_per_s
        self._pacing = anyio.Lock()
        self._next_start = float("-inf")

    @asynccontextmanager
    async def slot(self, *, paced: bool = True) -> AsyncIterator[None]:
        """Wait for capacity and, if `paced`, for the rate."""
        async with self._capacity:
            if paced and self._interval_s:
                # Only the first waiter watches the clock: a cancelled waiter uses up no start.
                async with self._pacing:
                    await anyio.sleep_until(self._next_start)
                    self._next_start = anyio.current_time() + self._interval_s
            yield


class CallStatistics:
    """Counts of all calls of a run by status, and the seconds spent in tools."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(("calls", *get_args(CallStatus)), 0))
        self.tool_s = 0.0

    def add(self, status: CallStatus, duration_s: float = 0.0) -> None:
        self.counts.update(("calls", status))
        self.tool_s += duration_s


class _StateCreation:
    """One attempt to create a tool's state. Settled, it is created, failed (`error`), or given up (neither)."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.created = False
        self.state: Any = None
        self.error: BaseException | None = None


class TrajectoryTool:
    """One tool in one trajectory, from its first call on."""

    def __init__(
        self,
        loaded: LoadedTool,
        limiter: CallLimiter,
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
        caller: MethodCaller,
        statistics: CallStatistics,
    ) -> None:
        """`kwargs` are the row's keyword arguments by method."""
        self._loaded = loaded
        self._limiter = limiter
        self._tool: BaseTool[Any] = loaded.tool
        self._timeout_s = loaded.config.timeout_s
        self._context = context
        self._kwargs = kwargs
        self._caller = caller
        self._statistics = statistics
        self._threads: set[ThreadCall] = set()
        self._creation: _StateCreation | None = None
        self._replayed: list[str] = []
        self._repeating = anyio.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def scores(self) -> bool:
        """Whether the tool overrides `calc_reward`."""
        return self._overrides("calc_reward")

    def note_replayed(self, arguments: str) -> None:
        """Remember a call that a record has answered, so that a later real call can repeat it for the state."""
        self._replayed.append(arguments)

    async def call(self, arguments: str) -> ToolOutcome:
        """Execute one call, creating the state first if necessary. `arguments` is checked JSON.

        Raises:
            ToolFailedError: the tool raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: its result has the wrong type.
        """

        async def attempt() -> ToolOutcome:
            state = await self._state()
            return await self._execute(state, arguments)

        requested = anyio.current_time()
        async with self._limiter.slot():
            started = anyio.current_time()
            with profile.span("tool.execute", tool=self.name, wait_s=round(started - requested, 6)) as span:
                try:
                    outcome = await self._outcome(attempt())
                except ToolFailedError as error:
                    span.add(status=error.status)
                    raise
                span.add(status=outcome.status)
            duration_s = anyio.current_time() - started
        return outcome._replace(duration_s=duration_s, wait_s=started - requested)

    async def score(self) -> ToolOutcome:
        """Return the result of `calc_reward`; its status is not `ok` if there is no state.

        Raises:
            ToolFailedError, UserCodeError: it raised, took too long, or is not a finite number.
        """
        if self._creation is None and not self._replayed:
            return ToolOutcome(status="raised")
        problem, cause = "", ""
        async with self._limiter.slot(paced=False):
            try:
                state = await self._state()
                value = await self._call("calc_reward", state)
            except CallTimeoutError:
                problem = f"did not return within {self._timeout_s:g} s"
            except (BugError, ConfigError, UserCodeError):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  as in `_outcome`, but the model gets no message
                problem, cause = f"raised {type(error).__name__}: {error}", _trace(error)
        if not problem:
            return ToolOutcome(reward=_finite(value, f"tool {self.name}: calc_reward"))
        on_error = self._loaded.config.on_error
        message = f"tool {self.name}: calc_reward {problem}"
        if on_error == "message":
            raise UserCodeError(message, cause)
        raise ToolFailedError(message, cause, on_error)

    async def release(self) -> None:
        """Release the state, if there is one, within `RELEASE_S`; exceptions are only logged. Call it shielded."""
        self._closed = True
        creation, self._creation = self._creation, None
        if creation is None or not creation.created:
            return
        if self._threads:
            # An abandoned thread must not delay its trajectory.
            self._caller.call_later(self._release_state, creation.state)
        else:
            await self._release_state(creation.state)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return await self._caller.call(
            getattr(self._tool, method),
            *args,
            kwargs=self._kwargs[method],
            **{"timeout_s": self._timeout_s, "threads": self._threads, **options},
        )

    async def _outcome(self, attempt: Awaitable[ToolOutcome]) -> ToolOutcome:
        """Turn exceptions of the tool into outcomes, unless `on_error` demands otherwise."""
        try:
            return await attempt
        except BadArgumentsError as error:
            return ToolOutcome(f"Error: the arguments of {self.name} do not fit: {error}", status="bad_arguments")
        except ToolError as error:
            return ToolOutcome(str(error), status="refused")
        except CallTimeoutError:
            return self._failed("timeout", f"{self.name} did not answer within {self._timeout_s:g} s")
        except (BugError, ConfigError, UserCodeError):
            raise  # the model cannot do anything about these
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything
            return self._failed("raised", f"{self.name} failed: {type(error).__name__}: {error}", error)

    async def _execute(self, state: Any, arguments: str) -> ToolOutcome:
        return _checked(await self._call("execute", state, parse_arguments(arguments)), self.name)

    def _failed(self, status: CallStatus, message: str, error: BaseException | None = None) -> ToolOutcome:
        """Return the failure as an outcome, or raise ToolFailedError if `on_error` is `drop` or `stop`."""
        on_error = self._loaded.config.on_error
        if on_error == "message":
            return ToolOutcome(f"Error: {shorten(message)}", status=status)
        self._statistics.add(status)
        failure = ToolFailedError(f"tool {message}", "" if error is None else _trace(error), on_error)
        failure.status = status
        raise failure

    # ------------------------------------------------------------------------------------------------ the state

    async def _state(self) -> Any:
        """Return the state, which one `create` makes for all calls. Calls that wait for a `create` share its failure;
        the next call tries again."""
        while not self._closed:
            creation = self._creation
            if creation is None:
                creation = self._creation = _StateCreation()
                await self._create(creation)
            await creation.settled.wait()
            if creation.error is not None:
                raise creation.error
            if creation.created:
                await self._repeat_replayed(creation.state)
                return creation.state
        raise self._ended()

    async def _create(self, creation: _StateCreation) -> None:
        try:
            if self._overrides("create"):
                creation.state = await self._call("create", self._context, on_late_result=self._release_state)
            creation.created = True
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised by each call that waits for it
            creation.error = error
        finally:
            if not creation.created:
                self._creation = None
            creation.settled.set()
        if creation.created and self._closed:
            self._creation = None
            await self._release_state(creation.state)
            raise self._ended()

    async def _repeat_replayed(self, state: Any) -> None:
        """Execute the calls that records have answered; their results are known already."""
        async with self._repeating:
            while self._replayed:
                await self._outcome(self._execute(state, self._replayed.pop(0)))

    async def _release_state(self, state: Any) -> None:
        if not self._overrides("release"):
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(RELEASE_S):
                while self._threads:
                    await next(iter(self._threads)).done.wait()
            try:
                await self._call("release", state, timeout_s=RELEASE_S, threads=set())
            except CallTimeoutError:
                logger.error("tool %s: release did not return within %g s, and is abandoned", self.name, RELEASE_S)
            except (Exception, SystemExit):
                logger.exception("tool %s: release failed; what it held may still be held", self.name)

    def _ended(self) -> BugError:
        return BugError(f"{self._context.sample_id}: tool {self.name} is called after its trajectory has ended")

    def _overrides(self, method: str) -> bool:
        return getattr(type(self._tool), method) is not getattr(BaseTool, method)


def _checked(result: Any, name: str) -> ToolOutcome:
    """Check the result of `execute`.

    Raises:
        UserCodeError: it has the wrong type, or a number in it is not finite.
    """
    about = f"tool {name}: execute"
    if isinstance(result, str):
        return ToolOutcome(result)
    if not isinstance(result, ToolResponse):
        raise UserCodeError(f"{about} returned {shorten(repr(result))}; return a text or a ToolResponse")
    if not isinstance(result.text, str) or not isinstance(result.metrics, Mapping):
        raise UserCodeError(f"{about} returned {shorten(repr(result))}; its text is a string, its metrics a mapping")
    metrics = {str(key): _finite(item, f"{about}, metric {key!r}") for key, item in result.metrics.items()}
    return ToolOutcome(result.text, _finite(result.reward, f"{about}, reward"), metrics, "ok", bool(result.done))


def _finite(value: Any, about: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserCodeError(f"{about}: {shorten(repr(value))} is no finite number")
    return float(value)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
