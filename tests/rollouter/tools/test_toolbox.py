"""Tool calls of a trajectory: their outcomes, their shared state, its release, and limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio import to_thread
from hypothesis import given, settings

from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core import failures
from asyncrl.core.failures import BugError, ConfigError, DataError, UserCodeError
from asyncrl.core.trajectory import CallStatus
from asyncrl.core.types import SampleId
from rollouter.drop_policy import ToolFailedError
from rollouter.tools import BadArgumentsError, BaseTool, ToolContext, ToolError, ToolResponse, execution
from rollouter.tools.loading import FunctionSchema, LoadedTool
from rollouter.tools.toolbox import CreateMode, Toolbox, ToolCallResult, ToolSession
from tests.fakes.hostile import BROKEN_JSON, LONE, LONG_TEXT, dumps, texts, values
from tests.fakes.tools import RememberingTool, schema_of, toolbox_of
from tests.fuzz.loop import run as run_virtually

CONTEXT = ToolContext(SampleId(0, 7), 0)
ASK = json.dumps({"query": "a"})


def fail(error: BaseException) -> Any:
    raise error


async def once(
    toolbox: Toolbox, arguments: str = ASK, name: str = "search", context: ToolContext = CONTEXT
) -> ToolCallResult:
    async with toolbox, toolbox.session(context) as tools:
        return await tools.call(name, arguments, turn=0)


@asynccontextmanager
async def opened(*tools: BaseTool[Any], **limits: Any) -> AsyncIterator[ToolSession]:
    """Open a trajectory's session with these tools."""
    toolbox = toolbox_of(*tools, **limits)
    async with toolbox, toolbox.session(CONTEXT) as session:
        yield session


# ------------------------------------------------------------------------------------------------ outcomes


async def test_a_call_returns_and_records_its_result() -> None:
    tool = RememberingTool(lambda query: ToolResponse(query * 2, 0.25, {"length": np.float32(2)}, done=True))
    toolbox = toolbox_of(tool)
    called = await once(toolbox)
    assert called.done
    call = called.call
    assert (call.name, call.arguments, call.result, call.status) == ("search", ASK, "aa", "ok")
    assert (call.reward, call.metrics) == (0.25, {"length": 2.0})
    assert call.duration_s >= 0 and call.wait_s >= 0
    assert tool.log == ["create", "execute a", "release a"]
    assert toolbox.counts() == dict.fromkeys(get_args(CallStatus), 0) | {"calls": 1, "ok": 1}
    assert toolbox.tool_s == call.duration_s


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ('{"query": ', "bad_json", "cannot be read: it is not JSON: Expecting value"),
        ('["a"]', "bad_json", 'they are ["a"]; write an object'),
        ('{"query": NaN}', "bad_json", "NaN, which is not finite"),
        ("[" * 100_000, "bad_json", "cannot be read: it "),
        ('{"query": ' + "1" * 5000 + "}", "bad_json", "cannot be read: it "),
        ("{}", "bad_arguments", "'query' is a required property"),
        ("", "bad_arguments", "'query' is a required property"),
        ('{"query": "a", "limit": "x"}', "bad_arguments", "limit: 'x' is not of type 'integer'"),
        (json.dumps({"query": ["x" * 9999]}), "bad_arguments", "..."),
    ],
)
async def test_invalid_calls_reach_the_model_regardless_of_on_error(arguments: str, status: str, message: str) -> None:
    tool = RememberingTool()
    toolbox = toolbox_of(tool, on_error="stop")
    called = await once(toolbox, arguments)
    assert called.call.status == status and message in called.call.result and len(called.call.result) < 300
    assert not called.done
    assert tool.log == [], "an invalid call does not create a state"
    assert toolbox.counts()["calls"] == toolbox.counts()[status] == 1


async def test_an_unknown_tool_is_reported_with_the_nearest_name() -> None:
    toolbox = toolbox_of(RememberingTool(), RememberingTool(), on_error="stop")
    assert (
        await once(toolbox, name="serach")
    ).call.result == "Error: there is no tool 'serach'; did you mean 'search'?"
    toolbox = toolbox_of(RememberingTool(), RememberingTool())
    called = await once(toolbox, name="zzz" * 1000)
    assert called.call.status == "unknown_tool" and "there is search, search_1" in called.call.result
    assert len(called.call.result) < 300
    assert "no tool 'search'" in (await once(Toolbox(()))).call.result


