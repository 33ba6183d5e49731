"""Compute advantages and returns from token rewards, with the estimator that `algorithm.adv_estimator` names. Pure
torch.

Everything is computed in the dtype of the rewards; callers pass float64 and round the result.

Outcome estimators compare the scores of whole trajectories. A trajectory counts once, however many rows it has, and all
its rows get the same advantage. A KL penalty in the rewards is part of the score, as in verl. The other estimators
compute one advantage per token within each row. They don't bootstrap across the rows of a trajectory, because the last
sampled token of a row already includes the rewards of later rows (`rewards.laid_out`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.import_path import load_function
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import BugError, ConfigError, UserCodeError
from trainer.algorithms.losses import shape_of
from trainer.algorithms.rewards import Trajectories

STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""
WHITEN_EPSILON = 1e-8
"""Added to a batch's variance."""


class AdvantageInputs(NamedTuple):
    """The tensors of a whole lease, because whitening spans it and groups must be complete."""

    token_rewards: Tensor
    """`[B, R]`, 0 where `response_mask` is False (`rewards.Rewards.tokens`)."""
    scores: Tensor
    """`[T]`: scores of whole trajectories (`rewards.scores_of`)."""
    response_mask: Tensor
    """bool `[B, R]`: tokens sampled by the policy, including those masked as stale."""
    groups: Tensor
    """int64 `[B]`, from 0: the sample of each row."""
    trajectories: Trajectories
    """The `T` trajectories that the `B` rows belong to."""
    values: Tensor | None = None
    """`[B, R]`: the critic's value before each response token; `gae` only."""
    baseline_rewards: Tensor | None = None
    """`[B]`: score of the greedy response; `remax` only."""

    @property
    def score_groups(self) -> Tensor:
        """int64 `[T]`: the sample of each score."""
        return self.groups[self.trajectories.first]


class Advantages(NamedTuple):
    """Advantages and returns, both `[B, R]`, 0 where `response_mask` is False."""

    advantages: Tensor
    returns: Tensor
    """The target of the critic's value before each token; without a critic, the sum of later rewards."""


AdvantageEstimator = Callable[[AdvantageInputs], Advantages]


def advantage_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator:
    """Return the estimator that `algorithm.adv_estimator` names.

    A user's function may also return one advantage for each score, `[T]`, or for each token, `[B, R]`.

    The estimator raises:
        ConfigError: a group has one response, and the estimator's baseline is the rest of the group.
        BugError: values or greedy baselines are missing.
        UserCodeError: the user's function raised, or returned something else.
    """
    key = "algorithm.adv_estimator"
    estimate = load_function(algorithm.adv_estimator, key, ESTIMATORS)

    def estimated(inputs: AdvantageInputs) -> Advantages:
        result = estimate(inputs, algorithm)
        if isinstance(result, Advantages):
            return result
        if isinstance(result, Tensor) and result.shape == inputs.scores.shape:
            return _outcome(inputs, result.to(inputs.scores))
        if isinstance(result, Tensor) and result.shape == inputs.token_rewards.shape:
            returns = discounted(inputs.token_rewards, inputs.response_mask, 1.0)
            return Advantages(result.to(returns) * inputs.response_mask, returns)
        raise UserCodeError(
            f"{key}: {algorithm.adv_estimator} returned {shape_of(result)}; expected Advantages, or a tensor of shape "
            f"{tuple(inputs.scores.shape)} (one per score) or {tuple(inputs.token_rewards.shape)} (one per token)"
        )

    return estimated


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """GRPO: `A_i = (r_i - mean(r)) / (std(r) + 1e-6)` within each group, where std divides by n - 1.

    DeepSeekMath (https://arxiv.org/abs/2402.03300) eq. 1 ff.; without the division: Dr.GRPO
    (https://arxiv.org/abs/2503.20783). A group of equal rewards gives exact zeros.
    """
    group = _Groups(inputs, algorithm)
    centred = group.centre(group.mean(group.scores))
    if algorithm.norm_adv_by_std_in_grpo:
        centred = centred / group.spread(group.std() + STD_EPSILON)
    return _outcome(inputs, centred)


