"""Conversations on a fake engine: contexts, rows, rewards, and their ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import DataError
from asyncrl.core.types import FinishReason
from rollouter.agent.parsing import ParsedTurn
from rollouter.drop_policy import MismatchError, ToolFailedError, TooLongError
from tests.fakes.agent_loop import FORGETFUL, PLAYER, TEMPLATE, Adder, AgentRig, LineParser, Player
from tests.fakes.hostile import LONG_INTEGER, LONG_TEXT, NESTED, messages, texts


@pytest.fixture(autouse=True)
def fresh_tool() -> None:
    Adder.made, Adder.released, Adder.gate, Adder.answer = [], [], None, None


async def test_a_turn_without_a_call_ends_the_conversation() -> None:
    rig = AgentRig()
    one = await rig.converse("3")
    (row,) = one.rows
    assert rig.text(row.response_ids) == "3" + rig.tokenizer.eos_token
    assert row.response_mask.all() and one.finish_reason is FinishReason.STOP
    assert one.messages == ({"role": "user", "content": "1"}, {"role": "assistant", "content": "3"})
    assert Adder.made == []


async def test_the_policy_continues_after_a_tool_response() -> None:
    rig = AgentRig()
    one = await rig.converse('[add {"x": 2}]', '[add {"x": 5}]', "7")
    (row,) = one.rows
    eos = rig.tokenizer.eos_token
    sampled = f'[add {{"x": 2}}]{eos}<|tool|>2{eos}<|assistant|>[add {{"x": 5}}]{eos}<|tool|>7{eos}<|assistant|>7{eos}'
    assert row.response_ids.tolist() == rig.ids(sampled)
    assert [rig.text(one.turn_ids(k)) for k in range(3)] == [
        f'[add {{"x": 2}}]{eos}',
        f'[add {{"x": 5}}]{eos}',
        f"7{eos}",
    ]
    assert rig.text(row.response_ids[~row.response_mask]) == f"<|tool|>2{eos}<|assistant|><|tool|>7{eos}<|assistant|>"
    assert (
        not row.rollout_log_probs[~row.response_mask].any() and (row.rollout_log_probs[row.response_mask] == -0.5).all()
    )
    assert [span.version for span in row.spans] == [1, 2, 3]
    assert [span.first_token for span in row.spans] == [turn.first_token for turn in one.turns]
    assert [turn.finish_reason for turn in one.turns] == [FinishReason.TOOL_CALL] * 2 + [FinishReason.STOP]
    assert [call.result for turn in one.turns for call in turn.calls] == ["2", "7"], "both calls share the state"
    assert [turn.reward for turn in one.turns] == [0.25, 0.25, 0.0]
    assert one.scores == {"add": 7.0} and one.metrics == {"add/added": 2.0}
    assert Adder.released == Adder.made == [[2, 5]]
    # The context of a turn is the row before it.
    assert rig.asked[2].context.tolist() == [*rig.prompt().prompt_ids, *rig.ids(sampled)[: one.turns[2].first_token]]


async def test_calls_of_one_turn_run_concurrently_and_are_answered_in_order() -> None:
    rig = AgentRig(max_parallel_calls=2)
    met = anyio.Event()
    order: list[int] = []

    async def gate(x: int) -> None:
        if x == 1:
            await met.wait()
        order.append(x)
        met.set()

    Adder.gate = staticmethod(gate)  # type: ignore[assignment]
    one = await rig.converse('[add {"x": 1}][add {"x": 2}][add {"x": 3}]', "6")
    assert order == [2, 1], "calls do not wait for each other"
    calls = one.turns[0].calls
    assert [(call.arguments, call.status) for call in calls] == [
        ('{"x": 1}', "ok"), ('{"x": 2}', "ok"), ('{"x": 3}', "too_many"),
    ]  # fmt: skip
    tools = [message for message in one.messages if message["role"] == "tool"]
    assert [message["content"] for message in tools] == [call.result for call in calls]
    assert len(Adder.made) == 1


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ('[add {"x": 1', "bad_json", ""),
        ("[add nonsense]", "bad_json", ""),
        ('[subtract {"x": 1}]', "unknown_tool", "add"),
        ('[add {"y": 1}]', "bad_arguments", "x"),
        ('[add {"x": 13}]', "raised", "unlucky"),
    ],
)
async def test_invalid_calls_are_reported_to_the_model(line: str, status: str, message: str) -> None:
    rig = AgentRig(tokenization_sanity_check_mode="off")
    one = await rig.converse(line, "3")
    assert one.turns[0].calls[0].status == status
    assert message in one.messages[2]["content"] and one.messages[2]["content"]
    assert rig.agent.status()[f"tool_calls/{status}"] == 1
    assert one.finish_reason is FinishReason.STOP


async def test_a_tool_may_end_the_conversation() -> None:
    one = await AgentRig().converse('[add {"x": 99}]')
    assert one.finish_reason is FinishReason.TOOL_CALL
    assert one.scores == {"add": 99.0}
    assert one.rows[0].response_mask.all(), "the response of the tool is left out"


async def test_calls_in_the_last_turn_are_not_executed() -> None:
    one = await AgentRig(max_assistant_turns=2).converse('[add {"x": 1}]', '[add {"x": 2}]')
    assert one.finish_reason is FinishReason.MAX_TURNS
    assert one.turns[1].calls == () and Adder.made == [[1]]


async def test_a_turn_cut_by_length_ends_the_conversation() -> None:
    one = await AgentRig().converse('[add {"x": 1}]', "33333…")
    assert one.finish_reason is FinishReason.LENGTH
    assert one.rows[0].response_mask[-1]


async def test_a_tool_response_without_room_ends_the_conversation() -> None:
    line = '[add {"x": 1}]'
    rig = AgentRig(response_length=len(AgentRig().ids(line)) + 4)
    one = await rig.converse(line)
    assert one.finish_reason is FinishReason.LENGTH
    assert one.rows[0].response_mask.all() and len(one.turns) == 1
    assert one.turns[0].calls[0].status == "ok", "the call is still recorded"


async def test_token_budgets_cover_the_trajectory() -> None:
    rig = AgentRig(response_length=60)
    await rig.converse('[add {"x": 1}]', "2")
    first, second = rig.asked
    assert first.max_tokens == 60
    assert second.max_tokens == 60 - (len(second.context) - len(first.context))


async def test_long_tool_responses_are_cut() -> None:
    rig = AgentRig(max_tool_response_length=6, tool_response_truncate_side="middle")
    one = await rig.converse('[add {"x": 123456789123}]', "3")
    assert len(rig.ids(one.turns[0].calls[0].result)) <= 6
    assert one.messages[2]["content"] == one.turns[0].calls[0].result


async def test_a_conversation_out_of_time_is_kept_if_it_has_a_turn() -> None:
    one = await AgentRig(timeout_s=0.5).converse('[add {"x": 1}]', 60.0, "too late")
    assert one.finish_reason is FinishReason.TIMEOUT
    assert len(one.turns) == 1 and one.scores == {"add": 1.0}
    assert one.rows[0].response_mask.all()
    with pytest.raises(TooLongError, match=r"multi_turn\.timeout_s"):
        await AgentRig(timeout_s=0.02).converse(60.0, "too late")


async def test_tools_are_released_when_the_engines_fail() -> None:
    rig = AgentRig()
    with pytest.raises(DataError, match="no room"):
        await rig.converse('[add {"x": 1}]', DataError("no room"))
    assert Adder.released == [[1]]


# ------------------------------------------------------------------------------------------------ users


async def test_a_simulated_user_replies_until_it_is_done() -> None:
    rig = AgentRig(tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2"]}}])
    one = await rig.converse("5", "6")
    assert [(m["role"], m["content"]) for m in one.messages] == [
        ("user", "1"), ("assistant", "5"), ("user", "2"), ("assistant", "6"),
    ]  # fmt: skip
    assert one.finish_reason is FinishReason.STOP
    assert [turn.reward for turn in one.turns] == [0.5, 0.5] and one.scores == {"environment": 2.0}


async def test_an_environment_may_send_the_first_message() -> None:
    rig = AgentRig(tools=(), interactions=[{"class_name": PLAYER, "config": {"opening": "9"}}])
    one = await rig.converse("5")
    assert rig.text(one.rows[0].prompt_ids).endswith(f"<|user|>9{rig.tokenizer.eos_token}<|assistant|>")
    assert [m["content"] for m in one.messages] == ["1", "9", "5"]


@pytest.mark.parametrize(
    ("settings", "lines", "reason"),
    [
        ({"max_user_turns": 1}, ("5", "6"), FinishReason.MAX_TURNS),
        ({"max_assistant_turns": 2}, ("5", "6"), FinishReason.MAX_TURNS),
        ({}, ("5", "66666…"), FinishReason.LENGTH),
    ],
)
async def test_every_response_gets_a_reward_including_the_last(
    settings: dict[str, Any], lines: tuple[str, ...], reason: FinishReason
) -> None:
    rig = AgentRig(tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2", "3"]}}], **settings)
    one = await rig.converse(*lines)
    assert one.finish_reason is reason
    assert one.scores == {"environment": 2.0} and [turn.reward for turn in one.turns] == [0.5, 0.5]
    assert one.rows[0].response_mask[-1], "a reply that no turn follows is left out"


# ------------------------------------------------------------------------------------------------ rewritten history


async def test_a_template_that_rewrites_history_forks_the_trajectory() -> None:
    rig = AgentRig(
        template=FORGETFUL, tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2", "3"]}}]
    )
    one = await rig.converse("55", "66", "77")
    eos = rig.tokenizer.eos_token
    assert [rig.text(row.response_ids) for row in one.rows] == [f"55{eos}", f"66{eos}", f"77{eos}"]
    assert [turn.row for turn in one.turns] == [0, 1, 2]
    assert rig.text(one.rows[2].prompt_ids).count("?") == 2 and "55" not in rig.text(one.rows[2].prompt_ids)
    for request, row in zip(rig.asked, one.rows, strict=True):
        assert request.context.tolist() == row.prompt_ids.tolist(), (
            "rows have the context in which their turns were sampled"
        )
    assert rig.agent.status()["rewrites"] == 1


# ------------------------------------------------------------------------------------------------ token check


class Sloppy(LineParser):
    """A parser that loses text which the policy generated before a call."""

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        parsed = super().parse(ids)
        return ParsedTurn(parsed.content.replace("5", ""), parsed.calls, text=parsed.text)


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
async def test_token_mismatches_with_the_template_are_detected(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = AgentRig(tokenization_sanity_check_mode=mode)
    rig.agent.parser = Sloppy(lambda ids: rig.tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[assignment]
    if mode == "strict":
        with pytest.raises(MismatchError, match="tokens differ"):
            await rig.converse('5[add {"x": 2}]', "3")
        return
    caplog.set_level(logging.WARNING)
    one = await rig.converse('5[add {"x": 2}]', "3")
    assert one.finish_reason is FinishReason.STOP
    assert rig.agent.status()["token_mismatches"] == (mode == "warn")
    assert ("tokens differ" in caplog.text) == (mode == "warn")


def test_the_identity_of_an_agent_is_json() -> None:
    identity = AgentRig().agent.identity()
    assert json.loads(json.dumps(identity)) == identity


# ------------------------------------------------------------------------------------------------ hostile text


@pytest.mark.parametrize("template", [TEMPLATE, FORGETFUL])
async def test_a_call_with_a_lone_surrogate_does_not_end_the_run(template: str) -> None:
    rig = AgentRig(template=template, tokenization_sanity_check_mode="off")
    one = await rig.converse('[add {"x": 2, "y": "\\ud83d", "\\ud83d": 1}]', "3")
    assert one.finish_reason is FinishReason.STOP
    (call,) = one.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"x": 2, "y": "?", "?": 1}


@pytest.mark.parametrize("arguments", ['{"x": ' * 1000, NESTED, LONG_INTEGER, '{"x": 1e999}'])
async def test_arguments_that_cannot_be_parsed_are_reported_to_the_model(arguments: str) -> None:
    rig = AgentRig(response_length=9000, max_model_len=9500, tokenization_sanity_check_mode="off")
    one = await rig.converse(f"[add {arguments}]", "3")
    (call,) = one.turns[0].calls
    assert call.status in ("bad_json", "bad_arguments") and call.result.startswith("Error: the arguments of add")
    assert one.messages[-1] == {"role": "assistant", "content": "3"}


@settings(max_examples=30)
@example(reply=LONG_TEXT, answer="")
@example(reply="hm", answer=LONG_TEXT)
@given(reply=texts(), answer=texts())
async def test_conversations_with_any_text_of_tools_and_users_end(reply: str, answer: str) -> None:
    rig = AgentRig(interactions=[{"class_name": PLAYER, "config": {"replies": [reply or "hm"]}}])
    Adder.answer = answer
    one = await rig.converse('[add {"x": 2}]', "3", "4")
    assert one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.MAX_TURNS)
    json.dumps([one.messages, [call.result for turn in one.turns for call in turn.calls]], ensure_ascii=False).encode()


@settings(max_examples=30)
@given(opening=st.lists(messages(), max_size=2))
async def test_opening_messages_of_any_shape_are_used_or_refused(opening: list[Any]) -> None:
    rig = AgentRig(interactions=[{"class_name": PLAYER, "config": {"replies": ["2"]}}])
    with patch.object(Player, "messages", opening), suppress(ToolFailedError, DataError):
        await rig.converse("3", "4", "5")
