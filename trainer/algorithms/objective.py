"""The losses of the policy, of the critic and of supervised training, as `trainer.engines.base.Loss`. Picklable."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.import_path import is_own
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import BugError
from asyncrl.core.records import Metrics
from trainer.algorithms.corrections import by_age, importance_weights, rejection_mask, weight_means, with_sample_size
from trainer.algorithms.losses import MAX_LOG_RATIO, Rows, kl_estimate, mismatch_kl, policy_terms, value_loss
from trainer.engines.base import LossParts, Tokens, TokenScores


class PolicyLoss:
    """The policy's loss: `policy objective + kl_loss_coef · KL(current ‖ reference) - entropy_coeff · entropy`.

    All three terms are aggregated as `algorithm.loss_agg_mode` says. The loss reads the fields `advantages`,
    `old_log_probs`, `rollout_log_probs` and, with a KL loss, `ref_log_probs`. If the batch has `is_weights`, they
    multiply the policy objective only; if it has `token_ages`, the mismatch metrics are also split by age.

    With `rollout_correction.bypass_mode` the batch has no weights. Instead, this loss computes rejection, and for
    `reinforce` the weights, between the current and the behaviour policy, without a gradient, as in verl's bypass mode.
    Rejected tokens still count in the denominators, which are computed before the loss.

    Args:
        response_length: `rollout.response_length` in tokens, the divisor of `seq-mean-token-sum-norm` unless
            `algorithm.loss_scale_factor` is set.
    """

    def __init__(self, algorithm: AlgorithmConfig, response_length: int) -> None:
        self.agg_mode: str = algorithm.loss_agg_mode
        self.agg_scale = float(algorithm.loss_scale_factor or response_length)
        self.entropy_gradient = algorithm.entropy_coeff > 0
        self._algorithm = algorithm

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        """Return the rows that may have a gradient, bool `[B]`.

        These are the rows with a trained token whose advantage times its weight is not 0; with a KL loss or an entropy
        bonus, all rows with a trained token; also with a user's objective, whose gradient may not vanish with the
        advantage.
        """
        algorithm, mask = self._algorithm, batch["loss_mask"]
        needs_all = self.entropy_gradient or is_own(algorithm.policy_loss)
        if needs_all or (algorithm.use_kl_loss and algorithm.kl_loss_coef > 0):
            return mask.any(dim=1)
        signal = batch["advantages"]
        if "is_weights" in batch:
            signal = signal * batch["is_weights"]
        return ((signal != 0) & mask).any(dim=1)

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        algorithm, fields = self._algorithm, tokens.fields
        log_probs, rollout_log_probs = scores.log_probs, _field(fields, "rollout_log_probs")
        terms = policy_terms(
            log_probs,
            _field(fields, "old_log_probs"),
            _field(fields, "advantages"),
            Rows(tokens.row, tokens.num_rows),
            algorithm,
        )
        mismatch = mismatch_kl(log_probs.detach(), rollout_log_probs)
        means = {
            "actor/entropy": scores.entropy.detach(),
            "actor/ratio_mean": terms.ratio,
            "actor/ppo_kl": (_field(fields, "old_log_probs") - log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            "actor/clip_fraction": terms.clipped.to(terms.ratio),
            "actor/dual_clip_fraction": terms.dual_clipped.to(terms.ratio),
            "rollout/mismatch_kl": mismatch,
        }
        if "token_ages" in fields:
            shares = by_age(torch.ones_like(mismatch), fields["token_ages"])
            means |= {f"rollout/token_share_{age}": share for age, share in shares.items()}
            means |= {f"rollout/mismatch_kl_{age}": share * mismatch for age, share in shares.items()}
        weights, corrected = self._weights(log_probs.detach(), tokens)
        per_token = terms.loss if weights is None else terms.loss * weights
        pg_loss = (per_token * tokens.weight).sum()
        sums, loss = {"actor/pg_loss": pg_loss.detach()}, pg_loss
        if algorithm.use_kl_loss:
            divergence = kl_estimate(log_probs, _field(fields, "ref_log_probs"), algorithm.kl_loss_type)
            kl_loss = (divergence * tokens.weight).sum()
            sums["actor/kl_loss"] = kl_loss.detach()
            loss = loss + algorithm.kl_loss_coef * kl_loss
        if self.entropy_gradient:
            loss = loss - algorithm.entropy_coeff * (scores.entropy * tokens.weight).sum()
        return LossParts(loss, sums, means | corrected)

    def _weights(self, log_probs: Tensor, tokens: Tokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the factor of each token's objective, and its metrics."""
        correction = self._algorithm.rollout_correction
        if not correction.bypass_mode:
            return tokens.fields.get("is_weights"), {}
        rows = Rows(tokens.row, tokens.num_rows)
        log_ratio = log_probs - _field(tokens.fields, "rollout_log_probs")
        weights, means = None, {}
        if correction.rollout_is != "none" and self._algorithm.policy_loss == "reinforce":
            weighted = importance_weights(log_ratio, rows, correction)
            weights, means = weighted.weights, weight_means(weighted)
        if correction.rollout_rs != "none":
            keep = rejection_mask(log_ratio, rows, correction).to(log_ratio)
            weights = keep if weights is None else weights * keep
            means["correction/rejected_share"] = 1.0 - keep
        if weights is not None:
            means["correction/masked_share"] = (weights == 0).to(log_ratio)
        return weights, means


