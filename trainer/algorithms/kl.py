"""Per-token estimates of a KL divergence from sampled tokens. Pure torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before `exp`: e^20 is far outside any clip range, and inf · 0 would be nan."""

MAX_LOW_VAR_KL = 10.0
"""Nats per token at which `low_var_kl` is cut, as verl does: one absurd token cannot own the loss."""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, bounded by e^±20. A bounded ratio has no gradient."""
    return torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k1(difference: Tensor) -> Tensor:
    return difference


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def _k3(difference: Tensor) -> Tensor:
    bounded = torch.clamp(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


def _low_var_kl(difference: Tensor) -> Tensor:
    return torch.clamp(_k3(difference), max=MAX_LOW_VAR_KL)


def _abs(difference: Tensor) -> Tensor:
    return difference.abs()


KL_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _low_var_kl,
    "abs": _abs,
}
"""Names of `algorithm.kl_loss_type` and `algorithm.kl_penalty`."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(current ‖ reference) in nats, elementwise, from tokens of the current policy; differentiable in `log_probs`.

    Schulman, http://joschu.net/blog/kl-approx.html. With `d = log_probs - ref_log_probs`:

    - k1: d. Unbiased, noisy; as a loss its expected gradient is 0 on-policy.
    - k2: d²/2. Biased, but on-policy its expected gradient is the KL's.
    - k3: e^-d - 1 + d. Never negative, unbiased, low variance; |d| is bounded by 20.
    - low_var_kl: k3, at most 10 (verl's name and bound).
    - abs: |d|. No KL, a penalty on any difference.
    """
    return KL_ESTIMATES[kind](log_probs - ref_log_probs)


def mismatch_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """k3 estimate of KL(behaviour ‖ `log_probs`' policy), from tokens of the behaviour policy. Elementwise, nats."""
    return kl_estimate(rollout_log_probs, log_probs, "k3")
