"""Scores of trajectories → rewards of tokens: combination, overlong punishment, KL penalty and its coefficient.

Pure torch, everything float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.schema import KlControlConfig, OverlongBufferConfig
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.trajectories import Trajectories

MAX_KL_ERROR = 0.2
"""Bound of the relative error that the adaptive controller follows (Ziegler et al., §2.2)."""


def combined_scores(scores: Tensor, model_scores: Tensor, *, model_weight: float) -> Tensor:
    """`scores + model_weight · model_scores`: rules, weighted by the Rollouter already, and models together."""
    return scores.double() + model_weight * model_scores.double()


def overlong_penalty(response_lens: Tensor, response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """What to add to each response's reward, ≤ 0: DAPO's soft punishment (https://arxiv.org/abs/2503.14476).

    Eq. 13: 0 up to `response_length - len` tokens, falling linearly to `-penalty_factor` at `response_length` tokens.
    """
    over = response_lens.double() - (response_length - buffer.len)
    return -buffer.penalty_factor * (over / buffer.len).clamp(0.0, 1.0)


class Rewards(NamedTuple):
    """A lease's rewards on its tokens, both `[B, R]`. They are equal where no row has turn rewards and each is a
    trajectory."""

    tokens: Tensor
    """Rewards to come from any token of any row are what its trajectory still earned from there on: what belongs to a
    turn is on that turn's last token, and what is left, rewards and penalties of later rows included, on the row's last
    sampled token."""
    whole: Tensor
    """Each reward once: a trajectory's on the last sampled token of its first row, and penalties where they arise."""


def laid_out(
    rewards: Tensor, response_mask: Tensor, trajectories: Trajectories, turn_rewards: Tensor | None = None
) -> Rewards:
    """Rewards of trajectories, on tokens.

    Args:
        rewards: `[B]`: of the row's whole trajectory, `turn_rewards` included.
        turn_rewards: `[B, R]`: the parts of it that belong to a sampled token; None: there are none.
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
    """`[B]` on the last token of each row that the policy sampled, 0 elsewhere. `[B, R]`.

    Not on a tool's last token: nothing before it would learn of it. A row without a sampled token keeps its value on
    the first one, where it still counts in its group.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, 0).amax(dim=1)
    return values.new_zeros(response_mask.shape).scatter(1, last.unsqueeze(1), values.unsqueeze(1))


def scores_of(rewards: Rewards, trajectories: Trajectories) -> Tensor:
    """`[T]`: what each trajectory got in all, over all its rows. Without a penalty exactly its reward, however that is
    split into turns."""
    return trajectories.sum(rewards.whole.sum(dim=1))


class Penalised(NamedTuple):
    rewards: Rewards
    kl: float
    """Nats per trajectory: sums over a trajectory's sampled tokens, averaged over trajectories. What `target_kl` is
    about."""


def kl_penalised(
    rewards: Rewards,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    trajectories: Trajectories,
    *,
    kind: str,
    coefficient: float,
) -> Penalised:
    """Subtract `coefficient` times the estimated KL(policy ‖ reference) from each sampled token's reward.

    Ziegler et al. (https://arxiv.org/abs/1909.08593) eq. 2. A trajectory's score loses the KL of all its rows.

    Args:
        log_probs: `old_log_probs`, the proximal policy, `[B, R]`: the one that the lease starts with, or in bypass mode
            the one that sampled the tokens, whose KL is told late by their staleness.
        kind: `algorithm.kl_penalty`.
    """
    estimate = kl_estimate(log_probs.double(), ref_log_probs.double(), kind)
    estimate = torch.where(response_mask, estimate, 0.0)
    of_rows = estimate.sum(dim=1)
    tokens, whole = rewards.tokens - coefficient * estimate, rewards.whole - coefficient * estimate
    if trajectories.forked:
        tokens = tokens - coefficient * on_last_token(trajectories.later(of_rows), response_mask)
    return Penalised(Rewards(tokens, whole), float(trajectories.sum(of_rows).mean()))


def next_kl_coefficient(coefficient: float, kl: float, num_trajectories: int, control: KlControlConfig) -> float:
    """The adaptive coefficient after a lease of `num_trajectories` whose KL was `kl` nats per trajectory.

    `β (1 + clip(kl / target - 1, ±0.2) · num_trajectories / horizon)`, Ziegler et al. §2.2, with the horizon counted in
    trajectories, as in OpenAI's code and verl's. A lease beyond the horizon counts as one horizon: otherwise five of
    them in a lease would turn the penalty into a reward.
    """
    error = min(max(kl / control.target_kl - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * min(num_trajectories / control.horizon, 1.0))
