"""Turns typed functions into tools: type hints and docstring become the schema.

@function_tool
def forecast(city: str, days: int = 1) -> str:
    \"\"\"The weather to come.

    Args:
        city: Its English name.
        days: How many to look ahead.
    \"\"\"
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs, PydanticSerializationError, to_json, to_jsonable_python

from asyncrl.core.failures import ConfigError
from asyncrl.core.text import encodable_values
from rollouter.tools.base import BadArgumentsError, BaseTool, ToolContext, ToolResponse
from rollouter.user_code import is_async

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?|Attributes|See Also|References):\s*"
)
_PARAMETERS = frozenset({"Args", "Arguments", "Parameters"})
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(\([^)]*\))?\s*:\s*(.*)")


class FunctionTool(BaseTool[ToolContext]):
    """A tool that runs a sync function in a worker thread. The tool can still be called like the function.

    A parameter annotated with `ToolContext` receives the calling trajectory and is not in the schema. Arguments are
    converted to the annotated types. A result that is neither a text nor a `ToolResponse` becomes JSON.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        """Derive the schema. By default, the name is the function's, and the description is its docstring up to the
        first section.

        Raises:
            ConfigError: no schema can be derived, because of a parameter without a type hint or a missing docstring.
        """
        functools.update_wrapper(self, function)
        self.function = function
        self._name = str(name or getattr(function, "__name__", type(function).__name__))
        summary, about = _docstring(function)
        self._description = summary if description is None else description
        if not self._description:
            raise ConfigError(
                f"tool function {self._name}: it has no docstring, so a model would not know its purpose; write one"
            )
        self._context = ""
        """The name of the parameter for the context; empty if the function has none."""
        collector = self._collector()
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(collector)
            self._parameters = self._adapter.json_schema(schema_generator=_PlainSchema)
        except PydanticUserError as error:
            raise ConfigError(
                f"tool function {self._name}: its parameters have no JSON schema: {error.message}"
            ) from error
        for name, parameter in self._parameters.setdefault("properties", {}).items():
            parameter.pop("title", None)
            if name in about:
                parameter["description"] = about[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def function_schema(self) -> Mapping[str, Any]:
        function = {"name": self._name, "description": self._description, "parameters": self._parameters}
        return {"type": "function", "function": function}

    async def create(self, context: ToolContext) -> ToolContext:  # type: ignore[override]  # no kwargs reach a function
        return context

    def execute(self, state: ToolContext, arguments: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return _as_response(self.function(**self._bound(state, arguments)))

    def _bound(self, context: ToolContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's keyword arguments.

        Raises:
            BadArgumentsError: the model's arguments cannot be converted.
        """
        try:
            bound: dict[str, Any] = self._adapter.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BadArgumentsError(f"{place}: {first['msg']}" if place else first["msg"]) from None
        return bound | {self._context: context} if self._context else bound

    def _collector(self) -> Any:
        """Return a function that has the parameters that the model sees, and that returns its arguments by name."""

        def collect(**arguments: Any) -> dict[str, Any]:
            return arguments

        hinted = list(self._hinted())
        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter, _ in hinted]
        collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        collect.__annotations__ = {parameter.name: hint for parameter, hint in hinted}
        return collect

    def _hinted(self) -> Iterator[tuple[inspect.Parameter, Any]]:
        function = self.function
        target = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
        try:
            hints = typing.get_type_hints(inspect.unwrap(target), include_extras=True)
        except NameError as error:
            raise ConfigError(
                f"tool function {self._name}: a type hint cannot be resolved: {error}; import it at module level, and "
                "not under TYPE_CHECKING"
            ) from error
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"tool function {self._name}: a model passes arguments by name, so `{parameter}` cannot be used; "
                    "use parameters with names"
                )
            if parameter.name not in hints:
                raise ConfigError(
                    f"tool function {self._name}: parameter {parameter.name!r} has no type hint, so the model would "
                    "not know what to write; annotate it"
                )
            if _is_context(hints[parameter.name]):
                self._context = parameter.name
            else:
                yield parameter, hints[parameter.name]


class AsyncFunctionTool(FunctionTool):
    """A tool that runs an async function on the event loop."""

    async def execute(self, state: ToolContext, arguments: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return _as_response(await self.function(**self._bound(state, arguments)))


def as_tool(function: Callable[..., Any], *, name: str | None = None, description: str | None = None) -> FunctionTool:
    """Convert a sync or async function to a tool. A `FunctionTool` is returned unchanged.

    Raises:
        ConfigError: see `FunctionTool`.
    """
    if isinstance(function, FunctionTool):
        return function
    return (AsyncFunctionTool if is_async(function) else FunctionTool)(function, name=name, description=description)


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def function_tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def function_tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Turn a typed function with a docstring into a tool; usable with or without arguments.

    Raises:
        ConfigError: see `FunctionTool`.
    """
    if function is not None:
        return as_tool(function)
    return functools.partial(as_tool, name=name, description=description)


class _PlainSchema(GenerateJsonSchema):
    """Generates schemas without redundant titles, and ignores defaults that JSON cannot represent."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  pydantic defines this attribute

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _is_context(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return ToolContext in typing.get_args(hint)
    return hint is ToolContext


def _as_response(result: Any) -> Any:
    if isinstance(result, str | ToolResponse):
        return result
    with suppress(PydanticSerializationError):
        return to_json(result, inf_nan_mode="constants").decode()
    with suppress(ValueError):  # one of its texts may have a lone surrogate
        plain = to_jsonable_python(encodable_values(result), inf_nan_mode="constants")
        return to_json(encodable_values(plain), inf_nan_mode="constants").decode()
    return result  # `execution` refuses this result with a better message


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the description of each parameter, of a Google-style docstring."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else None
    lines = (text or "").splitlines()
    sections = [n for n, line in enumerate(lines) if _SECTION.fullmatch(line)]
    about: dict[str, str] = {}
    for first, end in itertools.pairwise([*sections, len(lines)]):
        if lines[first].strip().rstrip(":") in _PARAMETERS:
            about |= _entries(lines[first + 1 : end])
    head = lines[: sections[0]] if sections else lines
    return "\n".join(head).strip(), about


def _entries(lines: list[str]) -> dict[str, str]:
    """Parse entries `name: text` or `name (type): text` with indented continuation lines."""
    entries: dict[str, str] = {}
    indent, current = None, ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        indent = depth if indent is None else indent
        entry = _ENTRY.fullmatch(line.strip()) if depth <= indent else None
        if entry is not None:
            current = entry[1]
            entries[current] = entry[3].strip()
        elif current:
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    return entries