async def test_a_long_error_that_is_cut_within_a_secret_shows_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_hidden", {})
    secret = "c4n4ry" * 10
    failures.hide(secret, "${secret:NAME}")
    tool = RememberingTool(lambda query: fail(ValueError("x" * 140 + secret)))
    assert "c4n4ry" not in (await once(toolbox_of(tool))).call.result


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ToolError("no such page"), "refused", "no such page"),
        (BadArgumentsError("no date"), "bad_arguments", "Error: the arguments of search do not fit: no date"),
    ],
)
async def test_tool_errors_reach_the_model_regardless_of_on_error(error: ToolError, status: str, message: str) -> None:
    called = await once(toolbox_of(RememberingTool(lambda _: fail(error)), on_error="stop"))
    assert (called.call.status, called.call.result) == (status, message)


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(3), TimeoutError("its own")], ids=repr)
async def test_an_exception_of_a_tool_is_reported_to_the_model(error: BaseException) -> None:
    called = await once(toolbox_of(RememberingTool(lambda _: fail(error))))
    assert called.call.status == "raised"
    assert called.call.result == f"Error: search failed: {type(error).__name__}: {error}"


async def test_a_cancelled_task_of_a_tool_fails_the_call_and_does_not_cancel_the_caller() -> None:
    async def cancelled() -> str:
        task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        task.cancel()
        await task
        return ""

    called = await once(toolbox_of(RememberingTool(lambda _: cancelled())))
    assert called.call.status == "raised" and "was cancelled" in called.call.result


@pytest.mark.parametrize("on_error", ["drop", "stop"])
async def test_a_failure_can_end_the_sample_or_the_run(on_error: Any) -> None:
    tool = RememberingTool(lambda _: fail(ZeroDivisionError("by zero")))
    toolbox = toolbox_of(tool, on_error=on_error)
    with pytest.raises(ToolFailedError, match="tool search failed: ZeroDivisionError: by zero") as caught:
        await once(toolbox)
    assert caught.value.on_error == on_error
    assert "in fail" in caught.value.cause
    assert tool.log[-1] == "release a"
    assert (toolbox.counts()["calls"], toolbox.counts()["raised"]) == (1, 1)


@pytest.mark.parametrize("error", [ConfigError("no index"), UserCodeError("bad"), BugError("ours")], ids=repr)
async def test_errors_that_are_not_caused_by_the_call_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        await once(toolbox_of(RememberingTool(lambda _: fail(error))))


