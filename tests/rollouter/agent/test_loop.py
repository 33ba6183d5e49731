"""Conversations on a fake engine: what the policy sees, what is kept of it, and every way in which they end."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.failures import DataError
from asyncrl.trajectory import Trajectory
from asyncrl.types import FinishReason, Prompt, SampleId, Span, Turn
from rollouter.agent.asking import TurnRequest
from rollouter.agent.chat import Chat
from rollouter.agent.loop import Agent
from rollouter.agent.parsing import Parsed, ParsedCall
from rollouter.drops import MismatchError, ToolFailedError, TooLongError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.loading import load_interactions
from rollouter.template import load_tokenizer
from rollouter.tools.base import BaseTool, ToolContext, ToolResponse
from rollouter.tools.box import ToolBox
from rollouter.tools.loading import load_tools

PLAYER = f"{__name__}:Player"
TOOL = f"{__name__}:Adder"

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '?' }}")


class LineParser:
    """`[name {"json": 1}]` is a call; `[` without an end is none."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def parse(self, ids: Sequence[int]) -> Parsed:
        text = self._decode(ids)
        content, bracket, rest = text.partition("[")
        if not bracket:
            return Parsed(text, text=text)
        if not rest.endswith("]"):
            return Parsed(text, malformed=True, text=text)
        calls = [ParsedCall(*one.split(" ", 1)) for one in rest[:-1].split("][")]
        return Parsed(content, tuple(calls), text=text)


