"""Agents that use the OpenAI client over HTTP: their recorded rows, their rewards, and how they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import ConfigError, DataError, InfraError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import FinishReason, Span, versions_per_token
from asyncrl.observe.metrics.registry import check
from rollouter.agent.conversation import TurnRequest
from rollouter.agent.loop import MismatchError
from rollouter.agent.parsing import NO_TOOLS, ParsedTurn, ToolCallParser
from rollouter.drop_policy import TooLongError
from rollouter.gateway import session
from rollouter.gateway.program import FunctionProgram
from rollouter.gateway.task import AgentTask
from rollouter.sample_runner import scored_rows
from tests.fakes.gateway_agent import CALL, MODEL, QUESTION, TOOLS, GatewayRig
from tests.fakes.hostile import LONE, LONG_TEXT, messages, texts, values


def mask_text(rig: GatewayRig, one: Trajectory, row: int = 0) -> list[str]:
    """Return the texts of a row's parts, which are alternately sampled and unsampled."""
    tokens = one.rows[row]
    cuts = np.flatnonzero(np.diff(tokens.response_mask.astype(int))) + 1
    return [rig.text(part) for part in np.split(tokens.response_ids, cuts)]


def stuck(cancelled: anyio.Event) -> Any:
    """Return a turn that takes forever and sets `cancelled` when it is cancelled."""

    async def turn(request: TurnRequest) -> str:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    return turn


async def with_calculator(rig: GatewayRig, task: AgentTask, *, reward: float | None = 1.0) -> Any:
    client = rig.client(task)
    messages: list[Any] = [dict(message) for message in task.messages]
    while True:
        answer = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return reward
        for call in message.tool_calls:
            x = json.loads(call.function.arguments)["x"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(eval(x))})


async def test_a_conversation_with_a_tool_is_one_row_token_by_token() -> None:
    rig = GatewayRig(CALL, "12")
    one = await rig.converse(lambda task: with_calculator(rig, task))
    (row,) = one.rows
    assert np.array_equal(row.prompt_ids, rig.prompt().prompt_ids)
    assert mask_text(rig, one) == [CALL + "<eos>", "<tool>12<eos><assistant>", "12<eos>"]
    sampled = row.response_mask
    log_probs = row.rollout_log_probs[sampled]
    calls = len(rig.cache.tokens(CALL)) + 1
    assert log_probs[:calls].tolist() == [-100.0 - n for n in range(1, calls + 1)]
    assert log_probs[calls:].tolist() == [-200.0 - n for n in range(1, len(log_probs) - calls + 1)]
    assert (row.rollout_log_probs[~sampled] == 0).all()
    assert set(versions_per_token(row.spans, len(row.response_ids))[sampled].tolist()) == {1, 2}
    assert row.spans[0] == Span(0, 1)
    assert one.scores == {"agent": 1.0} and one.finish_reason is FinishReason.STOP
    assert [turn.finish_reason for turn in one.turns] == [FinishReason.TOOL_CALL, FinishReason.STOP]
    assert one.turns[0].calls[0].name == "calc" and one.turns[0].calls[0].result == "12"
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert np.array_equal(rig.asked[1].context, np.concatenate([row.prompt_ids, row.response_ids[:-3]]))
    assert rig.agent.status() == {"turns": 2, "rewrites": 0, "token_mismatches": 0, "tool_calls": 1}


