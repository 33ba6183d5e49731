"""Recorded tool calls: a replay does not run the tool, and later calls find the same state as without records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.types import SampleId
from rollouter.drop_policy import ToolFailedError
from rollouter.tools import ToolContext, ToolError, ToolResponse
from rollouter.tools.toolbox import Toolbox
from skip import SkipManager
from tests.fakes.tools import RememberingTool, toolbox_of


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    SkipManager.reset()
    yield
    SkipManager.reset()


def configure(tmp_path: Path, **settings: Any) -> Config:
    section = {"enable": True, "dump_dir": str(tmp_path), "steps": "all", **settings}
    return Config.model_validate({"skip": {"tool": section}})


TRAINED = SampleId(0, 7)


def act(query: str) -> ToolResponse:
    if query == "wrong":
        raise ToolError("not this")
    if query == "broken":
        raise ZeroDivisionError("by zero")
    return ToolResponse(query.upper(), 0.25, {"length": float(len(query))}, done=query == "end")


async def converse(
    toolbox: Toolbox, *turns: str, sample_id: SampleId | str = TRAINED, **context: Any
) -> tuple[list[Any], dict[str, float]]:
    """Make one call per turn, and return the outcomes without times and the scores."""
    found: list[Any] = []
    async with toolbox, toolbox.session(ToolContext(sample_id, 0, **context)) as tools:
        for turn, query in enumerate(turns):
            call, done = await tools.call("search", json.dumps({"query": query}), turn=turn)
            found.append((call.result, call.status, call.reward, dict(call.metrics), done))
        return found, dict(await tools.scores())


async def test_a_replayed_call_does_not_run_the_tool(tmp_path: Path) -> None:
    turns = ("a", "wrong", "broken", "end")
    first, second = RememberingTool(act), RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        recorded = await converse(toolbox_of(first), *turns)
        assert SkipManager.status() == {"tool": {"recorded": 5}}
    assert [status for _, status, *_ in recorded[0]] == ["ok", "refused", "raised", "ok"]
    assert recorded[1] == {"search": 2.0}
    toolbox = toolbox_of(second)
    with SkipManager.session(configure(tmp_path)):
        assert await converse(toolbox, *turns) == recorded
        assert SkipManager.status() == {"tool": {"replayed": 5}}
    assert second.log == []
    assert (toolbox.counts()["calls"], toolbox.counts()["refused"], toolbox.tool_s) == (4, 1, 0.0)


async def test_invalid_calls_are_not_recorded(tmp_path: Path) -> None:
    toolbox = toolbox_of(RememberingTool())
    with SkipManager.session(configure(tmp_path)):
        async with toolbox, toolbox.session(ToolContext(SampleId(0, 7), 0)) as tools:
            for name, arguments in (("nothing", "{}"), ("search", "{"), ("search", "{}")):
                await tools.call(name, arguments, turn=0)
        assert SkipManager.status() == {"tool": {}}


async def test_a_diverging_conversation_has_the_state_of_all_its_calls(tmp_path: Path) -> None:
    first, second = RememberingTool(act), RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        await converse(toolbox_of(first), "a", "broken", "c")
        found, scores = await converse(toolbox_of(second), "a", "broken", "d")
        assert SkipManager.status() == {"tool": {"recorded": 4 + 2, "replayed": 2, "mismatched": 1}}
    assert [text for text, *_ in found] == ["A", "Error: search failed: ZeroDivisionError: by zero", "D"]
    assert scores == {"search": 1.5}
    made_up = ["execute a", "execute broken"]
    assert second.log == ["create", *made_up, "execute d", "calc_reward a,broken,d", "release a,broken,d"]


async def test_a_score_without_a_record_comes_from_repeated_calls(tmp_path: Path) -> None:
    first, second = RememberingTool(act), RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        await converse(toolbox_of(first), "a", "b")
        assert (await converse(toolbox_of(second), "a"))[1] == {"search": 0.5}
    assert second.log == ["create", "execute a", "calc_reward a", "release a"]


async def test_a_record_depends_on_earlier_calls(tmp_path: Path) -> None:
    tool = RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        await converse(toolbox_of(tool), "a", "b")
        tool.log.clear()
        await converse(toolbox_of(tool), "x", "b")
    assert "execute b" in tool.log


@pytest.mark.parametrize("changed", [{"ground_truth": "6"}, {"extra_info": {"tools_kwargs": {"search": None}}}])
async def test_a_record_depends_on_the_prompt(tmp_path: Path, changed: dict[str, Any]) -> None:
    first, second = RememberingTool(act), RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        await converse(toolbox_of(first), "a", ground_truth="5")
        await converse(toolbox_of(second), "a", **{"ground_truth": "5", **changed})
    assert first.log == second.log != []


async def test_a_tool_without_a_state_has_no_score_when_it_runs_and_when_it_is_replayed(tmp_path: Path) -> None:
    class Broken(RememberingTool):
        async def create(self, context: ToolContext, **kwargs: Any) -> list[str]:
            self.log.append("create")
            raise OSError("full")

    first, second = Broken(), Broken()
    with SkipManager.session(configure(tmp_path)):
        recorded = await converse(toolbox_of(first), "a")
        assert await converse(toolbox_of(second), "a") == recorded
    assert recorded[1] == {} and first.log == ["create"] and second.log == []


async def test_a_failure_that_ends_the_sample_is_not_recorded(tmp_path: Path) -> None:
    with SkipManager.session(configure(tmp_path)):
        for _ in range(2):
            with pytest.raises(ToolFailedError):
                await converse(toolbox_of(RememberingTool(act), on_error="drop"), "broken")
        assert SkipManager.status() == {"tool": {}}


async def test_validation_is_never_recorded(tmp_path: Path) -> None:
    tool = RememberingTool(act)
    with SkipManager.session(configure(tmp_path)):
        for _ in range(2):
            await converse(toolbox_of(tool), "a", sample_id="val/3")
            with SkipManager.suspended():
                await converse(toolbox_of(tool), "a")
        assert SkipManager.status() == {"tool": {}}
    assert tool.log.count("execute a") == 4
