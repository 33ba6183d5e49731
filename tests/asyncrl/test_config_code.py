"""What a configuration says of code and of entries of lists is found wrong before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.code_checks import conversation_problems
from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError

TOOL = {"class_name": "calculator"}


def found(**rollout: Any) -> list[str]:
    return [str(problem) for problem in conversation_problems(Config.model_validate({"rollout": rollout}))]


def tools(*entries: Any) -> list[str]:
    return found(multi_turn={"enable": True, "tools": list(entries)})


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"class_name": "calculater"}, "no built-in tool has this name\n    fix: did you mean calculator?"),
        ({"class_name": "calculator", "function": "a:b"}, "tools.0 = class_name, function\n    a tool is a class"),
        ({}, "and this is none of them"),
        ({"function": "nothere.py:price"}, "tools.0.function = nothere.py:price\n    the file nothere.py is not there"),
        ({"function": "no_such_module_at_all:price"}, "there is no module no_such_module_at_all"),
        ({"mcp": {"command": ["a"], "url": "http://b"}}, "a server is a command or a url, and both are set"),
        ({"mcp": {"url": "ftp://b"}}, "tools.0.mcp.url = ftp://b"),
        ({"mcp": {"command": ["no-such-program-here"]}}, "there is no such program on the PATH"),
        ({"mcp": {"command": ["python my_server.py"]}}, "the program first and then its arguments"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_be_is_named_with_its_place(entry: dict[str, Any], told: str) -> None:
    (problem,) = tools(entry)
    assert told in problem and "fix: " in problem


@pytest.mark.parametrize(
    "name", ["calculator", "rollouter.tools.calculator.Calculator", "rollouter.tools.calculator:Calculator"]
)
def test_a_class_may_be_written_in_three_ways(name: str) -> None:
    assert tools({"class_name": name}) == []


def test_a_file_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def price(item: str) -> int: ...\n")
    assert tools({"function": f"{tmp_path}/mine.py:price"}) == []
    (problem,) = tools({"function": f"{tmp_path}/mine.py:prize"})
    assert "did you mean price?" in problem


def test_interactions_and_agents() -> None:
    twice = [{"class_name": "scripted"}, {"class_name": "modle"}]
    first, second = found(multi_turn={"enable": True, "interactions": twice})
    assert "did you mean model?" in first and "two have this name" in second
    assert "no such program" in found(agent={"command": ["no-such-program-here"]})[0]
    assert "it names no function" in found(agent={"program": "my_agent"})[0]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({**TOOL, "timout_s": 3}, ("tools.0.timout_s = 3", "there is no such key\n    fix: did you mean timeout_s?")),
        ({**TOOL, "max_concurrency": 0}, ("tools.0.max_concurrency = 0", "greater than 0")),
        ({"mcp": {"urrl": "x"}}, ("tools.0.mcp.urrl", "did you mean url?")),
        ({"class_name": 3}, ("tools.0.class_name = 3", "valid string")),
    ],
)
def test_an_entry_of_a_list_is_named_with_its_key(tmp_path: Path, entry: dict[str, Any], told: tuple[str, ...]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"defaults": ["calculator"], "rollout": {"multi_turn": {"tools": [entry]}}}))
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), [])
    assert "1 problem in" in str(caught.value)
    assert all(text in str(caught.value) for text in told), str(caught.value)