async def test_streams_have_the_same_content_in_chunks() -> None:
    rig = GatewayRig(CALL, "12")

    async def agent(task: AgentTask) -> float:
        client = rig.client(task)
        stream = await client.chat.completions.create(
            model=task.model, messages=[QUESTION], tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        (call,) = [
            chunk.choices[0].delta.tool_calls[0]
            for chunk in chunks
            if chunk.choices and chunk.choices[0].delta.tool_calls
        ]
        assert json.loads(call.function.arguments) == {"x": "3*4"} and call.index == 0
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(rig.cache.tokens(CALL)) + 1
        async with client.chat.completions.stream(model=task.model, messages=[QUESTION]) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == "12" and final.choices[0].finish_reason == "stop"
        return 0.0

    one = await rig.converse(agent)
    assert len(one.turns) == 2 and len(one.rows) == 2, (
        "the second request has other tools, so it is another conversation"
    )


async def test_models_and_completions_are_served_with_logprobs_and_usage() -> None:
    rig = GatewayRig("12", "+5=", "7")

    async def agent(task: AgentTask) -> float:
        client = rig.client(task)
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        chat = await client.chat.completions.create(model=MODEL, messages=[QUESTION], logprobs=True)
        content = chat.choices[0].logprobs.content
        assert [(token.token, token.logprob) for token in content] == [("1", -101), ("2", -102), ("<eos>", -103)]
        assert chat.usage.prompt_tokens == len(rig.prompt().prompt_ids) and chat.usage.completion_tokens == 3
        text = await client.completions.create(model=MODEL, prompt="2", logprobs=0)
        assert text.choices[0].text == "+5=" and text.choices[0].logprobs.token_logprobs[0] == -201
        ids = await client.completions.create(model=MODEL, prompt=[5, 6, 7])
        assert ids.choices[0].text == "7"
        return 1.0

    one = await rig.converse(agent)
    assert [row.prompt_ids.tolist() for row in one.rows][1:] == [rig.cache.tokens("2"), [5, 6, 7]]
    assert all(row.response_mask.all() for row in one.rows)


async def test_other_histories_and_parallel_conversations_get_separate_rows() -> None:
    both = anyio.Event()
    waiting = 0

    async def together(request: TurnRequest) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        return "8" if rig.text(request.context).endswith("2*4=<eos><assistant>") else "9"

    rig = GatewayRig(together, together, "1", "2", "3", "4")

    async def agent(task: AgentTask) -> float:
        client = rig.client(task)

        async def complete(*texts: str) -> str:
            messages: list[Any] = []
            for place, text in enumerate(texts):
                messages.append({"role": "assistant" if place % 2 else "user", "content": text})
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            return answer.choices[0].message.content or ""

        async with anyio.create_task_group() as group:
            group.start_soon(complete, "2*4=")
            group.start_soon(complete, "3*3=")
        assert await complete("2*4=", "8", "+1=") == "1"
        assert await complete("2*4=", "8", "+2=") == "2", "a history from the middle of a row"
        assert await complete("2*4=", "9", "+3=") == "3", "a history that the model did not sample"
        assert await complete("3*3=", " 9\n", "+4=") == "4", "clients may add blanks to a message"
        return 1.0

    one = await rig.converse(agent)
    assert len(one.rows) == 4 and len(one.turns) == 6
    texts = [(rig.text(row.prompt_ids), mask_text(rig, one, number)) for number, row in enumerate(one.rows)]
    start = "<bos><user>{}=<eos><assistant>"
    # Either of the first two requests may arrive first.
    assert sorted(texts[:2]) == [
        (start.format("2*4"), ["8<eos>", "<user>+1=<eos><assistant>", "1<eos>"]),
        (start.format("3*3"), ["9<eos>", "<user>+4=<eos><assistant>", "4<eos>"]),
    ]
    assert texts[2:] == [
        (start.format("2*4") + "8<eos><user>+2=<eos><assistant>", ["2<eos>"]),
        (start.format("2*4") + "9<eos><user>+3=<eos><assistant>", ["3<eos>"]),
    ]
    sampled = sum(int(row.response_mask.sum()) for row in one.rows)
    assert sampled == one.num_sampled == 12, "every turn is in exactly one row"
    assert [message["content"] for message in one.messages] == ["3*3=", "9", "+4=", "4"], (
        "the messages are those of the last conversation"
    )
    assert rig.text(one.turn_ids()) == "4<eos>"


async def test_a_template_that_rewrites_history_starts_a_new_row() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role != 'assistant' else '0' }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rig = GatewayRig("5", "6", template=template)

    one = await rig.converse(rig.talk)
    assert [rig.text(row.prompt_ids) for row in one.rows] == [
        "<user>3*4=<eos><assistant>",
        "<user>3*4=<eos><assistant>0<eos><user>1<eos><assistant>",
    ]
    assert rig.agent.status()["rewrites"] == 1


