"""What the run does that is struck: the quickstart in small, and a reward function that goes wrong when told to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

REWARD_TIMEOUT_S = 2.0
WRONG_S = 4.0
"""How long the reward function goes wrong when it is told to."""
PROBE_S = 10.0
"""`timeouts.probe_s` of the run."""
MAX_STALENESS = 4

REWARD = '''\
"""Exact match, which goes wrong while the file beside it says so: {"how": "raise" | "hang" | "nan", "until": time}.

Each call that did leaves a byte in the other file beside it.
"""

import json
import time
from pathlib import Path

ORDERS = Path(__file__).with_suffix(".json")
MET = Path(__file__).with_suffix(".met")


def score(data_source, solution_str, ground_truth, extra_info):
    try:
        orders = json.loads(ORDERS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        orders = {"until": 0.0}
    # One in four: the rest of the run goes on.
    if time.time() < orders["until"] and hash(solution_str) % 4 == 0:
        with MET.open("ab") as met:
            met.write(b".")
        if orders["how"] == "raise":
            raise RuntimeError("told to")
        if orders["how"] == "nan":
            return float("nan")
        time.sleep(orders["hang_s"])
    return float(str(ground_truth) in solution_str)
'''
WATCHED = """

# What replicas tell, and what becomes of it when one fails, is written down in the process that loads this.
import sys  # noqa: E402

sys.path.insert(0, {root!r})
from benchmarks.chaos import watch  # noqa: E402

watch.install(Path({directory!r}))
"""


def go_wrong(reward_file: Path, how: str) -> float:
    """Tell the reward function to go wrong for `WRONG_S`. Returns the wall clock at which it is well again."""
    until = time.time() + WRONG_S
    orders = {"how": how, "until": until, "hang_s": REWARD_TIMEOUT_S + 3.0}
    temporary = reward_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(orders), encoding="utf-8")
    temporary.replace(reward_file.with_suffix(".json"))
    return until


def num_met(reward_file: Path) -> int:
    """Calls so far in which the reward function has gone wrong."""
    met = reward_file.with_suffix(".met")
    return met.stat().st_size if met.exists() else 0


def write_reward(path: Path, watched: Path | None = None) -> None:
    """`watched`: where the process that loads it writes down what `watch` sees; None: it watches nothing."""
    text = REWARD
    if watched is not None:
        text += WATCHED.format(root=str(Path(__file__).parents[2]), directory=str(watched))
    path.write_text(text, encoding="utf-8")


def configuration(reward_file: Path, *, replicas: int, ranks: int, seed: int) -> Mapping[str, Any]:
    """The quickstart with small steps, frequent checkpoints, short deadlines and no end of restarts."""
    return {
        "defaults": ["quickstart"],
        "experiment_name": "chaos",
        "seed": seed,
        "data": {"max_val_samples": 4},
        "reward": {
            "function": f"{reward_file}:score",
            "on_error": "drop",
            "max_errors": 1_000_000,
            "timeout_s": REWARD_TIMEOUT_S,
        },
        "async_training": {"max_staleness": MAX_STALENESS},
        "rollout": {
            "n": 4,
            "response_length": 64,
            "num_replicas": replicas,
            "max_concurrent_samples": 16,
            "max_attempts": 10,
        },
        "trainer": {
            "total_training_steps": 1_000_000,
            "ppo_mini_batch_size": 4,
            "save_freq": 10,
            "val_before_train": False,
            "num_workers": ranks,
            "strategy": "local" if ranks == 1 else "fsdp2",
        },
        "timeouts": {
            "call_s": 20.0,
            "probe_s": PROBE_S,
            "engine_s": 15.0,
            "generate_s": 60.0,
            "sample_s": 120.0,
            "train_s": 30.0,
            "collective_s": 20.0,
            "apply_s": 30.0,
            "watchdog_s": 150.0,
            "stop_s": 30.0,
            "start_s": 240.0,
        },
        "recovery": {"max_restarts": 1000, "window_s": 60.0},
        "logging": {"console": "plain", "sinks": ["jsonl"], "level": "info"},
    }


def write_configuration(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