@pytest.mark.parametrize("method", ["create", "execute"])
@pytest.mark.parametrize("on_error", ["message", "drop"])
def test_a_call_that_takes_too_long_times_out(method: str, on_error: Any) -> None:
    async def main() -> None:
        tool = RememberingTool(gates={method: anyio.Event()})
        toolbox = toolbox_of(tool, timeout_s=3.0, on_error=on_error)
        if on_error == "drop":
            with pytest.raises(ToolFailedError, match="search did not answer within 3 s"):
                await once(toolbox)
        else:
            call = (await once(toolbox)).call
            assert (call.status, call.result) == ("timeout", "Error: search did not answer within 3 s")
            assert call.duration_s == pytest.approx(3.0)
        assert anyio.current_time() == pytest.approx(3.0)
        assert tool.log == {"create": ["create"], "execute": ["create", "execute a", "release "]}[method]

    run_virtually(main, 0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (7, "returned 7; return a text or a ToolResponse"),
        (None, "returned None"),
        (ToolResponse(b"x"), "its text must be a string"),  # type: ignore[arg-type]
        (ToolResponse("", float("nan")), "reward: nan is not a finite number"),
        (ToolResponse("", "1"), "reward: '1' is not a finite number"),  # type: ignore[arg-type]
        (ToolResponse("", 0.0, {"hits": float("inf")}), "metric 'hits': inf"),
        (ToolResponse("", 0.0, ["hits"]), "its metrics a mapping"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
async def test_an_invalid_result_names_the_tool(result: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match="tool search: execute") as caught:
        await once(toolbox_of(RememberingTool(lambda _: result)))
    assert message in caught.value.message
    assert not isinstance(caught.value, ToolFailedError)


async def test_lone_surrogates_are_replaced() -> None:
    called = await once(toolbox_of(RememberingTool(lambda query: query + "\u00e9")), '{"query": "\\ud800"}')
    assert called.call.result == "?\u00e9"


@settings(max_examples=25)
@given(query=values(), answer=texts() | values(), error=texts())
async def test_calls_with_any_text_have_an_outcome(query: Any, answer: Any, error: str) -> None:
    """An answer that is no text is an error of the tool's author, which names the tool."""
    acts = (
        lambda _: answer,
        lambda _: ToolResponse(answer, metrics={LONE: 1.0}),
        lambda _: ToolResponse(answer, metrics={10**5000: 1.0}),  # type: ignore[dict-item]
        lambda _: fail(ValueError(error)),
        lambda _: fail(ToolError(error)),
    )
    for act in acts:
        for arguments in (dumps({"query": query}), dumps(query), error):
            try:
                call = (await once(toolbox_of(RememberingTool(act)), arguments)).call
            except UserCodeError as failure:
                assert "tool search: execute" in failure.message
                assert not isinstance(answer, str)
            else:
                json.dumps([call.result, dict(call.metrics)], ensure_ascii=False).encode()


@pytest.mark.parametrize("arguments", BROKEN_JSON)
async def test_arguments_that_are_no_json_are_reported_to_the_model(arguments: str) -> None:
    call = (await once(toolbox_of(RememberingTool()), arguments)).call
    assert call.status in ("bad_json", "bad_arguments") and call.result.startswith("Error: the arguments of search")


async def test_a_number_that_the_schema_cannot_check_is_a_bad_argument() -> None:
    parameters = {"type": "object", "properties": {"x": {"multipleOf": 0.1}}}
    loaded = LoadedTool(RememberingTool(), FunctionSchema(schema_of("search", parameters)), ToolConfig(), "tools.0")
    call = (await once(Toolbox([loaded]), '{"x": 1' + "0" * 400 + "}")).call
    assert call.status == "bad_arguments"
    assert call.result == "Error: the arguments of search do not fit: a number is too large"


async def test_long_answers_are_returned() -> None:
    assert (await once(toolbox_of(RememberingTool(lambda _: LONG_TEXT + LONE)))).call.result == LONG_TEXT + "?"


async def test_refused_calls_are_counted() -> None:
    toolbox = toolbox_of(RememberingTool())
    async with toolbox, toolbox.session(CONTEXT) as tools:
        assert tools.malformed("<tool_call>{" * 100).status == "bad_json"
        refused = tools.refused("search", ASK, 4)
        assert (refused.status, refused.name, refused.arguments) == ("too_many", "search", ASK)
        assert "at most 4" in refused.result
        assert await tools.scores() == {}
    assert toolbox.counts()["calls"] == 2


async def test_references_of_a_schema_to_other_addresses_are_not_fetched() -> None:
    parameters = {"type": "object", "properties": {"query": {"$ref": "http://localhost:9/x.json"}}}
    loaded = LoadedTool(RememberingTool(), FunctionSchema(schema_of("search", parameters)), ToolConfig(), "tools.0")
    with pytest.raises(UserCodeError, match="the schema of tool search cannot be used"):
        await once(Toolbox([loaded]))


# ------------------------------------------------------------------------------------------------ the state


async def test_calls_of_a_trajectory_share_a_state_which_is_scored() -> None:
    tool, other = RememberingTool(), RememberingTool()
    async with opened(tool, other) as tools:
        for turn, query in enumerate("abc"):
            await tools.call("search", json.dumps({"query": query}), turn=turn)
        assert await tools.scores() == {"search": 1.5}, "only tools that were called have scores"
    assert tool.log == ["create", *(f"execute {one}" for one in "abc"), "calc_reward a,b,c", "release a,b,c"]
    assert other.log == []


async def test_trajectories_have_separate_states() -> None:
    tool = RememberingTool()
    toolbox = toolbox_of(tool)
    async with toolbox, toolbox.session(CONTEXT) as one, toolbox.session(ToolContext(SampleId(0, 7), 1)) as other:
        await one.call("search", ASK, turn=0)
        await other.call("search", ASK, turn=0)
        await one.call("search", ASK, turn=1)
        assert (await one.scores(), await other.scores()) == ({"search": 1.0}, {"search": 0.5})
    assert tool.log.count("create") == 2


@pytest.mark.parametrize("seed", range(5))
def test_calls_of_one_turn_share_one_create(seed: int) -> None:
    async def main() -> None:
        gate = anyio.Event()
        tool = RememberingTool(gates={"create": gate})
        async with opened(tool) as tools, anyio.create_task_group() as group:
            for query in "abcd":
                group.start_soon(lambda query=query: tools.call("search", json.dumps({"query": query}), turn=0))
            await anyio.sleep(1.0)
            assert tool.log == ["create"]
            gate.set()
        assert sorted(tool.log)[:5] == ["create", "execute a", "execute b", "execute c", "execute d"]
        assert len(tool.log) == 6

    run_virtually(main, seed)


@pytest.mark.parametrize("seed", range(5))
def test_a_failed_create_fails_its_waiters_and_the_next_call_retries_it(seed: int) -> None:
    class Flaky(RememberingTool):
        async def create(self, context: ToolContext, **kwargs: Any) -> list[str]:
            first = not self.log
            state = await super().create(context)
            await anyio.sleep(1.0)
            return fail(OSError("busy")) if first else state  # type: ignore[no-any-return]

    async def main() -> None:
        tool, statuses = Flaky(), []
        toolbox = toolbox_of(tool)

        async def call() -> None:
            statuses.append((await tools.call("search", ASK, turn=0)).call.status)

        async with toolbox, toolbox.session(CONTEXT) as tools:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(call)
            assert await tools.scores() == {}, "there is no score without a state"
            await call()
            assert await tools.scores() == {"search": 0.5}
        assert statuses == ["raised"] * 3 + ["ok"]
        assert tool.log == ["create", "create", "execute a", "calc_reward a", "release a"]

    run_virtually(main, seed)


def test_a_waiting_call_retries_a_cancelled_create() -> None:
    async def main() -> None:
        gate = anyio.Event()
        tool = RememberingTool(gates={"create": gate})
        async with opened(tool) as tools:
            async with anyio.create_task_group() as others:
                with anyio.move_on_after(1.0):
                    async with anyio.create_task_group() as first:
                        first.start_soon(lambda: tools.call("search", ASK, turn=0))
                        await tool.begun.wait()
                        others.start_soon(lambda: tools.call("search", ASK, turn=0))
                gate.set()
            assert tool.log == ["create", "create", "execute a"]

    run_virtually(main, 0)


async def test_a_row_chooses_its_tools_which_are_created_before_the_first_turn_and_scored_without_a_call() -> None:
    kwargs = {"search": {"create_kwargs": {"index": "cats"}, "calc_reward_kwargs": {"truth": "5"}}, "search_1": None}
    tool, other = RememberingTool(), RememberingTool()
    toolbox = toolbox_of(tool, other)
    async with toolbox, toolbox.session(ToolContext("val", 0, extra_info={"tools_kwargs": kwargs})) as tools:
        assert tool.log == ["create {'index': 'cats'}"]
        refused = await tools.call("search_1", ASK, turn=0)
        assert refused.call.status == "unknown_tool"
        assert set(await tools.scores()) == {"search"}
    assert tool.log == ["create {'index': 'cats'}", "calc_reward  {'truth': '5'}", "release "]
    assert other.log == []


@pytest.mark.parametrize(
    ("create", "row", "created"),
    [
        ("auto", {}, []),
        ("auto", {"tools_kwargs": {"search": {}}}, ["search"]),
        ("lazy", {"tools_kwargs": {"search": {}}}, []),
        ("eager", {}, ["search", "search_1"]),
    ],
)
async def test_create_is_called_when_configured(create: CreateMode, row: dict[str, Any], created: list[str]) -> None:
    by_name = {"search": RememberingTool(), "search_1": RememberingTool()}
    toolbox = toolbox_of(*by_name.values(), create=create)
    async with toolbox, toolbox.session(ToolContext("val", 0, extra_info=row)) as tools:
        assert [name for name, tool in by_name.items() if tool.log] == created
        assert list(await tools.scores()) == created
    for name, tool in by_name.items():
        assert tool.log == (["create", "calc_reward ", "release "] if name in created else [])


async def test_an_early_create_that_fails_is_repeated_by_the_first_call() -> None:
    class FailsOnce(RememberingTool):
        async def create(self, context: ToolContext, **kwargs: Any) -> list[str]:
            state = await super().create(context, **kwargs)
            if len(self.log) == 1:
                raise ValueError("not yet")
            return state

    tool = FailsOnce()
    toolbox = toolbox_of(tool, create="eager")
    async with toolbox, toolbox.session(ToolContext("val", 0)) as tools:
        assert await tools.scores() == {}
        assert (await tools.call("search", ASK, turn=0)).call.status == "ok"
    assert tool.log == ["create", "create", "execute a", "release a"]


async def test_kwargs_of_the_row_are_passed_to_the_methods() -> None:
    kwargs = {
        "search": {
            "create_kwargs": {"index": "cats", "depth": None},
            "execute_kwargs": {"timeout_s": 3, "jobs": 1, "method": 2},
            "calc_reward_kwargs": {"truth": "5"},
            "release_kwargs": {"late": True},
        },
        "search_1": {},
        "of_another_run": {"whatever": 1},
    }
    tool, other = RememberingTool(), RememberingTool()
    toolbox = toolbox_of(tool, other)
    async with toolbox, toolbox.session(ToolContext("val", 0, extra_info={"tools_kwargs": kwargs})) as tools:
        await tools.call("search", ASK, turn=0)
        await tools.call("search_1", ASK, turn=0)
        await tools.scores()
    assert tool.log == [
        "create {'index': 'cats'}",
        "execute a {'timeout_s': 3, 'jobs': 1, 'method': 2}",
        "calc_reward a {'truth': '5'}",
        "release a {'late': True}",
    ]
    assert other.log == ["create", "execute a", "calc_reward a", "release a"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("x", "tools_kwargs = 'x'"),
        ({"search": [1]}, r"tools_kwargs.search = \[1\]"),
        ({"search": {"create_kwargs": 3}}, "search.create_kwargs = 3"),
        ({"search": {"create_kwarg": {}}}, "did you mean 'create_kwargs'"),
    ],
)
async def test_malformed_tools_kwargs_are_refused(kwargs: Any, message: str) -> None:
    async with toolbox_of(RememberingTool()) as toolbox:
        with pytest.raises(DataError, match=message):
            toolbox.session(ToolContext("val", 0, extra_info={"tools_kwargs": kwargs}))


async def test_unknown_kwargs_of_a_method_are_an_error() -> None:
    class Plain(BaseTool[None]):
        async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]
            return ""

    context = ToolContext("val", 0, extra_info={"tools_kwargs": {"search": {"execute_kwargs": {"page": 1}}}})
    with pytest.raises(UserCodeError, match=r"tools_kwargs do not fit .*Plain\.execute.*page"):
        await once(toolbox_of(Plain()), context=context)


