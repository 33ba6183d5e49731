"""Off-policy correction: importance weights, masking, rejection, and the gap between the policies. Pure torch.

The behaviour policy sampled the tokens (`rollout_log_probs`); the step starts from the proximal policy
(`old_log_probs`). The two differ because the weights have changed since a token was sampled, and because the inference
engine computes differently from the Trainer. `log_ratio = old_log_probs - rollout_log_probs`, in nats, for tokens in a
flat layout (`losses.Rows`).

Sources: AReaL's decoupled PPO (https://arxiv.org/abs/2505.24298), "When Speed Kills Stability"
(https://richardli.xyz/rl-collapse) for truncated and masked weights and geometric rejection, and verl's
`rollout_corr_helper` for the set of rejection statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.import_path import load_function
from asyncrl.config.sections.algorithm import RolloutCorrectionConfig
from asyncrl.core.failures import UserCodeError
from asyncrl.core.records import Metrics
from trainer.algorithms.losses import Rows, mismatch_kl, probability_ratio, shape_of

MAX_AGE = 3
"""Tokens of this age in versions, and older ones, are counted together."""

_EPSILON = 1e-8
"""Normalization divides by the mean weight, or by this if the mean is smaller."""


class ImportanceWeights(NamedTuple):
    """Importance weights of the trained tokens, `[N]`."""

    weights: Tensor
    """The weights that multiply the loss."""
    clipped: Tensor
    """bool: weights truncated to the upper threshold."""
    masked: Tensor
    """bool: weights set to 0."""


class Correction(NamedTuple):
    is_weights: Tensor | None
    """`[B, R]`, 0 where `loss_mask` was False; None if no weights are configured."""
    loss_mask: Tensor
    """bool `[B, R]`: the tokens that remain to be trained."""
    metrics: Metrics


def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    token_ages: Tensor,
    config: RolloutCorrectionConfig,
) -> Correction:
    """Correct a lease whose proximal log-probs were recomputed.

    Products and means over a response use its trained tokens, without those masked as too stale. Weights are computed
    before rejection, and their normalization includes the tokens that are then rejected, as in verl.

    Args:
        old_log_probs: log-probs of the proximal policy, `[B, R]`.
        rollout_log_probs: log-probs of the behaviour policy, `[B, R]`.
        loss_mask: bool `[B, R]`, the tokens to be trained.
        token_ages: int64, versions between the Trainer and the weights that sampled each token.
        config: with `bypass_mode` nothing is corrected here, because the behaviour policy is used as the proximal one
            and the loss (`objective.PolicyLoss`) corrects for the current policy.
    """
    if config.bypass_mode:
        return Correction(None, loss_mask, {})
    old, behaviour, ages = old_log_probs[loss_mask], rollout_log_probs[loss_mask], token_ages[loss_mask]
    log_ratio = old - behaviour
    rows = Rows(loss_mask.nonzero()[:, 0], len(loss_mask))
    metrics = gap_metrics(old, behaviour, ages)
    is_weights, new_mask = None, loss_mask
    lost = torch.zeros_like(log_ratio).bool()
    if config.rollout_is != "none":
        weighted = importance_weights(log_ratio, rows, config)
        is_weights = torch.zeros_like(old_log_probs).masked_scatter(loss_mask, weighted.weights)
        metrics |= with_sample_size({name: _mean(values) for name, values in weight_means(weighted).items()})
        lost = lost | weighted.masked
    if config.rollout_rs != "none":
        keep = rejection_mask(log_ratio, rows, config)
        new_mask = torch.zeros_like(loss_mask).masked_scatter(loss_mask, keep)
        metrics["correction/rejected_share"] = _mean(~keep)
        lost = lost | ~keep
    metrics["correction/masked_share"] = _mean(lost)
    return Correction(is_weights, new_mask, metrics)


def importance_weights(log_ratio: Tensor, rows: Rows, config: RolloutCorrectionConfig) -> ImportanceWeights:
    """Return the importance weights proximal / behaviour, within thresholds, of trained tokens; `log_ratio` is `[N]`.

    With `rollout_is: sequence` each token has the weight of its row. A user's function gets `(log_ratio, rows)` and
    returns weights `[N]`, which are bounded like the others.

    `truncate` bounds weights by the upper threshold: TIS, `min(ρ, C)`. `mask` sets weights outside the thresholds to 0:
    MIS `ρ · [ρ ≤ C]` or, with a lower threshold, IcePop's `ρ · [low ≤ ρ ≤ C]`. A token of weight 0 still counts in the
    denominators of the loss. `rollout_is_batch_normalize` then divides the weights by their mean over tokens, or
    over rows for sequence weights.
    """
    key = "algorithm.rollout_correction.rollout_is"
    weights = _checked(load_function(config.rollout_is, key, WEIGHTS)(log_ratio, rows), log_ratio, key)
    over = weights > config.rollout_is_threshold
    if config.rollout_is_mode == "truncate":
        clipped, masked = over, torch.zeros_like(over)
        weights = weights.clamp(max=config.rollout_is_threshold)
    else:
        clipped, masked = torch.zeros_like(over), over | (weights < config.rollout_is_threshold_low)
        weights = weights.masked_fill(masked, 0.0)
    if config.rollout_is_batch_normalize and len(weights):
        mean = weights.mean()
        if config.rollout_is == "sequence":
            per_row, present = rows.mean(weights), rows.sum(torch.ones_like(weights)) > 0
            mean = per_row[present].mean()
        if bool(mean > _EPSILON):
            weights = weights / mean
    return ImportanceWeights(weights, clipped, masked)


WEIGHTS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "token": lambda log_ratio, rows: probability_ratio(log_ratio),
    "sequence": lambda log_ratio, rows: probability_ratio(rows.spread(rows.sum(log_ratio))),
}
"""Names of `algorithm.rollout_correction.rollout_is`."""


def _checked(values: object, log_ratio: Tensor, key: str) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != log_ratio.shape:
        raise UserCodeError(f"{key}: the function returned {shape_of(values)}; expected one number per token")
    return values


def rejection_mask(log_ratio: Tensor, rows: Rows, config: RolloutCorrectionConfig) -> Tensor:
    """Return which tokens `rollout_rs` keeps, bool `[N]`.

    A token is kept if each statistic is within its bounds: `k1 = log_ratio`, `k2 = log_ratio² / 2` or `k3 =
    e^log_ratio - 1 - log_ratio` of the token (`token_*`), or their sum, mean or maximum over the tokens of its row
    (`seq_*_*`); `geometric` is the mean log ratio. Sum and mean of k1 have a sign, so deviations of opposite sign
    cancel; `seq_max_k1` is the largest |log_ratio|. A user's function gets `(log_ratio, rows)` and returns a statistic
    `[N]`.
    """
    key, keep = "algorithm.rollout_correction.rollout_rs", torch.ones_like(log_ratio).bool()
    for rule in config.rejections:
        statistic = _checked(load_function(rule.name, key, REJECTIONS)(log_ratio, rows), log_ratio, key)
        keep &= (statistic >= rule.low) & (statistic <= rule.high)
    return keep


def _k3(log_ratio: Tensor) -> Tensor:
    return mismatch_kl(log_ratio, torch.zeros_like(log_ratio))


REJECTIONS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "geometric": lambda log_ratio, rows: rows.spread(rows.mean(log_ratio)),
    "token_k1": lambda log_ratio, rows: log_ratio,
    "token_k2": lambda log_ratio, rows: 0.5 * log_ratio.square(),
    "token_k3": lambda log_ratio, rows: _k3(log_ratio),
    "seq_sum_k1": lambda log_ratio, rows: rows.spread(rows.sum(log_ratio)),
    "seq_sum_k2": lambda log_ratio, rows: rows.spread(rows.sum(0.5 * log_ratio.square())),
    "seq_sum_k3": lambda log_ratio, rows: rows.spread(rows.sum(_k3(log_ratio))),
    "seq_mean_k1": lambda log_ratio, rows: rows.spread(rows.mean(log_ratio)),
    "seq_mean_k2": lambda log_ratio, rows: rows.spread(rows.mean(0.5 * log_ratio.square())),
    "seq_mean_k3": lambda log_ratio, rows: rows.spread(rows.mean(_k3(log_ratio))),
    "seq_max_k1": lambda log_ratio, rows: rows.spread(rows.max(log_ratio.abs())),
    "seq_max_k2": lambda log_ratio, rows: rows.spread(rows.max(0.5 * log_ratio.square())),
    "seq_max_k3": lambda log_ratio, rows: rows.spread(rows.max(_k3(log_ratio))),
}
"""Names of `algorithm.rollout_correction.rollout_rs`."""


def weight_means(weighted: ImportanceWeights) -> dict[str, Tensor]:
    """Return the values `[N]` whose means over tokens are the metrics of the weights; `with_sample_size` needs the mean
    square."""
    return {
        "correction/is_weight_mean": weighted.weights,
        "correction/is_weight_mean_square": weighted.weights.square(),
        "correction/clipped_share": weighted.clipped.to(weighted.weights),
        "correction/masked_share": weighted.masked.to(weighted.weights),
    }


def with_sample_size(metrics: Metrics) -> Metrics:
    """Replace the mean square weight by `effective_sample_size = mean(w)² / mean(w²)`: the share of the tokens that
    would have the same variance with equal weights. Without weights, return `metrics` unchanged."""
    if "correction/is_weight_mean_square" not in metrics:
        return metrics
    rest = {name: value for name, value in metrics.items() if name != "correction/is_weight_mean_square"}
    mean, mean_square = metrics["correction/is_weight_mean"], metrics["correction/is_weight_mean_square"]
    return rest | {"correction/effective_sample_size": mean * mean / mean_square if mean_square > 0 else 0.0}


def by_age(values: Tensor, token_ages: Tensor) -> dict[str, Tensor]:
    """Split values `[N]` by age: `{"age_0": values where the age is 0, 0 elsewhere, …, "age_3": age 3 or more}`."""
    capped = token_ages.clamp(0, MAX_AGE)
    return {f"age_{age}": values * (capped == age) for age in range(MAX_AGE + 1)}


def gap_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, token_ages: Tensor) -> Metrics:
    """Return metrics of the gap between proximal and behaviour policy, over trained tokens `[N]`.

    `mismatch_kl` is KL(behaviour ‖ proximal) in nats per token, also by the token's age in versions (`age_3`: 3 or
    more; ages that don't occur are left out). `prob_gap` is the absolute difference of the two probabilities, as
    mean and maximum.
    """
    if not len(old_log_probs):
        return {}
    divergence = mismatch_kl(old_log_probs, rollout_log_probs)
    gap = (old_log_probs.exp() - rollout_log_probs.exp()).abs()
    metrics = {
        "correction/mismatch_kl": float(divergence.mean()),
        "correction/prob_gap_mean": float(gap.mean()),
        "correction/prob_gap_max": float(gap.max()),
    }
    counts = by_age(torch.ones_like(divergence), token_ages)
    for name, values in by_age(divergence, token_ages).items():
        if count := float(counts[name].sum()):
            metrics[f"correction/mismatch_kl_{name}"] = float(values.sum()) / count
    return metrics


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
