"""`algorithm`: advantages, objectives, corrections, and the rules between their keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from asyncrl.config.environment import check_code
from asyncrl.config.import_path import is_own
from asyncrl.config.problems import (
    ConfigProblem,
    ConfigRule,
    RuleFunction,
    configured,
    no_effect,
    only_with,
    warning,
)
from asyncrl.config.sections.base import ConfigSection, ImportPath, Positive, Share

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

AdvEstimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gae",
    "on_policy_distill",
]
PolicyObjective = Literal["ppo", "gspo", "cispo", "reinforce"]
_KL_NAMES = {"kl": "k1", "mse": "k2", "kl+": "k1+", "mse+": "k2", "k2+": "k2"}
"""verl's second names of estimators."""


def _one_name(value: object) -> object:
    if isinstance(value, str) and value in _KL_NAMES:
        raise ValueError(f"verl's {value} is {_KL_NAMES[value]} here; write {_KL_NAMES[value]}")
    return value


def _listed(value: object) -> object:
    """Refuse verl's chain of statistics, which is one text."""
    if isinstance(value, str) and "," in value:
        raise ValueError(f"a chain of statistics is a list here; write [{value}], and a list of thresholds")
    return value


def _own_bounds(value: object) -> object:
    """Refuse verl's thresholds of `rollout_rs`: `low_high` is a range of a ratio, and a chain of them is one text."""
    if isinstance(value, str) and ("_" in value or "," in value):
        raise ValueError(
            "verl's low_high are bounds of a ratio, and here k1 is bounded in nats; write what `asyncrl migrate` makes "
            "of both keys (docs/algorithms/corrections.md)"
        )
    return value


def _one_bound(value: object) -> object:
    """Refuse verl's range of importance weights."""
    if isinstance(value, str) and len(bounds := value.split("_")) == 2:
        raise ValueError(
            f"verl's low_high is IcePop, which has three keys here; write {bounds[1]}, with "
            f"rollout_is_threshold_low={bounds[0]} and rollout_is_mode=mask"
        )
    return value


KlEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs"]
StraightThrough = Literal["k1+", "k3+", "low_var_kl+", "abs+"]
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
GroupFilter = Literal["equal_rewards"]
Rejection = Literal[
    "geometric",
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
_SIGNED = ("geometric", "token_k1", "seq_sum_k1", "seq_mean_k1")
Bound = Annotated[float, Field(gt=0)]
LowBound = Annotated[float, Field(ge=0)]
NEEDS_GROUPS = ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators that compute the baseline from the rest of the group."""
_GEOMETRIC_BOUND = 1.001
"""Default upper bound of a geometric mean of token ratios."""
_SEQUENCE_CLIP = 0.05
"""A larger clip range rarely affects a geometric mean of probability ratios."""


class KlControlConfig(ConfigSection):
    """The coefficient of the KL divergence from the reference policy in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the coefficient changes to keep the measured KL near `target_kl` (https://arxiv.org/abs/1909.08593)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """The coefficient, or the first value of the adaptive one."""
    target_kl: Annotated[float, Field(gt=0)] = 0.1
    """Target of the adaptive controller, in nats per response."""
    horizon: Positive = 10000
    """Number of responses after which an error of 20 % or more has changed the coefficient by a factor of about 1.2."""


class FilterGroupsConfig(ConfigSection):
    """Dynamic sampling (DAPO): groups without a learning signal are dropped as `filtered` and replaced by others."""

    enable: bool = False
    """Drop samples that `drop` selects."""
    drop: GroupFilter | ImportPath = "equal_rewards"
    """`equal_rewards`: samples whose responses all have the same reward; or your own function, which gets the rewards
    of a sample's responses and returns whether to drop it."""
    max_consecutive: Positive = 256
    """This many filtered samples in a row stop the run: the task is too hard or too easy."""


class RejectionRule(NamedTuple):
    """Keeps tokens whose statistic is between two bounds, in nats (`geometric`: the mean log ratio)."""

    name: str
    low: float
    high: float


class RolloutCorrectionConfig(ConfigSection):
    """Correction for tokens sampled by an older policy, or by an engine that computes differently."""

    bypass_mode: bool = True
    """true: the recorded behaviour policy is also the proximal policy. false: the Trainer recomputes the log-probs of
    the proximal policy when a lease starts (decoupled PPO, https://arxiv.org/abs/2505.24298)."""
    rollout_is: Literal["none", "token", "sequence"] | ImportPath = "none"
    """Importance weights (proximal over behaviour policy): none, one for each token, their product over a response, or
    your own function."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """`truncate` cuts weights to the upper threshold (TIS); `mask` sets weights outside the thresholds to 0 (MIS,
    IcePop)."""
    rollout_is_threshold: Annotated[float, Field(gt=0), BeforeValidator(_one_bound)] = 2.0
    """Upper threshold of a weight."""
    rollout_is_threshold_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower threshold of a weight, with `rollout_is_mode: mask`; 0: none. IcePop uses 0.5, and 5 as the upper
    threshold."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the lease; needs `bypass_mode: false`."""
    rollout_rs: Annotated[
        Literal["none"] | Rejection | ImportPath | tuple[Rejection | ImportPath, ...], BeforeValidator(_listed)
    ] = "none"
    """Rejection: leave out tokens, or whole responses, whose divergence between behaviour and proximal policy is out
    of bounds. `geometric` rejects responses by the geometric mean of their token ratios. Your own function gets the log
    ratios and returns a statistic of each token. A list leaves out what any of its entries rejects."""
    rollout_rs_threshold: Annotated[Bound | tuple[Bound, ...] | None, BeforeValidator(_own_bounds)] = None
    """Upper bound, or a list with one for each entry of `rollout_rs`. For `geometric` it is a ratio, and null means
    1.001; otherwise it bounds the statistic (k1, k2 or k3 in nats) and is required."""
    rollout_rs_threshold_low: LowBound | tuple[LowBound, ...] = 0.0
    """Lower bound, or a list. For `geometric` it is a ratio, and 0 means one over the upper bound. For a statistic with
    a sign (`token_k1`, `seq_sum_k1`, `seq_mean_k1`, your own) it is the largest deviation below 0, and 0 means the same
    as above it."""

    @property
    def rejections(self) -> tuple[RejectionRule, ...]:
        """Return the statistics with their bounds. A missing bound is that of `geometric`; the rules refuse it for
        others, and lists of different lengths."""
        names = self.rollout_rs if isinstance(self.rollout_rs, tuple) else (self.rollout_rs,)
        highs, lows = self.rollout_rs_threshold, self.rollout_rs_threshold_low
        highs = highs if isinstance(highs, tuple) else (_GEOMETRIC_BOUND if highs is None else highs,)
        lows = lows if isinstance(lows, tuple) else (lows,) * len(names)
        pairs = zip(names, highs, lows, strict=False) if self.rollout_rs != "none" else ()
        return tuple(
            RejectionRule(name, math.log(low or 1.0 / high), math.log(high))
            if name == "geometric"
            else RejectionRule(name, -(low or high), high)
            for name, high, low in pairs
        )


class AlgorithmConfig(ConfigSection):
    """Advantages and losses. docs/algorithms/ has a page for each estimator and loss."""

    adv_estimator: AdvEstimator | ImportPath = "grpo"
    """How rewards become advantages. `gae` trains a critic (see `critic`); `on_policy_distill` learns from a teacher
    alone (see `teacher`). Your own: docs/extending.md."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the group's standard deviation (GRPO); false: only subtract the mean (Dr.GRPO)."""
    gamma: Share = 1.0
    """Discount per token of `gae` and `reinforce_plus_plus`."""
    lam: Share = 1.0
    """Trace decay of `gae`."""
    policy_loss: PolicyObjective | ImportPath = "ppo"
    """Objective of the policy. Your own: docs/extending.md."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    """The probability ratio is clipped at 1 plus this."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: for negative advantages the loss is bounded as if the ratio were at most this; null: off."""
    loss_agg_mode: AggMode | ImportPath = "token-mean"
    """How the loss of a mini-batch is averaged. Your own: docs/extending.md."""
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens; null: rollout.response_length."""
    entropy_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL loss against the frozen reference model."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL loss."""
    kl_loss_type: Annotated[KlEstimator | StraightThrough | ImportPath, BeforeValidator(_one_name)] = "k3"
    """Estimator of the KL divergence (Schulman, http://joschu.net/blog/kl-approx.html). With a `+`, its value has the
    gradient of k2, which on-policy is the KL's."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from each token's reward."""
    kl_penalty: Annotated[KlEstimator | ImportPath, BeforeValidator(_one_name)] = "k1"
    """Estimator of the KL divergence in the reward."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


def _biased_gradient(config: Config) -> Iterator[ConfigProblem]:
    """Warn if a plain policy gradient is biased: it uses samples of older policies without importance weights."""
    correction = config.algorithm.rollout_correction
    if config.algorithm.policy_loss != "reinforce" or correction.rollout_is != "none":
        return
    training = config.async_training
    causes = (
        ("async_training.staleness_threshold", training.staleness_threshold, 0),
        ("async_training.trigger_parameter_sync_step", training.trigger_parameter_sync_step, 1),
        ("async_training.require_batches", training.require_batches, 1),
        ("trainer.ppo_epochs", config.trainer.ppo_epochs, 1),
    )
    off_policy = [f"{name}={value:g}" for name, value, on_policy in causes if value > on_policy]
    if off_policy:
        yield warning(
            "algorithm.rollout_correction.rollout_is",
            "none",
            f"with {', '.join(off_policy)} samples come from older policies than the one that is trained, and "
            "algorithm.policy_loss=reinforce neither clips nor weights them: the gradient is biased",
            "set it to token or sequence, or train on-policy",
        )


def _rejections(config: Config) -> Iterator[ConfigProblem]:
    """Check that each statistic of `rollout_rs` has its bounds, and that they accept something."""
    correction, key = config.algorithm.rollout_correction, f"{_RS}_threshold"
    names, highs, lows = correction.rollout_rs, correction.rollout_rs_threshold, correction.rollout_rs_threshold_low
    if names == "none":
        return
    number = len(names) if isinstance(names, tuple) else 1
    if highs is None and names != "geometric":
        consequence = f"{_RS}={names} rejects larger divergences, and no default suits every statistic"
        fix = "give the largest divergence that is accepted, in nats, or a list with one for each entry"
        yield ConfigProblem(key, highs, consequence, fix)
        return
    for name, values in ((key, highs), (f"{key}_low", lows)):
        given = len(values) if isinstance(values, tuple) else 1
        if given != number and not (name == f"{key}_low" and values == 0.0):
            yield ConfigProblem(
                name, values, f"{_RS} has {number} entries", "give a list with one bound for each entry"
            )
    for rule in correction.rejections:
        if rule.low > rule.high:
            consequence = f"with this bound and {key}_low={lows}, every response would be rejected by {rule.name}"
            fix = f"set it above 1, such as 1.001, and {key}_low below it, or to 0, which means one over this bound"
            yield ConfigProblem(key, highs, consequence, fix)


_IS = "algorithm.rollout_correction.rollout_is"
_RS = "algorithm.rollout_correction.rollout_rs"

RULES: tuple[RuleFunction, ...] = (
    ConfigRule("rollout.n", lambda c: c.rollout.n == 1 and c.algorithm.adv_estimator in NEEDS_GROUPS,
               "{c.algorithm.adv_estimator} compares the responses to one prompt; with a single one every advantage "
               "is 0 and nothing is learned",
               "set rollout.n to 2 or more, usually 8, or another algorithm.adv_estimator"),
    ConfigRule("algorithm.filter_groups.enable", lambda c: c.rollout.n == 1 and c.algorithm.filter_groups.enable,
               "a group of one response (rollout.n=1) always has equal rewards, so every sample would be filtered",
               "set rollout.n to 2 or more, or algorithm.filter_groups.enable=false"),
    ConfigRule("algorithm.filter_groups.enable",
               lambda c: c.algorithm.filter_groups.enable and c.reward_model.placement == "worker",
               "groups are filtered when they are leased, before the Trainer's reward model has scored them: groups "
               "whose rewards only this model distinguishes would be dropped",
               "set reward_model.placement=serve, which scores before the lease, or set this key to false"),
    ConfigRule("algorithm.filter_groups.enable",
               lambda c: c.algorithm.filter_groups.enable and c.algorithm.adv_estimator == "on_policy_distill",
               "groups are dropped because of their rewards, and algorithm.adv_estimator=on_policy_distill learns from "
               "the teacher alone: it would learn from few of its samples, or from none", "set it to false"),
    ConfigRule("algorithm.filter_groups.enable",
               lambda c: c.algorithm.filter_groups.enable and c.algorithm.filter_groups.drop == "equal_rewards"
               and c.algorithm.adv_estimator not in NEEDS_GROUPS and not is_own(c.algorithm.adv_estimator)
               and c.algorithm.adv_estimator != "on_policy_distill",
               "algorithm.adv_estimator={c.algorithm.adv_estimator} learns from groups of equal rewards too; they "
               "would be dropped", "set it to false", "warning"),
    ConfigRule("algorithm.filter_groups.enable",
               lambda c: c.algorithm.filter_groups.enable and c.algorithm.filter_groups.drop == "equal_rewards"
               and c.algorithm.adv_estimator in NEEDS_GROUPS and c.needs_teacher,
               "the teacher has something to say about groups of equal rewards too; they would be dropped",
               "set it to false, unless the reward shall decide which prompts count", "warning"),
    ConfigRule("algorithm.use_kl_in_reward",
               lambda c: c.algorithm.use_kl_in_reward and c.algorithm.adv_estimator == "on_policy_distill",
               "algorithm.adv_estimator=on_policy_distill does not use rewards, so the penalty would change nothing",
               "use algorithm.use_kl_loss=true, or leave this key out"),
    ConfigRule("reward_model.placement",
               lambda c: c.algorithm.adv_estimator == "remax" and c.reward_model.placement == "worker",
               "ReMax's greedy responses are scored where they are generated, without the Trainer's reward model, so "
               "the baseline would belong to another reward", "set reward_model.placement=serve"),
    ConfigRule(_IS, lambda c: c.algorithm.rollout_correction.bypass_mode
               and c.algorithm.rollout_correction.rollout_is != "none" and c.algorithm.policy_loss != "reinforce",
               "in bypass mode the ratio of algorithm.policy_loss={c.algorithm.policy_loss} already compares the "
               "current with the behaviour policy: importance weights would count it twice, so none are applied",
               "set it to none, algorithm.rollout_correction.bypass_mode=false or algorithm.policy_loss=reinforce"),
    ConfigRule(f"{_IS}_batch_normalize", lambda c: c.algorithm.rollout_correction.bypass_mode
               and c.algorithm.rollout_correction.rollout_is != "none" and c.algorithm.policy_loss == "reinforce"
               and c.algorithm.rollout_correction.rollout_is_batch_normalize,
               "in bypass mode every micro-batch computes its weights with the current policy, so there is no mean "
               "over the lease", "set it to false, or algorithm.rollout_correction.bypass_mode=false"),
    ConfigRule(f"{_IS}_threshold_low", lambda c: c.algorithm.rollout_correction.rollout_is_threshold_low
               >= c.algorithm.rollout_correction.rollout_is_threshold,
               "every weight is below it or above rollout_is_threshold = "
               "{c.algorithm.rollout_correction.rollout_is_threshold:g}: all would be 0",
               "set it below rollout_is_threshold"),
    _rejections,
    _biased_gradient,
    ConfigRule("algorithm.clip_ratio_high", lambda c: c.algorithm.policy_loss == "gspo"
               and min(c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high) > _SEQUENCE_CLIP,
               "GSPO clips a mean over the response, which stays far closer to 1 than a token's ratio: nothing would "
               "be clipped", "set algorithm.clip_ratio_low=3e-4 algorithm.clip_ratio_high=4e-4", "warning"),
    ConfigRule("algorithm.loss_agg_mode",
               lambda c: c.algorithm.policy_loss == "gspo" and c.algorithm.loss_agg_mode != "seq-mean-token-mean",
               "GSPO's objective is a mean over responses; this mode weights them by length",
               "set it to seq-mean-token-mean", "warning"),
    ConfigRule("algorithm.use_kl_in_reward", lambda c: c.algorithm.use_kl_loss and c.algorithm.use_kl_in_reward,
               "the KL divergence would be penalized twice, in the reward and in the loss",
               "leave out use_kl_in_reward or use_kl_loss, unless you want both", "warning"),
    ConfigRule("algorithm.kl_loss_coef", lambda c: c.algorithm.use_kl_loss and c.algorithm.kl_loss_coef == 0,
               "the reference model is computed, and its result changes nothing",
               "set it above 0, or use_kl_loss=false", "warning"),
    ConfigRule("algorithm.kl_ctrl.kl_coef",
               lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.kl_coef == 0,
               "the reference model is computed, and its result changes nothing",
               "set it above 0, or use_kl_in_reward=false", "warning"),
    ConfigRule("algorithm.kl_ctrl.horizon", lambda c: c.algorithm.use_kl_in_reward
               and c.algorithm.kl_ctrl.type == "adaptive"
               and c.samples_per_lease * c.rollout.n > c.algorithm.kl_ctrl.horizon,
               "a lease has {c.samples_per_lease} samples (trainer.ppo_mini_batch_size x "
               "async_training.require_batches) of {c.rollout.n} responses each, so each lease would change the "
               "coefficient by more than a fifth, and it would oscillate",
               "set it well above {c.samples_per_lease} x {c.rollout.n}", "warning"),
)  # fmt: skip

OWN_FUNCTIONS = (
    "adv_estimator", "policy_loss", "loss_agg_mode", "kl_loss_type", "kl_penalty",
    "rollout_correction.rollout_is", "rollout_correction.rollout_rs", "filter_groups.drop",
)  # fmt: skip
"""The keys of `algorithm` that may name a function of the user's."""


def own_functions(config: Config) -> dict[str, str]:
    """Return the user's own functions of `algorithm` by key."""
    found: dict[str, str] = {}
    for name in OWN_FUNCTIONS:
        value = configured(config, f"algorithm.{name}")
        for one in value if isinstance(value, tuple) else (value,):
            found |= {f"algorithm.{name}": one} if is_own(one) else {}
    return found


def _code(config: Config) -> Iterator[ConfigProblem]:
    for key, name in own_functions(config).items():
        yield from check_code(key, name, (), "function")


ENVIRONMENT: tuple[RuleFunction, ...] = (_code,)

NO_EFFECT = (
    only_with("algorithm.norm_adv_by_std_in_grpo", "algorithm.adv_estimator", "grpo", "grpo_passk"),
    only_with("algorithm.gamma", "algorithm.adv_estimator", "gae", "reinforce_plus_plus"),
    only_with("algorithm.lam", "algorithm.adv_estimator", "gae"),
    only_with("algorithm.clip_ratio_low algorithm.clip_ratio_high", "algorithm.policy_loss", "ppo", "gspo", "cispo"),
    only_with("algorithm.clip_ratio_c", "algorithm.policy_loss", "ppo"),
    only_with("algorithm.loss_scale_factor", "algorithm.loss_agg_mode", "seq-mean-token-sum-norm"),
    only_with("algorithm.kl_loss_coef algorithm.kl_loss_type", "algorithm.use_kl_loss", True),
    only_with("algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef",
              "algorithm.use_kl_in_reward", True),
    only_with("algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.type", "adaptive"),
    only_with("algorithm.filter_groups.drop algorithm.filter_groups.max_consecutive", "algorithm.filter_groups.enable",
              True),
    only_with(f"{_IS}_*", _IS, "token", "sequence"),
    only_with(f"{_IS}_threshold_low", f"{_IS}_mode", "mask"),
    no_effect(f"{_RS}_*", lambda c: c.algorithm.rollout_correction.rollout_rs == "none",
              f"{_RS} is none", f"set {_RS}"),
    no_effect(f"{_RS}_threshold_low", lambda c: not any(
                  rule.name in _SIGNED or is_own(rule.name) for rule in c.algorithm.rollout_correction.rejections),
              f"no statistic of {_RS} has a sign", "name one that has, such as token_k1"),
)  # fmt: skip