async def test_a_tool_without_state_needs_no_create() -> None:
    class Plain(BaseTool[None]):
        async def execute(self, state: None, arguments: Mapping[str, Any], **kwargs: Any) -> str:
            return repr(state)

    async with opened(Plain()) as tools:
        assert (await tools.call("search", ASK, turn=0)).call.result == "None"
        assert await tools.scores() == {"search": 0.0}


@pytest.mark.parametrize(
    ("on_error", "kind"), [("message", UserCodeError), ("drop", ToolFailedError), ("stop", ToolFailedError)]
)
@pytest.mark.parametrize("how", ["raises", "waits", "text", "nan"])
def test_an_invalid_or_missing_score_fails_the_sample(how: str, on_error: Any, kind: type[UserCodeError]) -> None:
    class Bad(RememberingTool):
        async def calc_reward(self, state: list[str], **kwargs: Any) -> Any:
            if how == "raises":
                raise ZeroDivisionError("by zero")
            if how == "waits":
                await anyio.sleep_forever()
            return "1" if how == "text" else float("nan")

    async def main() -> None:
        tool = Bad()
        toolbox = toolbox_of(tool, on_error=on_error, timeout_s=2.0)
        with pytest.raises(UserCodeError, match="tool search: calc_reward") as caught:
            async with toolbox, toolbox.session(CONTEXT) as tools:
                await tools.call("search", ASK, turn=0)
                await tools.scores()
        assert type(caught.value) is (UserCodeError if how in ("text", "nan") else kind)
        assert tool.log[-1] == "release a"

    run_virtually(main, 0)


