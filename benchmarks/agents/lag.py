"""Measure how late timers are on an event loop that runs conversations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet
from benchmarks.agents.conversations import (
    MODEL,
    TURN_LENGTHS,
    BlockingTool,
    N,
    SlowTool,
    SumPrompts,
    conversation_settings,
    make_agent,
)
from benchmarks.agents.fleets import DrawnFleet
from benchmarks.agents.rollouts import RolloutWork, running_dispatcher
from benchmarks.agents.tools import IN_FLIGHT
from benchmarks.report import Table
from benchmarks.running import print_progress

TICK_S = 0.002
LATENCY_S = 0.1
"""Latency of a tool. With a slower tool, most conversations would be waiting, and the loop would be idle."""
WARM_UP_S = 1.5
LOAD_S = 6.0
BESIDE: dict[str, type[SlowTool]] = {"async tools": SlowTool, "tools in threads": BlockingTool}


async def measure_lag(
    fleet: EngineFleet, rounds: int, *, load_s: float = LOAD_S, warm_up_s: float = WARM_UP_S
) -> Table:
    """Return a row for an idle loop and one for each kind of tool, each measured for `load_s` in a round."""
    late: dict[str, list[float]] = {"nothing": [], **{name: [] for name in BESIDE}}
    turns, watched = dict.fromkeys(late, 0), dict.fromkeys(late, 0.0)
    for number in range(rounds):
        print_progress(f"lag, round {number + 1} of {rounds}")
        late["nothing"] += await lateness(load_s)
        for name, tool in BESIDE.items():
            config = Config.model_validate(
                {
                    "model": {"path": MODEL},
                    "rollout": {
                        **conversation_settings(tool, latency_s=LATENCY_S),
                        "max_concurrent_samples": IN_FLIGHT // N,
                    },
                    "async_training": {"staleness_threshold": 1e6},
                }
            )
            async with make_agent(config) as agent:
                work = RolloutWork(config, SumPrompts(config), DrawnFleet(fleet, TURN_LENGTHS, seed=number), agent)
                async with running_dispatcher(work):
                    await anyio.sleep(warm_up_s)
                    before, started = agent.counts.turns, time.perf_counter()
                    late[name] += await lateness(load_s)
                    watched[name] += time.perf_counter() - started
                    turns[name] += agent.counts.turns - before
    return [_row(name, late[name], turns[name], watched[name]) for name in late]


async def lateness(seconds: float) -> list[float]:
    """Return how late each tick of `TICK_S` was, including every tick that was due while the loop was blocked."""
    late: list[float] = []
    started = time.perf_counter()
    due = itertools.count(1)
    while (now := time.perf_counter()) < started + seconds:
        when = started + next(due) * TICK_S
        await asyncio.sleep(max(0.0, when - now))
        late.append(max(0.0, time.perf_counter() - when))
    return late


def percentiles_ms(late: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds of a lateness in seconds."""
    p50, p99, most = np.percentile(np.fromiter(late, dtype=np.float64), (50, 99, 100))
    return {"p50 ms": 1e3 * float(p50), "p99 ms": 1e3 * float(p99), "max ms": 1e3 * float(most)}


def _row(name: str, late: list[float], turns: int, watched_s: float) -> dict[str, Any]:
    rate = turns / watched_s if watched_s else 0.0
    return {"beside": name, "turns/s": rate, "ticks": len(late), **percentiles_ms(late)}
