"""The tools of one run, and the calls that each trajectory makes to them.

    arguments ─▶ JSON? known tool? schema? ─▶ a record? ─▶ the tool (`rollouter.tools.execution`) ─▶ outcome
                           │ no                    └───────────────────────────────────────────────▶ outcome
                           └─▶ a message to the model

If a call is replayed from a record, the tool does not run. If a later call has no record, the tool first repeats the
replayed calls, so that its state is the same as without records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple, Self

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.import_path import nearest
from asyncrl.core.failures import BugError, DataError, UserCodeError, conceal
from asyncrl.core.tasks import gather
from asyncrl.core.trajectory import ToolCall
from asyncrl.core.types import SampleId
from asyncrl.profiling import profile
from rollouter.prompts.chat_template import chosen_tools
from rollouter.tools.base import ToolContext
from rollouter.tools.execution import CallLimiter, CallStatistics, MethodCaller, TrajectoryTool
from rollouter.tools.loading import (
    BadJsonError,
    LoadedMcpServer,
    LoadedTool,
    check_names,
    function_schema,
    parse_arguments,
)
from rollouter.user_code import shorten, shown
from skip import SkipManager
from skip.stages import ToolOutcome

CALC_REWARD = "calc_reward"
"""The arguments in the record of `calc_reward`, whose turn is -1. No real call has them, as they are not JSON."""
CreateMode = Literal["auto", "eager", "lazy"]
_METHODS = ("create", "execute", "calc_reward", "release")


class ToolCallResult(NamedTuple):
    """A completed call."""

    call: ToolCall
    done: bool
    """Whether the call ends the trajectory."""


class ToolSession:
    """An async context manager for the calls of one trajectory. At its exit, it releases the states of the tools."""

    def __init__(
        self,
        caller: MethodCaller,
        statistics: CallStatistics,
        ready: Mapping[str, tuple[LoadedTool, CallLimiter]],
        context: ToolContext,
        create: CreateMode,
    ) -> None:
        self._statistics = statistics
        self._context = context
        self._tools = {
            name: TrajectoryTool(*ready[name], caller, statistics, context, _rows_kwargs(context, name))
            for name in chosen_tools(context.extra_info, list(ready))
        }
        named = _mapping(context.extra_info.get("tools_kwargs"), "extra_info.tools_kwargs")
        self._eager = [name for name in self._tools if create == "eager" or (create == "auto" and name in named)]
        self._calls: list[tuple[str, int, str]] = []
        """Tool, turn and arguments of each call that reached the tool or its record."""

    async def __aenter__(self) -> Self:
        try:
            await gather(lambda name: self._tools[name].create(), self._eager)
        except BaseException:
            await self.release()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.release()

    async def call(self, name: str, arguments: str, *, turn: int) -> ToolCallResult:
        """Make one call of turn `turn`. Calls of one turn may run concurrently. `arguments` is the model's JSON text.

        Raises:
            ToolFailedError: the tool raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: the tool's result has the wrong type.
        """
        refusal = self._refusal(name, arguments)
        outcome = refusal or await self._outcome(name, arguments, turn)
        record = self._not_executed if refusal is not None or outcome.replayed else self._recorded_call
        return ToolCallResult(record(name, arguments, outcome), outcome.done)

    def malformed(self, text: str) -> ToolCall:
        """Return a refused call for text that looks like a call but could not be parsed."""
        outcome = ToolOutcome(f"Error: this is no tool call: {shorten(text)}", status="bad_json")
        return self._not_executed("", text, outcome)

    def refused(self, name: str, arguments: str, limit: int) -> ToolCall:
        """Return a call that is not executed because its turn has more than `limit` calls."""
        text = f"Error: this call was not made: at most {limit} are made in one turn"
        return self._not_executed(name, arguments, ToolOutcome(text, status="too_many"))

    async def scores(self) -> Mapping[str, float]:
        """Return the `calc_reward` of each tool that the trajectory has used or that was created before its first turn,
        unless its state could not be created.

        Raises:
            ToolFailedError, UserCodeError: a `calc_reward` raised, took too long, or did not return a finite number.
        """
        scores: dict[str, float] = {}
        for name in dict.fromkeys([*self._eager, *(called for called, _, _ in self._calls)]):
            if not self._tools[name].overrides("calc_reward"):
                scores[name] = 0.0
                continue
            outcome = await self._recorded(name, CALC_REWARD, turn=-1)
            if outcome.status == "ok":
                scores[name] = outcome.reward
        return scores

    async def release(self) -> None:
        """Release every state once. Each tool has `RELEASE_S` for this, and exceptions are only logged."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for tool in self._tools.values():
                    group.start_soon(tool.release)

    # ------------------------------------------------------------------------------------------------ one call

    def _refusal(self, name: str, arguments: str) -> ToolOutcome | None:
        """Return the outcome of an invalid call, or None if the tool can be called."""
        if name not in self._tools:
            text = f"Error: there is no tool {shorten(name)!r}{nearest(name, list(self._tools))}"
            return ToolOutcome(text, status="unknown_tool")
        try:
            parsed = parse_arguments(arguments)
        except BadJsonError as error:
            return ToolOutcome(f"Error: the arguments of {name} cannot be read: {error}", status="bad_json")
        try:
            problem = self._tools[name].loaded.schema.problem(parsed)
        except Exception as error:
            raise UserCodeError.wrap(f"the schema of tool {name} cannot be used: {error}", error) from error
        if problem:
            return ToolOutcome(f"Error: the arguments of {name} do not fit: {problem}", status="bad_arguments")
        return None

    async def _outcome(self, name: str, arguments: str, turn: int) -> ToolOutcome:
        self._calls.append((name, turn, arguments))
        outcome = await self._recorded(name, arguments, turn)
        if outcome.replayed:
            self._tools[name].replayed.append(arguments)
        return outcome

    async def _recorded(self, name: str, arguments: str, turn: int) -> ToolOutcome:
        """Call the tool, or return the record of the call. Validation does not use records."""
        context = self._context
        if not isinstance(context.sample_id, SampleId):
            return await self._run(name, arguments)
        # Calls of one turn run concurrently, so only the calls of earlier turns count as previous ones.
        before = sorted([when, what] for tool, when, what in self._calls if tool == name and (turn < 0 or when < turn))
        row = [context.messages, context.data_source, context.ground_truth, context.extra_info]
        background = {"before": before, "prompt": row}
        return await self._recordable(context.sample_id, context.trajectory, turn, name, arguments, background)

    @SkipManager.annotate(role="tool")
    async def _recordable(
        self,
        sample_id: SampleId,
        trajectory: int,
        turn: int,
        name: str,
        arguments: str,
        background: Mapping[str, Any],
    ) -> ToolOutcome:
        return await self._run(name, arguments)

    async def _run(self, name: str, arguments: str) -> ToolOutcome:
        """Run the tool. Its text has no secret of the configuration, because samples, records and dumps contain it."""
        tool = self._tools[name]
        outcome = await (tool.score() if arguments == CALC_REWARD else tool.call(arguments))
        return outcome._replace(text=conceal(outcome.text))

    def _not_executed(self, name: str, arguments: str, outcome: ToolOutcome) -> ToolCall:
        profile.note("tool.execute", tool=shorten(name), status=outcome.status, wait_s=0.0)
        return self._recorded_call(name, arguments, outcome)

    def _recorded_call(self, name: str, arguments: str, outcome: ToolOutcome) -> ToolCall:
        self._statistics.add(outcome.status, outcome.duration_s)
        return ToolCall(
            name=name,
            arguments=arguments,
            result=outcome.text,
            status=outcome.status,
            reward=outcome.reward,
            duration_s=outcome.duration_s,
            wait_s=outcome.wait_s,
            metrics=outcome.metrics,
        )


