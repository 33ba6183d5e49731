"""The configuration of the run under test, and a reward function that fails on demand."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

REWARD_TIMEOUT_S = 2.0
FAILURE_S = 4.0
"""Seconds for which the reward function fails."""
PROBE_S = 10.0
"""`timeouts.probe_s` of the run."""
MAX_STALENESS = 4

REWARD = '''\
"""An exact match, which fails as the JSON file next to it orders: {"how": "raise" | "hang" | "nan", "until": time}.

Each failed call appends a byte to the `.failed` file next to it.
"""

import json
import time
from pathlib import Path

PLANNED_FAILURE = Path(__file__).with_suffix(".json")
FAILED_CALLS = Path(__file__).with_suffix(".failed")


def score(data_source, solution_str, ground_truth, extra_info):
    try:
        failure = json.loads(PLANNED_FAILURE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        failure = {"until": 0.0}
    # One call in four fails, so that the run continues.
    if time.time() < failure["until"] and hash(solution_str) % 4 == 0:
        with FAILED_CALLS.open("ab") as failed_calls:
            failed_calls.write(b".")
        if failure["how"] == "raise":
            raise RuntimeError("a planned failure")
        if failure["how"] == "nan":
            return float("nan")
        time.sleep(failure["hang_s"])
    return float(str(ground_truth) in solution_str)
'''
WATCH_CALLS = """

# Records the tokens from replicas that fail, in the process that loads this module.
import sys  # noqa: E402

sys.path.insert(0, {root!r})
from benchmarks.chaos import watch  # noqa: E402

watch.install(Path({directory!r}))
"""


def start_failing(reward_file: Path, how: str) -> float:
    """Make the reward function fail for `FAILURE_S`, and return the wall clock at which it works again."""
    until = time.time() + FAILURE_S
    failure = {"how": how, "until": until, "hang_s": REWARD_TIMEOUT_S + 3.0}
    temporary = reward_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(failure), encoding="utf-8")
    temporary.replace(reward_file.with_suffix(".json"))
    return until


def num_failed_calls(reward_file: Path) -> int:
    """Return the number of failed calls of the reward function."""
    failed_calls = reward_file.with_suffix(".failed")
    return failed_calls.stat().st_size if failed_calls.exists() else 0


def write_reward(path: Path, watched: Path | None = None) -> None:
    """Write the reward module; `watched`: directory of the records of `watch`, None: nothing is watched."""
    text = REWARD
    if watched is not None:
        text += WATCH_CALLS.format(root=str(Path(__file__).parents[2]), directory=str(watched))
    path.write_text(text, encoding="utf-8")


def configuration(reward_file: Path, *, replicas: int, ranks: int, seed: int) -> Mapping[str, Any]:
    """Return the quickstart with small steps, frequent checkpoints, short timeouts and almost unlimited restarts."""
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
