"""Measure conversations with a slow tool: independent of each other, against all of them in lockstep."""

from __future__ import annotations

import statistics
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet
from benchmarks.agents.conversations import MODEL, TURN_LENGTHS, TURNS, N, SumPrompts, conversation_settings, make_agent
from benchmarks.agents.fleets import BarrierFleet, DrawnFleet, TurnLengths
from benchmarks.agents.rollouts import RolloutOutcome, RolloutWork, take
from benchmarks.report import Table
from benchmarks.running import print_progress, ratio
from rollouter.agent.loop import BuiltInAgent

IN_FLIGHT = 64
LATENCY_S = 0.5
BATCHES = 3
VARIANTS = ("barrier", "streaming")


async def measure_tools(
    fleet: EngineFleet,
    rounds: int,
    *,
    latency_s: float = LATENCY_S,
    jitter: float = 0.0,
    batches: int = BATCHES,
    lengths: TurnLengths = TURN_LENGTHS,
) -> Table:
    """Return a row for streaming and one for the barrier.

    Args:
        fleet: The engines.
        latency_s: Latency of a tool call.
        jitter: The share of the latency by which a call varies at most.
        batches: Batches of `IN_FLIGHT` trajectories in a round.
        lengths: Lengths of turns.
    """
    configs = {name: _config(latency_s, jitter, ahead) for name, ahead in zip(VARIANTS, (0, batches), strict=True)}
    prompts, agent = SumPrompts(configs["barrier"]), make_agent(configs["barrier"])
    outcomes: dict[str, list[RolloutOutcome]] = {variant: [] for variant in VARIANTS}
    async with agent:
        for number in range(-1, rounds):
            print_progress(f"tools, round {number + 1} of {rounds}" if number >= 0 else "tools, warming up")
            for variant, config in configs.items():
                engines = BarrierFleet(fleet, IN_FLIGHT) if variant == "barrier" else fleet
                work = RolloutWork(config, prompts, DrawnFleet(engines, lengths, seed=number), agent)
                if number >= 0:
                    outcomes[variant].append(_checked(await take(work, batches), agent))
                elif variant == "streaming":
                    await take(work, 1)
    return [_row(variant, outcomes) for variant in VARIANTS]


def _config(latency_s: float, jitter: float, ahead: float) -> Config:
    """Return the configuration. `ahead` is the number of batches that may start before the first one is complete."""
    return Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {
                **conversation_settings(latency_s=latency_s, jitter=jitter),
                "max_concurrent_samples": IN_FLIGHT // N,
            },
            "trainer": {"ppo_mini_batch_size": IN_FLIGHT // N},
            "async_training": {"staleness_threshold": ahead},
        }
    )


def _checked(outcome: RolloutOutcome, agent: BuiltInAgent) -> RolloutOutcome:
    """Return `outcome` if its conversations have the expected turns.

    Raises:
        SystemExit: they have another number of turns, or a rewritten history.
    """
    turns = {row.reward_extra["num_turns"] for sample in outcome.samples for row in sample.rows}
    if turns != {float(TURNS)} or agent.counts.rewrites:
        raise SystemExit(f"conversations of {turns} turns, {agent.counts.rewrites} rewritten: {TURNS} and 0 expected")
    return outcome


def _row(variant: str, outcomes: dict[str, list[RolloutOutcome]]) -> dict[str, Any]:
    mine = outcomes[variant]
    rates = {name: [one.trajectories / one.seconds for one in some] for name, some in outcomes.items()}
    return {
        "variant": variant,
        "trajectories": sum(one.trajectories for one in mine),
        "per s": statistics.median(rates[variant]),
        "least": min(rates[variant]),
        "most": max(rates[variant]),
        "tokens/s": statistics.median(one.sampled_tokens / one.seconds for one in mine),
        "ratio": ratio(rates[variant], rates["barrier"]),
    }