async def test_stop_and_max_tokens_end_turns() -> None:
    rig = GatewayRig("12=34=56", "123456")

    async def agent(task: AgentTask) -> float:
        client = rig.client(task)
        first = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stop="4=")
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("12=3", "stop")
        more: list[Any] = [QUESTION, first.choices[0].message, {"role": "user", "content": "1"}]
        second = await client.chat.completions.create(model=MODEL, messages=more, max_completion_tokens=3)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("123", "length")
        return 0.0

    one = await rig.converse(agent)
    assert mask_text(rig, one) == ["12=34=", "<eos><user>1<eos><assistant>", "123"]
    assert [asked.stop for asked in rig.asked] == [("4=",), ()]
    assert rig.asked[1].max_tokens == 3 and one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 0.5}, "rollout.sampling.temperature = 1.0"),
        ({"top_p": 0.9}, "top_p"),
        ({"n": 2}, "n=2"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "positive"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "critic", "content": "1"}]}, "role is 'critic'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"model": "gpt-4o"}, "the run trains 'tiny'"),
    ],
)  # fmt: skip
async def test_requests_that_cannot_be_trained_on_are_refused_with_the_reason(
    body: dict[str, Any], message: str
) -> None:
    rig = GatewayRig("12", "12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            refused = await http.post("chat/completions", json={"model": MODEL, "messages": [QUESTION], **body})
            assert refused.status_code == (404 if body.get("model") else 400)
            assert message in refused.json()["error"]["message"]
            fine = {
                "temperature": 1.0,
                "top_p": 1,
                "n": 1,
                "seed": 7,
                "user": "me",
                "response_format": {"type": "text"},
            }
            accepted = await http.post("chat/completions", json={"messages": [QUESTION], **fine})
            assert accepted.status_code == 200
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1


async def test_validation_ignores_the_sampling_of_requests() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        await rig.question(task, temperature=0.3)
        return 1.0

    assert (await rig.converse(agent, sample_id="val_0")).scores == {"agent": 1.0}


async def test_a_key_belongs_to_one_running_trajectory() -> None:
    rig = GatewayRig("12", "12")
    other_done = anyio.Event()

    async def agent(task: AgentTask) -> float:
        await rig.question(task)
        if task.trajectory == 0:
            await other_done.wait()
            return 0.0
        return 1.0

    agents = rig.made(agent)
    trajectories: dict[int, Trajectory] = {}

    async def one(number: int) -> None:
        trajectories[number] = await agents.converse("val", number, rig.prompt(), rig.ask)
        if number == 1:
            other_done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(one, 0)
        group.start_soon(one, 1)
    assert [len(trajectories[number].turns) for number in (0, 1)] == [1, 1]
    first, second = rig.tasks
    assert first.api_key != second.api_key and first.api_key.startswith("asyncrl-3-")
    with pytest.raises(openai.ConflictError, match="is over"):
        await rig.client(first).chat.completions.create(model=MODEL, messages=[QUESTION])
    async with rig.http() as http:
        unknown = {"authorization": f"Bearer asyncrl-3-{'A' * 43}"}
        assert (await http.post("chat/completions", json={}, headers=unknown)).status_code == 401
        other = {"authorization": "Bearer sk-1"}
        assert (await http.post("chat/completions", json={}, headers=other)).text == "not recorded"
        assert (await http.get("models")).text == "not recorded"
    with pytest.raises(RuntimeError, match="is over"):
        first.post_reward(1.0)


async def test_the_last_posted_reward_counts_and_done_ends_the_trajectory() -> None:
    rig = GatewayRig("12", "12")

    async def agent(task: AgentTask) -> None:
        await rig.question(task)
        async with rig.http(task) as http:
            for wrong in ({"reward": "much"}, {"reward": -1e300}, {"metrics": {"a": 1e300}}):
                bad = await http.post("reward", json=wrong)
                assert bad.status_code == 400 and "finite number of at most 1e+15" in bad.json()["error"]["message"]
            await http.post("reward", json={"reward": 0.25, "metrics": {"a": 1}})
            task.post_reward(0.75, metrics={"b": 2})
            posted = await http.post("reward", json={"metrics": {"c": 3}, "done": True})
            assert posted.json() == {"object": "reward", "reward": 0.75, "metrics": {"a": 1, "b": 2, "c": 3}}
            late = await http.post("chat/completions", json={"messages": [QUESTION]})
            assert late.status_code == 409 and late.headers["x-should-retry"] == "false"
        raise RuntimeError("after the end")

    one = await rig.converse(agent)
    assert one.scores == {"agent": 0.75} and one.metrics == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert one.finish_reason is FinishReason.STOP


async def test_a_program_in_a_thread_can_post_rewards() -> None:
    rig = GatewayRig("12")

    def agent(task: AgentTask) -> dict[str, Any]:
        anyio.from_thread.run(rig.agent.gateway.answer, task.api_key, "chat/completions", {"messages": [QUESTION]})
        task.post_reward(0.5, metrics={"seen": 1})
        return {"metrics": {"returned": 2}}

    one = await rig.converse(FunctionProgram("thread", agent, 2))
    assert one.scores == {"agent": 0.5} and one.metrics == {"seen": 1.0, "returned": 2.0}


async def test_a_timeout_keeps_a_trajectory_that_has_a_reward() -> None:
    async def agent(task: AgentTask) -> None:
        await rig.question(task)
        if task.trajectory:
            task.post_reward(0.5)
        await anyio.sleep_forever()

    rig = GatewayRig("12", "12", timeout_s=1)
    with pytest.raises(TooLongError, match="no reward was posted"):
        await rig.converse(agent)
    one = await rig.agent.converse("s", 1, rig.prompt(), rig.ask)
    assert one.finish_reason is FinishReason.TIMEOUT and one.scores == {"agent": 0.5}
    rig = GatewayRig("12", timeout_s=1, config={"reward": {"function": "exact_match"}})
    one = await rig.converse(agent)
    assert one.finish_reason is FinishReason.TIMEOUT and one.scores == {}, "the reward function scores it"
    rig = GatewayRig(timeout_s=0.2)
    with pytest.raises(TooLongError, match="no turn was complete"):
        await rig.converse(lambda task: anyio.sleep_forever())


async def test_the_deadline_cancels_the_turn_in_the_engine() -> None:
    cancelled = anyio.Event()
    rig = GatewayRig("12", stuck(cancelled), timeout_s=1, config={"reward": {"function": "exact_match"}})
    one = await rig.converse(rig.talk)
    assert cancelled.is_set() and len(one.turns) == 1


async def test_a_client_that_disconnects_cancels_only_its_turn() -> None:
    cancelled = anyio.Event()
    rig = GatewayRig(stuck(cancelled), "12")

    async def agent(task: AgentTask) -> float:
        with anyio.move_on_after(0.2):
            await rig.question(task)
        with anyio.fail_after(5):
            await cancelled.wait()
        await rig.question(task)
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1


async def test_a_refusal_for_lack_of_room_ends_the_trajectory_by_length() -> None:
    async def agent(task: AgentTask) -> None:
        await rig.talk(task, 3)

    rollout = {"response_length": 13, "max_model_len": 60}
    rig = GatewayRig("1234567", "12345678901234", rollout=rollout, config={"reward": {"function": "exact_match"}})
    one = await rig.converse(agent)
    assert rig.asked[1].max_tokens == 1 and len(rig.asked) == 2
    assert one.finish_reason is FinishReason.LENGTH and sum(len(row.response_ids) for row in one.rows) == 13
    rig = GatewayRig("1234567", "12345678901234", rollout=rollout)
    with pytest.raises(UserCodeError, match="context_length_exceeded") as failed:
        await rig.converse(agent)
    assert "BadRequestError" in failed.value.cause


FAILURES: list[tuple[Any, bool, type[Exception], str]] = [
    (1.0, False, UserCodeError, "without a turn of the model"),
    (None, True, UserCodeError, "gave no reward"),
    (ZeroDivisionError("in the agent"), True, UserCodeError, "ZeroDivisionError: in the agent"),
    ("good", True, UserCodeError, 'not a reward: reward is "good"'),
    (DataError("this row is empty"), False, DataError, "row is empty"),
]


@pytest.mark.parametrize(("outcome", "asks", "error", "message"), FAILURES)
async def test_failures_of_a_program_fail_the_trajectory(
    outcome: Any, asks: bool, error: type[Exception], message: str
) -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> Any:
        if asks:
            await rig.question(task)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(error, match=message):
        await rig.converse(agent)


async def test_a_failure_of_the_engines_fails_the_trajectory() -> None:
    rig = GatewayRig(InfraError("no replica"))
    seen: list[int] = []

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            seen.append((await http.post("chat/completions", json={"messages": [QUESTION]})).status_code)
        return 1.0

    with pytest.raises(InfraError, match="no replica"):
        await rig.converse(agent)
    assert seen in ([], [503])


async def test_a_row_that_differs_from_the_template_is_detected() -> None:
    class Sloppy:
        def parse(self, ids: Sequence[int]) -> ParsedTurn:
            return ParsedTurn("13", text="13")

    rig = GatewayRig("12")
    make = rig.cache._make
    rig.cache._make = lambda request: make(request)._replace(parser=Sloppy())
    with pytest.raises(MismatchError, match="strict"):
        await rig.converse(lambda task: rig.talk(task, 1))


async def test_malformed_http_requests_are_refused() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> float:
        async with rig.http(task) as http:
            assert (await http.get("chat/completions")).status_code == 405
            assert (await http.post("embeddings", json={})).status_code == 404
            assert (await http.post("chat/completions", content=b"{")).status_code == 400
            assert (await http.post("chat/completions", content=b"[]")).status_code == 400
            await http.post("chat/completions", json={"messages": [QUESTION]})
        return 1.0

    assert len((await rig.converse(agent)).turns) == 1


# ------------------------------------------------------------------------------------------------ hostile requests


async def answered(rig: GatewayRig, requests: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the gateway's responses to requests of one trajectory, which then ends with the reward 1."""
    responses: list[Any] = []

    async def agent(task: AgentTask) -> float:
        for path, body in requests:
            responses.append(await rig.agent.gateway.answer(task.api_key, path, body))
            json.dumps(responses[-1].body, ensure_ascii=False).encode()
        await rig.question(task)
        return 1.0

    one = await rig.converse(agent)
    assert one.scores == {"agent": 1.0}
    json.dumps(one.messages, ensure_ascii=False).encode()
    return responses


async def test_lone_surrogates_in_requests_and_calls_are_replaced() -> None:
    call = {"id": LONE, "function": {"name": LONE, "arguments": '{"x": "\\ud83d"}'}}
    said = [
        {"role": "user", "content": LONE, "name": LONE},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": LONE, "content": [{"type": "text", "text": LONE}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": LONE, "parameters": {"type": "object"}}}]
    requests = [
        ("chat/completions", {"messages": said}),
        ("chat/completions", {"messages": [QUESTION], "tools": tools}),
        ("completions", {"prompt": LONE}),
        ("reward", {"reward": 0.5, "metrics": {LONE: 1}}),
    ]
    rollout = {"multi_turn": {"tokenization_sanity_check_mode": "off"}}  # the call differs from what was sampled
    rig = GatewayRig("12", CALL.replace("3*4", "\\ud83d"), "12", "12", rollout=rollout)
    responses = await answered(rig, requests)
    assert [response.status for response in responses] == [200] * 4
    (made,) = responses[1].body["choices"][0]["message"]["tool_calls"]
    assert made["function"]["arguments"] == '{"x": "?"}'


