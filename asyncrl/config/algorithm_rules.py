"""Rules between the keys of `algorithm` and of reward shaping; `rules` runs them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import AlgorithmConfig, Config

NEEDS_GROUPS = ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Estimators whose baseline is the rest of the group."""

_SEQUENCE_CLIP = 0.05
"""A clip range above this hardly ever touches a geometric mean of probability ratios."""


def groups(config: Config, given: Given) -> Iterator[Problem]:
    name, single = config.algorithm.adv_estimator, config.rollout.n == 1
    if single and name in NEEDS_GROUPS:
        yield Problem(
            "rollout.n",
            1,
            f"{name} compares the responses to one prompt; of a single one every advantage is 0 and nothing is learned",
            "set rollout.n to 2 or more, usually 8, or another algorithm.adv_estimator",
        )
    if single and config.algorithm.filter_groups.enable:
        yield Problem(
            "algorithm.filter_groups.enable",
            True,
            "a group of one response (rollout.n=1) always has equal rewards, so every sample would be filtered",
            "set rollout.n to 2 or more, or algorithm.filter_groups.enable=false",
        )


def correction(config: Config, given: Given) -> Iterator[Problem]:
    section, keys = "algorithm.rollout_correction", config.algorithm.rollout_correction
    if keys.bypass_mode and keys.rollout_is != "none":
        if config.algorithm.policy_loss != "reinforce":
            yield Problem(
                f"{section}.rollout_is",
                keys.rollout_is,
                f"in bypass mode the ratio of algorithm.policy_loss={config.algorithm.policy_loss} is current over "
                "behaviour policy already: weights on top would count it twice, so none are taken",
                f"set it to none, {section}.bypass_mode=false or algorithm.policy_loss=reinforce",
            )
        elif keys.rollout_is_batch_normalize:
            yield Problem(
                f"{section}.rollout_is_batch_normalize",
                True,
                "in bypass mode weights follow the current policy, micro-batch by micro-batch: there is no mean over "
                "the lease to divide by",
                f"set it to false, or {section}.bypass_mode=false",
            )
    if keys.rollout_is_threshold_low >= keys.rollout_is_threshold:
        yield Problem(
            f"{section}.rollout_is_threshold_low",
            keys.rollout_is_threshold_low,
            f"every weight is below it or above rollout_is_threshold = {keys.rollout_is_threshold:g}: all would be 0",
            "set it below rollout_is_threshold",
        )
    if keys.rollout_rs not in ("none", "geometric") and keys.rollout_rs_threshold is None:
        yield Problem(
            f"{section}.rollout_rs_threshold",
            None,
            f"{section}.rollout_rs={keys.rollout_rs} rejects what diverges by more than so many nats, and no number is "
            "right for every statistic",
            "give the largest divergence that is let through, in nats",
        )
    low = keys.rollout_rs_threshold_low or 1.0 / keys.rejection_bound
    if keys.rollout_rs == "geometric" and low > keys.rejection_bound:
        yield Problem(
            f"{section}.rollout_rs_threshold",
            keys.rejection_bound,
            f"the ratio would have to be at least {low:g} and at most that: every response would be rejected",
            "set it above 1, such as 1.001, and rollout_rs_threshold_low below it, or to 0 for one over it",
        )


def objective(config: Config, given: Given) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.policy_loss == "gspo":
        if min(algorithm.clip_ratio_low, algorithm.clip_ratio_high) > _SEQUENCE_CLIP:
            yield warning(
                "algorithm.clip_ratio_high",
                algorithm.clip_ratio_high,
                "GSPO clips a mean over the response, which stays far closer to 1 than a token's ratio: nothing would "
                "be clipped",
                "set algorithm.clip_ratio_low=3e-4 algorithm.clip_ratio_high=4e-4",
            )
        if algorithm.loss_agg_mode != "seq-mean-token-mean":
            yield warning(
                "algorithm.loss_agg_mode",
                algorithm.loss_agg_mode,
                "GSPO's objective is a mean over responses; this one weighs them by length",
                "set it to seq-mean-token-mean",
            )
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield warning(
            "algorithm.use_kl_in_reward",
            True,
            "the KL divergence would be penalized twice, in the reward and in the loss",
            "leave out one of use_kl_in_reward and use_kl_loss, unless you mean it",
        )


def unclipped(config: Config, given: Given) -> Iterator[Problem]:
    """Plain policy gradients are of the policy that sampled; what else there is needs weights."""
    drift, key = config.async_training, "algorithm.rollout_correction.rollout_is"
    if config.algorithm.policy_loss != "reinforce" or config.algorithm.rollout_correction.rollout_is != "none":
        return
    causes = (
        ("async_training.staleness_threshold", drift.staleness_threshold, 0),
        ("async_training.trigger_parameter_sync_step", drift.trigger_parameter_sync_step, 1),
        ("async_training.require_batches", drift.require_batches, 1),
        ("trainer.ppo_epochs", config.trainer.ppo_epochs, 1),
    )
    told = [f"{name}={value:g}" for name, value, on_policy in causes if value > on_policy]
    if told:
        yield warning(
            key,
            "none",
            f"with {', '.join(told)} samples are of older policies than the one that learns from them, and "
            "algorithm.policy_loss=reinforce neither clips nor weighs them: the gradient is biased",
            "set it to token or sequence, or train on-policy",
        )


def adaptive_kl(config: Config, given: Given) -> Iterator[Problem]:
    control, responses = config.algorithm.kl_ctrl, config.samples_per_lease * config.rollout.n
    if config.algorithm.use_kl_in_reward and control.type == "adaptive" and responses > control.horizon:
        yield warning(
            "algorithm.kl_ctrl.horizon",
            control.horizon,
            f"a lease has {responses} responses (trainer.ppo_mini_batch_size x async_training.require_batches x "
            "rollout.n), so each would change the coefficient by more than a fifth, and it would swing",
            f"set it well above {responses}",
        )


