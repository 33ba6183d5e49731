"""The setup of a fuzzed run, which its seed determines."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.config.sections.rollout import AutoscalingConfig, OverSampleConfig
from asyncrl.config.sections.skip import AsyncRolloutSkipConfig
from tests.fakes.configurations import config_with

FaultKind = Literal[
    "engine", "rollouter", "trainer", "queue", "answer", "store", "hang engine", "hang rollouter", "hang trainer",
    "hang queue", "apply", "payload", "driver", "driver stops", "stop", "record", "join", "leave", "drain",
]  # fmt: skip
FAULTS: tuple[FaultKind, ...] = (
    "engine", "engine", "rollouter", "rollouter", "trainer", "trainer", "queue", "queue", "answer", "answer", "store",
    "store", "hang engine", "hang rollouter", "hang trainer", "hang queue", "apply", "payload", "driver",
    "driver stops", "stop",
)  # fmt: skip
"""`answer` kills the queue's process between an operation and its answer. `driver stops` stops the driver for a while.
Faults that are listed more than once are drawn more often. `record` is drawn for runs with records only. `join`,
`leave` and `drain` are no faults but planned changes of the replicas; `drain` starts a successor first."""
PLANNED: tuple[FaultKind, ...] = ("join", "leave", "drain")
SERVE_PUSH_S = 10.0
"""Serve's default period (`metrics_interval_s`)."""
MAX_REPLICAS = 4
"""No replica joins beyond this number, and the last one does not leave."""
LONG_S = 1000.0
"""A deadline longer than any run, so that retries do not hide a lost notification."""
SHORT_S = 4.0
"""A deadline that is shorter than a hang of the queue."""
SAMPLE_S = 30.0
PROBE_S = 3.0
START_S = 10.0
WATCHDOG_S = 120.0
"""Longer than the longest legal time without progress, in which all samples time out."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Virtual seconds from the start of the launch to the fault."""
    kind: FaultKind


@dataclass(frozen=True, slots=True)
class FuzzSetup:
    """The configuration, sizes, probabilities and faults of one run."""

    seed: int
    mode: str
    config: Config
    num_prompts: int
    num_replicas: int
    """The number at the start of a launch."""
    reward_fails: float
    """Share of groups whose scoring raises."""
    stragglers: float
    """Probability, for each batch of tokens of a training session, that the session never continues."""
    mean_s: float
    """Mean time for one batch of tokens."""
    step_s: float
    call_s: float
    """`timeouts.call_s`."""
    poison: int | None
    """The prompt that crashes every engine."""
    faults: tuple[Fault, ...]
    """Faults and planned changes."""
    max_turns: int = 1
    """Maximum number of turns in a conversation; 1 if the run has no conversations."""
    forks: bool = False
    """Whether every turn starts another row."""
    num_recorded: int | None = None
    """The number of samples that an earlier run has recorded; None: samples are neither recorded nor replayed."""
    push_s: float = SERVE_PUSH_S
    """Period in which replicas push metrics to Serve, with `rollout.autoscaling`."""

    @property
    def attaches(self) -> bool:
        """Whether all launches use the replicas of one separately deployed application (`rollout.attach`)."""
        return self.config.rollout.attach is not None

    @property
    def autoscales(self) -> bool:
        """Whether the driver decides how many replicas there are (`rollout.autoscaling`)."""
        return self.config.rollout.autoscaling.enable

    @property
    def unplanned(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind not in PLANNED]

    def __str__(self) -> str:
        training, drift = self.config.trainer, self.config.async_training
        faults = ", ".join(f"{fault.kind} at {fault.at_s:.2f} s" for fault in self.faults) or "no faults"
        return (
            f"seed {self.seed}: mode {self.mode}, {training.total_training_steps} steps of "
            f"{training.ppo_mini_batch_size}, lease of {drift.require_batches}, sync every "
            f"{drift.trigger_parameter_sync_step}, threshold {drift.staleness_threshold:g}, bound "
            f"{drift.max_staleness}{', in feed order' if drift.deterministic else ''}, {training.ppo_epochs} epochs, "
            f"n {self.config.rollout.n}, "
            f"{self.config.rollout.max_concurrent_samples} at once, checkpoint every {training.save_freq}, "
            f"over-sampled {self.config.rollout.over_sample}, "
            f"{self.max_turns} turns{' in rows' if self.forks else ''}, "
            f"{'no' if self.num_recorded is None else self.num_recorded} records, "
            f"{self.num_replicas} replicas{', attached' if self.attaches else ''}"
            f"{f', autoscaled with {self.config.rollout.autoscaling}' if self.autoscales else ''}, "
            f"{self.config.rollout.num_workers} workers, "
            f"calls of {self.call_s:g} s, poison {self.poison}, validation every "
            f"{training.test_freq if self.config.has_validation else 'never'}; {faults}"
        )


