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

REWARD = '''\
"""Exact match, which goes wrong while the file beside it says so: {"how": "raise" | "hang" | "nan", "until": time}."""

import json
import time
from pathlib import Path

ORDERS = Path(__file__).with_suffix(".json")


def score(data_source, solution_str, ground_truth, extra_info):
    try:
        orders = json.loads(ORDERS.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        orders = {"until": 0.0}
    # One in four: the rest of the run goes on.
    if time.time() < orders["until"] and hash(solution_str) % 4 == 0:
        if orders["how"] == "raise":
            raise RuntimeError("told to")
        if orders["how"] == "nan":
            return float("nan")
        time.sleep(orders["hang_s"])
    return float(str(ground_truth) in solution_str)
'''


def go_wrong(reward_file: Path, how: str) -> float:
    """Tell the reward function to go wrong for `WRONG_S`. Returns the wall clock at which it is well again."""
    until = time.time() + WRONG_S
    orders = {"how": how, "until": until, "hang_s": REWARD_TIMEOUT_S + 3.0}
    temporary = reward_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(orders), encoding="utf-8")
    temporary.replace(reward_file.with_suffix(".json"))
    return until


def write_reward(path: Path) -> None:
    path.write_text(REWARD, encoding="utf-8")


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
            "probe_s": 10.0,
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
        "logging": {"console": "plain", "tensorboard": False, "level": "info"},
    }


def write_configuration(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
