"""Leased samples → rows for the loss: staleness, masks, advantages; and a step's samples in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.ports import Metrics, TrainRow
from asyncrl.staleness import stale_token_mask, staleness
from asyncrl.types import DropReason, Sample, SampleId
from trainer.algorithms.advantages import Estimator


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One leased sample, ready to be trained on."""

    sample_id: SampleId
    lease_id: int
    rows: tuple[TrainRow, ...]
    rewards: tuple[float, ...]
    staleness: int
    """Trainer version at lease minus the version of its oldest token, masked tokens included."""
    untrainable: DropReason | None
    """Why none of its tokens can be trained on: `stale` if the bound masked them, else `filtered`."""

    @property
    def trained_tokens(self) -> int:
        return sum(int(row.response_mask.sum()) for row in self.rows)


def prepare(
    sample: Sample, *, lease_id: int, trainer_version: int, mask_beyond: int | None, estimate: Estimator
) -> TrainSample:
    """Turn a sample into rows.

    Args:
        mask_beyond: with `stale_action: mask`, tokens more versions old than this leave the loss; None: none do.
        estimate: advantages of the whole group. A masked row still counts in its group's mean.

    Raises:
        BugError: tokens of a version the trainer has not reached.
        ConfigError: a group too small for the estimator.
    """
    advantages = estimate(np.array([row.reward for row in sample.trajectories], dtype=np.float64))
    rows, was_stale = [], False
    for trajectory, advantage in zip(sample.trajectories, advantages, strict=True):
        length = len(trajectory.response_ids)
        stale = stale_token_mask(trajectory.spans, length, trainer_version, mask_beyond)
        was_stale |= bool((stale & trajectory.response_mask).any())
        rows.append(
            TrainRow(
                sample_id=sample.sample_id,
                prompt_ids=trajectory.prompt_ids,
                response_ids=trajectory.response_ids,
                response_mask=trajectory.response_mask & ~stale,
                rollout_log_probs=trajectory.rollout_log_probs,
                advantages=np.full(length, advantage, dtype=np.float32),
            )
        )
    untrainable = None
    if not any(row.response_mask.any() for row in rows):
        untrainable = DropReason.STALE if was_stale else DropReason.FILTERED
    return TrainSample(
        sample_id=sample.sample_id,
        lease_id=lease_id,
        rows=tuple(rows),
        rewards=tuple(float(row.reward) for row in sample.trajectories),
        staleness=staleness(trainer_version, min(row.oldest_version for row in sample.trajectories)),
        untrainable=untrainable,
    )


def sample_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """What went into a step."""
    rewards = np.array([reward for sample in samples for reward in sample.rewards])
    lengths = np.array([len(row.response_ids) for sample in samples for row in sample.rows])
    ages = np.array([sample.staleness for sample in samples])
    without_signal = [not any(row.advantages.any() for row in sample.rows) for sample in samples]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "advantages/zero_share": float(np.mean(without_signal)),
        "tokens/trained": float(sum(sample.trained_tokens for sample in samples)),
    }