def draw(seed: int) -> FuzzSetup:
    """Return the setup of the run of this seed."""
    rng = random.Random(seed)
    mode = rng.choice("abcd")
    trigger = {"a": 1, "b": rng.randint(2, 3)}.get(mode, rng.randint(1, 2))
    threshold = 0.0 if mode in "ab" else rng.choice([0.1, 0.5, 1.0, 2.0])
    max_staleness = rng.choice([None, None, 0, 1, 2])
    num_faults = rng.choice([0, 1, 1, 2, 2, 3, 4])
    call_s = rng.choice([LONG_S, LONG_S, LONG_S, SHORT_S])
    poison = rng.randrange(6) if rng.random() < 0.2 else None
    validates = rng.random() < 0.3
    deterministic = random.Random(f"order {seed}").random() < 0.2
    # These settings have a separate generator, so that they do not change what `rng` draws for the others.
    more = random.Random(f"conversations {seed}")
    max_turns, forks = more.choice([1, 1, 2, 3]), more.random() < 0.3
    over_sample = OverSampleConfig(
        samples=0.0 if deterministic else more.choice([0.0, 0.0, 0.5, 1.0]),
        trajectories=more.choice([0, 0, 1]),
        unfinished=more.choice(["drop", "keep_finished", "keep_partial"]),
    )
    records = random.Random(f"records {seed}")
    num_recorded = records.choice([0, 0, 3, 12]) if records.random() < 0.2 else None
    skip = AsyncRolloutSkipConfig(
        enable=num_recorded is not None,
        steps="all",
        replay_versions=records.choice(["recorded", "recorded", "current"]),
    )
    spoiled = [Fault(records.expovariate(1 / 1.5), "record") for _ in range(records.randrange(4))]
    scaling = random.Random(f"replicas {seed}")
    changed = [
        Fault(scaling.expovariate(1 / 1.5), scaling.choice(PLANNED)) for _ in range(scaling.choice([0, 0, 1, 2, 4, 8]))
    ]
    attach = "servers" if random.Random(f"attach {seed}").random() < 0.2 else None
    changes: dict[str, dict[str, Any]] = {
        "skip": {"async_rollout": skip},
        "rollout": {
            "over_sample": over_sample,
            "n": rng.randint(1, 2),
            "max_concurrent_samples": rng.randint(1, 6),
            "response_length": 8,
            "num_workers": random.Random(f"workers {seed}").choice([0, 0, 1, 2]),
            "attach": attach,
        },
        "async_training": {
            "staleness_threshold": threshold,
            "trigger_parameter_sync_step": trigger,
            "require_batches": rng.choice([1, 1, 2]),
            "partial_rollout": mode == "d",
            "partial_mode": rng.choice(["keep", "abort"]),
            "max_staleness": max_staleness,
            "deterministic": deterministic,
        },
        "trainer": {
            "total_training_steps": rng.randint(2, 6),
            "ppo_mini_batch_size": rng.randint(1, 2),
            "ppo_epochs": rng.choice([1, 1, 1, 2]),
            "save_freq": rng.choice([-1, 1, 2, 3]),
            "save_last": rng.random() < 0.8,
            "partial_final_batch": rng.choice(["train", "drop"]),
            "val_before_train": validates and rng.random() < 0.5,
            "test_freq": rng.choice([-1, 1, 2, 3]),
        },
        "data": {"val_files": ["validation"] if validates else []},
        "timeouts": {"call_s": call_s},
        "recovery": {"max_crashes": rng.choice([1, 2]) if poison is not None else 1000},
    }
    setup = FuzzSetup(
        seed=seed,
        mode=mode,
        config=_with(_base(), changes),
        num_prompts=rng.randint(6, 9),
        num_replicas=rng.randint(1, 2),
        reward_fails=rng.choice([0.0, 0.0, 0.1]),
        # Each turn of each conversation may be a straggler, so conversations have a lower probability.
        stragglers=rng.choice([0.0, 0.0, 0.05]) / (1 if max_turns == 1 else 4 * max_turns),
        mean_s=rng.choice([0.02, 0.1, 0.4]),
        step_s=rng.choice([0.02, 0.1, 0.4]),
        call_s=call_s,
        poison=poison,
        max_turns=max_turns,
        forks=forks,
        num_recorded=num_recorded,
        faults=tuple(
            sorted(
                [
                    *(Fault(rng.expovariate(1 / 1.5), rng.choice(FAULTS)) for _ in range(num_faults)),
                    *(spoiled if num_recorded is not None else ()),
                    *changed,
                ],
                key=lambda fault: fault.at_s,
            )
        ),
    )
    return setup if attach is not None else _autoscaled(setup)


def _autoscaled(setup: FuzzSetup) -> FuzzSetup:
    """Return the setup with `rollout.autoscaling` in a share of the seeds, otherwise the same setup.

    Such a run is longer and slower, because decisions take seconds, and no replica joins or leaves without a decision.
    """
    rng = random.Random(f"autoscaling {setup.seed}")
    if rng.random() >= 0.1:
        return setup
    low = rng.randint(1, 2)
    high = rng.randint(low + 1, MAX_REPLICAS)
    num_replicas = rng.randint(low, high)
    policy = AutoscalingConfig(
        enable=True,
        min_replicas=low,
        max_replicas=high,
        target_trainer_wait=rng.choice([0.0, 0.1, 0.3]),
        spare_capacity=rng.choice([0.0, 0.1, 0.3]),
        up_after_s=rng.choice([1.0, 2.0, 4.0]),
        down_after_s=rng.choice([1.0, 3.0, 6.0]),
    )
    changes = {
        "rollout": {"autoscaling": policy, "num_replicas": num_replicas},
        "trainer": {"total_training_steps": rng.randint(5, 15)},
    }
    return replace(
        setup,
        config=_with(setup.config, changes),
        num_replicas=num_replicas,
        mean_s=rng.choice([0.05, 0.2, 1.0]),
        step_s=rng.choice([0.05, 0.2, 1.0]),
        push_s=rng.choice([1.0, SERVE_PUSH_S]),
        faults=tuple(fault for fault in setup.faults if fault.kind not in ("join", "leave")),
    )


@cache
def _base() -> Config:
    return config_with(
        {
            "reward.on_error": "drop",
            "reward.max_errors": 1_000_000,
            "timeouts.sample_s": SAMPLE_S,
            "timeouts.probe_s": PROBE_S,
            "timeouts.start_s": START_S,
            "timeouts.watchdog_s": WATCHDOG_S,
        }
    )


def _with(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update=sections)
