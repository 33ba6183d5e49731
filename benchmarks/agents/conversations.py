"""Conversations of a known number of turns, with a model that knows nothing of tools: its tools, parser and prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.types import Prompt, SampleId
from benchmarks.agents.fleets import Lengths
from rollouter.agent.chat import Chat
from rollouter.agent.loop import Agent
from rollouter.agent.parsing import CallParser, Parsed, ParsedCall
from rollouter.template import end_token_ids, load_tokenizer
from rollouter.tools.base import BaseTool, ToolContext
from rollouter.tools.box import ToolBox
from rollouter.tools.loading import load_tools

MODEL = "asyncrl://calculator"
"""Shipped: 0.9M parameters, characters as tokens, a template with tools, a context of 1,024."""
MAX_MODEL_LEN = 1024
N = 8
"""Trajectories of a sample."""
TURNS = 4
"""Of the model in each conversation; its tool is called between them."""
TURN_LENGTHS = Lengths(median=32, sigma=1.0, longest=200)
"""49 tokens on average, and the longest of 64 has 197."""
TOOL = "work"
FORMAT = "hermes"
"""In which it is called."""
FILLER = "7"
NUM_PROMPTS = 1 << 40


class SlowTool(BaseTool[random.Random]):
    """Takes its time without using any."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": TOOL, "description": "Works.", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self, latency_s: float, jitter: float = 0.0) -> None:
        """A call takes `latency_s`, give or take up to a share of it: uniform, seeded by the trajectory."""
        self._latency_s = latency_s
        self._jitter = jitter

    async def create(self, context: ToolContext, **kwargs: Any) -> random.Random:
        return random.Random(f"{context.sample_id}/{context.trajectory}")

    async def execute(self, state: random.Random, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        if self._latency_s:
            await anyio.sleep(self.seconds(state))
        return "done"

    def seconds(self, state: random.Random) -> float:
        """Of the next call."""
        return self._latency_s * (1 + state.uniform(-self._jitter, self._jitter))


class BlockingTool(SlowTool):
    """The same, written without async: it blocks its thread, and works a little besides."""

    LOOPS = 20_000
    """About 1 ms of Python, in which nobody else in the process runs any."""

    def execute(self, state: random.Random, arguments: Mapping[str, Any], **kwargs: Any) -> str:  # type: ignore[override]
        time.sleep(self.seconds(state))
        return str(sum(range(self.LOOPS)))


class ScriptedParser(CallParser):
    """Reads every turn as ever, and then says that it was a call: whoever is asked never learnt to call anything.

    `multi_turn.max_assistant_turns` ends the conversation.
    """

    def parse(self, ids: Sequence[int]) -> Parsed:
        super().parse(ids)
        text = FILLER * len(ids)
        return Parsed(text, (ParsedCall(TOOL, "{}"),), text=text)


class Sums:
    """`PromptSource` without end."""

    def __init__(self, config: Config) -> None:
        self._chat = Chat(load_tokenizer(config.model))

    def __len__(self) -> int:
        return NUM_PROMPTS

    def at(self, sample_id: SampleId) -> Prompt:
        messages = ({"role": "user", "content": f"{sample_id.index % 1000}+{sample_id.index % 77}="},)
        return Prompt(np.asarray(self._chat.prompt(messages), dtype=np.int32), messages)


def conversing(tool: type[SlowTool] = SlowTool, *, turns: int = TURNS, **settings: Any) -> dict[str, Any]:
    """The configuration's `rollout`, with this one tool.

    Args:
        settings: Of the tool.
    """
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


def made_agent(
    config: Config, *, parser: Callable[..., CallParser] = ScriptedParser, chat: Callable[..., Chat] = Chat
) -> Agent:
    """As `rollouter.agent.loading` makes it, but for this parser and this chat."""
    tokenizer = load_tokenizer(config.model)
    settings = config.rollout.multi_turn
    box = ToolBox(load_tools(settings.tools))
    end_ids = end_token_ids(config.model, tokenizer)
    speaking = chat(tokenizer, tools=box.schemas, template_kwargs=config.model.chat_template_kwargs, end_ids=end_ids)
    return Agent(
        config,
        chat=speaking,
        parser=parser(settings.format, tokenizer, box.schemas, end_ids=speaking.end_ids),
        schemas=box.schemas,
        tools=box,
        interactions=None,
    )
