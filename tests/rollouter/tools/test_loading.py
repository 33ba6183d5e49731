"""Loading tools from the configuration; errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from asyncrl.config.import_path import load_object
from asyncrl.config.sections.rollout import McpServerConfig, ToolConfig
from asyncrl.core.failures import ConfigError, UserCodeError
from rollouter.tools.loading import BUILT_IN, FunctionSchema, LoadedMcpServer, LoadedTool, load_tools
from tests.fakes.tools import schema_of

SOURCE = '''
from rollouter.tools import BaseTool, function_tool

class Search(BaseTool):
    name = "search"
    schema = {"type": "function", "function": {"description": "Finds."}}
    def __init__(self, index="cats", depth=1):
        if depth < 0:
            raise ZeroDivisionError("no depth")
        self.index = index
    def execute(self, state, arguments):
        return self.index

class Nameless(BaseTool):
    def execute(self, state, arguments):
        return ""

class Idle(BaseTool):
    name = "idle"
    schema = {"type": "function", "function": {"description": "Does nothing."}}

def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

def untyped(a):
    """Adds."""

@function_tool(name="twice")
def double(a: int) -> int:
    """Doubles."""
    return 2 * a

made = Search()
number = 3
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a file with tools, which is also the module `tools_of_a_test`, and return its path."""
    (tmp_path / "tools_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "tools_of_a_test.py")


def load(**config: Any) -> LoadedTool:
    (one,) = load_tools([ToolConfig(**config)])
    assert isinstance(one, LoadedTool)
    return one


def test_classes_are_found_by_every_form_of_reference(source: str) -> None:
    for name in (f"{source}:Search", "tools_of_a_test:Search", "tools_of_a_test.Search"):
        one = load(class_name=name, config={"index": "dogs"})
        assert one.name == "search" and one.tool.index == "dogs"  # type: ignore[attr-defined]
        assert one.schema.schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert load(class_name="calculator").name == "calculator"


def test_a_class_without_execute_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"tools\.0\.class_name: .*:Idle does not define execute"):
        load(class_name=f"{source}:Idle")


def test_plain_functions_and_function_tools_are_found(source: str) -> None:
    assert load(function=f"{source}:add").name == "add"
    assert load(function="tools_of_a_test:double").name == "twice"


def test_the_schema_can_be_configured(source: str) -> None:
    one = load(class_name=f"{source}:Nameless", tool_schema=schema_of("find"))
    assert one.name == "find"
    assert one.schema.problem({"query": 3}) == "query: 3 is not of type 'string'"


def test_servers_are_started_by_the_toolbox() -> None:
    (one,) = load_tools([ToolConfig(mcp=McpServerConfig(url="http://localhost:1/mcp"))])
    assert isinstance(one, LoadedMcpServer) and one.key == "rollout.multi_turn.tools.0"


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tools_have_short_names(name: str) -> None:
    assert load_object(BUILT_IN[name], "tools.0.class_name")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"function": "a:b", "config": {"x": 1}}, r"tools\.0\.config: only class_name"),
    ({"class_name": "calculater"}, "did you mean 'calculator'"),
    ({"class_name": "tools_of_a_test:Serch"}, "did you mean 'Search'"),
    ({"class_name": "no_such_module:Search"}, "no module 'no_such_module'"),
    ({"class_name": "tools_of_a_test:add"}, "name a function in function"),
    ({"class_name": "pathlib:Path"}, "derive it from rollouter.tools.BaseTool"),
    ({"class_name": "tools_of_a_test:number"}, "derive it from rollouter.tools.BaseTool"),
    (
        {"class_name": "tools_of_a_test:Search", "config": {"indx": 1}},
        r"tools\.0\.config: .*; did you mean 'index'",
    ),
    ({"class_name": "tools_of_a_test:Nameless"}, "not a function schema"),
    ({"function": "tools_of_a_test:Search"}, "is not a function; name a class in class_name"),
    ({"function": "tools_of_a_test:made"}, "is not a function"),
    ({"function": "tools_of_a_test:number"}, "is not a function"),
    ({"function": "tools_of_a_test:untyped"}, r"tools\.0\.function: .*'a' has no type hint"),
    ({"class_name": "calculator", "tool_schema": {"name": "x"}}, r"tools\.0\.tool_schema: it is not a function schema"),
    ({"mcp": {"url": "http://x", "env": {"A": "1"}}}, r"mcp\.env"),
    ({"mcp": {"url": "http://x"}, "tool_schema": schema_of("x")}, "a server defines"),
    ({"mcp": {"url": "http://x"}, "config": {"x": 1}}, "only class_name"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_errors_of_invalid_tools_name_the_key(source: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**config)


def test_an_exception_of_a_constructor_is_a_user_error(source: str) -> None:
    with pytest.raises(UserCodeError, match=r"making .*:Search failed: ZeroDivisionError: no depth") as caught:
        load(class_name="tools_of_a_test:Search", config={"depth": -1})
    assert "__init__" in caught.value.cause


def test_two_tools_with_the_same_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tools\.1: its tool is called 'calculator', like that of .*tools\.0"):
        load_tools([ToolConfig(class_name="calculator"), ToolConfig(class_name="calculator")])
    other = ToolConfig(class_name="calculator", config={"name": "c"})
    assert len(load_tools([ToolConfig(class_name="calculator"), other])) == 2


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "x", **changes}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "not a function schema"),
        ({"type": "function"}, "not a function schema"),
        (function() | {"type": "tool"}, "not a function schema"),
        (function(name=""), "function.name: '' is not a valid name"),
        (function(name="a.b"), "function.name: 'a.b'"),
        (function(name="x" * 65), "1 to 64"),
        (function(name=3), "function.name: 3"),
        (function(description=None), "function.description"),
        (function(parameters={"type": "array"}), "arguments have names"),
        (function(parameters=True), "arguments have names"),
        (
            function(parameters={"properties": {"a": {"type": "text"}}}),
            r"function\.parameters\.properties\.a\.type: not a JSON",
        ),
        (function(parameters={"required": "a"}), r"function\.parameters\.required"),
        (function(parameters={"default": float("nan")}), "values that JSON cannot represent"),
        (function(parameters={"default": {1, 2}}), "values that JSON cannot represent"),
    ],
)
def test_invalid_function_schemas_are_refused(schema: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionSchema(schema)


def test_a_schema_is_converted_to_plain_json() -> None:
    schema = FunctionSchema(MappingProxyType(function(parameters=MappingProxyType({"required": ("a",)}))))
    assert schema.schema == function(description="", parameters={"required": ["a"], "type": "object"})


def test_a_tool_gets_its_secrets_and_its_errors_do_not_show_them(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEX", "c4n4ry-of-tools")
    loaded = load(class_name=f"{source}:Search", config={"index": "${secret:INDEX}"})
    assert loaded.tool.index == "c4n4ry-of-tools"  # type: ignore[attr-defined]
    assert loaded.config.config == {"index": "${secret:INDEX}"}
    with pytest.raises(ConfigError, match=r"name: \['\$\{secret:INDEX\}'\] is not") as raised:
        load(class_name="calculator", config={"name": ["${secret:INDEX}"]})
    assert "c4n4ry" not in str(raised.value)
