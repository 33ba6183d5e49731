"""Leased samples → rows for the loss: staleness, masks, what is not trained on; a step's samples in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.failures import DataError
from asyncrl.records import Metrics
from asyncrl.staleness import stale_token_mask, staleness
from asyncrl.types import DropReason, Provenance, Sample, SampleId, TokenIds, versions_per_token
from trainer.algorithms.filtering import group_is_flat


class UnusableRowError(DataError):
    """A row that would train on nonsense or crash in the model; its sample is DROPPED."""

    def __init__(self, message: str, cause: str = "", kind: str = "") -> None:
        super().__init__(message, cause)
        self.kind = kind
        """What is wrong, in words that are the same for all samples of one kind."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One trajectory, as the Trainer takes it in. Arrays of `L` response tokens."""

    sample_id: SampleId
    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: NDArray[np.bool_]
    """Sampled by the policy."""
    loss_mask: NDArray[np.bool_]
    """Of these, what may be trained: without tokens masked as too stale."""
    rollout_log_probs: NDArray[np.float32]
    versions: NDArray[np.int64]
    """Weights that sampled each token."""
    reward: float
    baseline_reward: float | None = None
    """Score of the greedy response to the same prompt (ReMax)."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One leased sample, ready to be trained on."""

    sample_id: SampleId
    lease_id: int
    rows: tuple[TrainRow, ...]
    rewards: tuple[float, ...]
    """As the Rollouter scored them: without what the Trainer adds (`trainer.experience`)."""
    staleness: int
    """Trainer version at lease minus the version of its oldest token, masked tokens included."""
    provenance: Provenance
    untrainable: DropReason | None
    """Why it is not trained on: `stale` if the bound masked all its tokens, `filtered` if it has none or if its group
    teaches nothing."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What `prepare` goes by."""

    mask_beyond: int | None
    """With `stale_action: mask`, tokens more versions old than this leave the loss; None: none do."""
    filter_groups: bool
    """Samples whose responses all have the same reward are `filtered` (DAPO, https://arxiv.org/abs/2503.14476). Judged
    by the Rollouter's score: overlong punishment, KL and the Trainer's own reward model come after it."""
    vocab_size: int | None
    """Of the model; None: not known here, so token ids are only checked for being no less than 0."""
    rewound: bool = False
    """Training went back to a checkpoint in this run, so that a sample in its old place in the order may be of versions
    that the Trainer has yet to reach again. Its staleness is 0, and so is that of one that another run has recorded."""


def prepare(sample: Sample, *, lease_id: int, trainer_version: int, rules: RowRules) -> TrainSample:
    """Turn a sample into rows.

    Raises:
        BugError: tokens of a version the trainer has not reached, neither after a rewind nor of a replayed sample.
        UnusableRowError: see `check_row`.
    """
    rows, was_stale = [], False
    for trajectory in sample.trajectories:
        length = len(trajectory.response_ids)
        stale = stale_token_mask(trajectory.spans, length, trainer_version, rules.mask_beyond)
        was_stale |= bool((stale & trajectory.response_mask).any())
        row = TrainRow(
            sample_id=sample.sample_id,
            prompt_ids=trajectory.prompt_ids,
            response_ids=trajectory.response_ids,
            response_mask=trajectory.response_mask,
            loss_mask=trajectory.response_mask & ~stale,
            rollout_log_probs=trajectory.rollout_log_probs,
            versions=versions_per_token(trajectory.spans, length),
            reward=float(trajectory.reward),
            baseline_reward=sample.baseline_reward,
        )
        check_row(row, vocab_size=rules.vocab_size)
        rows.append(row)
    rewards = tuple(row.reward for row in rows)
    oldest = min(row.oldest_version for row in sample.trajectories)
    untrainable = None
    if not any(row.loss_mask.any() for row in rows):
        untrainable = DropReason.STALE if was_stale else DropReason.FILTERED
    elif rules.filter_groups and group_is_flat(rewards):
        untrainable = DropReason.FILTERED
    return TrainSample(
        sample_id=sample.sample_id,
        lease_id=lease_id,
        rows=tuple(rows),
        rewards=rewards,
        staleness=staleness(trainer_version, oldest, allows_newer=rules.rewound or sample.replay is not None),
        provenance=sample.provenance,
        untrainable=untrainable,
    )


def check_row(row: TrainRow, *, vocab_size: int | None) -> None:
    """Refuse what would train on nonsense or crash in the model.

    Raises:
        UnusableRowError: empty prompt or response, arrays of unequal length, a token id outside the vocabulary, a
            behaviour log-prob of a sampled token or a reward that is not finite.
    """
    length = len(row.response_ids)
    kind = problem = ""
    if len(row.prompt_ids) == 0 or length == 0:
        kind = "no prompt or no response"
        problem = f"prompt of {len(row.prompt_ids)} and response of {length} tokens; both need at least one"
    elif {len(row.response_mask), len(row.loss_mask), len(row.rollout_log_probs), len(row.versions)} != {length}:
        kind = "arrays of unequal length"
        problem = (
            f"{length} response tokens but masks, rollout_log_probs and versions of {len(row.response_mask)}, "
            f"{len(row.loss_mask)}, {len(row.rollout_log_probs)} and {len(row.versions)}"
        )
    else:
        low = int(min(row.prompt_ids.min(), row.response_ids.min()))
        high = int(max(row.prompt_ids.max(), row.response_ids.max()))
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            kind = "tokens outside the vocabulary"
            vocabulary = "vocabulary" if vocab_size is None else f"vocabulary of {vocab_size}"
            problem = f"token id {low if low < 0 else high} outside the model's {vocabulary}"
        elif not np.all(np.isfinite(row.rollout_log_probs[row.response_mask])):
            kind = "log-probs that are not finite"
            problem = "a behaviour log-prob that is not finite: its probability ratio would be 0 or infinite"
        elif not np.isfinite(row.reward) or (row.baseline_reward is not None and not np.isfinite(row.baseline_reward)):
            kind = "rewards that are not finite"
            problem = f"a reward of {row.reward} (baseline {row.baseline_reward}), which is not finite"
    if problem:
        raise UnusableRowError(
            f"{row.sample_id} cannot be trained on: {problem}. Check the engine's and the reward's output.", kind=kind
        )


def sample_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """What went into a step."""
    rewards = np.array([reward for sample in samples for reward in sample.rewards])
    lengths = np.array([len(row.response_ids) for sample in samples for row in sample.rows])
    ages = np.array([sample.staleness for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **_replayed(samples),
    }


def _replayed(samples: Sequence[TrainSample]) -> Metrics:
    """Only where there are any: most runs replay nothing."""
    made = [sample.provenance for sample in samples]
    generated, substituted = made.count(Provenance.GENERATED), made.count(Provenance.SUBSTITUTED)
    if generated == len(made):
        return {}
    return {"skip/replayed_share": 1 - generated / len(made), "skip/substituted_share": substituted / len(made)}
