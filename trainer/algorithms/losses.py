"""Estimates of the KL divergence, policy objectives and the value loss, per trained token. Pure torch.

Tensors are flat, `[N]`: the trained tokens of a micro-batch one after another, without prompt, tool and padding tokens.
Losses are per token and unreduced. The engine multiplies them by weights (`trainer.engines.base.Tokens.weight`) that
include the denominators of `algorithm.loss_agg_mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.import_path import load_function
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import UserCodeError

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this value before `exp`: e^20 is far outside any clip range, and inf · 0 would be nan."""

MAX_LOW_VAR_KL = 10.0
"""Upper bound of `low_var_kl` in nats per token, as in verl, so that a single extreme token cannot dominate the
loss."""


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, bounded by e^±20. A bounded ratio has no gradient."""
    return torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs


def _k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    bounded = torch.clamp(log_probs - ref_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


def _low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return torch.clamp(_k3(log_probs, ref_log_probs), max=MAX_LOW_VAR_KL)


def _abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).abs()


def _straight_through(estimate: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an estimate with the value of another and the gradient of k2, as verl's `+` does."""

    def estimated(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        gradient = _k2(log_probs, ref_log_probs)
        return gradient - gradient.detach() + estimate(log_probs, ref_log_probs).detach()

    return estimated


_PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "low_var_kl": _low_var_kl,
    "abs": _abs,
}
KL_ESTIMATES = _PLAIN | {f"{name}+": _straight_through(_PLAIN[name]) for name in ("k1", "k3", "low_var_kl", "abs")}
"""Names of `algorithm.kl_loss_type` and, without `+`, of `algorithm.kl_penalty`."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str, key: str = "algorithm.kl_loss_type") -> Tensor:
    """Estimate KL(current ‖ reference) in nats, elementwise, from tokens of the current policy.

    Estimates are differentiable in `log_probs`. Schulman, http://joschu.net/blog/kl-approx.html. With
    `d = log_probs - ref_log_probs`:

    - k1: d. Unbiased, noisy; as a loss its expected gradient is 0 on-policy.
    - k2: d²/2. Biased, but on-policy its expected gradient is the KL's.
    - k3: e^-d - 1 + d. Never negative, unbiased, low variance; |d| is bounded by 20.
    - low_var_kl: k3, at most 10 (verl's name and bound).
    - abs: |d|. No KL, a penalty on any difference.
    - k1+, k3+, low_var_kl+, abs+: the same values with the gradient of k2.

    Raises:
        UserCodeError: the user's function raised, or returned another shape. `key`: the key that names it.
    """
    estimate = load_function(kind, key, KL_ESTIMATES)(log_probs, ref_log_probs)
    if getattr(estimate, "shape", None) != log_probs.shape:
        raise UserCodeError(f"{key}: {kind} returned {shape_of(estimate)}; expected one estimate per token")
    return estimate


def mismatch_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Estimate KL(behaviour ‖ policy of `log_probs`) in nats by k3, elementwise, from the behaviour policy's tokens."""
    return kl_estimate(rollout_log_probs, log_probs, "k3")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The row that each token of a flat layout belongs to."""

    row: Tensor
    """int64 `[N]`."""
    num_rows: int

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each row's tokens, `[num_rows]`."""
        return values.new_zeros(self.num_rows).index_add(0, self.row, values)

    def count(self, like: Tensor) -> Tensor:
        """Number of tokens of each row, at least 1, `[num_rows]` in the dtype of `like`."""
        return self.sum(torch.ones_like(like)).clamp(min=1.0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each row's tokens, `[num_rows]`; 0 for a row without a token."""
        return self.sum(values) / self.count(values)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over each row's tokens of values ≥ 0, `[num_rows]`; 0 for a row without a token."""
        return values.new_zeros(self.num_rows).scatter_reduce(0, self.row, values, "amax")

    def spread(self, per_row: Tensor) -> Tensor:
        """Give each token the value of its row: `[num_rows]` → `[N]`."""
        return per_row[self.row]


class PolicyTerms(NamedTuple):
    loss: Tensor
    """`[N]`, differentiable in `log_probs`."""
    ratio: Tensor
    """`[N]`: the ratio that the objective clips, current over proximal probability of the token or (GSPO) the row.
    Detached."""
    clipped: Tensor
    """bool `[N]`: clipping changed this token's loss or (CISPO) weight."""
    dual_clipped: Tensor
    """bool `[N]`: the dual clip bounded this token's loss, so it has no gradient."""


Objective = Callable[[Tensor, Tensor, Tensor, Rows, AlgorithmConfig], PolicyTerms]
"""Called with `(log_probs, old_log_probs, advantages, rows, algorithm)`, where tensors are `[N]`."""


def ppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """PPO: `max(-A·r, -A·clip(r, 1 - low, 1 + high))`, with `r = exp(log_probs - old_log_probs)`.

    https://arxiv.org/abs/1707.06347 eq. 7, with DAPO's two bounds (https://arxiv.org/abs/2503.14476). Dual clip
    (https://arxiv.org/abs/1912.09729 eq. 5): where A < 0 the loss is at most `-A·c`.
    """
    terms = _clipped(probability_ratio(log_probs - old_log_probs), advantages, algorithm)
    if algorithm.clip_ratio_c is None:
        return terms
    bound = -advantages * algorithm.clip_ratio_c
    over = (advantages < 0) & (terms.loss > bound)
    return PolicyTerms(torch.where(over, bound, terms.loss), terms.ratio, terms.clipped & ~over, over.detach())


def gspo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """GSPO (https://arxiv.org/abs/2507.18071): PPO's clip on one ratio per row: the geometric mean of token ratios.

    `s_i = exp(mean_t(log_probs - old_log_probs))` over the row's trained tokens. Each token's ratio is `sg[s_i] ·
    π/sg[π]` (GSPO-token, eq. 14). Its value is GSPO's; its gradient is GSPO's too if the tokens of a row share one
    advantage and are averaged (`seq-mean-token-mean`). A ratio at the bound has no gradient. There is no dual clip.
    """
    sequence = rows.spread(rows.mean((log_probs - old_log_probs).detach()))
    # Add sg[log s] last: the difference log_probs - sg[log_probs] is then exactly 0 and does not round the ratio.
    return _clipped(probability_ratio(log_probs - log_probs.detach() + sequence), advantages, algorithm)


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """CISPO: `-sg[clip(r, 1 - low, 1 + high)] · A · log_probs`. Weights are clipped, but every token keeps a gradient.

    MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4 and 5; `sg` stops the gradient.
    """
    ratio = probability_ratio(log_probs - old_log_probs).detach()
    weight = torch.clamp(ratio, 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    return PolicyTerms(-weight * advantages * log_probs, ratio, weight != ratio, torch.zeros_like(ratio).bool())


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """REINFORCE: `-A · log_probs`, without a clip. Williams 1992 (https://doi.org/10.1007/BF00992696).

    On off-policy samples it is unbiased only with importance weights (`algorithm.rollout_correction.rollout_is`).
    """
    ratio = probability_ratio(log_probs - old_log_probs).detach()
    nothing = torch.zeros_like(ratio).bool()
    return PolicyTerms(-advantages * log_probs, ratio, nothing, nothing)


POLICY_OBJECTIVES: dict[str, Objective] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
"""Names of `algorithm.policy_loss`."""


def policy_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """Compute the objective that `algorithm.policy_loss` names. A user's function may return only the loss, `[N]`.

    Raises:
        UserCodeError: the user's function raised, or returned something else.
    """
    name, key = algorithm.policy_loss, "algorithm.policy_loss"
    terms = load_function(name, key, POLICY_OBJECTIVES)(log_probs, old_log_probs, advantages, rows, algorithm)
    if isinstance(terms, PolicyTerms):
        return terms
    if not isinstance(terms, Tensor) or terms.shape != log_probs.shape:
        raise UserCodeError(f"{key}: {name} returned {shape_of(terms)}; expected PolicyTerms or one loss per token")
    ratio = probability_ratio(log_probs - old_log_probs).detach()
    nothing = torch.zeros_like(ratio).bool()
    return PolicyTerms(terms, ratio, nothing, nothing)


def shape_of(value: object) -> str:
    """Describe a value of the wrong type or shape."""
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a value of type {type(value).__name__}"
    )


class ValueTerms(NamedTuple):
    loss: Tensor
    """`[N]`, differentiable in `predicted`."""
    clipped: Tensor
    """bool `[N]`: clipping changed this token's loss, so it has no gradient."""


def value_loss(predicted: Tensor, values: Tensor, returns: Tensor, *, cliprange: float | None) -> ValueTerms:
    """PPO's clipped value loss, as in verl and OpenAI baselines.

    `½ max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)`

    Args:
        predicted: values of the critic being trained, `[N]`.
        values: values of the critic when the lease started.
        returns: the targets of the critic.
        cliprange: ε in units of reward; None disables clipping.
    """
    plain = (predicted - returns).square()
    if cliprange is None:
        return ValueTerms(0.5 * plain, torch.zeros_like(plain).bool())
    bounded = torch.clamp(predicted, values - cliprange, values + cliprange)
    clipped = (bounded - returns).square()
    return ValueTerms(0.5 * torch.maximum(plain, clipped), (clipped > plain).detach())


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> PolicyTerms:
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    over = (clipped > unclipped).detach()
    return PolicyTerms(torch.maximum(unclipped, clipped), ratio.detach(), over, torch.zeros_like(over))
