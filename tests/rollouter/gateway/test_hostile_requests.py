"""Requests that try to run templates, exhaust the endpoint or break its parsers: each is refused with a reason."""

from __future__ import annotations

import json
import threading
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from asyncrl.config.schema import Config
from rollouter.gateway import http as http_module
from rollouter.gateway import session as session_module
from rollouter.gateway.protocol import FIELDS, ChatRequest, RequestError, RequestReader, engines_failed, read_reward
from rollouter.gateway.task import AgentTask
from tests.fakes.gateway_agent import MODEL, QUESTION, TOOLS, GatewayRig

LONG_LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
DEEP = "[" * 100_000


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [QUESTION], **more}


def reader(*template_arguments: str) -> RequestReader:
    return RequestReader(MODEL, Config().rollout.sampling, template_arguments)


# ------------------------------------------------------------------------------------------------ template arguments


@pytest.mark.parametrize(
    "name", ["chat_template", "tools", "messages", "tokenize", "add_generation_prompt", "padding", "documents", "range"]
)
def test_a_request_sets_only_listed_arguments_of_the_template(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be set by a request.*enable_thinking") as refused:
        reader().chat(chat(chat_template_kwargs={name: LONG_LOOP}))
    assert refused.value.status == 400 and refused.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("value", [True, None, 512, 0.5, "low"])
def test_listed_arguments_have_plain_values(value: Any) -> None:
    request = reader().chat(chat(chat_template_kwargs={"reasoning_effort": value}))
    assert request.template_kwargs == {"reasoning_effort": value}


@pytest.mark.parametrize("value", [["low"], {"a": 1}, "low" * 1000])
def test_other_values_of_template_arguments_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="expected true, false, a number or a text of at most 1000"):
        reader().chat(chat(chat_template_kwargs={"reasoning_effort": value}))


def test_a_run_allows_the_template_arguments_that_it_sets() -> None:
    assert reader("mood").chat(chat(chat_template_kwargs={"mood": "bright"})).template_kwargs == {"mood": "bright"}


async def test_a_template_in_a_request_is_not_run() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            for body in (chat(chat_template_kwargs={"chat_template": LONG_LOOP}), chat(chat_template=LONG_LOOP)):
                answer = await http.post("chat/completions", json=body)
                assert answer.status_code == (400 if "chat_template_kwargs" in body else 200)
        return 1.0

    with anyio.fail_after(20):
        (row,) = (await rig.converse(agent)).rows
    assert row.prompt_ids.tolist() == rig.prompt().prompt_ids.tolist(), "a template outside of the arguments is ignored"


# ------------------------------------------------------------------------------------------------ bodies


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (DEEP, "nested more than 64 levels"),
        (json.dumps(chat())[:-1] + ', "metadata": ' + "[" * 65 + "]" * 65 + "}", "nested more than 64 levels"),
        ('{"max_tokens": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"max_tokens": -' + "9" * 19 + "}", "an integer of 19 digits"),
        ('{"temperature": NaN}', "NaN, which is not finite"),
        ('{"temperature": 1e999}', "1e999, which is not finite"),
        (b'{"model": "\xff"}', "not JSON: 'utf-8' codec"),
        (json.dumps(chat()).encode("utf-16"), "not JSON"),
        ("", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
    ],
)
async def test_bodies_that_are_no_plain_json_are_refused(body: str | bytes, why: str) -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            for path in ("chat/completions", "completions", "reward"):
                answer = await http.post(path, content=body)
                assert answer.status_code == 400 and why in answer.json()["error"]["message"]
        await rig.question(task)
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1


