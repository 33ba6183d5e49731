"""Executes tool methods (sync ones in threads) with deadlines and rate limits, and keeps a state per trajectory.

capacity, rate ─▶ create, once ─▶ repeat calls that were replayed from records ─▶ execute ─▶ outcome
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.config.import_path import call_problem
from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core.failures import BugError, ConfigError, UserCodeError
from asyncrl.core.text import encodable
from asyncrl.core.trajectory import CallStatus
from asyncrl.profiling import profile
from rollouter.drop_policy import ToolFailedError
from rollouter.tools.base import BadArgumentsError, BaseTool, ToolContext, ToolError, ToolResponse
from rollouter.tools.loading import LoadedTool, parse_arguments
from rollouter.user_code import LARGEST, describe, finite, name_of, shorten, shown
from skip.stages import ToolOutcome

logger = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Deadline of `release`, and the time for which `release` waits for a thread that still uses the state."""

OnLateResult = Callable[[Any], Coroutine[Any, Any, None]]


class CallTimeoutError(Exception):
    """A method did not return within its deadline. This differs from a `TimeoutError` that a tool raises."""


@dataclass(slots=True, eq=False)
class ThreadCall:
    """A call of a sync method in a worker thread. The thread continues if the caller is cancelled."""

    function: Callable[[], Any]
    on_late_result: OnLateResult | None
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: BaseException | None = None
    abandoned: bool = False
    scope: anyio.CancelScope = field(default_factory=lambda: anyio.CancelScope(shield=True))
    """Shields the thread, because a cancellation must not lose its result. It has no deadline until the toolbox
    closes."""