def grpo_passk(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """Pass@k: only the best of a group gets an advantage, `r_max - r_second`, over `std(r) + 1e-6` as in GRPO.

    This is the leave-one-out gradient of max(r), https://arxiv.org/abs/2503.19595. If two responses tie for the
    best, all advantages are 0.
    """
    group = _Groups(inputs, algorithm)
    advantages = torch.zeros_like(group.scores)
    best = group.extreme(group.scores, "amax")
    is_best = group.scores == group.spread(best)
    second = group.extreme(group.scores.masked_fill(is_best, -torch.inf), "amax")
    alone = is_best & group.spread(group.sum(is_best.to(group.scores.dtype)) == 1)
    gain = best - second
    if algorithm.norm_adv_by_std_in_grpo:
        gain = gain / (group.std() + STD_EPSILON)
    advantages[alone] = group.spread(gain)[alone]
    return _outcome(inputs, advantages)


def rloo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """RLOO (https://arxiv.org/abs/2402.14740): `A_i = r_i - mean of the others = (r_i - mean(r)) · n / (n - 1)`."""
    group = _Groups(inputs, algorithm)
    return _outcome(inputs, group.centre(group.mean(group.scores)) * group.spread(group.size / (group.size - 1)))


def opo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """OPO (https://arxiv.org/abs/2505.23585): `A_i = r_i - Σ l·r / Σ l`, where l is a trajectory's sampled tokens."""
    group = _Groups(inputs, algorithm)
    lengths = inputs.trajectories.sum(inputs.response_mask.sum(dim=1)).to(group.scores.dtype)
    return _outcome(inputs, group.centre(group.sum(lengths * group.scores) / group.sum(lengths).clamp(min=1.0)))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """REINFORCE++-baseline: `r_i - mean(r)` of the group, then whitened over all tokens of the batch.

    https://arxiv.org/abs/2501.03262. Whitening also shifts, so a group of equal rewards may have advantages other
    than 0.
    """
    group = _Groups(inputs, algorithm)
    plain = _outcome(inputs, group.centre(group.mean(group.scores)))
    return Advantages(whiten(plain.advantages, inputs.response_mask), plain.returns)


def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): discounted later rewards, whitened over all tokens of the batch.

    The discount counts sampled tokens only. Tool tokens are skipped, so later rewards still reach the tokens before
    them.
    """
    returns = discounted(inputs.token_rewards, inputs.response_mask, algorithm.gamma)
    return Advantages(whiten(returns, inputs.response_mask), returns)


def remax(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """ReMax (https://arxiv.org/abs/2310.10505): sum of later rewards minus the score of the greedy response.

    Raises:
        BugError: the inputs have no `baseline_rewards`.
    """
    if inputs.baseline_rewards is None:
        raise BugError("algorithm.adv_estimator=remax without baseline_rewards: no greedy response was scored")
    returns = discounted(inputs.token_rewards, inputs.response_mask, 1.0)
    baselines = inputs.baseline_rewards.to(returns).unsqueeze(1)
    return Advantages((returns - baselines) * inputs.response_mask, returns)


def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """GAE: `δ_t = r_t + γ V_{t+1} - V_t`, `A_t = δ_t + γλ A_{t+1}`, whitened; the returns are `A_t + V_t`.

    https://arxiv.org/abs/1506.02438. Advantages are whitened over all tokens of the batch, after the returns are
    computed. `t + 1` is the next token sampled by the policy: tool tokens are skipped.

    Raises:
        BugError: the inputs have no `values`.
    """
    if inputs.values is None:
        raise BugError("algorithm.adv_estimator=gae without values: the critic did not compute any")
    rewards, values = inputs.token_rewards, inputs.values.to(inputs.token_rewards)
    advantages = torch.zeros_like(rewards)
    next_value, running = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        sampled = inputs.response_mask[:, t]
        delta = rewards[:, t] + algorithm.gamma * next_value - values[:, t]
        running = torch.where(sampled, delta + algorithm.gamma * algorithm.lam * running, running)
        next_value = torch.where(sampled, values[:, t], next_value)
        advantages[:, t] = running
    advantages = advantages * inputs.response_mask
    returns = (advantages + values) * inputs.response_mask
    return Advantages(whiten(advantages, inputs.response_mask), returns)


def on_policy_distill(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Advantages:
    """On-policy distillation: rewards have no effect, and `with_teacher` adds all there is to learn."""
    return _outcome(inputs, torch.zeros_like(inputs.scores))


def with_teacher(estimated: Advantages, log_ratio: Tensor, response_mask: Tensor, coefficient: float) -> Advantages:
    """Subtract from each sampled token's advantage the reverse KL divergence at this token, times `coefficient`.

    `A_t - coefficient · (log π_t - log π_teacher,t)`: on-policy, minus the gradient of the sum over t of
    KL(π ‖ π_teacher) given the tokens before t, as in generalized knowledge distillation
    (https://arxiv.org/abs/2306.13649) and Thinking Machines' on-policy distillation
    (https://thinkingmachines.ai/blog/on-policy-distillation/). What a token changes for later tokens is left out there,
    too: it is a discount of 0.

    Args:
        log_ratio: `[B, R]`, log-probs of the proximal policy minus those of the teacher.
    """
    estimate = torch.where(response_mask, log_ratio, 0.0)
    return estimated._replace(advantages=estimated.advantages - coefficient * estimate)


ESTIMATORS: dict[str, Callable[[AdvantageInputs, AlgorithmConfig], Advantages]] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gae": gae,
    "on_policy_distill": on_policy_distill,
}
"""Names of `algorithm.adv_estimator`."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return `(x - mean) / sqrt(var + 1e-8)` over the elements where `mask` is True, and 0 elsewhere.

    The variance divides by n - 1. Equal values give exact zeros.
    """
    chosen = values[mask]
    whitened = torch.zeros_like(values)
    if chosen.numel() > 1 and bool((chosen != chosen[0]).any()):
        whitened[mask] = (chosen - chosen.mean()) * torch.rsqrt(chosen.var() + WHITEN_EPSILON)
    return whitened


def discounted(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return the sum of rewards from each sampled token to the end of its row, discounted by `gamma` per sampled token,
    and 0 elsewhere: `[B, R]`."""
    if gamma == 1.0:
        return token_rewards.flip(1).cumsum(1).flip(1) * response_mask
    returns = torch.zeros_like(token_rewards)
    running = torch.zeros_like(token_rewards[:, 0])
    for t in range(token_rewards.shape[1] - 1, -1, -1):
        running = torch.where(response_mask[:, t], token_rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return returns * response_mask


def _outcome(inputs: AdvantageInputs, advantages: Tensor) -> Advantages:
    """Give all sampled tokens of a trajectory its advantage: `[T]` → `[B, R]`."""
    spread = inputs.trajectories.spread(advantages).unsqueeze(1) * inputs.response_mask
    return Advantages(spread, discounted(inputs.token_rewards, inputs.response_mask, 1.0))


class _Groups:
    """Scores `[T]` with sums over their groups `[G]`.

    Raises:
        ConfigError: a group has only one response.
    """

    def __init__(self, inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> None:
        self.scores = inputs.scores
        self._groups = inputs.score_groups
        self._num_groups = int(inputs.groups.max()) + 1
        self.size = self.sum(torch.ones_like(self.scores))
        if bool((self.size == 1).any()):
            raise ConfigError(
                f"rollout.n=1 with algorithm.adv_estimator={algorithm.adv_estimator}: a group of one response has no "
                "baseline, so every advantage would be 0 and nothing would be learned; set rollout.n to 2 or more"
            )

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_groups).index_add(0, self._groups, values)

    def spread(self, per_group: Tensor) -> Tensor:
        """Give each trajectory the value of its group: `[G]` → `[T]`."""
        return per_group[self._groups]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def std(self) -> Tensor:
        centred = self.scores - self.spread(self.mean(self.scores))
        return torch.sqrt(self.sum(centred.square()) / (self.size - 1))

    def extreme(self, values: Tensor, which: str) -> Tensor:
        start = values.new_zeros(self._num_groups)
        return start.scatter_reduce(0, self._groups, values, which, include_self=False)

    def centre(self, baselines: Tensor) -> Tensor:
        """Return scores minus the baselines `[G]` of their groups. In a group of equal scores the result is exactly
        0, although rounding may make their mean differ from them."""
        flat = self.extreme(self.scores, "amax") == self.extreme(self.scores, "amin")
        return (self.scores - self.spread(baselines)).masked_fill(self.spread(flat), 0.0)
