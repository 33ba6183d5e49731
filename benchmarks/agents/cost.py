"""Python per turn of a conversation, on engines that answer at once. CPU time of the loop's thread, and of no other."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
from anyio import lowlevel

from asyncrl.config.schema import Config
from asyncrl.ports import ApplyReport, GenerateRequest, Publication
from asyncrl.trajectory import Trajectory
from asyncrl.types import FinishReason, Prompt, SampleId, Span, Turn
from benchmarks.agents.conversations import MAX_MODEL_LEN, MODEL, TOOL, N, Sums, conversing, made_agent
from benchmarks.skip.samples import Table, say
from rollouter.agent.chat import Chat, Extension, Message
from rollouter.agent.loop import Agent
from rollouter.agent.parsing import CallParser, Parsed
from rollouter.group import Group, Unheard, generate_group
from rollouter.template import load_tokenizer

CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{}}}}\n</tool_call><eos>'
ANSWER = "42<eos>"
TURNS = (1, 2, 4, 8)
GROUPS = 8
PARTS = ("parse", "extend", "check")
"""Turns read, answers made tokens, finished conversations compared with the template's own tokens."""


class RecitingFleet:
    """Engines that call the tool in every turn but the last, and take no time for it."""

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

    async def generate(self, requests: Sequence[GenerateRequest], **_: Any) -> list[Turn]:
        await lowlevel.checkpoint()
        return [self._turn(request.request_id) for request in requests]

    def _turn(self, request_id: str) -> Turn:
        number = int(request_id.partition("/")[2].partition(".")[2] or 0)
        return self._answer if number + 1 >= self._turns else self._call

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return []


class Stopwatch:
    """CPU seconds of this thread in named parts, which must not lie in each other."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - started


class TimedParser(CallParser):
    def __init__(self, watch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch

    def parse(self, ids: Sequence[int]) -> Parsed:
        with self._watch.on("parse"):
            return super().parse(ids)


class TimedChat(Chat):
    def __init__(self, watch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch

    def extend(self, before: Sequence[Message], new: Sequence[Message], sampled: Sequence[int]) -> Extension:
        with self._watch.on("extend"):
            return super().extend(before, new, sampled)

    def difference(self, row_ids: Sequence[int], messages: Sequence[Message]) -> str | None:
        with self._watch.on("check"):
            return super().difference(row_ids, messages)


def measure_cost(rounds: int, *, turns: Sequence[int] = TURNS, groups: int = GROUPS) -> Table:
    """A row without an agent, and one for each number of turns; `groups` of `N` trajectories at once."""
    cases = [("no", 1), *(("yes", number) for number in turns)]
    return [anyio.run(_row, name, number, rounds, groups) for name, number in cases]


async def _row(name: str, turns: int, rounds: int, groups: int) -> dict[str, Any]:
    """All parts are milliseconds per turn, `check` too, which is made once a conversation."""
    say(f"cost, {turns} turns, agent: {name}")
    config = Config.model_validate({"model": {"path": MODEL}, "rollout": conversing(turns=turns, latency_s=0.0)})
    tokenizer = load_tokenizer(config.model)
    call, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CALL, ANSWER))
    fleet, prompt, watch = RecitingFleet(call, answer, turns), Sums(config).at(SampleId(0, 1)), Stopwatch()
    agent = made_agent(config, parser=partial(TimedParser, watch), chat=partial(TimedChat, watch))
    spent: list[dict[str, float]] = []
    async with agent:
        for _ in range(rounds + 1):
            watch.seconds.clear()
            with watch.on("all"):
                await _generate(fleet, prompt, groups, agent if name == "yes" else None, turns)
            spent.append(dict(watch.seconds))
    if agent.counts.mismatches or agent.counts.rewrites:
        raise SystemExit(f"the calls that are recited are not the template's own: {agent.counts}")
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


async def _generate(fleet: RecitingFleet, prompt: Prompt, groups: int, agent: Agent | None, turns: int) -> None:
    made: list[Trajectory] = []

    async def one(index: int) -> None:
        sample_id = SampleId(0, index)
        group = Group(str(sample_id), sample_id, prompt, {"max_tokens": MAX_MODEL_LEN}, N)
        made.extend(await generate_group(fleet, group, Unheard(), agent=agent))

    async with anyio.create_task_group() as tasks:
        for index in range(1, groups + 1):
            tasks.start_soon(one, index)
    if {len(one.turns) for one in made} != {turns}:
        raise SystemExit(f"conversations of other than {turns} turns: the calls that are recited are not understood")