@pytest.mark.parametrize(
    "metrics", [{"": 1}, {"a//b": 1}, {"../a": 1}, {"\0": 1}, {"a" * 201: 1}, dict.fromkeys(map(str, range(60)), 1)]
)
async def test_metrics_with_names_that_cannot_be_reported_are_refused(metrics: Any) -> None:
    known = {f"known {n}": 1.0 for n in range(50)}
    rig = GatewayRig("12", "12")

    async def agent(task: AgentTask) -> dict[str, Any]:
        await rig.question(task)
        async with rig.http(task) as http:
            assert (await http.post("reward", json={"metrics": known})).status_code == 200
            refused = await http.post("reward", json={"reward": 1, "metrics": metrics})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "metrics"
        with pytest.raises(RuntimeError, match="the metrics cannot be used"):
            task.post_reward(1.0, metrics=metrics)
        return 0.5

    one = await rig.converse(agent)
    assert (one.scores, one.metrics) == ({"agent": 0.5}, known)
    (row,) = scored_rows(0, one, Score(0.5))
    check(f"reward/extra/{name}" for name in row.reward_extra)


async def test_a_result_with_metrics_that_cannot_be_reported_is_a_failure_of_the_agent() -> None:
    rig = GatewayRig("12")

    async def agent(task: AgentTask) -> dict[str, Any]:
        await rig.question(task)
        return {"reward": 0.5, "metrics": {"": 1}}

    with pytest.raises(UserCodeError, match="the agent's result is refused: the metrics cannot be used: a number has"):
        await rig.converse(agent)