def shaping(config: Config, given: Given) -> Iterator[Problem]:
    buffer, longest = config.reward.overlong_buffer, config.rollout.response_length
    if buffer.enable and buffer.len > longest:
        yield Problem(
            "reward.overlong_buffer.len",
            buffer.len,
            f"it is longer than a response may be (rollout.response_length = {longest}): every one would be punished",
            f"set it to a fraction of {longest}",
        )


RULES: tuple[Rule, ...] = (groups, correction, unclipped, objective, adaptive_kl, shaping)

_Idle = tuple[str, Callable[[Config], bool], str, str]


def _unless(key: str, needs: Callable[[AlgorithmConfig], bool], because: str, fix: str) -> _Idle:
    return (f"algorithm.{key}", lambda config: not needs(config.algorithm), because, fix)


_CORRECTION = "rollout_correction"
_NO_KL_LOSS = (lambda a: a.use_kl_loss, "algorithm.use_kl_loss is false", "set algorithm.use_kl_loss=true")
_NO_KL_REWARD = (
    lambda a: a.use_kl_in_reward, "algorithm.use_kl_in_reward is false", "set algorithm.use_kl_in_reward=true",
)  # fmt: skip
_FIXED_KL = (
    lambda a: a.kl_ctrl.type == "adaptive", "algorithm.kl_ctrl.type is fixed", "set algorithm.kl_ctrl.type=adaptive",
)  # fmt: skip
_NO_WEIGHTS = (
    lambda a: a.rollout_correction.rollout_is != "none", f"algorithm.{_CORRECTION}.rollout_is is none",
    f"set algorithm.{_CORRECTION}.rollout_is to token or sequence",
)  # fmt: skip

IDLE: tuple[_Idle, ...] = (
    _unless("norm_adv_by_std_in_grpo", lambda a: a.adv_estimator in ("grpo", "grpo_passk"),
            "algorithm.adv_estimator is neither grpo nor grpo_passk", "set algorithm.adv_estimator=grpo"),
    _unless("gamma", lambda a: a.adv_estimator in ("gae", "reinforce_plus_plus"),
            "algorithm.adv_estimator discounts nothing", "set algorithm.adv_estimator to gae or reinforce_plus_plus"),
    _unless("lam", lambda a: a.adv_estimator == "gae",
            "algorithm.adv_estimator is not gae", "set algorithm.adv_estimator=gae"),
    _unless("clip_ratio_low", lambda a: a.policy_loss != "reinforce",
            "algorithm.policy_loss=reinforce clips nothing", "set another algorithm.policy_loss"),
    _unless("clip_ratio_high", lambda a: a.policy_loss != "reinforce",
            "algorithm.policy_loss=reinforce clips nothing", "set another algorithm.policy_loss"),
    _unless("clip_ratio_c", lambda a: a.policy_loss == "ppo",
            "algorithm.policy_loss is not ppo", "set algorithm.policy_loss=ppo"),
    _unless("loss_scale_factor", lambda a: a.loss_agg_mode == "seq-mean-token-sum-norm",
            "algorithm.loss_agg_mode is not seq-mean-token-sum-norm",
            "set algorithm.loss_agg_mode=seq-mean-token-sum-norm"),
    _unless("kl_loss_coef", *_NO_KL_LOSS),
    _unless("kl_loss_type", *_NO_KL_LOSS),
    _unless("kl_penalty", *_NO_KL_REWARD),
    _unless("kl_ctrl.type", *_NO_KL_REWARD),
    _unless("kl_ctrl.kl_coef", *_NO_KL_REWARD),
    _unless("kl_ctrl.target_kl", *_FIXED_KL),
    _unless("kl_ctrl.horizon", *_FIXED_KL),
    _unless("filter_groups.max_consecutive", lambda a: a.filter_groups.enable,
            "algorithm.filter_groups.enable is false", "set algorithm.filter_groups.enable=true"),
    _unless(f"{_CORRECTION}.rollout_is_mode", *_NO_WEIGHTS),
    _unless(f"{_CORRECTION}.rollout_is_threshold", *_NO_WEIGHTS),
    _unless(f"{_CORRECTION}.rollout_is_batch_normalize", *_NO_WEIGHTS),
    _unless(f"{_CORRECTION}.rollout_is_threshold_low",
            lambda a: a.rollout_correction.rollout_is != "none" and a.rollout_correction.rollout_is_mode == "mask",
            "weights are cut to the upper threshold alone, or there are none",
            f"set algorithm.{_CORRECTION}.rollout_is and rollout_is_mode=mask"),
    _unless(f"{_CORRECTION}.rollout_rs_threshold", lambda a: a.rollout_correction.rollout_rs != "none",
            f"algorithm.{_CORRECTION}.rollout_rs is none", f"set algorithm.{_CORRECTION}.rollout_rs"),
    _unless(f"{_CORRECTION}.rollout_rs_threshold_low", lambda a: a.rollout_correction.rollout_rs == "geometric",
            f"algorithm.{_CORRECTION}.rollout_rs is not geometric",
            f"set algorithm.{_CORRECTION}.rollout_rs=geometric"),
    ("reward.overlong_buffer.len", lambda c: not c.reward.overlong_buffer.enable,
     "reward.overlong_buffer.enable is false", "set reward.overlong_buffer.enable=true"),
    ("reward.overlong_buffer.penalty_factor", lambda c: not c.reward.overlong_buffer.enable,
     "reward.overlong_buffer.enable is false", "set reward.overlong_buffer.enable=true"),
)  # fmt: skip
"""Keys that a run may ignore: key, when it does, because, what to do."""
