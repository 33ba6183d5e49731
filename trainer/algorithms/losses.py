"""Policy objectives and the value loss, per trained token. Pure torch.

Tensors are flat: `[N]`, the trained tokens of a micro-batch one after another; prompt, tool and padding tokens never
get here. Losses are per token and unreduced: the engine's weights (`trainer.engine.base.Tokens.weight`) hold the
denominators, as `algorithm.loss_agg_mode` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from trainer.algorithms.kl import MAX_LOG_RATIO, probability_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which row each token belongs to."""

    row: Tensor
    """int64 `[N]`."""
    num_rows: int

    def sum(self, values: Tensor) -> Tensor:
        """`[num_rows]`: sum over each row's tokens."""
        return values.new_zeros(self.num_rows).index_add(0, self.row, values)

    def count(self, like: Tensor) -> Tensor:
        """`[num_rows]` in the dtype of `like`: tokens of each row, at least 1."""
        return self.sum(torch.ones_like(like)).clamp(min=1.0)

    def mean(self, values: Tensor) -> Tensor:
        """`[num_rows]`; 0 for a row without a token."""
        return self.sum(values) / self.count(values)

    def max(self, values: Tensor) -> Tensor:
        """`[num_rows]` of values ≥ 0; 0 for a row without a token."""
        return values.new_zeros(self.num_rows).scatter_reduce(0, self.row, values, "amax")

    def spread(self, per_row: Tensor) -> Tensor:
        """`[num_rows]` → `[N]`: each token gets its row's."""
        return per_row[self.row]


class PolicyTerms(NamedTuple):
    loss: Tensor
    """`[N]`, differentiable in `log_probs`."""
    ratio: Tensor
    """`[N]`, what the objective clips: current over proximal probability, of the token or (GSPO) the row. Detached."""
    clipped: Tensor
    """bool `[N]`: the clip range decided this token's loss or (CISPO) weight."""
    dual_clipped: Tensor
    """bool `[N]`: the dual clip did, so it has no gradient."""


Objective = Callable[[Tensor, Tensor, Tensor, Rows, AlgorithmConfig], PolicyTerms]
"""`(log_probs, old_log_probs, advantages, rows, algorithm)`, tensors `[N]`."""


def ppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """`max(-A·r, -A·clip(r, 1 - low, 1 + high))`, with `r = exp(log_probs - old_log_probs)`.

    PPO (https://arxiv.org/abs/1707.06347) eq. 7, with DAPO's two bounds (https://arxiv.org/abs/2503.14476). Dual clip
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
    """PPO's clip on one ratio per row, the geometric mean of its tokens'. GSPO (https://arxiv.org/abs/2507.18071).

    `s_i = exp(mean_t(log_probs - old_log_probs))` over the row's trained tokens; each token takes `sg[s_i] · π/sg[π]`
    (GSPO-token, eq. 14), which has GSPO's value and, where the tokens of a row share one advantage and are averaged
    (`seq-mean-token-mean`), its gradient. No dual clip.
    """
    sequence = rows.mean((log_probs - old_log_probs).detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # sg[log s] last: log_probs - sg[log_probs] is exactly 0 and must not round the ratio.
    return _clipped(torch.exp(log_probs - log_probs.detach() + rows.spread(sequence)), advantages, algorithm)


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """`-sg[clip(r, 1 - low, 1 + high)] · A · log_probs`: clipped weights, but every token keeps a gradient.

    CISPO (MiniMax-M1, https://arxiv.org/abs/2506.13585) eq. 4 and 5.
    """
    ratio = probability_ratio(log_probs - old_log_probs).detach()
    weight = torch.clamp(ratio, 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    return PolicyTerms(-weight * advantages * log_probs, ratio, weight != ratio, torch.zeros_like(ratio).bool())


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Rows, algorithm: AlgorithmConfig
) -> PolicyTerms:
    """`-A · log_probs`: Williams 1992 (https://doi.org/10.1007/BF00992696); nothing is clipped.

    Off-policy it is only right with importance weights (`algorithm.rollout_correction.rollout_is`).
    """
    ratio = probability_ratio(log_probs - old_log_probs).detach()
    nothing = torch.zeros_like(ratio).bool()
    return PolicyTerms(-advantages * log_probs, ratio, nothing, nothing)


POLICY_OBJECTIVES: dict[str, Objective] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
"""Names of `algorithm.policy_loss`."""


class ValueTerms(NamedTuple):
    loss: Tensor
    """`[N]`, differentiable in `predicted`."""
    clipped: Tensor
    """bool `[N]`: the clip decided this token's loss, so it has no gradient."""


def value_loss(predicted: Tensor, values: Tensor, returns: Tensor, *, cliprange: float | None) -> ValueTerms:
    """`½ max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)`: PPO's value clipping, as in verl and OpenAI baselines.

    Args:
        predicted: of the critic being trained, `[N]`.
        values: of the critic when the lease started.
        returns: what it should have said.
        cliprange: ε, in units of reward; None: no clipping.
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
