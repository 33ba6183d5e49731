"""Loads the configured tools, and checks schemas and the arguments that models write."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
from referencing import Registry

from asyncrl.config.import_path import call_problem, load_object, load_registered
from asyncrl.config.interpolation import reveal
from asyncrl.config.sections.rollout import McpServerConfig, ToolConfig
from asyncrl.core.failures import AsyncRLError, ConfigError, UserCodeError
from asyncrl.core.text import encodable_values, parse_json
from rollouter.tools.base import BaseTool
from rollouter.tools.function import as_tool
from rollouter.user_code import describe, shorten

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The names of functions that OpenAI's API accepts."""


class BadJsonError(ValueError):
    """The model's arguments are not a JSON object; the message says why."""


class FunctionSchema:
    """The schema of a tool that the model sees. It also checks arguments.

    Raises:
        ValueError: the value is not an OpenAI function schema; the message begins with the invalid key.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: Mapping[str, Any] = _checked(schema)
        """The complete schema, in plain JSON values."""
        function = self.schema["function"]
        self.name: str = function["name"]
        # An empty registry makes references to other documents an error instead of a download.
        self._validator = jsonschema.Draft202012Validator(function["parameters"], registry=Registry())

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """Describe for the model what is wrong with `arguments`; empty if they fit."""
        try:
            error = best_match(self._validator.iter_errors(arguments))
        except OverflowError:  # from `multipleOf`
            return "a number is too large"
        if error is None:
            return ""
        place = ".".join(str(part) for part in error.absolute_path)
        return shorten(f"{place}: {error.message}" if place else error.message)


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments that the model wrote; an empty text means no arguments. All texts in them can be encoded.

    Raises:
        BadJsonError: the text is not a JSON object.
    """
    try:
        parsed = encodable_values(parse_json(text or "{}", finite=True))
    except ValueError as error:
        raise BadJsonError(str(error)) from None
    if not isinstance(parsed, dict):
        raise BadJsonError(f"they are {shorten(json.dumps(parsed))}; write an object with the arguments by name")
    return parsed


def _checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        schema = encodable_values(json.loads(json.dumps(given, allow_nan=False, default=_mapping)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it contains values that JSON cannot represent: {error}") from None
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict):
        raise ValueError('it is not a function schema; write {"type": "function", "function": {"name": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"function.name: {name!r} is not a valid name; use 1 to 64 letters, digits, _ and -")
    if not isinstance(function.setdefault("description", ""), str):
        raise ValueError(f"function.description: {function['description']!r} is not a text")
    parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        place = ".".join(["function.parameters", *(str(part) for part in error.absolute_path)])
        raise ValueError(f"{place}: not a JSON schema: {shorten(error.message)}") from None
    if not isinstance(parameters, dict) or parameters.setdefault("type", "object") != "object":
        raise ValueError('function.parameters: arguments have names, so it must be {"type": "object", ...}')
    return {"type": "function", "function": function}


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is not a JSON value")


BUILT_IN: Mapping[str, str] = {
    "calculator": "rollouter.tools.calculator:Calculator",
    "python": "rollouter.tools.python_code:PythonTool",
    "search": "rollouter.tools.search:SearchTool",
    "gsm8k": "rollouter.tools.gsm8k:Gsm8kTool",
}
"""Short names for `class_name`."""


@dataclass(frozen=True, slots=True)
class LoadedTool:
    """A configured tool."""

    tool: BaseTool[Any]
    schema: FunctionSchema
    config: ToolConfig
    key: str
    """The tool's configuration key, for errors."""

    @property
    def name(self) -> str:
        return self.schema.name


@dataclass(frozen=True, slots=True)
class LoadedMcpServer:
    """A configured server. Its tools are known once it runs."""

    mcp: McpServerConfig
    config: ToolConfig
    key: str


def load_tools(configs: Sequence[ToolConfig]) -> tuple[LoadedTool | LoadedMcpServer, ...]:
    """Import and construct the configured tools, in order. Blocks.

    Raises:
        ConfigError: an entry is invalid, or two tools have the same name; the message names the key.
        UserCodeError: a user's module or class raised.
    """
    loaded = [_load(config, f"rollout.multi_turn.tools.{number}") for number, config in enumerate(configs)]
    check_names([one for one in loaded if isinstance(one, LoadedTool)])
    return tuple(loaded)


def check_names(tools: Sequence[LoadedTool]) -> None:
    """Check that the names of the tools differ.

    Raises:
        ConfigError: two tools have the same name.
    """
    keys: dict[str, str] = {}
    for one in tools:
        if one.name in keys:
            raise ConfigError(
                f"{one.key}: its tool is called {one.name!r}, like that of {keys[one.name]}, so calls would be "
                "ambiguous; give one of the tools another name in tool_schema"
            )
        keys[one.name] = one.key


def function_schema(schema: Mapping[str, Any], key: str) -> FunctionSchema:
    """Check a function schema; `key` is its configuration key.

    Raises:
        ConfigError: the value is not a function schema.
    """
    try:
        return FunctionSchema(schema)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _load(config: ToolConfig, key: str) -> LoadedTool | LoadedMcpServer:
    if config.class_name is None and config.config:
        given = "mcp" if config.function is None else "function"
        raise ConfigError(f"{key}.config: only class_name uses it, but {given} is set; leave it out")
    if config.mcp is not None:
        return _server(config, config.mcp, key)
    if config.function is not None:
        tool = _function(config.function, f"{key}.function")
    else:
        tool = _instance(str(config.class_name), config.config, key)
    if config.tool_schema is not None:
        return LoadedTool(tool, function_schema(config.tool_schema, f"{key}.tool_schema"), config, key)
    return LoadedTool(tool, function_schema(tool.function_schema(), f"{key}: the schema of its tool"), config, key)


def _server(config: ToolConfig, mcp: McpServerConfig, key: str) -> LoadedMcpServer:
    if config.tool_schema is not None:
        raise ConfigError(f"{key}.tool_schema: a server defines the schemas of its tools itself; leave it out")
    if mcp.env and not mcp.command:
        raise ConfigError(f"{key}.mcp.env: it has no effect on a server that has a url; leave it out")
    import rollouter.tools.mcp  # noqa: F401  importing it takes a second, so do it here, before the event loop runs

    return LoadedMcpServer(mcp, config, key)


def _function(reference: str, key: str) -> BaseTool[Any]:
    function = load_object(reference, key)
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"{key}: {reference} is not a function; name a class in class_name")
    try:
        return as_tool(function)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", error.cause) from error


def _instance(name: str, arguments: Mapping[str, Any], key: str) -> BaseTool[Any]:
    found = load_registered(name, f"{key}.class_name", BUILT_IN, "Class")
    if not (inspect.isclass(found) and issubclass(found, BaseTool)):
        is_function = callable(found) and not inspect.isclass(found)
        fix = "name a function in function" if is_function else "derive it from rollouter.tools.BaseTool"
        raise ConfigError(f"{key}.class_name: {name} is not a tool class; {fix}")
    if found.execute is BaseTool.execute:
        raise ConfigError(f"{key}.class_name: {name} does not define execute, so calls would do nothing; define it")
    if problem := call_problem(found, **arguments):
        raise ConfigError(f"{key}.config: it does not fit {problem}")
    try:
        return found(**reveal(arguments, f"{key}.config"))
    except ConfigError as error:
        raise ConfigError(f"{key}.config: {error.message}", error.cause) from error
    except AsyncRLError:
        raise
    except Exception as error:
        raise UserCodeError.wrap(f"{key}: making {name} failed: {describe(error)}", error) from error