@pytest.mark.parametrize("item", [b"1,", b"{},", b"[],", b'"1\\u002c"\n'])
async def test_bodies_of_too_many_values_are_refused_before_they_are_parsed(
    item: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            with monkeypatch.context() as patch:
                patch.setattr(http_module, "parse_json", Mock(side_effect=AssertionError("parsed")))
                answer = await http.post("chat/completions", content=b'{"messages": [' + item * 1_000_001 + b"1]}")
        assert answer.status_code == 413 and "more than 1,000,000 commas" in answer.json()["error"]["message"]
        await rig.question(task)
        return 1.0

    await rig.converse(agent)


async def test_long_bodies_are_parsed_and_read_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = GatewayRig("12", rollout={"max_model_len": 2**18 + 300})
    threads: list[tuple[str, int]] = []
    forwarded: list[set[str]] = []

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            threads.append((name, threading.get_ident()))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    watch(http_module, "parse_json")
    watch(session_module, "encodable_values")
    watch(session_module, "exceeds")

    async def agent(task: AgentTask) -> float:
        async def answer(key: str, path: str, body: Any) -> Any:
            forwarded.append(set(body))
            return await rig.agent.gateway.answer(key, path, body)

        app = http_module.TrajectoryKeyMiddleware(rig.app(), Mock(answer=answer))
        body = {"prompt": [1] * 2**18, "metadata": [{}] * 200_000}
        async with rig.http(task, app) as http:
            assert (await http.post("completions", json=body)).status_code == 200
        return 1.0

    (row,) = (await rig.converse(agent)).rows
    assert len(row.prompt_ids) == 2**18
    assert [name for name, _ in threads] == ["parse_json", "encodable_values", "exceeds"]
    assert threading.get_ident() not in dict(threads).values()
    assert forwarded[-1] == {"prompt"}, "the Rollouter receives only the fields that it reads"


def test_the_fields_of_bodies_are_those_that_are_read() -> None:
    read: set[str] = set()

    class Body(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    for reads in (reader().chat, reader().completion, read_reward):
        reads(Body(messages=[QUESTION], prompt="3*4="))
    assert read == FIELDS


async def test_deep_arguments_of_a_call_stay_text() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        call = {"id": "a", "type": "function", "function": {"name": "calc", "arguments": DEEP}}
        messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, QUESTION]
        async with rig.http(task) as http:
            answer = await http.post("chat/completions", json={"messages": messages, "tools": TOOLS})
            assert answer.status_code < 500, answer.text
        await rig.question(task)
        return 1.0

    await rig.converse(agent)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [2**31]}),
        ("completions", {"prompt": [1, 10**17]}),
        ("chat/completions", chat(stop=["a"] * 17)),
        ("chat/completions", chat(stop="a" * 257)),
        ("chat/completions", chat(tools=[{"type": 7, "function": {"name": "f", "parameters": 7}}])),
        ("chat/completions", chat(tools=[{"type": "function", "function": {"name": "f", "description": [1]}}])),
        ("chat/completions", chat(tools=7)),
        ("chat/completions", chat(model=["tiny"])),
        ("chat/completions", chat(tool_choice={"type": "function"})),
        ("chat/completions", chat(response_format={"type": "json_schema"})),
        ("chat/completions", chat(structured_outputs={"regex": "(a+)+"})),
        ("chat/completions", chat(max_tokens=[1])),
    ],
)
async def test_fields_of_wrong_types_or_sizes_are_refused(path: str, body: dict[str, Any]) -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            answer = await http.post(path, json=body)
            assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]
        await rig.question(task)
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1, "the trajectory goes on after a refusal"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("model", "prompt", "tools", "tool_choice", "chat_template_kwargs", "max_tokens", "max_completion_tokens",
         "stop", "logprobs", "n", "logit_bias", "response_format", "temperature", "parallel_tool_calls", "reward",
         "metrics", "done")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_json_object_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (reader().chat, reader().completion, read_reward):
        try:
            result: Any = read({**chat(), **body})
        except RequestError as refusal:
            assert 400 <= refusal.status < 500
            json.dumps(refusal.body)
        else:
            assert not isinstance(result, ChatRequest) or json.loads(result.scheme)


# ------------------------------------------------------------------------------------------------ the key comes first


async def post(rig: GatewayRig, key: str, *chunks: bytes) -> tuple[int, int]:
    """Post a body in chunks. Return the status of the response, and how many chunks were read before it."""
    waiting = list(chunks)
    status = 0

    async def receive() -> Message:
        if not waiting:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": waiting.pop(0), "more_body": True}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
             "headers": [(b"authorization", f"Bearer {key}".encode())]}  # fmt: skip
    with anyio.fail_after(20):
        await rig.app()(scope, receive, send)
    return status, len(chunks) - len(waiting)


async def test_the_body_of_a_request_without_a_valid_key_is_not_read() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        await rig.question(task)
        return 1.0

    await rig.converse(agent)
    for key, status in ((f"asyncrl-3-{'A' * 43}", 401), (rig.tasks[0].api_key, 409)):
        assert await post(rig, key, b"{" * 1000) == (status, 0)
    giant = f"asyncrl-{'3' * 5000}-{'A' * 43}"
    assert await post(rig, giant, b"{" * 1000) == (200, 0), "it is no key of a trajectory, so the application answers"


async def test_long_and_slow_bodies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_BYTES", 2000)
    monkeypatch.setattr(http_module, "BODY_S", 0.05)
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        assert await post(rig, task.api_key, *[b" " * 900] * 5) == (413, 3)
        assert await post(rig, task.api_key, b"{") == (408, 1)
        await rig.question(task)
        return 1.0

    await rig.converse(agent)


async def test_the_rollouter_is_asked_once_whether_a_key_is_known() -> None:
    rig = GatewayRig("12", "12")
    asked: list[str] = []

    async def agent(task: AgentTask) -> float:
        async def answer(key: str, path: str, body: Any) -> Any:
            asked.append(path)
            return await rig.agent.gateway.answer(key, path, body)

        app = http_module.TrajectoryKeyMiddleware(rig.app(), Mock(answer=answer))
        async with rig.http(task, app) as http:
            for _ in range(2):
                assert (await http.post("chat/completions", json=chat())).status_code == 200
            await http.post("reward", json={"reward": 1.0, "done": True})
            for _ in range(2):
                assert (await http.post("reward", json={})).status_code == 409
        return 1.0

    await rig.converse(agent)
    assert asked == ["models", "chat/completions", "chat/completions", "reward", "reward", "models"]


async def test_a_key_is_checked_again_after_its_rollouter_did_not_answer() -> None:
    rig = GatewayRig("12")
    asked: list[str] = []

    async def agent(task: AgentTask) -> float:
        async def answer(key: str, path: str, body: Any) -> Any:
            asked.append(path)
            if asked == ["models", "chat/completions"]:
                raise engines_failed()
            return await rig.agent.gateway.answer(key, path, body)

        app = http_module.TrajectoryKeyMiddleware(rig.app(), Mock(answer=answer))
        async with rig.http(task, app) as http:
            failed = await http.post("chat/completions", json=chat())
            assert failed.status_code == 503
            assert "x-should-retry" not in failed.headers
            assert (await http.post("chat/completions", json=chat())).status_code == 200
        return 1.0

    await rig.converse(agent)
    assert asked == ["models", "chat/completions"] * 2
