"""Conversations of a fixed number of turns with a model that cannot call tools: tools, parser and prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.types import Prompt, SampleId
from benchmarks.agents.fleets import TurnLengths
from rollouter.agent.chat import ChatTokenizer
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import ParsedCall, ParsedTurn, ToolCallParser
from rollouter.prompts.chat_template import end_token_ids, load_tokenizer
from rollouter.tools.base import BaseTool, ToolContext
from rollouter.tools.loading import load_tools
from rollouter.tools.toolbox import Toolbox

MODEL = "asyncrl://calculator"
"""The shipped model: 0.9M parameters, one token per character, a chat template with tools, a context of 1,024."""
MAX_MODEL_LEN = 1024
N = 8
"""Trajectories per sample."""
TURNS = 4
"""Assistant turns of a conversation, with a tool call between them."""
TURN_LENGTHS = TurnLengths(median=32, sigma=1.0, longest=200)
"""The mean is 49 tokens, and the longest of 64 turns has 197."""
TOOL = "work"
FORMAT = "hermes"
"""The tool-call format of the parser."""
FILLER = "7"
NUM_PROMPTS = 1 << 40


class SlowTool(BaseTool[random.Random]):
    """Sleeps for a configured latency."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": TOOL, "description": "Works.", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self, latency_s: float, jitter: float = 0.0) -> None:
        """`jitter`: the share of `latency_s` by which a call varies at most, uniformly and seeded by the trajectory."""
        self._latency_s = latency_s
        self._jitter = jitter

    async def create(self, context: ToolContext, **kwargs: Any) -> random.Random:
        return random.Random(f"{context.sample_id}/{context.trajectory}")

    async def execute(self, state: random.Random, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        if self._latency_s:
            await anyio.sleep(self.seconds(state))
        return "done"

    def seconds(self, state: random.Random) -> float:
        """Return the latency of the next call."""
        return self._latency_s * (1 + state.uniform(-self._jitter, self._jitter))


class BlockingTool(SlowTool):
    """A synchronous `SlowTool` that blocks its thread and also computes for a moment."""

    LOOPS = 20_000
    """About 1 ms of Python under the GIL."""

    def execute(self, state: random.Random, arguments: Mapping[str, Any], **kwargs: Any) -> str:  # type: ignore[override]
        time.sleep(self.seconds(state))
        return str(sum(range(self.LOOPS)))


class ScriptedParser(ToolCallParser):
    """Parses every turn and then returns a tool call instead, because the model never learnt to call tools.

    `multi_turn.max_assistant_turns` ends the conversation.
    """

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        super().parse(ids)
        text = FILLER * len(ids)
        return ParsedTurn(text, (ParsedCall(TOOL, "{}"),), text=text)


class SumPrompts:
    """A `PromptSource` of endless sums."""

    def __init__(self, config: Config) -> None:
        self._chat = ChatTokenizer(load_tokenizer(config.model))

    def __len__(self) -> int:
        return NUM_PROMPTS

    def at(self, sample_id: SampleId) -> Prompt:
        messages = ({"role": "user", "content": f"{sample_id.index % 1000}+{sample_id.index % 77}="},)
        return Prompt(np.asarray(self._chat.prompt(messages), dtype=np.int32), messages)


def conversation_settings(tool: type[SlowTool] = SlowTool, *, turns: int = TURNS, **settings: Any) -> dict[str, Any]:
    """Return the `rollout` section for conversations with this tool; `settings` are the tool's."""
    return {
        "n": N,
        "response_length": MAX_MODEL_LEN - 64,
        "max_model_len": MAX_MODEL_LEN,
        "multi_turn": {
            "enable": True,
            "format": FORMAT,
            "tools": [{"class_name": f"{tool.__module__}:{tool.__name__}", "config": settings}],
            "max_assistant_turns": turns,
        },
    }


def make_agent(
    config: Config,
    *,
    parser: Callable[..., ToolCallParser] = ScriptedParser,
    chat: Callable[..., ChatTokenizer] = ChatTokenizer,
) -> BuiltInAgent:
    """Make the agent as `rollouter.loading` does, but with this parser and this chat."""
    tokenizer = load_tokenizer(config.model)
    settings = config.rollout.multi_turn
    toolbox = Toolbox(load_tools(settings.tools))
    end_ids = end_token_ids(config.model, tokenizer)
    speaking = chat(
        tokenizer, tools=toolbox.schemas, template_kwargs=config.model.chat_template_kwargs, end_ids=end_ids
    )
    return BuiltInAgent(
        config,
        chat=speaking,
        parser=parser(settings.format, tokenizer, toolbox.schemas, end_ids=speaking.end_ids),
        schemas=toolbox.schemas,
        tools=toolbox,
        interactions=None,
    )
