"""Measure the time to the same number of finished samples, with and without over-sampling.

Each version needs all of its samples before the next one starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet
from benchmarks.agents.conversations import MAX_MODEL_LEN, MODEL, N, SumPrompts
from benchmarks.agents.fleets import DrawnFleet, TurnLengths
from benchmarks.agents.rollouts import RolloutOutcome, RolloutWork, take
from benchmarks.report import Table
from benchmarks.running import print_progress, ratio

SAMPLES = 16
"""Samples per version."""
VERSIONS = 3
LENGTHS = TurnLengths(median=48, sigma=0.6, longest=600, prompt_sigma=0.6)
"""The mean is 68 tokens, and the longest of 128 responses has 397."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "samples 20 %": {"samples": 0.2, "unfinished": "drop"},
    f"n = {N} + 2": {"trajectories": 2, "unfinished": "drop"},
}


@dataclass(frozen=True, slots=True)
class OverSamplingRound:
    """One setting in one round."""

    outcome: RolloutOutcome
    generated: int
    """Generated tokens, including those of surplus trajectories."""


async def measure_over_sampling(
    fleet: EngineFleet,
    generated_tokens: Callable[[], Awaitable[int]],
    rounds: int,
    *,
    samples: int = SAMPLES,
    versions: int = VERSIONS,
    lengths: TurnLengths = LENGTHS,
) -> Table:
    """Return a row for each over-sampling setting.

    Args:
        fleet: The engines.
        generated_tokens: Returns the tokens that the engines have generated so far, including aborted requests.
        samples: Samples per version.
        versions: Versions per round.
        lengths: Response lengths.
    """
    configs = {variant: _config(settings, samples) for variant, settings in VARIANTS.items()}
    prompts = SumPrompts(configs["none"])
    measured: dict[str, list[OverSamplingRound]] = {variant: [] for variant in VARIANTS}
    for number in range(-1, rounds):
        print_progress(f"over-sampling, round {number + 1} of {rounds}" if number >= 0 else "over-sampling, warming up")
        for variant, config in configs.items():
            work = RolloutWork(config, prompts, DrawnFleet(fleet, lengths, seed=number))
            if number < 0:
                await take(work, 1)
                break
            before = await generated_tokens()
            outcome = await take(work, versions)
            measured[variant].append(OverSamplingRound(outcome, await generated_tokens() - before))
    return [_row(variant, measured) for variant in VARIANTS]


def _config(over_sample: Mapping[str, Any], samples: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": MODEL},
            "rollout": {
                "n": N,
                "response_length": MAX_MODEL_LEN - 64,
                "max_model_len": MAX_MODEL_LEN,
                "max_concurrent_samples": 2 * samples,
                "over_sample": over_sample,
            },
            "trainer": {"ppo_mini_batch_size": samples},
            "async_training": {"staleness_threshold": 0.0},
        }
    )


def _row(variant: str, measured: Mapping[str, list[OverSamplingRound]]) -> dict[str, Any]:
    """Return the table row of a setting. `tokens` is the mean length of the accepted responses; `wasted` is the number
    of tokens in all other responses."""
    mine = measured[variant]
    seconds = {name: [one.outcome.seconds for one in some] for name, some in measured.items()}
    tokens, generated = sum(one.outcome.sampled_tokens for one in mine), sum(one.generated for one in mine)
    return {
        "over-sampling": variant,
        "s": statistics.median(seconds[variant]),
        "least": min(seconds[variant]),
        "most": max(seconds[variant]),
        "faster": ratio(seconds["none"], seconds[variant]),
        "tokens": tokens / sum(one.outcome.trajectories for one in mine),
        "wasted": generated - tokens,
        "wasted %": 100 * (generated - tokens) / generated,
    }
