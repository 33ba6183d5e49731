"""The configured tools: imported, made, and their schemas checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import McpServerConfig, ToolConfig
from asyncrl.failures import AsyncRLError, ConfigError, UserCodeError
from rollouter.tools.base import BaseTool
from rollouter.tools.function import FunctionTool, as_tool
from rollouter.tools.schemas import FunctionSchema
from rollouter.user_code import load_object, nearest

BUILT_IN: Mapping[str, str] = {
    "calculator": "rollouter.tools.calculator:Calculator",
    "python": "rollouter.tools.python_code:PythonTool",
    "search": "rollouter.tools.search:SearchTool",
    "gsm8k": "rollouter.tools.gsm8k:Gsm8kTool",
}
"""What `class_name` may say for short."""


@dataclass(frozen=True, slots=True)
class LoadedTool:
    """One tool, ready to be called."""

    tool: BaseTool[Any]
    schema: FunctionSchema
    config: ToolConfig
    key: str
    """Where it is configured, for errors."""

    @property
    def name(self) -> str:
        return self.schema.name


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server of tools; which ones, it tells once it runs."""

    mcp: McpServerConfig
    config: ToolConfig
    key: str


def load_tools(
    configs: Sequence[ToolConfig], key: str = "rollout.multi_turn.tools"
) -> tuple[LoadedTool | LoadedServer, ...]:
    """Import and make what is configured, in order. Blocks: user modules are imported, and classes made.

    Raises:
        ConfigError: an entry is none, or two tools have one name; names the key.
        UserCodeError: a module or a class of the user raised.
    """
    loaded: list[LoadedTool | LoadedServer] = []
    for number, config in enumerate(configs):
        loaded.append(_load(config, f"{key}.{number}"))
    check_names([one for one in loaded if isinstance(one, LoadedTool)])
    return tuple(loaded)


def check_names(tools: Sequence[LoadedTool]) -> None:
    """
    Raises:
        ConfigError: two tools have one name.
    """
    seen: dict[str, str] = {}
    for one in tools:
        if one.name in seen:
            raise ConfigError(
                f"{one.key}: its tool is called {one.name!r}, as is that of {seen[one.name]}, so a call of it would be "
                "for either; give one of them another name in tool_schema"
            )
        seen[one.name] = one.key


def function_schema(schema: Mapping[str, Any], key: str) -> FunctionSchema:
    """
    Raises:
        ConfigError: it is no function schema.
    """
    try:
        return FunctionSchema(schema)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _load(config: ToolConfig, key: str) -> LoadedTool | LoadedServer:
    given = [name for name in ("class_name", "function", "mcp") if getattr(config, name) is not None]
    if len(given) != 1:
        told = " and ".join(given) or "none of them"
        raise ConfigError(f"{key}: a tool is one of class_name, function and mcp, and {told} is set; set exactly one")
    if config.class_name is None and config.config:
        raise ConfigError(f"{key}.config: only a class is made of it, and {given[0]} is set; leave it out")
    if config.mcp is not None:
        return _server(config, config.mcp, key)
    if config.function is not None:
        tool = _function(config.function, f"{key}.function")
    else:
        tool = _made(str(config.class_name), config.config, key)
    if config.tool_schema is not None:
        return LoadedTool(tool, function_schema(config.tool_schema, f"{key}.tool_schema"), config, key)
    return LoadedTool(tool, function_schema(tool.function_schema(), f"{key}: the schema of its tool"), config, key)


def _server(config: ToolConfig, mcp: McpServerConfig, key: str) -> LoadedServer:
    if config.tool_schema is not None:
        raise ConfigError(f"{key}.tool_schema: a server tells the schemas of its tools itself; leave it out")
    if bool(mcp.command) == (mcp.url is not None):
        told = "both are set" if mcp.command else "neither is set"
        raise ConfigError(f"{key}.mcp: a server is a command or a url, and {told}; set exactly one")
    if mcp.env and not mcp.command:
        raise ConfigError(f"{key}.mcp.env: a server at a url has the environment that it has; leave it out")
    import rollouter.tools.mcp  # noqa: F401  it takes a second, which no event loop has to spare; few runs need it

    return LoadedServer(mcp, config, key)


def _function(reference: str, key: str) -> BaseTool[Any]:
    function = load_object(reference, key)
    if isinstance(function, FunctionTool):
        return function
    if inspect.isclass(function) or isinstance(function, BaseTool) or not callable(function):
        raise ConfigError(f"{key}: {reference} is no function; a class is named in class_name")
    try:
        return as_tool(function)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", error.cause) from error


def _made(name: str, arguments: Mapping[str, Any], key: str) -> BaseTool[Any]:
    reference = BUILT_IN.get(name, name)
    if ":" not in reference:
        module, dot, class_name = reference.rpartition(".")
        if not dot:
            raise ConfigError(
                f"{key}.class_name: there is no tool {name!r}{nearest(name, list(BUILT_IN))}; or write module:Class"
            )
        reference = f"{module}:{class_name}"
    found = load_object(reference, f"{key}.class_name")
    if not (inspect.isclass(found) and issubclass(found, BaseTool)):
        fix = "a function is named in function" if callable(found) else "derive it from rollouter.tools.BaseTool"
        fix = "derive it from rollouter.tools.BaseTool" if inspect.isclass(found) else fix
        raise ConfigError(f"{key}.class_name: {name} is no class of a tool; {fix}")
    if found.execute is BaseTool.execute:
        raise ConfigError(f"{key}.class_name: {name} has no execute of its own, so a call could do nothing; write one")
    signature = inspect.signature(found)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [one for one in arguments if one not in signature.parameters]
        hint = nearest(unknown[0], list(signature.parameters)) if unknown else ""
        raise ConfigError(f"{key}.config: {name} cannot be made of it: {error}{hint}") from error
    try:
        made = found(**arguments)
    except AsyncRLError:
        raise
    except Exception as error:
        raise UserCodeError.wrap(f"{key}: making {name} failed: {type(error).__name__}: {error}", error) from error
    assert isinstance(made, BaseTool)
    return made
