"""Conversations with a slow tool: each on its own way, against all of them in step."""

from __future__ import annotations

import statistics
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.ports import EngineFleet
from benchmarks.agents.conversations import MODEL, TURN_LENGTHS, TURNS, N, Sums, conversing, made_agent
from benchmarks.agents.fleets import BarrierFleet, DrawnFleet, Lengths
from benchmarks.agents.rollouts import Outcome, Work, take
from benchmarks.skip.samples import Table, ratio, say
from rollouter.agent.loop import Agent

IN_FLIGHT = 64
LATENCY_S = 0.5
BATCHES = 3
WAYS = ("barrier", "streaming")


async def measure_tools(
    fleet: EngineFleet,
    rounds: int,
    *,
    latency_s: float = LATENCY_S,
    jitter: float = 0.0,
    batches: int = BATCHES,
    lengths: Lengths = TURN_LENGTHS,
) -> Table:
    """A row for each way.

    Args:
        fleet: The engines.
        latency_s: Of one call of the tool, give or take a share `jitter` of it.
        batches: Of `IN_FLIGHT` trajectories, in each round.
        lengths: Of turns.
    """
    configs = {way: _config(latency_s, jitter, ahead) for way, ahead in zip(WAYS, (0, batches), strict=True)}
    prompts, agent = Sums(configs["barrier"]), made_agent(configs["barrier"])
    outcomes: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    async with agent:
        for number in range(-1, rounds):
            say(f"tools, round {number + 1} of {rounds}" if number >= 0 else "tools, warming up")
            for way, config in configs.items():
                engines = BarrierFleet(fleet, IN_FLIGHT) if way == "barrier" else fleet
                work = Work(config, prompts, DrawnFleet(engines, lengths, seed=number), agent)
                if number >= 0:
                    outcomes[way].append(_checked(await take(work, batches), agent))
                elif way == "streaming":
                    await take(work, 1)
    return [_row(way, outcomes) for way in WAYS]


def _config(latency_s: float, jitter: float, ahead: float) -> Config:
    """`ahead`: batches beyond the first one that may be begun before it is done."""
    return Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {**conversing(latency_s=latency_s, jitter=jitter), "max_concurrent_samples": IN_FLIGHT // N},
            "trainer": {"ppo_mini_batch_size": IN_FLIGHT // N},
            "async_training": {"staleness_threshold": ahead},
        }
    )


def _checked(outcome: Outcome, agent: Agent) -> Outcome:
    """
    Raises:
        SystemExit: the conversations were not those that were to be measured.
    """
    turns = {row.reward_extra["num_turns"] for sample in outcome.samples for row in sample.rows}
    if turns != {float(TURNS)} or agent.counts.rewrites:
        raise SystemExit(f"conversations of {turns} turns, {agent.counts.rewrites} rewritten: {TURNS} and 0 expected")
    return outcome


def _row(way: str, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    mine = outcomes[way]
    rates = {name: [one.trajectories / one.seconds for one in some] for name, some in outcomes.items()}
    return {
        "way": way,
        "trajectories": sum(one.trajectories for one in mine),
        "per s": statistics.median(rates[way]),
        "least": min(rates[way]),
        "most": max(rates[way]),
        "tokens/s": statistics.median(one.sampled_tokens / one.seconds for one in mine),
        "ratio": ratio(rates[way], rates["barrier"]),
    }
