"""How late an event loop is on which conversations are held."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.ports import EngineFleet
from benchmarks.agents.conversations import (
    MODEL,
    TURN_LENGTHS,
    BlockingTool,
    N,
    SlowTool,
    Sums,
    conversing,
    made_agent,
)
from benchmarks.agents.fleets import DrawnFleet
from benchmarks.agents.rollouts import Work, pumping
from benchmarks.agents.tools import IN_FLIGHT
from benchmarks.skip.samples import Table, say

TICK_S = 0.002
LATENCY_S = 0.1
"""Of a tool: with a slower one, most conversations would wait, and the loop have little to do."""
WARM_UP_S = 1.5
LOAD_S = 6.0
BESIDE: dict[str, type[SlowTool]] = {"async tools": SlowTool, "tools in threads": BlockingTool}


async def measure_lag(
    fleet: EngineFleet, rounds: int, *, load_s: float = LOAD_S, warm_up_s: float = WARM_UP_S
) -> Table:
    """A row without load, and one beside each kind of tool; `load_s` is how long each is looked at in a round."""
    late: dict[str, list[float]] = {"nothing": [], **{name: [] for name in BESIDE}}
    turns, watched = dict.fromkeys(late, 0), dict.fromkeys(late, 0.0)
    for number in range(rounds):
        say(f"lag, round {number + 1} of {rounds}")
        late["nothing"] += await lateness(load_s)
        for name, tool in BESIDE.items():
            config = Config.model_validate(
                {
                    "model": {"path": MODEL},
                    "rollout": {**conversing(tool, latency_s=LATENCY_S), "max_concurrent_samples": IN_FLIGHT // N},
                    "async_training": {"staleness_threshold": 1e6},
                }
            )
            async with made_agent(config) as agent:
                work = Work(config, Sums(config), DrawnFleet(fleet, TURN_LENGTHS, seed=number), agent)
                async with pumping(work):
                    await anyio.sleep(warm_up_s)
                    before, started = agent.counts.turns, time.perf_counter()
                    late[name] += await lateness(load_s)
                    watched[name] += time.perf_counter() - started
                    turns[name] += agent.counts.turns - before
    return [_row(name, late[name], turns[name], watched[name]) for name in late]


async def lateness(seconds: float) -> list[float]:
    """Seconds by which something due every `TICK_S` came late: what came due during one halt is late as well."""
    late: list[float] = []
    started = time.perf_counter()
    due = itertools.count(1)
    while (now := time.perf_counter()) < started + seconds:
        when = started + next(due) * TICK_S
        await asyncio.sleep(max(0.0, when - now))
        late.append(max(0.0, time.perf_counter() - when))
    return late


def percentiles_ms(late: Iterable[float]) -> dict[str, float]:
    """Of seconds."""
    p50, p99, most = np.percentile(np.fromiter(late, dtype=np.float64), (50, 99, 100))
    return {"p50 ms": 1e3 * float(p50), "p99 ms": 1e3 * float(p99), "max ms": 1e3 * float(most)}


def _row(name: str, late: list[float], turns: int, watched_s: float) -> dict[str, Any]:
    rate = turns / watched_s if watched_s else 0.0
    return {"beside": name, "turns/s": rate, "ticks": len(late), **percentiles_ms(late)}
