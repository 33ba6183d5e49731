"""Measure the CPU time of the event loop's thread for each turn of a conversation, on engines that answer at once."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
from anyio import lowlevel

from asyncrl.config.schema import Config
from asyncrl.core.ports import ApplyReport, GenerateRequest, GenerationEvent, Publication, TurnFinished
from asyncrl.core.trajectory import SampleRequest, Trajectory
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, Turn
from benchmarks.agents.conversations import MAX_MODEL_LEN, MODEL, TOOL, N, SumPrompts, conversation_settings, make_agent
from benchmarks.report import Table
from benchmarks.running import print_progress
from rollouter.agent.chat import ChatExtension, ChatTokenizer, Message
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import ParsedTurn, ToolCallParser
from rollouter.group import GroupGeneration
from rollouter.prompts.chat_template import load_tokenizer

CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{}}}}\n</tool_call><eos>'
ANSWER = "42<eos>"
TURNS = (1, 2, 4, 8)
GROUPS = 8
PARTS = ("parse", "extend", "check")
"""The timed parts: parsing turns, tokenizing tool results, and comparing the tokens of finished conversations with
those of the chat template."""


class RecitingFleet:
    """Engines that answer at once, with a tool call in every turn but the last."""

    def __init__(self, call: Sequence[int], answer: Sequence[int], turns: int) -> None:
        self._turns = turns
        self._call, self._answer = (
            Turn(
                np.asarray(ids, dtype=np.int32),
                np.full(len(ids), -0.5, dtype=np.float32),
                (Span(0, 0),),
                FinishReason.STOP,
            )
            for ids in (call, answer)
        )

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        await lowlevel.checkpoint()
        for number, request in enumerate(requests):
            yield TurnFinished(number, self._turn(request.request_id))

    def _turn(self, request_id: str) -> Turn:
        number = int(request_id.partition("/")[2].partition(".")[2] or 0)
        return self._answer if number + 1 >= self._turns else self._call

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return []


class Stopwatch:
    """Measures the CPU seconds of this thread in named parts, which must not be nested."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - started


class TimedParser(ToolCallParser):
    def __init__(self, watch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        with self._watch.on("parse"):
            return super().parse(ids)


class TimedChat(ChatTokenizer):
    def __init__(self, watch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch

    def extend(self, before: Sequence[Message], new: Sequence[Message], sampled: Sequence[int]) -> ChatExtension:
        with self._watch.on("extend"):
            return super().extend(before, new, sampled)

    def difference(self, row_ids: Sequence[int], messages: Sequence[Message]) -> str | None:
        with self._watch.on("check"):
            return super().difference(row_ids, messages)


def measure_cost(rounds: int, *, turns: Sequence[int] = TURNS, groups: int = GROUPS) -> Table:
    """Return a row without an agent and one for each number of turns, with `groups` concurrent groups of `N`."""
    cases = [("no", 1), *(("yes", number) for number in turns)]
    return [anyio.run(_row, name, number, rounds, groups) for name, number in cases]


async def _row(name: str, turns: int, rounds: int, groups: int) -> dict[str, Any]:
    """Return milliseconds per turn for all parts, also for `check`, which runs once per conversation."""
    print_progress(f"cost, {turns} turns, agent: {name}")
    config = Config.model_validate(
        {"model": {"path": MODEL}, "rollout": conversation_settings(turns=turns, latency_s=0.0)}
    )
    tokenizer = load_tokenizer(config.model)
    call, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CALL, ANSWER))
    fleet, prompt, watch = RecitingFleet(call, answer, turns), SumPrompts(config).at(SampleId(0, 1)), Stopwatch()
    agent = make_agent(config, parser=partial(TimedParser, watch), chat=partial(TimedChat, watch))
    spent: list[dict[str, float]] = []
    async with agent:
        for _ in range(rounds + 1):
            watch.seconds.clear()
            with watch.on("all"):
                await _generate(fleet, prompt, groups, agent if name == "yes" else None, turns)
            spent.append(dict(watch.seconds))
    if agent.counts.mismatches or agent.counts.rewrites:
        raise SystemExit(f"the recited calls differ from those of the chat template: {agent.counts}")
    ms = {
        part: 1e3 * statistics.median(one.get(part, 0.0) for one in spent[1:]) / (groups * N * turns)
        for part in ("all", *PARTS)
    }
    return {
        "agent": name,
        "turns": turns,
        "ms/turn": ms["all"],
        **{part: ms[part] for part in PARTS},
        "rest": ms["all"] - sum(ms[part] for part in PARTS),
        "ms/trajectory": ms["all"] * turns,
    }


async def _generate(fleet: RecitingFleet, prompt: Prompt, groups: int, agent: BuiltInAgent | None, turns: int) -> None:
    made: list[Trajectory] = []

    async def one(index: int) -> None:
        request = SampleRequest(SampleId(0, index), prompt, {"max_tokens": MAX_MODEL_LEN}, N)
        made.extend(await GroupGeneration(request, fleet=fleet, agent=agent).run())

    async with anyio.create_task_group() as tasks:
        for index in range(1, groups + 1):
            tasks.start_soon(one, index)
    if {len(one.turns) for one in made} != {turns}:
        raise SystemExit(f"the parser did not read the recited calls: not all conversations have {turns} turns")