class MethodCaller:
    """Calls methods of tools: async ones on the event loop, sync ones in threads that tasks of `group` supervise."""

    def __init__(self, group: TaskGroup) -> None:
        self.group = group
        """The task group of the toolbox, which waits for these tasks before it closes."""
        self._threads: set[ThreadCall] = set()
        self._closing = False
        # The tools' limits bound the calls, and an abandoned thread must not occupy capacity for ever.
        self._unbounded = anyio.CapacityLimiter(math.inf)
        self._starts = anyio.Semaphore(1)

    def close(self) -> None:
        """Give running threads, and threads that start later, `RELEASE_S` to end, and then abandon them."""
        self._closing = True
        for thread in self._threads:
            thread.scope.deadline = anyio.current_time() + RELEASE_S

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
            threads: A set to which the call adds its thread, if the method needs one, until the thread ends.
            on_late_result: Receives, and releases, the result of a thread whose caller no longer waits.

        Raises:
            CallTimeoutError: the method did not return in time.
            UserCodeError: the method's signature does not accept `kwargs`.
            BaseException: whatever the method raises.
        """
        if kwargs and (problem := call_problem(method, *args, **kwargs)):
            raise UserCodeError(f"the row's tools_kwargs do not fit {problem}")
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
        self.group.start_soon(self._supervise, thread, threads)
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
    """Await a tool's coroutine. A cancellation from inside the tool counts as its failure, not as the caller's
    cancellation."""
    task = asyncio.current_task()
    assert task is not None
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from error


class CallLimiter:
    """Limits concurrent calls in the order of their arrival, and lets them start at least `1 / max_per_s` s apart."""

    def __init__(self, config: ToolConfig) -> None:
        self._capacity = anyio.CapacityLimiter(config.max_concurrency)
        self._interval_s = 0.0 if config.max_per_s is None else 1.0 / config.max_per_s
        self._pacing = anyio.Lock()
        self._next_start = float("-inf")

    @asynccontextmanager
    async def slot(self, *, paced: bool = True) -> AsyncIterator[None]:
        """Wait for capacity and, if `paced`, for the rate."""
        async with self._capacity:
            if paced and self._interval_s:
                # Only the first waiter sleeps, so a cancelled waiter does not use up a start.
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


@dataclass(slots=True, eq=False)
class TrajectoryTool:
    """One tool in one trajectory, from its first call on."""

    loaded: LoadedTool
    limiter: CallLimiter
    caller: MethodCaller
    statistics: CallStatistics
    context: ToolContext
    kwargs: Mapping[str, Mapping[str, Any]]
    """The row's keyword arguments by method."""
    replayed: list[str] = field(default_factory=list)
    """Arguments of calls that records have answered. The next executed call repeats them first to restore the state."""
    _threads: set[ThreadCall] = field(default_factory=set)
    _created: bool = False
    _closed: bool = False
    _state: Any = None
    _failures: list[BaseException] = field(default_factory=list)
    """The exceptions of failed calls of `create`."""
    _preparing: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while the state is created, and while it is restored by repeating calls that records have answered."""

    @property
    def name(self) -> str:
        return self.loaded.name

    def overrides(self, method: str) -> bool:
        return getattr(type(self.loaded.tool), method) is not getattr(BaseTool, method)

    async def call(self, arguments: str) -> ToolOutcome:
        """Execute one call, creating the state first if necessary. `arguments` is valid JSON that fits the schema.

        Raises:
            ToolFailedError: the tool raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: the tool's result has the wrong type.
        """
        requested = anyio.current_time()
        async with self.limiter.slot():
            started = anyio.current_time()
            with profile.span("tool.execute", tool=self.name, wait_s=round(started - requested, 6)) as span:
                try:
                    outcome = await self._outcome(arguments)
                except ToolFailedError as error:
                    span.add(status=error.status)
                    raise
                span.add(status=outcome.status)
            duration_s = anyio.current_time() - started
        return outcome._replace(text=encodable(outcome.text), duration_s=duration_s, wait_s=started - requested)

    async def create(self) -> None:
        """Create the state. If that fails, the first call tries again.

        Raises:
            ToolFailedError: `create` raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: the row's `tools_kwargs` do not fit.
        """
        async with self.limiter.slot(paced=False):
            try:
                await self._ready_state()
            except CallTimeoutError:
                self._not_created(f"did not return within {self.loaded.config.timeout_s:g} s")
            except (BugError, ConfigError, UserCodeError):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything
                self._not_created(f"raised {describe(error)}", _trace(error))

    def _not_created(self, problem: str, cause: str = "") -> None:
        message, on_error = f"tool {self.name}: create {problem}", self.loaded.config.on_error
        if on_error != "message":
            raise ToolFailedError(message, cause, on_error)
        logger.warning("%s; the first call tries again", message)

    async def score(self) -> ToolOutcome:
        """Return the result of `calc_reward`; its status is not `ok` if there is no state.

        Raises:
            ToolFailedError, UserCodeError: `calc_reward` raised, took too long, or did not return a finite number.
        """
        if not self._created and not self.replayed:
            return ToolOutcome(status="raised")
        async with self.limiter.slot(paced=False):
            try:
                value = await self._call("calc_reward", await self._ready_state())
            except CallTimeoutError:
                problem, cause = f"did not return within {self.loaded.config.timeout_s:g} s", ""
            except (BugError, ConfigError, UserCodeError):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  as in `_outcome`, but the model gets no message
                problem, cause = f"raised {describe(error)}", _trace(error)
            else:
                return ToolOutcome(reward=_number(value, f"tool {self.name}: calc_reward"))
        message = f"tool {self.name}: calc_reward {problem}"
        on_error = self.loaded.config.on_error
        raise UserCodeError(message, cause) if on_error == "message" else ToolFailedError(message, cause, on_error)

    async def release(self) -> None:
        """Release the state, if any, within `RELEASE_S`. Exceptions are only logged. Call this method shielded."""
        self._closed = True
        if not self._created:
            return
        self._created = False
        if self._threads:
            # An abandoned thread must not delay its trajectory.
            self.caller.group.start_soon(self._release_state, self._state)
        else:
            await self._release_state(self._state)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        options = {"timeout_s": self.loaded.config.timeout_s, "threads": self._threads, **options}
        bound = getattr(self.loaded.tool, method)
        return await self.caller.call(bound, *args, kwargs=self.kwargs[method], **options)

    async def _outcome(self, arguments: str, state: Any = None) -> ToolOutcome:
        """Execute a call, and convert exceptions of the tool to outcomes unless `on_error` is `drop` or `stop`."""
        try:
            state = await self._ready_state() if state is None else state[0]
            return _checked(await self._call("execute", state, parse_arguments(arguments)), self.name)
        except BadArgumentsError as error:
            return ToolOutcome(f"Error: the arguments of {self.name} do not fit: {error}", status="bad_arguments")
        except ToolError as error:
            return ToolOutcome(str(error), status="refused")
        except CallTimeoutError:
            return self._failed("timeout", f"{self.name} did not answer within {self.loaded.config.timeout_s:g} s")
        except (BugError, ConfigError, UserCodeError):
            raise  # the model cannot do anything about these
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything
            return self._failed("raised", f"{self.name} failed: {type(error).__name__}: {error}", _trace(error))

    def _failed(self, status: CallStatus, message: str, cause: str = "") -> ToolOutcome:
        """Return the failure as an outcome, or raise ToolFailedError if `on_error` is `drop` or `stop`."""
        on_error = self.loaded.config.on_error
        if on_error == "message":
            return ToolOutcome(f"Error: {shorten(message)}", status=status)
        self.statistics.add(status)
        failure = ToolFailedError(f"tool {message}", cause, on_error)
        failure.status = status
        raise failure

    # ------------------------------------------------------------------------------------------------ the state

    async def _ready_state(self) -> Any:
        """Return the state, and create it if necessary. If `create` fails, all calls that wait for it fail, and the
        next call tries again."""
        failures = len(self._failures)
        async with self._preparing:
            if len(self._failures) > failures:
                raise self._failures[-1]
            if not self._created:
                await self._create()
            while self.replayed:
                await self._outcome(self.replayed.pop(0), (self._state,))
        return self._state

    async def _create(self) -> None:
        ended = BugError(f"{self.context.sample_id}: tool {self.name} is called after its trajectory has ended")
        if self._closed:
            raise ended
        try:
            if self.overrides("create"):
                self._state = await self._call("create", self.context, on_late_result=self._release_state)
        except (Exception, SystemExit) as error:
            self._failures.append(error)
            raise
        if self._closed:
            await self._release_state(self._state)
            raise ended
        self._created = True

    async def _release_state(self, state: Any) -> None:
        if not self.overrides("release"):
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
                logger.exception("tool %s: release failed; its resources may not be freed", self.name)


def _checked(result: Any, name: str) -> ToolOutcome:
    """Check the result of `execute`.

    Raises:
        UserCodeError: the result has the wrong type, or contains a number that is not finite.
    """
    about = f"tool {name}: execute"
    if isinstance(result, str):
        return ToolOutcome(result)
    if not isinstance(result, ToolResponse):
        raise UserCodeError(f"{about} returned {shown(result)}; return a text or a ToolResponse")
    if not isinstance(result.text, str) or not isinstance(result.metrics, Mapping):
        raise UserCodeError(f"{about} returned {shown(result)}; its text must be a string, its metrics a mapping")
    metrics = {name_of(key): _number(item, f"{about}, metric {shown(key)}") for key, item in result.metrics.items()}
    return ToolOutcome(result.text, _number(result.reward, f"{about}, reward"), metrics, "ok", bool(result.done))


def _number(value: Any, about: str) -> float:
    number = finite(value)
    if number is None:
        raise UserCodeError(f"{about}: {shown(value)} is not a finite number of at most {LARGEST:g}")
    return number


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
