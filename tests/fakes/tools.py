"""A tool that logs its calls, and toolboxes of such tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from asyncrl.config.sections.rollout import ToolConfig
from rollouter.tools.base import BaseTool, ToolContext
from rollouter.tools.loading import FunctionSchema, LoadedTool
from rollouter.tools.toolbox import CreateMode, Toolbox

QUERY = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}


def schema_of(name: str, parameters: Mapping[str, Any] = QUERY) -> dict[str, Any]:
    function = {"name": name, "description": f"A {name}.", "parameters": dict(parameters)}
    return {"type": "function", "function": function}


class RememberingTool(BaseTool[list[str]]):
    """A tool whose state is the list of its queries; `log` lists the calls of its methods over all trajectories.

    `act` returns the answer to a query, and may raise or wait. A method in `gates` waits until its event is set.
    """

    def __init__(self, act: Callable[[str], Any] = str.upper, gates: Mapping[str, anyio.Event] | None = None) -> None:
        self.log: list[str] = []
        self.begun = anyio.Event()
        """Set when a method waits at its gate."""
        self._act = act
        self._gates = gates or {}

    async def create(self, context: ToolContext, **kwargs: Any) -> list[str]:
        self.log.append(f"create {kwargs}" if kwargs else "create")
        await self._gate("create")
        return []

    async def execute(self, state: list[str], arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        self.log.append(f"execute {arguments['query']}" + (f" {kwargs}" if kwargs else ""))
        await self._gate("execute")
        state.append(arguments["query"])
        result = self._act(arguments["query"])
        return await result if hasattr(result, "__await__") else result

    async def calc_reward(self, state: list[str], **kwargs: Any) -> float:
        self.log.append(f"calc_reward {','.join(state)}" + (f" {kwargs}" if kwargs else ""))
        await self._gate("calc_reward")
        return 0.5 * len(state)

    async def release(self, state: list[str], **kwargs: Any) -> None:
        self.log.append(f"release {','.join(state)}" + (f" {kwargs}" if kwargs else ""))
        await self._gate("release")

    async def _gate(self, method: str) -> None:
        if method in self._gates:
            self.begun.set()
            await self._gates[method].wait()


def toolbox_of(*tools: BaseTool[Any], key: str = "tools.0", create: CreateMode = "auto", **limits: Any) -> Toolbox:
    """Return a toolbox of tools with the names `search`, `search_1`, …, each with these limits."""
    loaded = []
    for number, tool in enumerate(tools):
        name = f"search_{number}" if number else "search"
        config = ToolConfig(class_name="of:ATest", **limits)
        loaded.append(LoadedTool(tool, FunctionSchema(schema_of(name)), config, f"{key}{number}"))
    return Toolbox(loaded, create)
