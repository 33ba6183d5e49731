"""The pure parts of the gateway: messages, requests, stops, keys, results."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, UserCodeError
from asyncrl.core.types import FinishReason, Span, Turn
from rollouter.gateway.program import load_program, read_result
from rollouter.gateway.protocol import RequestError, RequestReader, fingerprint, read_reward, to_template
from rollouter.gateway.session import AgentGateway, cut_at, incarnation_of, text_before
from tests.fakes.hostile import BROKEN_JSON, messages, texts, values

ANSWER = {
    "role": "assistant",
    "content": "so",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": 2}'}}],
}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {**more, "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({**ANSWER, "refusal": None, "annotations": [], "audio": None, "function_call": None}, True),
        ({**ANSWER, "content": [{"type": "text", "text": "so"}]}, True),
        ({**ANSWER, "content": "\nso "}, True),
        ({**ANSWER, "reasoning_content": "hm"}, True),
        ({**ANSWER, "name": "agent"}, True),
        ({**ANSWER, "tool_calls": [call('{"y":2,"x":1}', id="b", index=0)]}, True),
        ({**ANSWER, "tool_calls": [call({"x": 1, "y": 2})]}, True),
        ({**ANSWER, "content": "no"}, False),
        ({**ANSWER, "content": None}, False),
        ({**ANSWER, "role": "user"}, False),
        ({**ANSWER, "tool_calls": [call('{"x": 1, "y": 3}')]}, False),
        ({**ANSWER, "tool_calls": [call('{"x": 1, "y": 2')]}, False),
        ({**ANSWER, "tool_calls": []}, False),
        ({**ANSWER, "tool_calls": [call({"x": 1, "y": 2}), call({})]}, False),
    ],
)
def test_equal_messages_of_different_clients_have_the_same_fingerprint(other: dict[str, Any], same: bool) -> None:
    assert (fingerprint(to_template([other])[0]) == fingerprint(to_template([ANSWER])[0])) is same


def test_blanks_matter_in_messages_of_other_roles() -> None:
    one, two = to_template([{"role": "user", "content": "a"}, {"role": "user", "content": "a "}])
    assert fingerprint(one) != fingerprint(two)


def test_messages_are_converted_for_templates() -> None:
    tool = {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
    }
    assert to_template([{"role": "developer", "content": "x"}, {**ANSWER, "content": None, "refusal": None}, tool]) == [
        {"role": "system", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": {"x": 1, "y": 2}}}],
        },
        {"role": "tool", "content": "1\n2", "tool_call_id": "a", "name": "f"},
    ]


@pytest.mark.parametrize(
    "messages",
    [
        None, "hello", [], ["hello"], [{"content": 1}], [{"role": "user", "content": 3}], [{"role": ["user"]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], [ANSWER | {"tool_calls": 7}],
        [ANSWER | {"tool_calls": {"a": 1}}], [ANSWER | {"tool_calls": [{}]}],
        [ANSWER | {"tool_calls": [{"function": {"name": 1}}]}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        to_template(messages)
    assert refused.value.status == 400


@pytest.mark.parametrize("arguments", BROKEN_JSON)
def test_arguments_that_are_no_json_stay_text(arguments: str) -> None:
    (message,) = to_template([ANSWER | {"tool_calls": [call(arguments)]}])
    assert message["tool_calls"][0]["function"]["arguments"] in (arguments, {})


def reads(read: Callable[[], Any]) -> None:
    """Read a request, which may be refused."""
    try:
        read()
    except RequestError as error:
        assert 400 <= error.status < 500 and error.message.encode()


FIELDS = ("model", "stop", "n", "logprobs", "tool_choice", "chat_template_kwargs", "max_tokens", "prompt")


@settings(max_examples=50)
@given(
    said=st.lists(messages(), max_size=2) | values(),
    tools=values(),
    fields=st.dictionaries(st.sampled_from(FIELDS), values(), max_size=3),
)
def test_requests_of_any_shape_are_parsed_or_refused(said: Any, tools: Any, fields: dict[str, Any]) -> None:
    reader = RequestReader("tiny", None)
    body = {"messages": said, "tools": tools}
    reads(lambda: [fingerprint(one) for one in to_template(said)])
    for given_body in (body, {**body, **fields}, {"messages": [{"role": "user", "content": "x"}], **fields}):
        reads(partial(reader.chat, given_body))
        reads(partial(reader.completion, given_body))


@settings(max_examples=50)
@given(reward=values(), metrics=values(), done=values(), name=texts())
def test_rewards_of_any_shape_are_used_or_refused(reward: Any, metrics: Any, done: Any, name: str) -> None:
    reads(lambda: read_reward({"reward": reward, "metrics": metrics, "done": done}))
    knot: list[Any] = []
    knot.append(knot)
    odd = [10**5000, knot, {"metrics": {(1, 2): knot}}, {"reward": {(1, 2): 3}}]
    for result in (reward, metrics, {"reward": reward, "metrics": metrics}, *odd):
        with suppress(UserCodeError):
            read_result(result)
    assert [one.encode() for one in read_result({"metrics": {name: 1}}).metrics]


def turn(text: str, *spans: Span) -> Turn:
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    return Turn(ids, -np.arange(len(ids), dtype=np.float32), spans or (Span(0, 1),), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stops", "kept", "spans"),
    [
        ((), "one two three", 2),
        (("four",), "one two three", 2),
        (("two",), "one two", 2),
        (("three", "ne"), "one", 1),
        (("one two three",), "one two three", 2),
    ],
)
def test_a_turn_is_cut_after_the_token_that_completes_a_stop_string(
    stops: tuple[str, ...], kept: str, spans: int
) -> None:
    whole = turn("one two three", Span(0, 1), Span(4, 2))
    cut = cut_at(whole, stops, lambda ids: bytes(ids).decode())
    assert bytes(cut.response_ids.tolist()).decode() == kept
    assert len(cut.rollout_log_probs) == len(kept) and len(cut.spans) == spans
    assert (cut.finish_reason is FinishReason.STOP) is any(stop in "one two three" for stop in stops)


def test_clients_do_not_receive_the_stop_string() -> None:
    assert text_before("one two three", ("three", "two")) == "one "
    assert text_before("one", ()) == text_before("one", ("two",)) == "one"


def test_requests_are_parsed() -> None:
    reader = RequestReader("tiny", Config().rollout.sampling)
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    request = reader.chat(
        {"messages": messages, "tools": tools, "max_tokens": 9, "max_completion_tokens": 4, "stop": "a"}
    )
    assert (
        request.parse_calls
        and not request.one_call
        and request.options.max_tokens == 4
        and request.options.stop == ("a",)
    )
    none = reader.chat({"messages": messages, "tools": tools, "tool_choice": "none", "parallel_tool_calls": False})
    assert not none.parse_calls and none.one_call and none.scheme == request.scheme
    other = reader.chat({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    assert other.scheme not in (request.scheme, reader.chat({"messages": messages, "tools": None}).scheme)
    assert reader.completion({"prompt": [[1, 2]]}).ids == (1, 2) and reader.completion({"prompt": ["a"]}).text == "a"
    for prompt in (None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [-1], [True], [2**31]):
        with pytest.raises(RequestError, match="one text or one list"):
            reader.completion({"prompt": prompt})


def test_a_key_contains_the_incarnation_of_its_rollouter() -> None:
    assert incarnation_of("sk-123") is None and incarnation_of("asyncrl-7-short") is None
    assert incarnation_of(f"asyncrl-7-{'x' * 43}") == 7
    assert incarnation_of(f"asyncrl-{'7' * 5000}-{'x' * 43}") is None, "Python converts at most 4,300 digits"


async def test_an_unknown_key_is_refused() -> None:
    answer = await AgentGateway().answer(f"asyncrl-1-{'x' * 43}", "models", {})
    assert answer.status == 401 and answer.body["error"]["code"] == "invalid_api_key"
    json.dumps(answer.body)


@pytest.mark.parametrize(
    ("returned", "reward", "metrics"),
    [
        (None, None, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"reward": 0, "metrics": {"a": 1}}, 0.0, {"a": 1.0}),
        ({"metrics": {"a": np.int64(2)}}, None, {"a": 2.0}),
        ({}, None, {}),
    ],
)
def test_results_of_programs(returned: Any, reward: float | None, metrics: dict[str, float]) -> None:
    read = read_result(returned)
    assert (read.reward, read.metrics, read.done) == (reward, metrics, False)


@pytest.mark.parametrize(
    "returned", ["1", float("nan"), {"rewards": 1}, {"metrics": {"a": "b"}}, {"metrics": [1]}, [1, 2], object()]
)
def test_invalid_results_are_refused(returned: Any) -> None:
    with pytest.raises(UserCodeError, match="not a reward"):
        read_result(returned)


def two(one: Any, other: Any) -> None:
    """An agent program with too many parameters."""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (f"{__name__}:two", "called with one AgentTask"),
        (f"{__name__}:ANSWER", "is dict"),
        (f"{__name__}:too", "did you mean 'two'"),
    ],
)
def test_programs_that_cannot_be_called_are_refused(program: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_program(Config.model_validate({"rollout": {"agent": {"program": program}}}).rollout.agent)