class Adder(BaseTool[list[int]]):
    """Adds up all it is ever given in one conversation."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    made: list[list[int]] = []  # noqa: RUF012
    released: list[list[int]] = []  # noqa: RUF012
    gate: Callable[[int], Awaitable[None]] | None = None

    def create(self, context: ToolContext, **kwargs: Any) -> list[int]:
        state: list[int] = []
        type(self).made.append(state)
        return state

    async def execute(self, state: list[int], arguments: Mapping[str, Any], **kwargs: Any) -> ToolResponse:
        x = arguments["x"]
        if type(self).gate is not None:
            await type(self).gate(x)
        if x == 13:
            raise RuntimeError("unlucky")
        state.append(x)
        return ToolResponse(str(sum(state)), reward=0.25, metrics={"added": 1.0}, done=x == 99)

    def calc_reward(self, state: list[int], **kwargs: Any) -> float:
        return float(sum(state))

    def release(self, state: list[int], **kwargs: Any) -> None:
        type(self).released.append(state)


class Player(Environment):
    """Says what it is told to, and counts the turns."""

    def __init__(self, replies: Sequence[str] = (), opening: str = "") -> None:
        self._replies = list(replies)
        self._opening = opening
        self._seen: list[str] = []

    async def reset(self, context: EpisodeContext, *args: Any, **kwargs: Any) -> Sequence[Message]:
        return [{"role": "user", "content": self._opening}] if self._opening else ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        self._seen.append(text)
        if not self._replies:
            return Reply(done=True, reward=0.5)
        return Reply(self._replies.pop(0), reward=0.5)

    async def score(self) -> float | None:
        return float(len(self._seen))


@pytest.fixture(autouse=True)
def fresh_tool() -> None:
    Adder.made, Adder.released, Adder.gate = [], [], None


class Rig:
    """An agent whose policy says its lines one after the other, whatever it is told."""

    def __init__(self, *, template: str = TEMPLATE, interactions: Sequence[Any] = (), tools: Sequence[Any] = ({},),
                 response_length: int = 200, **multi_turn: Any) -> None:  # fmt: skip
        entries = [{"class_name": TOOL, **entry} for entry in tools]
        self.config = Config.model_validate(
            {
                "rollout": {
                    "response_length": response_length,
                    "max_model_len": 400,
                    "multi_turn": {
                        "enable": True,
                        "tools": entries,
                        "interactions": list(interactions),
                        "tokenization_sanity_check_mode": "strict",
                        **multi_turn,
                    },
                }
            }
        )
        settings = self.config.rollout.multi_turn
        self.tokenizer = load_tokenizer(self.config.model)
        self.tokenizer.chat_template = template
        self.chat = Chat(self.tokenizer)
        self.agent = Agent(
            self.config,
            chat=self.chat,
            parser=LineParser(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True)),  # type: ignore[arg-type]
            tools=ToolBox(load_tools(settings.tools)) if tools else None,
            interactions=load_interactions(settings.interactions) if interactions else None,
        )
        self.asked: list[TurnRequest] = []

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids))

    def prompt(self) -> Prompt:
        messages = ({"role": "user", "content": "1"},)
        return Prompt(np.array(self.chat.prompt(messages), dtype=np.int32), messages, ground_truth="3")

    async def converse(self, *lines: str | BaseException | float, number: int = 0) -> Trajectory:
        script = list(lines)

        async def ask(request: TurnRequest) -> Turn:
            self.asked.append(request)
            line = script.pop(0)
            if isinstance(line, float):
                await anyio.sleep(line)
                line = script.pop(0)
            if isinstance(line, BaseException):
                raise line
            assert isinstance(line, str)
            ids = [*self.ids(line), self.tokenizer.eos_token_id]
            finish = FinishReason.STOP
            if line.endswith("…") or len(ids) > request.max_tokens:
                ids, finish = ids[: min(len(ids) - 2, request.max_tokens)], FinishReason.LENGTH
            version = len(self.asked)
            log_probs = np.full(len(ids), -0.5, dtype=np.float32)
            return Turn(np.array(ids, dtype=np.int32), log_probs, (Span(0, version),), finish)

        async with self.agent:
            return await self.agent.converse(SampleId(0, 1), number, self.prompt(), ask)


async def test_a_turn_without_a_call_is_all_there_is() -> None:
    rig = Rig()
    one = await rig.converse("3")
    (row,) = one.rows
    assert rig.text(row.response_ids) == "3" + rig.tokenizer.eos_token
    assert row.response_mask.all() and one.finish_reason is FinishReason.STOP
    assert one.messages == ({"role": "user", "content": "1"}, {"role": "assistant", "content": "3"})
    assert Adder.made == [], "nobody has called it"


async def test_a_call_is_answered_and_the_policy_goes_on() -> None:
    rig = Rig()
    one = await rig.converse('[add {"x": 2}]', '[add {"x": 5}]', "7")
    (row,) = one.rows
    eos = rig.tokenizer.eos_token
    said = f'[add {{"x": 2}}]{eos}<|tool|>2{eos}<|assistant|>[add {{"x": 5}}]{eos}<|tool|>7{eos}<|assistant|>7{eos}'
    assert row.response_ids.tolist() == rig.ids(said)
    assert [rig.text(one.turn_ids(k)) for k in range(3)] == [
        f'[add {{"x": 2}}]{eos}',
        f'[add {{"x": 5}}]{eos}',
        f"7{eos}",
    ]
    told = rig.text(row.response_ids[~row.response_mask])
    assert told == f"<|tool|>2{eos}<|assistant|><|tool|>7{eos}<|assistant|>"
    assert (
        not row.rollout_log_probs[~row.response_mask].any() and (row.rollout_log_probs[row.response_mask] == -0.5).all()
    )
    assert [span.version for span in row.spans] == [1, 2, 3]
    assert [span.first_token for span in row.spans] == [turn.first_token for turn in one.turns]
    assert [turn.finish_reason for turn in one.turns] == [FinishReason.TOOL_CALL] * 2 + [FinishReason.STOP]
    assert [call.result for turn in one.turns for call in turn.calls] == ["2", "7"], "its state lives on"
    assert [turn.reward for turn in one.turns] == [0.25, 0.25, 0.0]
    assert one.scores == {"add": 7.0} and one.metrics == {"add/added": 2.0}
    assert Adder.released == Adder.made == [[2, 5]]
    # Every turn is sampled behind what was really there.
    assert rig.asked[2].context.tolist() == [*rig.prompt().prompt_ids, *rig.ids(said)[: one.turns[2].first_token]]


async def test_calls_of_one_turn_are_made_together_and_answered_in_order() -> None:
    rig = Rig(max_parallel_calls=2)
    met = anyio.Event()
    order: list[int] = []

    async def gate(x: int) -> None:
        if x == 1:
            await met.wait()
        order.append(x)
        met.set()

    Adder.gate = staticmethod(gate)  # type: ignore[assignment]
    one = await rig.converse('[add {"x": 1}][add {"x": 2}][add {"x": 3}]', "6")
    assert order == [2, 1], "none waits for another"
    calls = one.turns[0].calls
    assert [(call.arguments, call.status) for call in calls] == [
        ('{"x": 1}', "ok"), ('{"x": 2}', "ok"), ('{"x": 3}', "too_many"),
    ]  # fmt: skip
    tools = [message for message in one.messages if message["role"] == "tool"]
    assert [message["content"] for message in tools] == [call.result for call in calls]
    assert len(Adder.made) == 1


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ('[add {"x": 1', "bad_json", ""),
        ("[add nonsense]", "bad_json", ""),
        ('[subtract {"x": 1}]', "unknown_tool", "add"),
        ('[add {"y": 1}]', "bad_arguments", "x"),
        ('[add {"x": 13}]', "raised", "unlucky"),
    ],
)
async def test_what_goes_wrong_with_a_call_is_told_to_the_model(line: str, status: str, told: str) -> None:
    rig = Rig(tokenization_sanity_check_mode="off")
    one = await rig.converse(line, "3")
    assert one.turns[0].calls[0].status == status
    assert told in one.messages[2]["content"] and one.messages[2]["content"]
    assert rig.agent.status()[f"tool_calls/{status}"] == 1
    assert one.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("on_error", ["drop", "stop"])
async def test_a_tool_that_fails_may_end_the_sample_or_the_run(on_error: str) -> None:
    rig = Rig(tools=[{"on_error": on_error}])
    with pytest.raises(ToolFailedError, match="unlucky") as caught:
        await rig.converse('[add {"x": 13}]', "3")
    assert caught.value.on_error == on_error
    assert len(Adder.released) == len(Adder.made) == 1


async def test_a_tool_that_takes_too_long_is_told_to_the_model() -> None:
    rig = Rig(tools=[{"timeout_s": 0.02}])

    async def gate(x: int) -> None:
        await anyio.sleep_forever()

    Adder.gate = staticmethod(gate)  # type: ignore[assignment]
    one = await rig.converse('[add {"x": 1}]', "3")
    assert one.turns[0].calls[0].status == "timeout"
    assert len(Adder.released) == 1


async def test_a_tool_may_end_it() -> None:
    one = await Rig().converse('[add {"x": 99}]')
    assert one.finish_reason is FinishReason.TOOL_CALL
    assert one.scores == {"add": 99.0}
    assert one.rows[0].response_mask.all(), "nobody reads the answer"


async def test_the_last_turn_may_not_call() -> None:
    one = await Rig(max_assistant_turns=2).converse('[add {"x": 1}]', '[add {"x": 2}]')
    assert one.finish_reason is FinishReason.MAX_TURNS
    assert one.turns[1].calls == () and Adder.made == [[1]]


async def test_a_turn_that_is_cut_ends_it() -> None:
    one = await Rig().converse('[add {"x": 1}]', "33333…")
    assert one.finish_reason is FinishReason.LENGTH
    assert one.rows[0].response_mask[-1]


async def test_an_answer_that_leaves_no_room_ends_it() -> None:
    line = '[add {"x": 1}]'
    rig = Rig(response_length=len(Rig().ids(line)) + 4)
    one = await rig.converse(line)
    assert one.finish_reason is FinishReason.LENGTH
    assert one.rows[0].response_mask.all() and len(one.turns) == 1
    assert one.turns[0].calls[0].status == "ok", "it was made, and counts"


async def test_budgets_are_of_the_whole_trajectory() -> None:
    rig = Rig(response_length=60)
    await rig.converse('[add {"x": 1}]', "2")
    first, second = rig.asked
    assert first.max_tokens == 60
    assert second.max_tokens == 60 - (len(second.context) - len(first.context))


async def test_long_answers_are_cut() -> None:
    rig = Rig(tools=[{}], max_tool_response_length=6, tool_response_truncate_side="middle")
    one = await rig.converse('[add {"x": 123456789123}]', "3")
    assert len(rig.ids(one.turns[0].calls[0].result)) <= 6
    assert one.messages[2]["content"] == one.turns[0].calls[0].result


async def test_a_conversation_may_be_out_of_time_and_is_kept() -> None:
    rig = Rig(timeout_s=0.05)
    one = await rig.converse('[add {"x": 1}]', 60.0, "never said")
    assert one.finish_reason is FinishReason.TIMEOUT
    assert len(one.turns) == 1 and one.scores == {"add": 1.0}
    assert one.rows[0].response_mask.all()


async def test_out_of_time_without_a_turn_it_is_dropped() -> None:
    with pytest.raises(TooLongError, match=r"multi_turn\.timeout_s"):
        await Rig(timeout_s=0.02).converse(60.0, "never said")


async def test_tools_are_released_when_a_conversation_is_cancelled_in_one() -> None:
    rig = Rig()
    inside = anyio.Event()

    async def gate(x: int) -> None:
        inside.set()
        await anyio.sleep_forever()

    Adder.gate = staticmethod(gate)  # type: ignore[assignment]
    async with anyio.create_task_group() as group:
        group.start_soon(rig.converse, '[add {"x": 1}]', "3")
        await inside.wait()
        group.cancel_scope.cancel()
    assert Adder.released == [[]]


async def test_tools_are_released_when_the_engines_fail() -> None:
    rig = Rig()
    with pytest.raises(DataError, match="no room"):
        await rig.converse('[add {"x": 1}]', DataError("no room"))
    assert Adder.released == [[1]]


# ------------------------------------------------------------------------------------------------ users


async def test_a_user_answers_until_it_is_done() -> None:
    rig = Rig(tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2"]}}])
    one = await rig.converse("5", "6")
    assert [(m["role"], m["content"]) for m in one.messages] == [
        ("user", "1"), ("assistant", "5"), ("user", "2"), ("assistant", "6"),
    ]  # fmt: skip
    assert one.finish_reason is FinishReason.STOP
    assert [turn.reward for turn in one.turns] == [0.5, 0.5] and one.scores == {"environment": 2.0}


async def test_an_environment_may_speak_first() -> None:
    rig = Rig(tools=(), interactions=[{"class_name": PLAYER, "config": {"opening": "9"}}])
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
async def test_every_answer_is_judged_the_last_one_too(
    settings: dict[str, Any], lines: tuple[str, ...], reason: FinishReason
) -> None:
    rig = Rig(tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2", "3"]}}], **settings)
    one = await rig.converse(*lines)
    assert one.finish_reason is reason
    assert one.scores == {"environment": 2.0} and [turn.reward for turn in one.turns] == [0.5, 0.5]
    assert one.rows[0].response_mask[-1], "what nobody reads is not kept"


# ------------------------------------------------------------------------------------------------ rewritten history


async def test_a_template_that_rewrites_history_forks_the_trajectory() -> None:
    rig = Rig(template=FORGETFUL, tools=(), interactions=[{"class_name": PLAYER, "config": {"replies": ["2", "3"]}}])
    one = await rig.converse("55", "66", "77")
    eos = rig.tokenizer.eos_token
    assert [rig.text(row.response_ids) for row in one.rows] == [f"55{eos}", f"66{eos}", f"77{eos}"]
    assert [turn.row for turn in one.turns] == [0, 1, 2]
    assert rig.text(one.rows[2].prompt_ids).count("?") == 2 and "55" not in rig.text(one.rows[2].prompt_ids)
    for request, row in zip(rig.asked, one.rows, strict=True):
        assert request.context.tolist() == row.prompt_ids.tolist(), "trained behind what it was sampled behind"
    assert rig.agent.status()["rewrites"] == 1


# ------------------------------------------------------------------------------------------------ the check at the end


class Sloppy(LineParser):
    """Leaves out what the policy wrote before a call."""

    def parse(self, ids: Sequence[int]) -> Parsed:
        parsed = super().parse(ids)
        return Parsed(parsed.content.replace("5", ""), parsed.calls, text=parsed.text)


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
async def test_tokens_that_the_template_would_not_give_are_found(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tokenization_sanity_check_mode=mode)
    rig.agent._parser = Sloppy(lambda ids: rig.tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[assignment]
    if mode == "strict":
        with pytest.raises(MismatchError, match="other tokens"):
            await rig.converse('5[add {"x": 2}]', "3")
        return
    caplog.set_level(logging.WARNING)
    one = await rig.converse('5[add {"x": 2}]', "3")
    assert one.finish_reason is FinishReason.STOP
    assert rig.agent.status()["token_mismatches"] == (mode == "warn")
    assert ("other tokens" in caplog.text) == (mode == "warn")


def test_what_conversations_depend_on_is_plain() -> None:
    told = Rig().agent.identity()
    assert json.loads(json.dumps(told)) == told
