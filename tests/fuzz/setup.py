"""What one fuzzed run is like: everything that a seed decides, drawn before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from asyncrl.config.schema import Config
from tests.fakes.configurations import changed

FaultKind = Literal[
    "engine", "rollouter", "trainer", "queue", "answer", "store", "hang rollouter", "hang trainer", "apply", "payload",
    "driver", "stop",
]  # fmt: skip
FAULTS: tuple[FaultKind, ...] = (
    "engine", "engine", "rollouter", "rollouter", "trainer", "trainer", "queue", "queue", "answer", "answer", "store",
    "hang rollouter", "hang trainer", "apply", "payload", "driver", "stop",
)  # fmt: skip
"""`answer`: the queue's process dies when it has done what it was asked and has not said so. Those that are listed more
than once come more often."""
CALL_S = 1000.0
"""Longer than any run: nobody is woken by a deadline who should have been told."""
SAMPLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Virtual seconds after the launch that it strikes."""
    kind: FaultKind


@dataclass(frozen=True, slots=True)
class Setup:
    """One run."""

    seed: int
    mode: str
    config: Config
    num_prompts: int
    num_replicas: int
    reward_fails: float
    """Share of groups whose scoring raises."""
    stragglers: float
    """Share of sessions that never end."""
    mean_s: float
    """Of one piece of a response."""
    step_s: float
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        training, drift = self.config.trainer, self.config.async_training
        faults = ", ".join(f"{fault.kind} at {fault.at_s:.2f} s" for fault in self.faults) or "no faults"
        return (
            f"seed {self.seed}: mode {self.mode}, {training.total_training_steps} steps of "
            f"{training.ppo_mini_batch_size}, lease of {drift.require_batches}, sync every "
            f"{drift.trigger_parameter_sync_step}, threshold {drift.staleness_threshold:g}, bound "
            f"{drift.max_staleness}, {training.ppo_epochs} epochs, n {self.config.rollout.n}, "
            f"{self.config.rollout.max_concurrent_samples} at once, checkpoint every {training.save_freq}, "
            f"{self.num_replicas} replicas; {faults}"
        )


def draw(seed: int) -> Setup:
    """The run of this seed."""
    rng = random.Random(seed)
    mode = rng.choice("abcd")
    trigger = {"a": 1, "b": rng.randint(2, 3)}.get(mode, rng.randint(1, 2))
    threshold = 0.0 if mode in "ab" else rng.choice([0.1, 0.5, 1.0, 2.0])
    max_staleness = rng.choice([None, None, 0, 1, 2])
    num_faults = rng.choice([0, 1, 1, 2, 2, 3, 4])
    changes: dict[str, dict[str, Any]] = {
        "rollout": {
            "n": rng.randint(1, 2),
            "max_concurrent_samples": rng.randint(1, 6),
            "response_length": 8,
        },
        "async_training": {
            "staleness_threshold": threshold,
            "trigger_parameter_sync_step": trigger,
            "require_batches": rng.choice([1, 1, 2]),
            "partial_rollout": mode == "d",
            "max_staleness": max_staleness,
        },
        "trainer": {
            "total_training_steps": rng.randint(2, 6),
            "ppo_mini_batch_size": rng.randint(1, 2),
            "ppo_epochs": rng.choice([1, 1, 1, 2]),
            "save_freq": rng.choice([-1, 1, 2, 3]),
            "save_last": rng.random() < 0.8,
            "partial_final_batch": rng.choice(["train", "drop"]),
        },
    }
    return Setup(
        seed=seed,
        mode=mode,
        config=_with(_base(), changes),
        num_prompts=rng.randint(6, 9),
        num_replicas=rng.randint(1, 2),
        reward_fails=rng.choice([0.0, 0.0, 0.1]),
        stragglers=rng.choice([0.0, 0.0, 0.05]),
        mean_s=rng.choice([0.02, 0.1, 0.4]),
        step_s=rng.choice([0.02, 0.1, 0.4]),
        faults=tuple(
            sorted(
                (Fault(rng.expovariate(1 / 1.5), rng.choice(FAULTS)) for _ in range(num_faults)),
                key=lambda fault: fault.at_s,
            )
        ),
    )


@cache
def _base() -> Config:
    return changed(
        {
            "data.val_files": [],
            "reward.on_error": "drop",
            "reward.max_errors": 1_000_000,
            "timeouts.call_s": CALL_S,
            "timeouts.sample_s": SAMPLE_S,
            "recovery.max_crashes": 1000,
            "trainer.val_before_train": False,
        }
    )


def _with(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update=sections)
