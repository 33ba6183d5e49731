"""One tool in the hands of one trajectory: its state, the calls to it, and giving it back.

place, rate ─▶ create, once ─▶ make up for what records have answered ─▶ execute ─▶ outcome
                                                             at the end ─▶ calc_reward ─▶ release
"""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Mapping
from numbers import Real
from typing import Any, NamedTuple, get_args

import anyio

from asyncrl.failures import BugError, ConfigError, UserCodeError
from asyncrl.profiling import profile
from asyncrl.trajectory import CallStatus
from rollouter.drops import ToolFailedError
from rollouter.tools.base import BadArgumentsError, BaseTool, ToolContext, ToolError, ToolResponse
from rollouter.tools.calling import RELEASE_S, Caller, CallTimeoutError, Jobs
from rollouter.tools.limits import Gate
from rollouter.tools.loading import LoadedTool
from rollouter.tools.schemas import parse_arguments, shorten
from skip.stages import ToolOutcome

logger = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A tool of an open box."""

    loaded: LoadedTool
    gate: Gate


class Tally:
    """What became of all calls of a run."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(("calls", *get_args(CallStatus)), 0))
        self.tool_s = 0.0

    def add(self, status: CallStatus, duration_s: float = 0.0) -> None:
        self.counts.update(("calls", status))
        self.tool_s += duration_s


