"""KL loss against the frozen reference policy. Pure torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.losses import MAX_LOG_RATIO


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate `[N]` of KL(current ‖ reference), in nats, differentiable in `log_probs`.

    Schulman, http://joschu.net/blog/kl-approx.html. With `d = log_probs - ref_log_probs`: k1 = d (unbiased, noisy; as a
    loss its expected gradient is 0 on-policy), k2 = d²/2 (its gradient is the KL's), k3 = e^-d - 1 + d (≥ 0, low
    variance).
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    bounded = torch.clamp(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