# ------------------------------------------------------------------------------------------------ release


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward"])
@pytest.mark.parametrize("seed", range(3))
def test_a_state_is_released_after_a_cancellation_anywhere(method: str, seed: int) -> None:
    async def main() -> None:
        tool = RememberingTool(gates={method: anyio.Event()})
        toolbox = toolbox_of(tool)
        async with toolbox, anyio.create_task_group() as group:
            group.start_soon(_converse, toolbox)
            await tool.begun.wait()
            group.cancel_scope.cancel()
        assert [line for line in tool.log if line.startswith("release")] == (
            {"create": [], "execute": ["release "], "calc_reward": ["release a"]}[method]
        )

    run_virtually(main, seed)


async def _converse(toolbox: Toolbox) -> None:
    async with toolbox.session(CONTEXT) as tools:
        await tools.call("search", ASK, turn=0)
        await tools.scores()


async def test_a_state_is_released_once_after_a_failure() -> None:
    tool = RememberingTool()
    async with toolbox_of(tool) as toolbox:
        with pytest.raises(ZeroDivisionError):
            async with toolbox.session(CONTEXT) as tools:
                await tools.call("search", ASK, turn=0)
                raise ZeroDivisionError
        await tools.release()
        with pytest.raises(BugError, match="after its trajectory has ended"):
            await tools.call("search", ASK, turn=1)
    assert tool.log == ["create", "execute a", "release a"]


