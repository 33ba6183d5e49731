"""The figures of a run, their medians over rounds, and how asyncrl compares with each peer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.compare.measure import Usage
from benchmarks.running import ratio

WARM_UP = 2
"""Steps that are left out at the beginning; an asynchronous system fills its queue in them."""
REWARD = 0.5
"""The reward to reach."""
REWARD_STEPS = 3
"""Steps over which the reward is averaged."""
OURS = "asyncrl"


class TrainedStep(NamedTuple):
    """One optimizer step."""

    end_s: float
    reward: float
    tokens: int
    """Response tokens in the loss."""


class Generated(NamedTuple):
    """Response tokens that were complete at a time."""

    at_s: float
    tokens: int


class Progress(NamedTuple):
    """What a run reports itself, with times of the monotonic clock."""

    steps: list[TrainedStep]
    generated: list[Generated]


@dataclass(frozen=True)
class Figures:
    """The measured figures of one run."""

    step_s: float
    trained_tokens_s: float
    generated_tokens_s: float
    cold_start_s: float
    """From the start of the process to the end of the first step."""
    reward_s: float | None
    """From the start of the process until the mean reward of `REWARD_STEPS` steps is at least `REWARD`."""
    cpu_s: dict[str, float]
    """CPU seconds of a step by role."""
    peak_mb: float
    rewards: list[tuple[float, float]]
    """Time since the start, and reward, of each step."""

    @property
    def step_tokens(self) -> float:
        """Trained tokens of a step."""
        return self.trained_tokens_s * self.step_s


def read_progress(file: Path) -> Progress:
    """Read what a peer wrote: `{"steps": [[end_s, reward, tokens], …], "generated": [[at_s, tokens], …]}`."""
    result = json.loads(file.read_text(encoding="utf-8"))
    return Progress(
        [TrainedStep(*step) for step in result["steps"]], [Generated(*part) for part in result["generated"]]
    )


def read_metrics(run_dir: Path) -> Progress:
    """Read the steps of a run of asyncrl from its metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps, generated, before = [], [], 0
    for line in lines:
        if line["kind"] == "step":
            end_s = line["time/monotonic_s"]
            steps.append(TrainedStep(end_s, line["reward/mean"], line["tokens/trained"]))
            generated.append(Generated(end_s, line["rollouter/generated_tokens"] - before))
            before = line["rollouter/generated_tokens"]
    return Progress(steps, generated)


def figures(progress: Progress, usage: Usage) -> Figures:
    """Compute the figures of a run of more than `WARM_UP` steps."""
    steps = progress.steps
    begin_s, end_s = steps[WARM_UP - 1].end_s, steps[-1].end_s
    counted = steps[WARM_UP:]
    generated = sum(part.tokens for part in progress.generated if begin_s < part.at_s <= end_s)
    cpu = usage.cpu_between(begin_s, end_s)
    return Figures(
        step_s=(end_s - begin_s) / len(counted),
        trained_tokens_s=sum(step.tokens for step in counted) / (end_s - begin_s),
        generated_tokens_s=generated / (end_s - begin_s),
        cold_start_s=steps[0].end_s - usage.started_s,
        reward_s=_reward_s(steps, usage.started_s),
        cpu_s={role: seconds / len(counted) for role, seconds in sorted(cpu.items(), key=lambda item: -item[1])},
        peak_mb=usage.peak_mb,
        rewards=[(step.end_s - usage.started_s, step.reward) for step in steps],
    )


def _reward_s(steps: Sequence[TrainedStep], started_s: float) -> float | None:
    for end in range(REWARD_STEPS, len(steps) + 1):
        if sum(step.reward for step in steps[end - REWARD_STEPS : end]) / REWARD_STEPS >= REWARD:
            return steps[end - 1].end_s - started_s
    return None


@dataclass(frozen=True)
class Comparison:
    """The runs of all peers by workload."""

    runs: Mapping[str, Mapping[str, Sequence[Figures]]]
    """By workload and peer, one for each round; empty if the peer failed."""
    errors: Mapping[tuple[str, str], str]
    """By workload and peer."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a table line for each workload and peer: medians, with the lowest and the highest round."""
        return [
            _row(workload, peer, each, by_peer.get(OURS, ()), failed=(workload, peer) in self.errors)
            for workload, by_peer in self.runs.items()
            for peer, each in by_peer.items()
        ]

    def failures(self) -> list[dict[str, str]]:
        return [
            {"workload": workload, "system": peer, "error": error} for (workload, peer), error in self.errors.items()
        ]

    def as_json(self) -> dict[str, Any]:
        runs = {
            workload: {peer: [asdict(run) for run in each] for peer, each in by_peer.items()}
            for workload, by_peer in self.runs.items()
        }
        return {"rows": self.rows(), "failures": self.failures(), "runs": runs}


def _row(workload: str, peer: str, runs: Sequence[Figures], ours: Sequence[Figures], *, failed: bool) -> dict[str, Any]:
    missing = "failed" if failed else "not run yet"

    def spread(name: str) -> str:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        if not values:
            return "not reached" if runs else missing
        few = f" in {len(values)} of {len(runs)}" * (len(values) < len(runs))
        return f"{median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g}){few}"

    roles = {role for run in runs for role in run.cpu_s}
    cpu = {role: median(run.cpu_s.get(role, 0.0) for run in runs) for role in roles}
    shares = ", ".join(
        f"{role} {cpu[role]:.2f}" for role in sorted(cpu, key=lambda role: -cpu[role]) if cpu[role] >= 0.005
    )
    return {
        "workload": workload,
        "system": peer,
        "s/step": spread("step_s"),
        "tokens/step": spread("step_tokens"),
        "trained tokens/s": spread("trained_tokens_s"),
        "generated tokens/s": spread("generated_tokens_s"),
        "first step after s": spread("cold_start_s"),
        f"reward {REWARD} after s": spread("reward_s"),
        "peak MB": spread("peak_mb"),
        "CPU s/step": shares or missing,
        "asyncrl's tokens/s": _verdict(runs, ours) if peer != OURS else "",
    }


def _verdict(theirs: Sequence[Figures], ours: Sequence[Figures]) -> str:
    """Return asyncrl's rate of trained tokens as a multiple of the peer's, the median of the rounds' ratios."""
    if not theirs or len(theirs) != len(ours):
        return "no comparison"
    times = ratio([run.trained_tokens_s for run in ours], [run.trained_tokens_s for run in theirs])
    return f"{times:.2f} times" + " (LOSS)" * (times < 1)
