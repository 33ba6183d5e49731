"""Synthetic samples, and a configuration that records samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.trajectory import Generated, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn

ROLE = "async_rollout"


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The size of a sample, and how many samples are measured."""

    name: str
    n: int
    tokens: tuple[int, int]
    """Minimum and maximum length of a response."""
    records: int
    """Records in a round of `files`."""
    loop_s: float
    """Seconds of a round on the event loop."""


SIZES = (
    SampleSize("quickstart", n=8, tokens=(4, 16), records=60, loop_s=3.0),
    SampleSize("8k x 16", n=16, tokens=(8192, 8192), records=12, loop_s=3.0),
)


def make_generated(size: SampleSize, seed: int) -> Generated:
    """Make a sample of random tokens."""
    rng = np.random.default_rng(seed)
    text = "+".join(str(number) for number in rng.integers(1, 20, 4)) + "="
    messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": text},)
    ids = rng.integers(5, 60, len(text) + 3, dtype=np.int32)
    prompt = Prompt(ids, messages, "asyncrl/chain_sum", "26", {"index": seed, "split": "train"})
    turns = [
        Turn(
            rng.integers(5, 60, length, dtype=np.int32),
            -rng.random(length, dtype=np.float32),
            (Span(0, 0),),
            FinishReason.STOP,
        )
        for length in rng.integers(size.tokens[0], size.tokens[1], size.n, endpoint=True)
    ]
    return Generated(prompt, tuple(single_turn(prompt, turn) for turn in turns), 1.0)


def array_bytes(sample: Generated) -> int:
    """Return the size of all arrays of a sample."""
    rows = [row for each in sample.trajectories for row in each.rows]
    kept = [array for row in rows for array in (row.response_ids, row.response_mask, row.rollout_log_probs)]
    return sample.prompt.prompt_ids.nbytes + sum(array.nbytes for array in kept)


def recording(directory: Path, **sections: Any) -> Config:
    """Return a configuration that records all steps of the role in `directory`."""
    role = {"enable": True, "steps": "all", "dump_dir": str(directory)}
    return Config.model_validate({**sections, "skip": {ROLE: role}})


def truncate_files(directory: Path) -> None:
    """Truncate all files below `directory` without deleting them."""
    for folder, _, names in os.walk(directory):
        for name in names:
            os.truncate(os.path.join(folder, name), 0)
