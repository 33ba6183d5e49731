"""Off-policy correction: importance weights, masking, rejection, and how far the policies are apart. Pure torch.

Tokens come from the behaviour policy (`rollout_log_probs`); the proximal policy (`old_log_probs`) is where the step
starts. They differ because the weights moved on since a token was sampled and because the engine that sampled it
computes differently. `log_ratio = old_log_probs - rollout_log_probs`, in nats, of tokens laid out flat (`losses.Rows`).

Sources: AReaL's decoupled PPO (https://arxiv.org/abs/2505.24298), "When Speed Kills Stability"
(https://richardli.xyz/rl-collapse) for truncated and masked weights and geometric rejection, and verl's
`rollout_corr_helper` for the set of rejection statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.schema import RolloutCorrectionConfig
from asyncrl.records import Metrics
from trainer.algorithms.kl import mismatch_kl, probability_ratio
from trainer.algorithms.losses import Rows

MAX_AGE = 3
"""Versions from which token ages are counted together."""

_EPSILON = 1e-8
"""A mean weight below this is not divided by."""


class Weighted(NamedTuple):
    """Of the trained tokens, `[N]`."""

    weights: Tensor
    """As they multiply the loss."""
    clipped: Tensor
    """bool: cut to the upper threshold."""
    masked: Tensor
    """bool: set to 0."""


class Correction(NamedTuple):
    is_weights: Tensor | None
    """`[B, R]`, 0 where `loss_mask` was False; None: no weights."""
    loss_mask: Tensor
    """bool `[B, R]`: what is left to train."""
    metrics: Metrics


def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    token_ages: Tensor,
    config: RolloutCorrectionConfig,
) -> Correction:
    """Correct a lease whose proximal log-probs were recomputed.

    Products and means over a response take its trained tokens: what was masked as too stale has no say. Weights are
    those of all tokens that came in, before rejection, and normalization counts them all, as in verl.

    Args:
        old_log_probs: of the proximal policy, `[B, R]`.
        rollout_log_probs: of the behaviour policy.
        loss_mask: bool, the tokens that would be trained.
        token_ages: int64, versions between the Trainer and the weights that sampled each token.
        config: with `bypass_mode` nothing is done here: proximal and behaviour policy are one, and the loss
            (`objective.PolicyLoss`) compares with the current policy.
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
        keep = kept(log_ratio, rows, config)
        new_mask = torch.zeros_like(loss_mask).masked_scatter(loss_mask, keep)
        metrics["correction/rejected_share"] = _mean(~keep)
        lost = lost | ~keep
    metrics["correction/masked_share"] = _mean(lost)
    return Correction(is_weights, new_mask, metrics)


def importance_weights(log_ratio: Tensor, rows: Rows, config: RolloutCorrectionConfig) -> Weighted:
    """Weights proximal / behaviour of each token, or of its whole row (`rollout_is: sequence`), within thresholds.

    `truncate` cuts to the upper one: TIS, `min(ρ, C)`. `mask` sets to 0 what is outside: MIS `ρ · [ρ ≤ C]`, or, with a
    lower threshold, IcePop's `ρ · [low ≤ ρ ≤ C]`; a token of weight 0 still counts in the loss's denominators.
    `rollout_is_batch_normalize` then divides by their mean over tokens, or over rows for sequence weights.
    """
    if config.rollout_is == "sequence":
        log_ratio = rows.spread(rows.sum(log_ratio))
    weights = probability_ratio(log_ratio)
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
    return Weighted(weights, clipped, masked)


def kept(log_ratio: Tensor, rows: Rows, config: RolloutCorrectionConfig) -> Tensor:
    """bool `[N]`: tokens that `rollout_rs` lets through.

    geometric: whole rows whose `exp(mean log_ratio)` is within [low, high]. Otherwise a statistic of each token,
    `k1 = |log_ratio|`, `k2 = log_ratio² / 2`, `k3 = e^log_ratio - 1 - log_ratio`, bounded by the threshold: for itself
    (`token_*`, which drops the token) or as the row's sum, mean or maximum (`seq_*_*`, which drop the row). For k1, sum
    and mean are taken before the absolute value: there, errors of opposite sign cancel.
    """
    name, threshold = config.rollout_rs, config.rejection_bound
    if name == "geometric":
        ratio = probability_ratio(rows.mean(log_ratio))
        low = config.rollout_rs_threshold_low or 1.0 / threshold
        return rows.spread((ratio >= low) & (ratio <= threshold))
    statistic = _STATISTICS[name[-2:]](log_ratio)
    level = name[:-3]
    if level == "token":
        return statistic.abs() <= threshold
    return rows.spread(_LEVELS[level](rows, statistic).abs() <= threshold)


_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: mismatch_kl(log_ratio, torch.zeros_like(log_ratio)),
}
_LEVELS: dict[str, Callable[[Rows, Tensor], Tensor]] = {
    "seq_sum": lambda rows, statistic: rows.sum(statistic),
    "seq_mean": lambda rows, statistic: rows.mean(statistic),
    "seq_max": lambda rows, statistic: rows.max(statistic.abs()),
}


def weight_means(weighted: Weighted) -> dict[str, Tensor]:
    """What to average over tokens, `[N]`. The mean square is for `with_sample_size`."""
    return {
        "correction/is_weight_mean": weighted.weights,
        "correction/is_weight_mean_square": weighted.weights.square(),
        "correction/clipped_share": weighted.clipped.to(weighted.weights),
        "correction/masked_share": weighted.masked.to(weighted.weights),
    }


def with_sample_size(metrics: Metrics) -> Metrics:
    """The mean square weight replaced by `effective_sample_size = mean(w)² / mean(w²)`: the share of the tokens that
    equal weights would need for the same variance. Without weights: unchanged."""
    if "correction/is_weight_mean_square" not in metrics:
        return metrics
    rest = {name: value for name, value in metrics.items() if name != "correction/is_weight_mean_square"}
    mean, mean_square = metrics["correction/is_weight_mean"], metrics["correction/is_weight_mean_square"]
    return rest | {"correction/effective_sample_size": mean * mean / mean_square if mean_square > 0 else 0.0}


def by_age(values: Tensor, token_ages: Tensor) -> dict[str, Tensor]:
    """`{"age_0": (values where the age is 0, else 0), …, "age_3": 3 and more}`, `[N]` each."""
    capped = token_ages.clamp(0, MAX_AGE)
    return {f"age_{age}": values * (capped == age) for age in range(MAX_AGE + 1)}


def gap_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, token_ages: Tensor) -> Metrics:
    """How far proximal and behaviour policy are apart, over trained tokens `[N]`.

    `mismatch_kl`: KL(behaviour ‖ proximal) in nats per token, also by the token's age in versions (`age_3`: 3 and
    more; ages that don't occur are left out). `prob_gap`: |difference of the two probabilities|, mean and maximum.
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
