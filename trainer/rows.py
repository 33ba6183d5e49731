"""Leased samples → rows for the loss: staleness, masks, turn rewards, what is refused and what is not trained on; a
step's samples in numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from asyncrl.failures import DataError
from asyncrl.records import Metrics
from asyncrl.staleness import stale_token_mask, staleness
from asyncrl.types import (
    DropReason,
    FinishReason,
    Media,
    Provenance,
    Row,
    Sample,
    SampleId,
    TokenIds,
    versions_per_token,
)
from trainer.algorithms.filtering import group_is_flat

OLD = 3
"""So many versions, and more, are one bar of the staleness histogram."""


class UnusableRowError(DataError):
    """A row that would train on nonsense or crash in the model; its sample is DROPPED."""

    def __init__(self, message: str, cause: str = "", kind: str = "") -> None:
        super().__init__(message, cause)
        self.kind = kind
        """What is wrong, in words that are the same for all samples of one kind."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One row of a trajectory, as the Trainer takes it in. Arrays of `L` response tokens."""

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
    """Of the whole trajectory, `turn_rewards` of all its rows included."""
    trajectory: int
    """Which of the sample's trajectories; neighbours with one number are rows of one."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """See `asyncrl.types.Row`."""
    reward_extra: Mapping[str, float] = field(default_factory=dict)
    baseline_reward: float | None = None
    """Score of the greedy response to the same prompt (ReMax)."""
    media: tuple[Media, ...] = ()
    """Of the prompt."""
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One leased sample, ready to be trained on."""

    sample_id: SampleId
    lease_id: int
    rows: tuple[TrainRow, ...]
    rewards: tuple[float, ...]
    """One for each trajectory, as the Rollouter scored them: without what the Trainer adds (`trainer.experience`)."""
    staleness: int
    """Trainer version at lease minus the version of its oldest token, masked tokens included."""
    version_span: int
    """Newest minus oldest version that sampled any of its tokens."""
    processing_s: float
    """Generation, if it was cut and resumed all of it, and scoring; waits between them left out."""
    provenance: Provenance
    untrainable: DropReason | None
    """Why it is not trained on: `stale` if the bound masked all its tokens, `filtered` if it has none or if its group
    teaches nothing."""

    @property
    def response_tokens(self) -> int:
        """Tools' and users' among them."""
        return sum(len(row.response_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowRules:
    """What `prepare` goes by."""

    mask_beyond: int | None
    """With `stale_action: mask`, tokens more versions old than this leave the loss; None: none do."""
    filter_groups: bool
    """Samples whose trajectories all have the same reward are `filtered` (DAPO, https://arxiv.org/abs/2503.14476).
    Judged by the Rollouter's score: overlong punishment, KL and the Trainer's own reward model come after it."""
    vocab_size: int | None
    """Of the model; None: not known here, so token ids are only checked for being no less than 0."""
    rewound: bool = False
    """Training went back to a checkpoint in this run, so that a sample in its old place in the order may be of versions
    that the Trainer has yet to reach again. Its staleness is 0, and so is that of one that another run has recorded."""


def prepare(sample: Sample, *, lease_id: int, trainer_version: int, rules: RowRules) -> TrainSample:
    """Turn a sample into rows.

    Raises:
        BugError: tokens of a version the trainer has not reached, neither after a rewind nor of a replayed sample.
        UnusableRowError: see `check_row` and `check_trajectories`.
    """
    rows, was_stale = [], False
    for row in sample.rows:
        stale = stale_token_mask(row.spans, len(row.response_ids), trainer_version, rules.mask_beyond)
        was_stale |= bool((stale & row.response_mask).any())
        rows.append(_train_row(sample, row, stale))
        check_row(rows[-1], vocab_size=rules.vocab_size)
    check_trajectories(rows)
    rewards = tuple(trajectory[0].reward for trajectory in trajectories(rows))
    oldest = min(row.oldest_version for row in sample.rows)
    newest = max(row.newest_version for row in sample.rows)
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
        version_span=newest - oldest,
        processing_s=sample.generate_s + sample.reward_s,
        provenance=sample.provenance,
        untrainable=untrainable,
    )


def _train_row(sample: Sample, row: Row, stale: NDArray[np.bool_]) -> TrainRow:
    return TrainRow(
        sample_id=sample.sample_id,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.response_mask,
        loss_mask=row.response_mask & ~stale,
        rollout_log_probs=row.rollout_log_probs,
        versions=versions_per_token(row.spans, len(row.response_ids)),
        reward=float(row.reward),
        trajectory=row.trajectory,
        turn_rewards=row.turn_rewards,
        reward_extra=row.reward_extra,
        baseline_reward=sample.baseline_reward,
        media=sample.media,
        finish_reason=row.finish_reason,
    )


def trajectories(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    """The rows of a sample, by trajectory."""
    return [list(members) for _, members in groupby(rows, key=lambda row: row.trajectory)]


def check_row(row: TrainRow, *, vocab_size: int | None) -> None:
    """Refuse what would train on nonsense or crash in the model.

    Raises:
        UnusableRowError: empty prompt or response, arrays of unequal length, a token id outside the vocabulary, a
            behaviour log-prob of a sampled token or a reward that is not finite, a turn's reward on a token that was
            not sampled.
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
        else:
            kind, problem = _bad_turn(row)
    if problem:
        raise _unusable(row, problem, kind)


def _bad_turn(row: TrainRow) -> tuple[str, str]:
    """What is wrong with a turn's reward, as its kind and in full; empty: nothing."""
    for token, reward in row.turn_rewards:
        if not (0 <= token < len(row.response_mask) and row.response_mask[token]):
            problem = f"a turn's reward on token {token} of {len(row.response_mask)}, which the policy did not sample"
            return "turn rewards on no sampled token", problem
        if not np.isfinite(reward):
            return "turn rewards that are not finite", f"a turn's reward of {reward}, which is not finite"
    return "", ""


def check_trajectories(rows: Sequence[TrainRow]) -> None:
    """Refuse rows of a sample that are not trajectories.

    Raises:
        UnusableRowError: rows of one trajectory are not neighbours, or have different rewards.
    """
    seen: set[int] = set()
    for first, *others in trajectories(rows):
        if first.trajectory in seen:
            problem = f"rows of trajectory {first.trajectory} are not neighbours"
            raise _unusable(first, problem, "rows of a trajectory that are not neighbours")
        seen.add(first.trajectory)
        odd = [row.reward for row in others if row.reward != first.reward]
        if odd:
            problem = f"rows of trajectory {first.trajectory} have rewards of {first.reward} and {odd[0]}"
            raise _unusable(first, problem, "rows of a trajectory that disagree")


def _unusable(row: TrainRow, problem: str, kind: str) -> UnusableRowError:
    return UnusableRowError(
        f"{row.sample_id} cannot be trained on: {problem}. Check the engine's and the reward's output.", kind=kind
    )


def sample_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """What went into a step. Trajectories count once, however many rows they are."""
    rewards = np.array([reward for sample in samples for reward in sample.rewards])
    of_all = [trajectory for sample in samples for trajectory in trajectories(sample.rows)]
    lengths = np.array([sum(len(row.response_ids) for row in trajectory) for trajectory in of_all])
    cut = np.array([trajectory[-1].finish_reason is FinishReason.LENGTH for trajectory in of_all])
    ages = np.array([sample.staleness for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "response_tokens/length_share": float(cut.mean()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/share_{age}": float((ages == age).mean()) for age in range(OLD)},
        f"staleness/share_{OLD}": float((ages >= OLD).mean()),
        **_partial(samples),
        **_processing(samples),
        **_of_turns(of_all, lengths),
        **_extras(of_all),
        **_replayed(samples),
    }


def _partial(samples: Sequence[TrainSample]) -> Metrics:
    """Of samples that went on under newer weights."""
    spans = [sample.version_span for sample in samples if sample.version_span > 0]
    return {
        "partial/count": float(len(spans)),
        "partial/ratio": len(spans) / len(samples),
        "partial/max_span": float(max(spans, default=0)),
    }


def _processing(samples: Sequence[TrainSample]) -> Metrics:
    seconds = np.array([sample.processing_s for sample in samples])
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {
        "processing_s/mean": float(seconds.mean()),
        "processing_s/min": float(seconds.min()),
        "processing_s/max": float(seconds.max()),
        "processing_s/p50": p50,
        "processing_s/p95": p95,
        "processing_s/p99": p99,
    }


def _of_turns(of_all: Sequence[Sequence[TrainRow]], lengths: NDArray[np.int64]) -> Metrics:
    """Only where there is more to a trajectory than one response."""
    metrics = Metrics()
    sampled = np.array([sum(int(row.response_mask.sum()) for row in trajectory) for trajectory in of_all])
    if (sampled != lengths).any():
        metrics["sampled_tokens/mean"] = float(sampled.mean())
    num_rows = [len(trajectory) for trajectory in of_all]
    if max(num_rows) > 1:
        metrics["rows/per_trajectory"] = sum(num_rows) / len(num_rows)
    return metrics


def _extras(of_all: Sequence[Sequence[TrainRow]]) -> Metrics:
    """Means over the trajectories that have each."""
    values: dict[str, list[float]] = {}
    for trajectory in of_all:
        for name, value in trajectory[0].reward_extra.items():
            values.setdefault(name, []).append(value)
    return {f"reward/extra/{name}": sum(found) / len(found) for name, found in sorted(values.items())}


def _replayed(samples: Sequence[TrainSample]) -> Metrics:
    """Only where there are any: most runs replay nothing."""
    made = [sample.provenance for sample in samples]
    generated, substituted = made.count(Provenance.GENERATED), made.count(Provenance.SUBSTITUTED)
    if generated == len(made):
        return {}
    return {"skip/replayed_share": 1 - generated / len(made), "skip/substituted_share": substituted / len(made)}