class ValueLoss:
    """The loss of the critic: squared error against `returns`, clipped around `values`. See `losses.value_loss`."""

    entropy_gradient = False
    agg_mode: str = "token-mean"
    agg_scale = 1.0

    def __init__(self, cliprange_value: float | None) -> None:
        self._cliprange = cliprange_value

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        """Return the rows with a trained token, bool `[B]`."""
        return batch["loss_mask"].any(dim=1)

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        predicted, returns = scores.log_probs, _field(tokens.fields, "returns")
        terms = value_loss(predicted, _field(tokens.fields, "values"), returns, cliprange=self._cliprange)
        loss = (terms.loss * tokens.weight).sum()
        means = {
            "critic/value_mean": predicted.detach(),
            "critic/return_mean": returns,
            "critic/clip_fraction": terms.clipped.to(predicted),
        }
        return LossParts(loss, {"critic/loss": loss.detach()}, means)


class SupervisedLoss:
    """The loss of `asyncrl sft`: the cross-entropy of the demonstrated tokens in nats, averaged over all of a step."""

    entropy_gradient = False
    agg_mode: str = "token-mean"
    agg_scale = 1.0

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        """Return the rows with a trained token, bool `[B]`."""
        return batch["loss_mask"].any(dim=1)

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        loss = -(scores.log_probs * tokens.weight).sum()
        return LossParts(loss, {"sft/loss": loss.detach()}, {"actor/entropy": scores.entropy.detach()})


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return `1 - var(returns - values) / var(returns)` over the tokens of a lease where `mask` is True. Tensors are
    `[B, R]`.

    1 is a perfect critic, 0 a critic that predicts only the mean. If all returns are equal, the result is 0."""
    wanted, error = returns[mask].double(), (returns - values)[mask].double()
    spread = wanted.var(correction=0)
    if not bool(spread > 0):
        return 0.0
    return float(1.0 - error.var(correction=0) / spread)


def finish_metrics(metrics: Metrics) -> Metrics:
    """Compute the metrics of a step that are neither sums nor means, from sums and means over all ranks.

    `rollout/mismatch_kl_age_*` become means over the tokens of that age and are left out if there are none; the mean
    square of the weights becomes `correction/effective_sample_size`.
    """
    finished = dict(with_sample_size(metrics))
    for name in [name for name in finished if name.startswith("rollout/mismatch_kl_age_")]:
        total, share = finished.pop(name), metrics[name.replace("mismatch_kl", "token_share")]
        if share > 0:
            finished[name] = total / share
    return finished


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise BugError(f"the loss needs {name!r}, but its batch has only {', '.join(sorted(fields))}")
    return fields[name]
