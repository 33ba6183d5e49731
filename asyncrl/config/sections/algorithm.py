"""`algorithm`: advantages, objectives and corrections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.base import Positive, Section, Share

GEOMETRIC_BOUND = 1.001
"""Of a geometric mean of token ratios."""


class KlControlConfig(Section):
    """How much the KL divergence from the reference counts in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the coefficient follows the measured KL towards `target_kl` (https://arxiv.org/abs/1909.08593)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """The coefficient, or where the adaptive one starts."""
    target_kl: Annotated[float, Field(gt=0)] = 0.1
    """Of the adaptive controller, in nats per response."""
    horizon: Positive = 10000
    """Of the adaptive controller: responses over which an error of 20 % or more changes it by a factor of about 1.2."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups that teach nothing are dropped as `filtered` and replaced by others."""

    enable: bool = False
    """Drop samples whose responses all have the same reward."""
    max_consecutive: Positive = 256
    """So many filtered samples in a row, without a usable one, stop the run: the task is too hard or too easy."""


class RolloutCorrectionConfig(Section):
    """Correction for tokens sampled by an older policy, or by an engine that computes differently."""

    bypass_mode: bool = True
    """true: the proximal policy is the behaviour policy as recorded. false: its log-probs are recomputed by the
    Trainer when a lease starts (decoupled PPO, https://arxiv.org/abs/2505.24298)."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights proximal / behaviour: none, of each token, or the product over a response."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Weights outside the thresholds: cut to the upper one (TIS), or set to 0 (MIS, IcePop)."""
    rollout_is_threshold: Annotated[float, Field(gt=0)] = 2.0
    """Upper threshold of a weight."""
    rollout_is_threshold_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower threshold of a weight, with `rollout_is_mode: mask`; 0: none. IcePop: 0.5 with an upper one of 5."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the lease; needs `bypass_mode: false`."""
    rollout_rs: Literal[
        "none", "geometric",
        "token_k1", "token_k2", "token_k3",
        "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        "seq_max_k1", "seq_max_k2", "seq_max_k3",
    ] = "none"  # fmt: skip
    """Rejection: leave out tokens, or whole responses, whose divergence between behaviour and proximal policy is out
    of bounds. geometric: by the geometric mean of the token ratios."""
    rollout_rs_threshold: Annotated[float, Field(gt=0)] | None = None
    """Upper bound: of the ratio for `geometric` (null: 1.001), of |k1|, k2 or k3 in nats otherwise (to be given)."""
    rollout_rs_threshold_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the ratio for `geometric`; 0: one over the upper bound."""

    @property
    def rejection_bound(self) -> float:
        """`rollout_rs_threshold`, or what stands for null with `geometric`; the rules refuse null for the others."""
        return GEOMETRIC_BOUND if self.rollout_rs_threshold is None else self.rollout_rs_threshold


class AlgorithmConfig(Section):
    """Advantages and losses. docs/algorithms/ has a page for each name."""

    adv_estimator: Literal[
        "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gae"
    ] = "grpo"
    """How rewards become advantages. `gae` trains a critic (see `critic`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); false: only subtract the mean (Dr.GRPO)."""
    gamma: Share = 1.0
    """Discount per token of `gae` and `reinforce_plus_plus`."""
    lam: Share = 1.0
    """Trace decay of `gae`."""
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """The objective."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    """The probability ratio is clipped at 1 plus this."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: for negative advantages the loss is bounded as if the ratio were at most this; null: off."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"  # fmt: skip
    """What a mini-batch's loss is the mean of."""
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens; null: rollout.response_length."""
    entropy_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL loss against the frozen reference model."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k3"
    """Estimator of the KL divergence (Schulman, http://joschu.net/blog/kl-approx.html)."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from each token's reward."""
    kl_penalty: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator of that divergence."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
