"""The tools of one run: servers among them started and ended, limits shared by all trajectories, calls counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from asyncrl.failures import BugError
from rollouter.tools.base import ToolContext
from rollouter.tools.calling import Caller
from rollouter.tools.limits import Gate
from rollouter.tools.loading import LoadedServer, LoadedTool, check_names, function_schema
from rollouter.tools.session import Called, ToolSession
from rollouter.tools.used import Ready, Tally

__all__ = ["Called", "ToolBox", "ToolSession"]


class ToolBox:
    """The tools of one run. Servers among them run while it is open, and it is open while its sessions are.

    Limits on calls are those of each entry of the configuration; the tools of a server share them.
    """

    def __init__(self, tools: Sequence[LoadedTool | LoadedServer]) -> None:
        self._configured = tuple(tools)
        self._ready: dict[str, Ready] = {}
        self._stack = AsyncExitStack()
        self._caller: Caller | None = None
        self._tally = Tally()
        if not any(isinstance(one, LoadedServer) for one in tools):
            self._make_ready([one for one in tools if isinstance(one, LoadedTool)])

    async def __aenter__(self) -> Self:
        """
        Raises:
            ConfigError, InfraError: a server cannot be reached, or does not offer what is asked of it.
        """
        try:
            group = await self._stack.enter_async_context(anyio.create_task_group())
            self._caller = Caller(group)
            self._stack.callback(self._caller.close)
            self._make_ready(await self._all_tools(group))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        # Without the error: it goes on as it is, and not in the group of a task group that had no part in it.
        await self._stack.__aexit__(None, None, None)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is shown, in the order of the configuration; those of servers once it is open."""
        if self._configured and not self._ready:
            raise BugError("the tools of a server are not known before the box is open")
        return tuple(ready.loaded.schema.schema for ready in self._ready.values())

    def session(self, context: ToolContext) -> ToolSession:
        """The calls of one trajectory.

        Raises:
            DataError: the row's `tools_kwargs` are no keyword arguments.
        """
        if self._caller is None:
            raise BugError("a box is opened before its tools are called")
        return ToolSession(self._caller, self._tally, self._ready, context)

    def counts(self) -> Mapping[str, int]:
        """So far: `calls`, and how many came to each `CallStatus`."""
        return dict(self._tally.counts)

    @property
    def tool_s(self) -> float:
        """Seconds that calls have spent in tools, so far."""
        return self._tally.tool_s

    async def _all_tools(self, group: TaskGroup) -> list[LoadedTool]:
        """The configured ones, those of servers in the place of their server; all of them start at once."""
        servers: dict[str, Any] = {}
        for one in self._configured:
            if isinstance(one, LoadedServer):
                from rollouter.tools.mcp import McpServer  # see `loading`

                servers[one.key] = server = McpServer(one.mcp, f"{one.key}.mcp")
                group.start_soon(server.run)
                self._stack.callback(server.close)
        tools: list[LoadedTool] = []
        for one in self._configured:
            if isinstance(one, LoadedTool):
                tools.append(one)
                continue
            for offered in await servers[one.key].offered():
                schema = function_schema(offered.schema, f"{one.key}: tool {offered.name!r} of {servers[one.key]}")
                tools.append(LoadedTool(offered.tool, schema, one.config, one.key))
        return tools

    def _make_ready(self, tools: Sequence[LoadedTool]) -> None:
        check_names(tools)
        gates: dict[str, Gate] = {}
        for one in tools:
            limits = one.config
            if one.key not in gates:
                gates[one.key] = Gate(max_concurrency=limits.max_concurrency, max_per_s=limits.max_per_s)
            self._ready[one.name] = Ready(one, gates[one.key])