async def test_a_request_that_is_far_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG_TEXT}}]
    requests = [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("chat/completions", {"messages": [QUESTION], "tools": tools}),
        ("completions", {"prompt": LONG_TEXT}),
        ("completions", {"prompt": [1] * 100_000}),
    ]
    rig = GatewayRig("12")
    decode = rig.cache.text

    def text(ids: Sequence[int], **options: Any) -> str:
        assert len(ids) < 1000, "decoding many ids takes seconds of the event loop"
        return decode(ids, **options)

    monkeypatch.setattr(rig.cache, "text", text)
    responses = await answered(rig, requests)
    assert [(one.status, one.body["error"]["code"]) for one in responses] == [(400, "context_length_exceeded")] * 4
    assert all(len(key) < 1000 for key in rig.cache._known), "the cache of formats keeps its keys"


async def test_tools_that_the_parser_refuses_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = GatewayRig("12")

    def parser(format: str, *args: Any, **kwargs: Any) -> ToolCallParser:
        if format != NO_TOOLS:
            raise ConfigError("the parser cannot use these tools")
        return ToolCallParser(format, *args, **kwargs)

    monkeypatch.setattr(session, "ToolCallParser", parser)
    (refused,) = await answered(rig, [("chat/completions", {"messages": [QUESTION], "tools": TOOLS})])
    assert refused.status == 400 and "the parser cannot use these tools" in refused.body["error"]["message"]


FUNCTIONS = st.fixed_dictionaries({"name": texts()}, optional={"parameters": values(), "description": values()})
SCHEMAS = st.fixed_dictionaries({"function": FUNCTIONS}, optional={"type": values()})


@settings(max_examples=25)
@given(
    said=st.lists(messages(), max_size=2) | values(),
    tools=st.lists(SCHEMAS, max_size=2) | values(),
    field=values(),
)
async def test_requests_of_any_shape_are_answered_or_refused(said: Any, tools: Any, field: Any) -> None:
    requests = [
        ("chat/completions", {"messages": said}),
        ("chat/completions", {"messages": [{"role": "user", "content": field}]}),
        ("chat/completions", {"messages": [QUESTION], "tools": tools}),
        ("completions", {"prompt": field}),
        ("reward", {"reward": field, "metrics": {"a": field}}),
    ]
    for response in await answered(GatewayRig(*["12"] * 6), requests):
        assert response.status in (200, 400)
