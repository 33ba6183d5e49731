"""Policy losses over trained tokens. Pure torch.

Tensors are flat: `[N]`, the trained tokens of a micro-batch one after another; prompt, tool and padding tokens never
get here. Losses are per token and unreduced; `batching.loss_weights` holds the denominators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before `exp`: e^20 is far outside any clip range, and inf · 0 would be nan."""


class PolicyLoss(NamedTuple):
    loss: Tensor
    """`[N]`, differentiable in `log_probs`."""
    ratio: Tensor
    """`[N]`, current over behaviour probability, detached."""
    clipped: Tensor
    """bool `[N]`: the clip decided this token's loss, so it has no gradient."""


def clipped_policy_loss(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """`max(-A·r, -A·clip(r, 1 - low, 1 + high))` per token, with `r = exp(log_probs - rollout_log_probs)`.

    PPO (https://arxiv.org/abs/1707.06347) eq. 7, with DAPO's two bounds (https://arxiv.org/abs/2503.14476). The ratio
    is taken against the recorded behaviour policy, so a stale token is weighted by how far the policy has moved since.
    """
    ratio = torch.exp(torch.clamp(log_probs - rollout_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return PolicyLoss(torch.maximum(unclipped, clipped), ratio.detach(), (clipped > unclipped).detach())


def mismatch_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Per-token estimate (k3) of KL(behaviour ‖ current), from tokens of the behaviour policy. `[N]`, nats."""
    log_ratio = torch.clamp(log_probs - rollout_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