def test_a_failing_release_is_logged_and_does_not_delay_others(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RememberingTool):
        async def release(self, state: list[str], **kwargs: Any) -> None:
            raise SystemExit(1)

    async def main() -> None:
        tools = RememberingTool(gates={"release": anyio.Event()}), Broken(), RememberingTool()
        toolbox = toolbox_of(*tools)
        async with toolbox, toolbox.session(CONTEXT) as session:
            for name in ("search", "search_1", "search_2"):
                await session.call(name, ASK, turn=0)
        assert anyio.current_time() == pytest.approx(execution.RELEASE_S)
        assert tools[2].log[-1] == "release a"

    run_virtually(main, 0)
    assert "tool search: release did not return within 10 s" in caplog.text
    assert "tool search_1: release failed" in caplog.text


def test_a_state_created_while_its_trajectory_ends_is_released() -> None:
    async def main() -> None:
        gate = anyio.Event()
        tool = RememberingTool(gates={"create": gate})
        toolbox = toolbox_of(tool)
        async with toolbox:
            session = toolbox.session(CONTEXT)
            with pytest.RaisesGroup(pytest.RaisesExc(BugError, match="after its trajectory has ended")):
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: session.call("search", ASK, turn=0))
                    await tool.begun.wait()
                    await session.release()
                    gate.set()
        assert tool.log == ["create", "release "]

    run_virtually(main, 0)


# ------------------------------------------------------------------------------------------------ sync tools


class Blocking(BaseTool[list[str]]):
    """A tool with synchronous methods; those in `held` block their thread until `go` is set."""

    def __init__(self, *held: str) -> None:
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.begun = threading.Event()
        self.go = threading.Event()
        self._held = held

    def create(self, context: ToolContext, **kwargs: Any) -> list[str]:
        self._enter("create")
        return []

    def execute(self, state: list[str], arguments: Mapping[str, Any], **kwargs: Any) -> str:
        self._enter("execute")
        state.append(arguments["query"])
        return str(arguments["query"]).upper()

    def calc_reward(self, state: list[str], **kwargs: Any) -> float:
        self._enter("calc_reward")
        return float(len(state))

    def release(self, state: list[str], **kwargs: Any) -> None:
        self.log.append(f"release {','.join(state)}")

    def _enter(self, method: str) -> None:
        self.log.append(method)
        self.threads.add(threading.get_ident())
        if method in self._held:
            self.begun.set()
            assert self.go.wait(30)


