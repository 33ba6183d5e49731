"""Compute the rewards of trajectories: combine scores, subtract penalties for length and KL, and assign them to tokens.
Pure torch.

Most trajectories are one row of a batch. If the chat template rewrote history, a trajectory has several adjacent rows,
in order. Each sampled token is in exactly one of them, and the reward belongs to all of them together. Everything is
float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from asyncrl.config.sections.algorithm import KlControlConfig
from asyncrl.config.sections.reward import OverlongBufferConfig
from trainer.algorithms.losses import kl_estimate


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """A mapping of `B` rows to `T` trajectories. If every trajectory has one row, sums over rows are exact copies."""

    number: Tensor
    """int64 `[B]`: each row's trajectory, from 0."""
    first: Tensor
    """int64 `[T]`: the first row of each."""
    last: Tensor
    """int64 `[T]`: the last row of each."""
    continuing: tuple[int, ...]
    """Rows that are not the first of their trajectory, ascending."""

    @classmethod
    def of(cls, labels: Tensor) -> Self:
        """Create from labels, int64 `[B]`: adjacent rows with the same label belong to one trajectory
        (`trajectories` of `trainer.workers.tensors`)."""
        _, number, counts = torch.unique_consecutive(labels, return_inverse=True, return_counts=True)
        last = counts.cumsum(0) - 1
        continuing = (number.diff() == 0).nonzero()[:, 0] + 1
        return cls(number, last - counts + 1, last, tuple(continuing.tolist()))

    def __len__(self) -> int:
        """Return `T`."""
        return len(self.first)

    @property
    def forked(self) -> bool:
        """Whether some trajectory has several rows."""
        return bool(self.continuing)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the rows of each trajectory: `[B]` → `[T]`."""
        return values.new_zeros(len(self)).index_add(0, self.number, values)

    def spread(self, values: Tensor) -> Tensor:
        """Give each row the value of its trajectory: `[T]` → `[B]`."""
        return values[self.number]

    def so_far(self, values: Tensor) -> Tensor:
        """Sum over the trajectory's rows up to and including each row: `[B]` → `[B]`."""
        sums = values.clone()
        for row in self.continuing:
            sums[row] += sums[row - 1]
        return sums

    def later(self, values: Tensor) -> Tensor:
        """Sum over the trajectory's rows after each row: `[B]` → `[B]`."""
        sums = torch.zeros_like(values)
        for row in reversed(self.continuing):
            sums[row - 1] = sums[row] + values[row]
        return sums


MAX_KL_ERROR = 0.2
"""Bound of the relative error of the KL in one update of the adaptive coefficient (Ziegler et al., §2.2)."""


def combined_scores(scores: Tensor, model_scores: Tensor, *, model_weight: float) -> Tensor:
    """Return `scores + model_weight · model_scores`. The Rollouter has already weighted its `scores`."""
    return scores.double() + model_weight * model_scores.double()


