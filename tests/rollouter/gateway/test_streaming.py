"""Streamed turns: the deltas of each are its complete response, however its tokens arrive, and its row is the same."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import Any

import anyio
import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.core.failures import InfraError
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import FinishReason, Span, Turn
from rollouter.agent.conversation import TurnRequest
from rollouter.agent.parsing import NO_TOOLS, ToolCallParser, assistant_message, before_any
from rollouter.gateway.http import TrajectoryKeyMiddleware
from rollouter.gateway.protocol import GatewayResponse, ResponseHeader, TurnOptions, chat_response, completion_response
from rollouter.gateway.session import text_before
from rollouter.gateway.streaming import IncrementalDecoder, SettledText, TurnEvents
from rollouter.gateway.task import AgentTask
from tests.fakes.gateway_agent import CALL, MODEL, QUESTION, TOOLS, GatewayRig

HEADER = ResponseHeader("chatcmpl-1", MODEL, 7, prompt_tokens=5)
WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<",
    "st",
    "op",
    "é",
    "🙂",
    "\ufffd",
    " ",
    "\n",
    "{",
    "1",
]


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte."""
    core = Tokenizer(
        models.BPE(vocab={one: at for at, one in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words begin with a blank, which it drops at the beginning of a text."""
    core = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "<eos>": 4}, merges=[]))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@st.composite
def chunks(draw: st.DrawFn, size: int) -> list[int]:
    """Return ascending positions that end with `size`."""
    return [*sorted(draw(st.sets(st.integers(1, max(1, size)), max_size=6)) - {size}), size]


@pytest.mark.parametrize(("make", "num_tokens"), [(byte_tokenizer, 257), (word_tokenizer, 4)])
@given(data=st.data())
def test_text_is_decoded_as_tokens_arrive_and_never_taken_back(make: Any, num_tokens: int, data: st.DataObject) -> None:
    tokenizer = make()
    text = data.draw(st.lists(st.sampled_from(["é", "🙂", "a"]), max_size=6).map("".join))
    known = tokenizer(text, add_special_tokens=False)["input_ids"] if num_tokens > 4 else []
    ids = [*known, *data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=12)), *known]
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    decoder = IncrementalDecoder(decode)
    begin, whole = 0, decode(ids)
    for end in data.draw(chunks(len(ids))):
        decoder.add(ids[begin:end])
        assert whole.startswith(decoder.text)
        begin = end
    assert not whole[len(decoder.text) :].strip("\ufffd"), "only an incomplete character may be missing"


def test_half_a_character_is_not_sent() -> None:
    decoder = IncrementalDecoder(byte_tokenizer().decode)
    seen = []
    for token in byte_tokenizer()("a🙂b")["input_ids"]:
        decoder.add([token])
        seen.append(decoder.text)
    assert seen == ["a", "a", "a", "a", "a🙂", "a🙂b"]


@pytest.mark.parametrize(
    ("text", "needles", "before"),
    [("abc", [], "abc"), ("abc", ["c"], "ab"), ("abc", ["cd"], "ab"), ("abc", ["bd", "cde"], "ab"), ("", ["a"], ""),
     ("aab", ["aabc"], ""), ("<a<", ["<tool"], "<a")],
)  # fmt: skip
def test_text_before_what_may_begin_at_its_end(text: str, needles: list[str], before: str) -> None:
    assert before_any(text, needles) == before


class Joined:
    """The events of one stream, joined as a client does it."""

    def __init__(self, data: bytes) -> None:
        lines = data.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        self.chunks: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        self.choices = [choice for chunk in self.chunks for choice in chunk["choices"]]

    def text(self, name: str = "content") -> str:
        return "".join(one["delta"].get(name, "") if "delta" in one else one["text"] for one in self.choices)

    def log_probs(self, name: str) -> list[Any]:
        return [entry for one in self.choices if one["logprobs"] for entry in one["logprobs"][name]]

    @property
    def reasons(self) -> list[str]:
        return [one["finish_reason"] for one in self.choices if one["finish_reason"]]


def pieces(ids: Sequence[int]) -> list[str]:
    return [byte_tokenizer().decode([token]) for token in ids]


def sampled(text: str, *, ended: bool) -> Turn:
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"] + [byte_tokenizer().eos_token_id] * ended
    log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    finish = FinishReason.STOP if ended else FinishReason.LENGTH
    return Turn(np.array(ids, dtype=np.int32), log_probs, (Span(0, 1),), finish)


def streamed(events: TurnEvents, turn: Turn, ends: Sequence[int]) -> bytes:
    return b"".join(
        events.progress(
            replace(turn, response_ids=turn.response_ids[:end], rollout_log_probs=turn.rollout_log_probs[:end])
        )
        for end in ends
    )


@pytest.mark.parametrize("format", [NO_TOOLS, "hermes"])
@given(data=st.data())
def test_the_deltas_of_a_chat_turn_are_its_message(format: str, data: st.DataObject) -> None:
    calls = st.just(CALL) if format != NO_TOOLS else st.nothing()
    text = "".join(data.draw(st.lists(st.sampled_from(WORDS) | calls, min_size=1, max_size=8)))
    turn = sampled(text, ended=data.draw(st.booleans()))
    opened = data.draw(st.booleans())
    stop = data.draw(st.sampled_from([(), ("stop",), ("op", "1 1")]))
    options = TurnOptions(stop=stop, log_probs=data.draw(st.booleans()), stream=True, include_usage=True)
    parser = parser_of(format)
    settled = SettledText(
        parser.decode, split=partial(parser.settled, opened=opened), end_ids=parser.end_ids, stop=stop
    )
    events = TurnEvents(HEADER, settled, options, pieces, chat=True)
    stream = streamed(events, turn, data.draw(chunks(len(turn.response_ids))))
    message = assistant_message(parser.parse(turn.response_ids.tolist()))
    message["content"] = text_before(message["content"], stop)
    complete = dict(message)
    if not events.settle(message):
        assert "</think>" in text or "<think>" in text, "only misplaced reasoning changes what the client received"
    else:
        assert message == complete
    response = chat_response(HEADER, turn, message, pieces(turn.response_ids) if options.log_probs else None)
    joined = Joined(stream + events.end(response))
    answer = response["choices"][0]["message"]
    assert joined.choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert joined.text() == (answer["content"] or "")
    assert [call["id"] for one in joined.choices for call in one["delta"].get("tool_calls", ())] == [
        call["id"] for call in answer.get("tool_calls", ())
    ]
    assert joined.reasons == [response["choices"][0]["finish_reason"]]
    if options.log_probs:
        assert joined.log_probs("content") == response["choices"][0]["logprobs"]["content"]
    assert joined.chunks[-1]["usage"] == response["usage"] and joined.chunks[0]["usage"] is None


@given(data=st.data())
def test_the_deltas_of_a_completion_are_its_text(data: st.DataObject) -> None:
    turn = sampled("".join(data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))), ended=True)
    stop = data.draw(st.sampled_from([(), ("stop",), ("🙂",)]))
    options = TurnOptions(stop=stop, log_probs=True, stream=True)
    decode = partial(byte_tokenizer().decode, skip_special_tokens=True)
    events = TurnEvents(HEADER, SettledText(decode, stop=stop), options, pieces, chat=False)
    stream = streamed(events, turn, data.draw(chunks(len(turn.response_ids))))
    text = text_before(decode(turn.response_ids.tolist()), stop)
    response = completion_response(HEADER, turn, text, pieces(turn.response_ids))
    joined = Joined(stream + events.end(response))
    assert joined.text() == text and joined.reasons == ["stop"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert joined.log_probs(name) == response["choices"][0]["logprobs"][name]


@cache
def parser_of(format: str) -> ToolCallParser:
    return ToolCallParser(format, byte_tokenizer(), TOOLS)


# ------------------------------------------------------------------------------------------------ the endpoint


async def conversation(rig: GatewayRig, task: AgentTask, *, stream: bool) -> list[Any]:
    """Ask for a turn with tools, answer its call, and ask for a completion. Return the texts received."""
    client, received = rig.client(task), list[Any]()
    messages: list[Any] = [dict(message) for message in task.messages]
    for _ in range(2):
        if stream:
            async with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as events:
                answer = (await events.get_final_completion()).choices[0]
        else:
            answer = (await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)).choices[0]
        received.append((answer.message.content or "", answer.finish_reason))
        calls = answer.message.tool_calls or []
        messages.append(answer.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in calls]
    text: Any = await client.completions.create(model=MODEL, prompt="2+", stop=["=4"], stream=stream)
    received.append("".join([part.choices[0].text async for part in text]) if stream else text.choices[0].text)
    return received


async def test_a_streamed_conversation_is_recorded_like_another() -> None:
    received: dict[bool, list[Any]] = {}
    recorded: dict[bool, Trajectory] = {}
    for stream in (False, True):
        rig = GatewayRig("1" + CALL, "12=", "2=4+5")

        async def agent(task: AgentTask, rig: GatewayRig = rig, stream: bool = stream) -> float:
            received[stream] = await conversation(rig, task, stream=stream)
            return 1.0

        recorded[stream] = await rig.converse(agent)
    assert received[True] == received[False] == [("1", "tool_calls"), ("12=", "stop"), "2"]
    one, other = recorded[False], recorded[True]
    assert len(one.rows) == len(other.rows) == 2
    for row, same in zip(one.rows, other.rows, strict=True):
        for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
            assert np.array_equal(getattr(row, name), getattr(same, name)), name
        assert row.spans == same.spans
    assert one.messages == other.messages
    assert [replace(turn, generate_s=0) for turn in one.turns] == [replace(turn, generate_s=0) for turn in other.turns]


async def test_tokens_arrive_while_the_turn_is_sampled() -> None:
    rig = GatewayRig("12345", "1234…")
    received, may_continue = list[str](), anyio.Event()

    async def pace(number: int) -> None:
        if number == 2:
            with anyio.fail_after(30):  # the client waits for the first two characters
                await may_continue.wait()

    rig.pace = pace

    async def agent(task: AgentTask) -> float:
        async with rig.server() as url:
            client = openai.AsyncOpenAI(base_url=url, api_key=task.api_key, max_retries=0)
            stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True, logprobs=True)
            async for chunk in stream:
                received.append(chunk.choices[0].delta.content or "")
                if "".join(received) == "12":
                    may_continue.set()
            text = await client.completions.create(model=MODEL, prompt="2", stream=True)
            received.append("|" + "".join([part.choices[0].text async for part in text]))
            await client.close()
        return 1.0

    assert len((await rig.converse(agent)).turns) == 2
    assert "".join(received) == "12345|1234" and received.count("") == 2, received


async def test_a_client_that_leaves_a_stream_cancels_only_its_turn() -> None:
    rig = GatewayRig("12345", "12")
    cancelled = anyio.Event()

    async def pace(number: int) -> None:
        if number == 2 and len(rig.asked) == 1:
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.set()

    rig.pace = pace

    async def agent(task: AgentTask) -> float:
        async with rig.server() as url:
            client = openai.AsyncOpenAI(base_url=url, api_key=task.api_key, max_retries=0)
            stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            with anyio.fail_after(30):
                await cancelled.wait()
            await client.chat.completions.create(model=MODEL, messages=[QUESTION])
            await client.close()
        return 1.0

    one = await rig.converse(agent)
    assert [row.response_ids.tolist() for row in one.rows] == [[*rig.cache.tokens("12"), rig.tokenizer.eos_token_id]]


async def test_failures_are_a_status_before_the_first_token_and_an_event_after_it() -> None:
    rig = GatewayRig("12345")
    rig.pace = failing_at(2)
    seen: list[Any] = []

    async def agent(task: AgentTask) -> float:
        client = rig.client(task)
        with pytest.raises(openai.BadRequestError, match="expected true or false"):
            await client.chat.completions.create(model=MODEL, messages=[QUESTION], extra_body={"stream": "yes"})
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.chat.completions.create(model=MODEL, messages=[QUESTION], top_p=0.5, stream=True)
        stream = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True)
        try:
            seen.extend([chunk.choices[0].delta.content async for chunk in stream])
        except openai.APIError as error:
            seen.append((error.code, error.message))
        return 1.0

    rig.made(agent)
    with pytest.raises(InfraError, match="no replica"):
        await rig.converse(agent)


def failing_at(number: int) -> Any:
    async def pace(current: int) -> None:
        if current == number:
            raise InfraError("no replica")

    return pace


async def test_a_refused_stream_is_closed() -> None:
    closed = anyio.Event()

    class Calls:
        async def answer(self, *request: Any) -> GatewayResponse:
            return GatewayResponse(200, {})

        async def stream(self, *request: Any) -> AsyncGenerator[GatewayResponse | bytes, None]:
            try:
                yield GatewayResponse(409, {})
            finally:
                closed.set()

    app = TrajectoryKeyMiddleware(PlainTextResponse(""), Calls())
    headers = {"authorization": f"Bearer asyncrl-1-{'k' * 43}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1", headers=headers) as http:
        answer = await http.post("/completions", json={"prompt": "1", "stream": True})
    assert answer.status_code == 409 and closed.is_set()


async def test_a_slow_consumer_gets_fewer_and_longer_parts() -> None:
    rig = GatewayRig("123456789")
    seen: list[Any] = []

    async def agent(task: AgentTask) -> float:
        body = {"messages": [QUESTION], "stream": True}
        async with aclosing(rig.agent.gateway.stream(task.api_key, "chat/completions", body)) as items:
            async for item in items:
                seen.append(item)
                await anyio.sleep(0.05)
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1
    assert len(seen) == 3 and Joined(b"".join(seen[1:])).text() == "123456789"


async def test_the_end_of_a_trajectory_ends_its_streams_with_an_event() -> None:
    rig = GatewayRig("12345", "1")
    seen: list[Any] = []
    first = anyio.Event()

    async def pace(number: int) -> None:
        first.set()
        await anyio.sleep_forever()

    async def agent(task: AgentTask) -> float:
        await rig.question(task)
        rig.pace = pace
        outside.start_soon(read, task.api_key)
        await first.wait()
        return 1.0

    async def read(key: str) -> None:
        body = {"messages": [QUESTION], "stream": True}
        async for item in rig.agent.gateway.stream(key, "chat/completions", body):
            seen.append(item)

    rig.lines.reverse()
    async with anyio.create_task_group() as outside:
        one = await rig.converse(agent)
    assert len(one.turns) == 1 and seen[0] == (200, {})
    assert b'"content": "1"' in seen[1] and b"trajectory_over" in seen[-1] and b"[DONE]" not in seen[-1]


async def test_a_pause_or_another_replica_only_delays_the_next_event() -> None:
    """An aborted turn is continued after its tokens, so that a report never has fewer tokens than the one before it."""
    rig = GatewayRig()

    async def ask(request: TurnRequest) -> Turn:
        assert request.progress is not None
        ids = np.array([*rig.cache.tokens("1234"), rig.tokenizer.eos_token_id], dtype=np.int32)
        turn = Turn(ids, np.zeros(5, dtype=np.float32), (Span(0, 1), Span(2, 2)), FinishReason.STOP)
        for number in (2, 2, 3):
            request.progress(
                replace(turn, response_ids=ids[:number], rollout_log_probs=turn.rollout_log_probs[:number])
            )
        return turn

    rig.ask = ask  # type: ignore[method-assign]

    async def agent(task: AgentTask) -> float:
        async with rig.client(task).chat.completions.stream(model=MODEL, messages=[QUESTION]) as events:
            assert (await events.get_final_completion()).choices[0].message.content == "1234"
        return 1.0

    (row,) = (await rig.converse(agent)).rows
    assert row.spans == (Span(0, 1), Span(2, 2))