def _rows_kwargs(context: ToolContext, name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the row's keyword arguments for each method of a tool, without the None that parquet stores for missing
    keys.

    Raises:
        DataError: the row's `tools_kwargs` are malformed.
    """
    key = "extra_info.tools_kwargs"
    of_row = _mapping(context.extra_info.get("tools_kwargs"), key)
    of_tool = _mapping(of_row.get(name), f"{key}.{name}")
    known = {f"{method}_kwargs": method for method in _METHODS}
    for one in of_tool:
        if one not in known:
            raise DataError(f"{key}.{name}: no method takes {one!r}{nearest(one, list(known))}")
    return {method: _mapping(of_tool.get(one), f"{key}.{name}.{one}") for one, method in known.items()}


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{key} = {shown(value)}: write a mapping from the names of arguments to their values")
    return {str(name): item for name, item in value.items() if item is not None}


class Toolbox:
    """The tools of one run. Its sessions must be used while it is entered; tool servers run during that time.

    Each entry of the configuration has separate limits on calls. All tools of a server share the limits of its entry.
    """

    def __init__(self, tools: Sequence[LoadedTool | LoadedMcpServer], create: CreateMode = "auto") -> None:
        """`create`: `rollout.multi_turn.create`."""
        self._configured = tuple(tools)
        self._create: CreateMode = create
        self._ready: dict[str, tuple[LoadedTool, CallLimiter]] = {}
        self._stack = AsyncExitStack()
        self._caller: MethodCaller | None = None
        self._statistics = CallStatistics()
        if not any(isinstance(one, LoadedMcpServer) for one in tools):
            self._make_ready([one for one in tools if isinstance(one, LoadedTool)])

    async def __aenter__(self) -> Self:
        """Start or connect to the tool servers, and list their tools.

        Raises:
            ConfigError, InfraError: a server cannot be reached, or lacks a configured tool.
        """
        try:
            group = await self._stack.enter_async_context(anyio.create_task_group())
            self._caller = MethodCaller(group)
            self._stack.callback(self._caller.close)
            self._make_ready(await self._all_tools(group))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        # The error is not passed on, so that it propagates unchanged and not inside this task group's exception group.
        await self._stack.__aexit__(None, None, None)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The function schemas in the order of the configuration. With servers, they are known once the toolbox is
        entered."""
        if self._configured and not self._ready:
            raise BugError("the tools of a server are not known before the toolbox is entered")
        return tuple(loaded.schema.schema for loaded, _ in self._ready.values())

    def session(self, context: ToolContext) -> ToolSession:
        """Return the session for the calls of one trajectory.

        Raises:
            DataError: the row's `tools_kwargs` are malformed.
        """
        if self._caller is None:
            raise BugError("a toolbox must be entered before its tools are called")
        return ToolSession(self._caller, self._statistics, self._ready, context, self._create)

    def counts(self) -> Mapping[str, int]:
        """Return the number of `calls` so far, and of each `CallStatus`."""
        return dict(self._statistics.counts)

    @property
    def tool_s(self) -> float:
        """Seconds that calls have spent in tools, so far."""
        return self._statistics.tool_s

    async def _all_tools(self, group: TaskGroup) -> list[LoadedTool]:
        """Start all servers concurrently, and return all tools in the order of the configuration."""
        servers: dict[str, Any] = {}
        for one in self._configured:
            if isinstance(one, LoadedMcpServer):
                from rollouter.tools.mcp import McpServer  # see `loading`

                servers[one.key] = McpServer(one.mcp, f"{one.key}.mcp", group)
                self._stack.callback(servers[one.key].close)
        tools: list[LoadedTool] = []
        for one in self._configured:
            if isinstance(one, LoadedTool):
                tools.append(one)
                continue
            for tool in await servers[one.key].offered():
                schema = function_schema(tool.function_schema(), f"{one.key}: a tool of {servers[one.key]}")
                tools.append(LoadedTool(tool, schema, one.config, one.key))
        return tools

    def _make_ready(self, tools: Sequence[LoadedTool]) -> None:
        check_names(tools)
        limiters: dict[str, CallLimiter] = {}
        for one in tools:
            if one.key not in limiters:
                limiters[one.key] = CallLimiter(one.config)
            self._ready[one.name] = (one, limiters[one.key])