def overlong_penalty(response_lens: Tensor, response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """Return what to add to each response's reward, ≤ 0: DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476).

    Eq. 13: 0 up to `response_length - len` tokens, then falling linearly to `-penalty_factor` at `response_length`
    tokens.
    """
    over = response_lens.double() - (response_length - buffer.len)
    return -buffer.penalty_factor * (over / buffer.len).clamp(0.0, 1.0)


class Rewards(NamedTuple):
    """The rewards of a lease, assigned to its tokens in two ways, both `[B, R]`. The two are equal if no row has
    turn rewards and every trajectory has one row."""

    tokens: Tensor
    """For estimators that work token by token: the rewards from any token to the end of its row add up to what the
    trajectory earns from that token on. The reward of a turn is on the last token of the turn; the rest, including
    rewards and penalties of later rows, is on the row's last sampled token."""
    whole: Tensor
    """For sums over trajectories: every reward occurs exactly once. A trajectory's reward is on the last sampled token
    of its first row, and each penalty is on the token that it belongs to."""


def laid_out(
    rewards: Tensor, response_mask: Tensor, trajectories: Trajectories, turn_rewards: Tensor | None = None
) -> Rewards:
    """Assign the rewards of trajectories to tokens.

    Args:
        rewards: `[B]`, the reward of each row's whole trajectory, including `turn_rewards`.
        turn_rewards: `[B, R]`, the parts of the reward that belong to a turn, on sampled tokens; None if there are
            none.
    """
    rewards = rewards.double()
    whole = rewards
    if trajectories.forked:
        whole = torch.zeros_like(rewards)
        whole[trajectories.first] = rewards[trajectories.first]
    on_whole = on_last_token(whole, response_mask)
    if turn_rewards is None:
        return Rewards(on_last_token(rewards, response_mask), on_whole)
    rest = rewards - trajectories.so_far(turn_rewards.double().sum(dim=1))
    return Rewards(on_last_token(rest, response_mask) + turn_rewards.double(), on_whole)


def on_last_token(values: Tensor, response_mask: Tensor) -> Tensor:
    """Put the values `[B]` on the last sampled token of each row and 0 elsewhere. Returns `[B, R]`.

    On a tool token the value would not reach the sampled tokens before it. A row without a sampled token gets its
    value on its first token, where it still counts in its group.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, 0).amax(dim=1)
    return values.new_zeros(response_mask.shape).scatter(1, last.unsqueeze(1), values.unsqueeze(1))


def scores_of(rewards: Rewards, trajectories: Trajectories) -> Tensor:
    """Return the total reward of each trajectory over all its rows, `[T]`. Without a penalty it is exactly the
    trajectory's reward, however that is split into turns."""
    return trajectories.sum(rewards.whole.sum(dim=1))


class PenalisedRewards(NamedTuple):
    rewards: Rewards
    kl: float
    """The KL in nats per trajectory, summed over its sampled tokens and averaged over trajectories; `target_kl` is
    in this unit."""


def kl_penalised(
    rewards: Rewards,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    trajectories: Trajectories,
    *,
    kind: str,
    coefficient: float,
) -> PenalisedRewards:
    """Subtract `coefficient` times the estimated KL(policy ‖ reference) from each sampled token's reward.

    Ziegler et al. (https://arxiv.org/abs/1909.08593) eq. 2. A trajectory's score loses the KL of all its rows.

    Args:
        log_probs: `old_log_probs` of the proximal policy, `[B, R]`: the policy at the start of the lease. In bypass
            mode it is the policy that sampled the tokens, so the KL lags by their staleness.
        kind: `algorithm.kl_penalty`.
    """
    estimate = kl_estimate(log_probs.double(), ref_log_probs.double(), kind, "algorithm.kl_penalty")
    estimate = torch.where(response_mask, estimate, 0.0)
    of_rows = estimate.sum(dim=1)
    tokens, whole = rewards.tokens - coefficient * estimate, rewards.whole - coefficient * estimate
    if trajectories.forked:
        tokens = tokens - coefficient * on_last_token(trajectories.later(of_rows), response_mask)
    return PenalisedRewards(Rewards(tokens, whole), float(trajectories.sum(of_rows).mean()))


def next_kl_coefficient(coefficient: float, kl: float, num_trajectories: int, control: KlControlConfig) -> float:
    """Return the adaptive KL coefficient after a lease of `num_trajectories` with a KL of `kl` nats per trajectory.

    `β (1 + clip(kl / target - 1, ±0.2) · num_trajectories / horizon)`, Ziegler et al. §2.2, with the horizon counted in
    trajectories, as in OpenAI's code and verl's. `num_trajectories / horizon` is bounded by 1, because a lease of
    more than five horizons could otherwise make the coefficient negative.
    """
    error = min(max(kl / control.target_kl - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * min(num_trajectories / control.horizon, 1.0))
