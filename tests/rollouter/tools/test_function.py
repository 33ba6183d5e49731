"""Functions as tools: their schemas, and the arguments that they receive."""

from __future__ import annotations

import datetime
import functools
import json
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio.lowlevel
import pytest
from pydantic import BaseModel, Field

from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core.failures import ConfigError, UserCodeError
from rollouter.tools import BaseTool, ToolContext, ToolError, ToolResponse, function_tool
from rollouter.tools.function import as_tool
from rollouter.tools.loading import FunctionSchema, LoadedTool
from rollouter.tools.toolbox import Toolbox


def toolbox_of(tool: BaseTool[Any], **limits: Any) -> Toolbox:
    return Toolbox([LoadedTool(tool, FunctionSchema(tool.function_schema()), ToolConfig(**limits), "tools.0")])


async def answer(tool: BaseTool[Any], context: ToolContext | None = None, /, **arguments: Any) -> tuple[str, str]:
    """Return status and text of one call."""
    toolbox = toolbox_of(tool)
    name = toolbox.schemas[0]["function"]["name"]
    async with toolbox, toolbox.session(context or ToolContext("val", 3)) as tools:
        call = (await tools.call(name, json.dumps(arguments), turn=0)).call
    return call.status, call.result


@function_tool
def forecast(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """The weather to come.

    It has no data of the last year.

    Args:
        city: Its English name,
            or another one.
        days (int): How many: one is today.

    Returns:
        One line for each day.
    """
    return f"{city} {days!r} {unit}"


def test_the_schema_is_derived_from_hints_and_docstring() -> None:
    assert forecast.function_schema() == {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "The weather to come.\n\nIt has no data of the last year.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its English name, or another one."},
                    "days": {"type": "integer", "description": "How many: one is today.", "default": 1},
                    "unit": {"enum": ["C", "F"], "type": "string", "default": "C"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def test_a_tool_can_be_called_like_its_function() -> None:
    assert forecast("Oslo", days=2) == "Oslo 2 C"
    assert forecast.__name__ == "forecast"


async def test_a_call_converts_arguments_and_result() -> None:
    assert await answer(forecast, city="Oslo") == ("ok", "Oslo 1 C")
    assert await answer(forecast, city="Oslo", days=3.0, unit="F") == ("ok", "Oslo 3 F")
    status, text = await answer(forecast, city="Oslo", day=2)
    assert status == "bad_arguments" and "'day' was unexpected" in text


async def test_name_and_description_can_be_set() -> None:
    @function_tool(name="add_up", description="Adds.")
    async def total(numbers: list[float]) -> float:
        return sum(numbers)

    function = total.function_schema()["function"]
    assert (function["name"], function["description"]) == ("add_up", "Adds.")
    assert await answer(total, numbers=[1, 2.5]) == ("ok", "3.5")


async def test_sync_functions_run_in_a_thread_and_async_ones_on_the_loop() -> None:
    threads: list[int] = []

    @function_tool
    def plain() -> None:
        """Notes its thread."""
        threads.append(threading.get_ident())

    @function_tool
    async def on_loop() -> None:
        """Notes its thread."""
        await anyio.lowlevel.checkpoint()
        threads.append(threading.get_ident())

    assert await answer(plain) == await answer(on_loop) == ("ok", "null")
    assert threads[0] != threading.get_ident() == threads[1]


async def test_the_context_is_passed_and_not_in_the_schema() -> None:
    @function_tool
    def describe_context(context: ToolContext, what: str = "it") -> str:
        """Returns the caller."""
        return f"{what}: {context.sample_id}, {context.trajectory}, {context.ground_truth}"

    @function_tool
    async def optional_context(context: ToolContext | None = None) -> str:
        """Returns the caller."""
        return repr(context and context.sample_id)

    assert list(describe_context.function_schema()["function"]["parameters"]["properties"]) == ["what"]
    context = ToolContext("gsm8k/3", 2, ground_truth="5")
    assert await answer(describe_context, context) == ("ok", "it: gsm8k/3, 2, 5")
    assert await answer(optional_context, context) == ("ok", "'gsm8k/3'")
    assert (await answer(describe_context, context, context="x"))[0] == "bad_arguments"


class Place(BaseModel):
    city: str
    country: str = "NO"


@dataclass
class Range:
    first: int
    last: int


async def test_arguments_are_converted_to_the_hinted_types() -> None:
    @function_tool
    def typed(
        day: datetime.date,
        place: Place,
        span: Range,
        tags: set[str],
        at_most: Annotated[int, Field(ge=1, description="Of them.")] = 3,
        copy: bool = False,
        schema: str | None = None,
        model_config: float = 1,
    ) -> str:
        """Shows what it is given.

        Args:
            tags: Some.
        """
        return f"{day!r} {place.city}/{place.country} {span} {sorted(tags)} {at_most} {copy} {schema} {model_config!r}"

    properties = typed.function_schema()["function"]["parameters"]["properties"]
    assert properties["at_most"] == {"type": "integer", "minimum": 1, "description": "Of them.", "default": 3}
    assert properties["day"] == {"type": "string", "format": "date"}
    given = {"day": "2024-02-29", "place": {"city": "Oslo"}, "span": {"first": 1, "last": 2}, "tags": ["b", "a"]}
    status, text = await answer(typed, **given, copy=True, model_config=2)
    assert status == "ok"
    assert text == "datetime.date(2024, 2, 29) Oslo/NO Range(first=1, last=2) ['a', 'b'] 3 True None 2.0"
    status, text = await answer(typed, **{**given, "day": "yesterday"})
    assert status == "bad_arguments" and "day: Input should be a valid date" in text
    status, text = await answer(typed, **given, at_most=0)
    assert status == "bad_arguments" and "at_most: 0 is less than the minimum of 1" in text


async def test_a_default_that_json_cannot_represent_is_kept() -> None:
    nothing = object()

    @function_tool
    def odd(what: Any = nothing) -> bool:
        """Whether it is left out."""
        return what is nothing

    assert await answer(odd) == ("ok", "true")
    assert await answer(odd, what=1) == ("ok", "false")


@pytest.mark.parametrize(
    ("result", "text"),
    [(3, "3"), (0.5, "0.5"), ({"a": [1, None]}, '{"a":[1,null]}'), (float("inf"), "Infinity"), (Range(1, 2), None),
     ({"\ud83d": ["\ud83d", float("inf")]}, '{"?":["?",Infinity]}')],
)  # fmt: skip
async def test_results_become_json(result: Any, text: str | None) -> None:
    def give() -> Any:
        """Gives it."""
        return result

    assert await answer(as_tool(give)) == ("ok", text or '{"first":1,"last":2}')


async def test_a_function_may_return_a_response_or_raise_a_tool_error() -> None:
    @function_tool
    def respond(wrong: bool) -> ToolResponse:
        """Responds."""
        if wrong:
            raise ToolError("not this")
        return ToolResponse("fine", 1.0, done=True)

    assert await answer(respond, wrong=True) == ("refused", "not this")
    assert await answer(respond, wrong=False) == ("ok", "fine")
    with pytest.raises(UserCodeError, match="tool give: execute returned <object"):

        def give() -> Any:
            """Gives what has no text."""
            return object()

        await answer(as_tool(give))


def test_the_hints_of_a_callable_object_and_of_a_partial_are_found() -> None:
    class Scale:
        """Not the description."""

        async def __call__(self, value: float) -> float:
            return 2 * value

    made = as_tool(Scale(), name="scale", description="Doubles.")
    assert type(made).__name__ == "AsyncFunctionTool"
    assert list(made.function_schema()["function"]["parameters"]["properties"]) == ["value"]

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    made = as_tool(functools.partial(add, b=2), name="add", description="Adds two.")
    assert made.function_schema()["function"]["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("parameters", "docstring", "message"),
    [
        ("city", "Returns the city.", "'city' has no type hint"),
        ("city: str", "", "no docstring"),
        ("*cities: str", "Returns the city.", r"`\*cities: 'str'` cannot be used"),
        ("**cities: str", "Returns the city.", r"`\*\*cities: 'str'` cannot be used"),
        ("city: str, /", "Returns the city.", "cannot be used"),
        ("lock: threading.Thread", "Returns the lock.", "no JSON schema"),
        ("city: Nowhere", "Returns the city.", "Nowhere.*TYPE_CHECKING"),
    ],
)
def test_functions_without_a_schema_are_configuration_errors(parameters: str, docstring: str, message: str) -> None:
    made: dict[str, Any] = {"threading": threading}
    exec(f"def lookup({parameters}):\n    {docstring!r}\n", made)
    with pytest.raises(ConfigError, match=f"tool function lookup: .*{message}"):
        as_tool(made["lookup"])