class _Creation:
    """The making of a tool's state for one trajectory. Neither made nor failed once it is settled: given up."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.made = False
        self.state: Any = None
        self.error: BaseException | None = None


class UsedTool:
    """A tool that a trajectory calls, from its first call on."""

    def __init__(
        self,
        ready: Ready,
        context: ToolContext,
        kwargs: Mapping[str, Mapping[str, Any]],
        caller: Caller,
        tally: Tally,
    ) -> None:
        """`kwargs`: the row's, by method."""
        self._loaded, self._gate = ready
        self._tool: BaseTool[Any] = ready.loaded.tool
        self._timeout_s = ready.loaded.config.timeout_s
        self._context = context
        self._kwargs = kwargs
        self._caller = caller
        self._tally = tally
        self._jobs = Jobs()
        self._creation: _Creation | None = None
        self._missed: list[str] = []
        self._making_up = anyio.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self._loaded.name

    @property
    def scores(self) -> bool:
        """It has a `calc_reward` of its own."""
        return self._own("calc_reward")

    def missed(self, arguments: str) -> None:
        """A record has answered a call, of which the state knows nothing yet."""
        self._missed.append(arguments)

    async def call(self, arguments: str) -> ToolOutcome:
        """Create if need be, and execute.

        Args:
            arguments: JSON, checked.

        Raises:
            ToolFailedError: it raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: what it gave is no result.
        """

        async def attempt() -> ToolOutcome:
            state = await self._state()
            return await self._execute(state, arguments)

        asked = anyio.current_time()
        async with self._gate.place():
            began = anyio.current_time()
            with profile.span("tool.execute", tool=self.name, wait_s=round(began - asked, 6)) as span:
                try:
                    outcome = await self._told(attempt())
                except ToolFailedError as error:
                    span.add(status=error.status)
                    raise
                span.add(status=outcome.status)
            duration_s = anyio.current_time() - began
        return outcome._replace(duration_s=duration_s, wait_s=began - asked)

    async def score(self) -> ToolOutcome:
        """What `calc_reward` says; not `ok` if there is no state, and no call to make one for.

        Raises:
            ToolFailedError, UserCodeError: it raised, took too long, or is no finite number.
        """
        if self._creation is None and not self._missed:
            return ToolOutcome(status="raised")
        problem, cause = "", ""
        async with self._gate.place(paced=False):
            try:
                state = await self._state()
                value = await self._caller.call(
                    self._tool.calc_reward,
                    state,
                    timeout_s=self._timeout_s,
                    jobs=self._jobs,
                    kwargs=self._kwargs["calc_reward"],
                )
            except CallTimeoutError:
                problem = f"did not return within {self._timeout_s:g} s"
            except (BugError, ConfigError, UserCodeError):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  as in `_told`; there is no model to tell here
                problem, cause = f"raised {type(error).__name__}: {error}", _trace(error)
        if not problem:
            return ToolOutcome(reward=_finite(value, f"tool {self.name}: calc_reward"))
        on_error = self._loaded.config.on_error
        message = f"tool {self.name}: calc_reward {problem}"
        if on_error == "message":
            raise UserCodeError(message, cause)
        raise ToolFailedError(message, cause, on_error)

    async def release(self) -> None:
        """Release its state, if it has one, within `RELEASE_S`; what it raises is only logged. To be shielded."""
        self._closed = True
        creation, self._creation = self._creation, None
        if creation is None or not creation.made:
            return
        if self._jobs.at_work:
            # A thread that nobody waits for any more does not hold up its trajectory either.
            self._caller.later(self._give_back, creation.state)
        else:
            await self._give_back(creation.state)

    async def _told(self, attempt: Awaitable[ToolOutcome]) -> ToolOutcome:
        """What the tool raises is an outcome too, unless `on_error` says otherwise."""
        try:
            return await attempt
        except BadArgumentsError as error:
            return ToolOutcome(f"Error: the arguments of {self.name} do not fit: {error}", status="bad_arguments")
        except ToolError as error:
            return ToolOutcome(str(error), status="refused")
        except CallTimeoutError:
            return self._failed("timeout", f"{self.name} did not answer within {self._timeout_s:g} s")
        except (BugError, ConfigError, UserCodeError):
            raise  # nothing that the model could do anything about
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything
            return self._failed("raised", f"{self.name} failed: {type(error).__name__}: {error}", error)

    async def _execute(self, state: Any, arguments: str) -> ToolOutcome:
        result = await self._caller.call(
            self._tool.execute,
            state,
            parse_arguments(arguments),
            timeout_s=self._timeout_s,
            jobs=self._jobs,
            kwargs=self._kwargs["execute"],
        )
        return _checked(result, self.name)

    def _failed(self, status: CallStatus, told: str, error: BaseException | None = None) -> ToolOutcome:
        """
        Raises:
            ToolFailedError: `on_error` is `drop` or `stop`.
        """
        on_error = self._loaded.config.on_error
        if on_error == "message":
            return ToolOutcome(f"Error: {shorten(told)}", status=status)
        self._tally.add(status)
        failure = ToolFailedError(f"tool {told}", "" if error is None else _trace(error), on_error)
        failure.status = status
        raise failure

    # ------------------------------------------------------------------------------------------------ the state

    async def _state(self) -> Any:
        """What `create` made, once for all calls. Those that come while it is at work share its failure; the next one
        tries again."""
        while not self._closed:
            creation = self._creation
            if creation is None:
                creation = self._creation = _Creation()
                await self._create(creation)
            await creation.settled.wait()
            if creation.error is not None:
                raise creation.error
            if creation.made:
                await self._make_up(creation.state)
                return creation.state
        raise self._over()

    async def _create(self, creation: _Creation) -> None:
        try:
            if self._own("create"):
                creation.state = await self._caller.call(
                    self._tool.create,
                    self._context,
                    timeout_s=self._timeout_s,
                    jobs=self._jobs,
                    late=self._give_back,
                    kwargs=self._kwargs["create"],
                )
            creation.made = True
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised by each call that waits for it
            creation.error = error
        finally:
            if not creation.made:
                self._creation = None
            creation.settled.set()
        if creation.made and self._closed:
            self._creation = None
            await self._give_back(creation.state)
            raise self._over()

    async def _make_up(self, state: Any) -> None:
        """Make the calls that records have answered; what they say is known."""
        async with self._making_up:
            while self._missed:
                await self._told(self._execute(state, self._missed.pop(0)))

    async def _give_back(self, state: Any) -> None:
        if not self._own("release"):
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(RELEASE_S):
                await self._jobs.ended()
            try:
                await self._caller.call(
                    self._tool.release, state, timeout_s=RELEASE_S, jobs=Jobs(), kwargs=self._kwargs["release"]
                )
            except CallTimeoutError:
                logger.error("tool %s: release did not return within %g s, and is left alone", self.name, RELEASE_S)
            except (Exception, SystemExit):
                logger.exception("tool %s: release failed; what it held may still be held", self.name)

    def _over(self) -> BugError:
        return BugError(f"{self._context.sample_id}: tool {self.name} is called after its trajectory has ended")

    def _own(self, method: str) -> bool:
        """The tool has a `method` of its own, and not what `BaseTool` does without being asked."""
        return getattr(type(self._tool), method) is not getattr(BaseTool, method)


def _checked(result: Any, name: str) -> ToolOutcome:
    """
    Raises:
        UserCodeError: a tool gives no such thing.
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
    """Of Python's numbers and numpy's."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserCodeError(f"{about}: {shorten(repr(value))} is no finite number")
    return float(value)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
