"""The built-in agent on a scripted policy, with a tool that adds and an environment with fixed replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, Turn
from rollouter.agent.chat import ChatTokenizer
from rollouter.agent.conversation import TurnRequest
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import ParsedCall, ParsedTurn
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.loading import load_interactions
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.tools.base import BaseTool, ToolContext, ToolResponse
from rollouter.tools.loading import load_tools
from rollouter.tools.toolbox import Toolbox

PLAYER = f"{__name__}:Player"
TOOL = f"{__name__}:Adder"

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '?' }}")


class LineParser:
    """A parser for which `[name {"json": 1}]` is a call, and a `[` without its end is a malformed one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        text = self._decode(ids)
        content, bracket, rest = text.partition("[")
        if not bracket:
            return ParsedTurn(text, text=text)
        if not rest.endswith("]"):
            return ParsedTurn(text, malformed=True, text=text)
        calls = [ParsedCall(*one.split(" ", 1)) for one in rest[:-1].split("][")]
        return ParsedTurn(content, tuple(calls), text=text)


class Adder(BaseTool[list[int]]):
    """Adds up the numbers of one conversation."""

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
    answer: str | None = None
    """The text of every answer; None: the sum."""

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
        text = str(sum(state)) if type(self).answer is None else type(self).answer
        return ToolResponse(text, reward=0.25, metrics={"added": 1.0}, done=x == 99)

    def calc_reward(self, state: list[int], **kwargs: Any) -> float:
        return float(sum(state))

    def release(self, state: list[int], **kwargs: Any) -> None:
        type(self).released.append(state)


class Player(Environment):
    """Replies with fixed texts and counts the turns."""

    messages: Sequence[Any] = ()
    """The first messages of every conversation, unless `opening` is set."""

    def __init__(self, replies: Sequence[str] = (), opening: str = "") -> None:
        """`opening` is a user's text."""
        self._replies = list(replies)
        self._opening = opening
        self._seen: list[str] = []

    async def reset(self, context: EpisodeContext, *args: Any, **kwargs: Any) -> Sequence[Message]:
        return [{"role": "user", "content": self._opening}] if self._opening else self.messages

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        self._seen.append(text)
        if not self._replies:
            return Reply(done=True, reward=0.5)
        return Reply(self._replies.pop(0), reward=0.5)

    async def score(self) -> float | None:
        return float(len(self._seen))


class AgentRig:
    """An agent whose policy samples the given lines one after the other."""

    def __init__(self, *, template: str = TEMPLATE, interactions: Sequence[Any] = (), tools: Sequence[Any] = ({},),
                 response_length: int = 200, max_model_len: int = 400, **multi_turn: Any) -> None:  # fmt: skip
        entries = [{"class_name": TOOL, **entry} for entry in tools]
        self.config = Config.model_validate(
            {
                "rollout": {
                    "response_length": response_length,
                    "max_model_len": max_model_len,
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
        self.chat = ChatTokenizer(self.tokenizer)
        self.agent = BuiltInAgent(
            self.config,
            chat=self.chat,
            parser=LineParser(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True)),  # type: ignore[arg-type]
            tools=Toolbox(load_tools(settings.tools)) if tools else None,
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
