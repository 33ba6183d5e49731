"""What the model is shown of a tool, and whether what it wrote fits: OpenAI function schemas, JSON arguments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError, best_match  # type: ignore[import-untyped]
from referencing import Registry

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Of a function, as OpenAI's interface has it."""
LONGEST = 200
"""Letters of what is quoted to the model."""


class BadJsonError(ValueError):
    """The model's arguments are no JSON object; the message says why."""


class FunctionSchema:
    """One tool as the model sees it, and the check of its arguments.

    Raises:
        ValueError: it is no OpenAI function schema; the message says what is wrong, and begins with the place.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema: Mapping[str, Any] = _checked(schema)
        """Plain JSON values, `parameters` included."""
        function = self.schema["function"]
        self.name: str = function["name"]
        # An empty registry: a reference to another document is an error, and not fetched from wherever it points to.
        self._validator = jsonschema.Draft202012Validator(function["parameters"], registry=Registry())

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with `arguments`, in words for the model; empty: nothing."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return ""
        place = ".".join(str(part) for part in error.absolute_path)
        return shorten(f"{place}: {error.message}" if place else error.message)


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments that the model wrote; nothing stands for none.

    Raises:
        BadJsonError: they are no JSON object.
    """
    try:
        parsed = json.loads(text or "{}", parse_constant=_refuse)
    except RecursionError:
        raise BadJsonError("they are nested too deeply") from None
    except ValueError as error:
        raise BadJsonError(str(error)) from None
    if not isinstance(parsed, dict):
        raise BadJsonError(f"they are {shorten(json.dumps(parsed))}; write an object with the arguments by name")
    return parsed


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        schema = json.loads(json.dumps(given, allow_nan=False, default=_mapping))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not made of JSON values: {error}") from None
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict):
        raise ValueError('it is no function schema; write {"type": "function", "function": {"name": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"function.name: {name!r} is no name of a function; use 1 to 64 letters, digits, _ and -")
    if not isinstance(function.setdefault("description", ""), str):
        raise ValueError(f"function.description: {function['description']!r} is no text")
    parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        place = ".".join(["function.parameters", *(str(part) for part in error.absolute_path)])
        raise ValueError(f"{place}: no JSON schema: {shorten(error.message)}") from None
    if not isinstance(parameters, dict) or parameters.setdefault("type", "object") != "object":
        raise ValueError('function.parameters: arguments have names, so it must be {"type": "object", ...}')
    return {"type": "function", "function": function}


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is none")
