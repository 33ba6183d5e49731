"""Scores of responses → rewards of tokens: combination, overlong punishment, KL penalty and its coefficient.

Pure torch, everything float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.schema import KlControlConfig, OverlongBufferConfig
from trainer.algorithms.kl import kl_estimate

MAX_KL_ERROR = 0.2
"""Bound of the relative error that the adaptive controller follows (Ziegler et al., §2.2)."""


def combined_scores(scores: Tensor, model_scores: Tensor, *, model_weight: float) -> Tensor:
    """`scores + model_weight · model_scores`, `[B]`: rules, weighted by the Rollouter already, and models together."""
    return scores.double() + model_weight * model_scores.double()


def overlong_penalty(response_lens: Tensor, response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """What to add to each response's reward, `[B]`, ≤ 0: DAPO's soft punishment (https://arxiv.org/abs/2503.14476).

    Eq. 13: 0 up to `response_length - len` tokens, falling linearly to `-penalty_factor` at `response_length` tokens.
    """
    over = response_lens.double() - (response_length - buffer.len)
    return -buffer.penalty_factor * (over / buffer.len).clamp(0.0, 1.0)


def token_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The reward `[B]` on the last token that the policy sampled, 0 elsewhere. `[B, R]`.

    Not on a tool's last token: nothing before it would learn of it. A row without a sampled token keeps its reward on
    the first one, where it still counts in its group.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, 0).amax(dim=1)
    rewards = rewards.double()
    return rewards.new_zeros(response_mask.shape).scatter(1, last.unsqueeze(1), rewards.unsqueeze(1))


class Penalised(NamedTuple):
    token_rewards: Tensor
    """`[B, R]`."""
    kl: float
    """Nats per response: sums over a response's sampled tokens, averaged over responses. What `target_kl` is about."""


def kl_penalised(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    kind: str,
    coefficient: float,
) -> Penalised:
    """Subtract `coefficient` times the estimated KL(policy ‖ reference) from each sampled token's reward.

    Ziegler et al. (https://arxiv.org/abs/1909.08593) eq. 2.

    Args:
        log_probs: `old_log_probs`, the proximal policy, `[B, R]`: the one that the lease starts with, or in bypass mode
            the one that sampled the tokens, whose KL is told late by their staleness.
        kind: `algorithm.kl_penalty`.
    """
    estimate = kl_estimate(log_probs.double(), ref_log_probs.double(), kind)
    estimate = torch.where(response_mask, estimate, 0.0)
    return Penalised(token_rewards.double() - coefficient * estimate, float(estimate.sum(dim=1).mean()))


def next_kl_coefficient(coefficient: float, kl: float, num_responses: int, control: KlControlConfig) -> float:
    """The adaptive coefficient after a lease of `num_responses` whose KL was `kl` nats per response.

    `β (1 + clip(kl / target - 1, ±0.2) · num_responses / horizon)`, Ziegler et al. §2.2, with the horizon counted in
    responses, as in OpenAI's code and verl's. A lease beyond the horizon counts as one horizon: otherwise five of them
    in a lease would turn the penalty into a reward.
    """
    error = min(max(kl / control.target_kl - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1.0 + error * min(num_responses / control.horizon, 1.0))