class BlockingOnlyIn(Blocking):
    """Its other methods need no thread, so that they meet every deadline, however busy the machine is."""

    async def create(self, context: ToolContext, **kwargs: Any) -> list[str]:  # type: ignore[override]
        self.log.append("create")
        return []

    async def release(self, state: list[str], **kwargs: Any) -> None:  # type: ignore[override]
        self.log.append(f"release {','.join(state)}")


async def begun(tool: Blocking) -> None:
    """Wait until a method of the tool blocks its thread. On a busy machine, the thread begins long after the call, even
    after the call's deadline."""
    assert await to_thread.run_sync(tool.begun.wait, 30)


async def test_sync_methods_do_not_block_the_event_loop() -> None:
    tool = Blocking("execute")
    toolbox = toolbox_of(tool)
    beats = 0
    async with toolbox, toolbox.session(CONTEXT) as tools, anyio.create_task_group() as group:
        group.start_soon(lambda: tools.call("search", ASK, turn=0))
        await begun(tool)
        for beats in range(1, 6):  # noqa: B007  the event loop runs while the tool's thread blocks
            await anyio.lowlevel.checkpoint()
        tool.go.set()
    assert beats == 5
    async with toolbox, toolbox.session(CONTEXT) as tools:
        assert (await tools.call("search", ASK, turn=0)).call.result == "A"
        assert await tools.scores() == {"search": 1.0}
    assert threading.get_ident() not in tool.threads
    assert tool.log[-4:] == ["create", "execute", "calc_reward", "release a"]


async def test_a_sync_method_may_return_an_awaitable() -> None:
    class Half(BaseTool[None]):
        def execute(self, state: None, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
            async def later() -> str:
                await anyio.lowlevel.checkpoint()
                return "later"

            return later()

    assert (await once(toolbox_of(Half()))).call.result == "later"


@pytest.mark.parametrize("ends", ["timeout", "cancellation"])
async def test_a_state_that_a_thread_creates_too_late_is_released(ends: str) -> None:
    tool = Blocking("create")
    async with toolbox_of(tool, timeout_s=0.05 if ends == "timeout" else 60.0) as toolbox:
        async with anyio.create_task_group() as group:
            group.start_soon(_converse, toolbox)
            if ends == "cancellation":
                await begun(tool)
                group.cancel_scope.cancel()
        await begun(tool)
        assert tool.log == ["create"], "the session does not wait for the late state"
        tool.go.set()
    assert tool.log == ["create", "release "]


async def test_release_waits_for_a_thread_that_uses_the_state() -> None:
    tool = BlockingOnlyIn("execute")
    async with toolbox_of(tool, timeout_s=0.05) as toolbox:
        async with toolbox.session(CONTEXT) as tools:
            assert (await tools.call("search", ASK, turn=0)).call.status == "timeout"
            await begun(tool)
        await anyio.wait_all_tasks_blocked()
        assert tool.log == ["create", "execute"]
        tool.go.set()
    assert tool.log == ["create", "execute", "release a"]


async def test_a_stuck_thread_delays_neither_release_nor_toolbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "RELEASE_S", 0.1)
    tool = BlockingOnlyIn("execute")
    with anyio.fail_after(25):
        async with opened(tool, timeout_s=0.05) as tools:
            assert (await tools.call("search", ASK, turn=0)).call.status == "timeout"
            await begun(tool)
    assert tool.log == ["create", "execute", "release "]
    tool.go.set()


async def test_a_stuck_release_of_a_late_state_does_not_delay_the_toolbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state comes while the toolbox closes. Its release is abandoned after `RELEASE_S`, by when it has begun."""
    monkeypatch.setattr(execution, "RELEASE_S", 2.0)

    class Stuck(Blocking):
        def release(self, state: list[str], **kwargs: Any) -> None:
            self._enter("release")

    tool = Stuck("create", "release")
    held = tool.go

    def close(caller: execution.MethodCaller) -> None:
        closing(caller)
        held.set()

    closing = execution.MethodCaller.close
    monkeypatch.setattr(execution.MethodCaller, "close", close)
    with anyio.fail_after(25):
        async with toolbox_of(tool, timeout_s=0.05) as toolbox:
            async with toolbox.session(CONTEXT) as tools:
                assert (await tools.call("search", ASK, turn=0)).call.status == "timeout"
            await begun(tool)
            tool.go = threading.Event()  # wait for the release
    assert tool.log == ["create", "release"]
    tool.go.set()


# ------------------------------------------------------------------------------------------------ limits


def crowd(toolbox: Toolbox, number: int) -> Any:
    """Run `number` trajectories at once, which make one call each in order."""

    async def main() -> list[Any]:
        calls: list[Any] = [None] * number
        async with toolbox:

            async def one(place: int) -> None:
                async with toolbox.session(ToolContext(SampleId(0, place + 1), 0)) as tools:
                    calls[place] = (await tools.call("search", ASK, turn=0)).call

            async with anyio.create_task_group() as group:
                for place in range(number):
                    group.start_soon(one, place)
        return calls

    return main


@pytest.mark.parametrize("seed", range(5))
def test_max_concurrency_bounds_calls_and_their_duration_excludes_waiting(seed: int) -> None:
    running, most = 0, 0

    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(1.0)
        running -= 1
        return ""

    toolbox = toolbox_of(RememberingTool(lambda _: work()), max_concurrency=4, timeout_s=1.5)
    calls = run_virtually(crowd(toolbox, 12), seed)
    assert most == 4
    assert {call.status for call in calls} == {"ok"}, "the deadline begins when the call starts"
    assert sorted(round(call.wait_s) for call in calls) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(call.duration_s == pytest.approx(1.0) for call in calls)
    assert toolbox.tool_s == pytest.approx(12.0)


@pytest.mark.parametrize("seed", range(5))
def test_calls_begin_evenly_spaced(seed: int) -> None:
    starts: list[float] = []

    async def work() -> str:
        starts.append(anyio.current_time())
        await anyio.sleep(3.0)
        return ""

    toolbox = toolbox_of(RememberingTool(lambda _: work()), max_per_s=2.0, timeout_s=5.0)
    calls = run_virtually(crowd(toolbox, 6), seed)
    assert np.diff(starts) == pytest.approx([0.5] * 5)
    assert sorted(call.wait_s for call in calls) == pytest.approx([0.5 * n for n in range(6)])
    assert all(call.duration_s == pytest.approx(3.0) for call in calls)


def test_a_cancelled_waiter_does_not_delay_the_next_start() -> None:
    starts: list[float] = []

    async def main() -> None:
        async with opened(RememberingTool(lambda _: starts.append(anyio.current_time()) or ""), max_per_s=1.0) as tools:
            await tools.call("search", ASK, turn=0)
            async with anyio.create_task_group() as line:
                for _ in range(50):
                    line.start_soon(lambda: tools.call("search", ASK, turn=1))
                await anyio.sleep(0.5)
                line.cancel_scope.cancel()
            await tools.call("search", ASK, turn=2)

    run_virtually(main, 0)
    assert starts == pytest.approx([0.0, 1.0])


def test_a_slow_tool_does_not_delay_others() -> None:
    async def main() -> None:
        toolbox = toolbox_of(
            RememberingTool(lambda _: anyio.sleep(100)), RememberingTool(), max_concurrency=1, timeout_s=1000
        )
        async with toolbox, anyio.create_task_group() as group:
            session = toolbox.session(CONTEXT)
            group.start_soon(lambda: session.call("search", ASK, turn=0))
            other = await session.call("search_1", ASK, turn=0)
            assert (other.call.status, anyio.current_time()) == ("ok", pytest.approx(0.0))
            group.cancel_scope.cancel()

    run_virtually(main, 0)


# ------------------------------------------------------------------------------------------------ the toolbox


async def test_a_toolbox_must_be_entered_before_use() -> None:
    with pytest.raises(BugError, match="must be entered"):
        toolbox_of(RememberingTool()).session(CONTEXT)
