"""Advantages, losses and KL against plain float64 references."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.failures import ConfigError
from trainer.algorithms.advantages import estimator, grpo_advantages
from trainer.algorithms.kl import kl_loss
from trainer.algorithms.losses import clipped_policy_loss, mismatch_kl

REWARDS = [1.0, 0.0, 0.25, 0.0, 1.0]


def tensors(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_grpo_subtracts_the_group_mean_and_divides_by_its_std() -> None:
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    expected = [(reward - mean) / (std + 1e-6) for reward in REWARDS]
    np.testing.assert_allclose(grpo_advantages(np.array(REWARDS), norm_by_std=True), expected, rtol=1e-6)


def test_without_the_std_only_the_mean_goes() -> None:
    estimate = estimator(AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    expected = [reward - statistics.mean(REWARDS) for reward in REWARDS]
    np.testing.assert_allclose(estimate(np.array(REWARDS)), expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    assert not grpo_advantages(np.full(7, reward), norm_by_std=True).any()


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.n=1.*set rollout\.n to 2"):
        grpo_advantages(np.array([1.0]), norm_by_std=True)


def test_policy_loss_clips_only_where_it_makes_the_loss_larger() -> None:
    log_ratios = [0.0, 0.5, 0.5, -0.5, -0.5, 0.25, 300.0]
    advantages = [1.0, 1.0, -1.0, 1.0, -2.0, 1.0, 1.0]
    behaviour = [-1.0, -2.0, -0.5, -3.0, -0.1, -1.0, -400.0]
    current = [b + r for b, r in zip(behaviour, log_ratios, strict=True)]
    expected = []
    for log_ratio, advantage in zip(log_ratios, advantages, strict=True):
        ratio = math.exp(min(log_ratio, 20.0))
        bounded = min(max(ratio, 1 - 0.2), 1 + 0.3)
        expected.append(-min(ratio * advantage, bounded * advantage))
    outcome = clipped_policy_loss(*tensors(current, behaviour, advantages), clip_ratio_low=0.2, clip_ratio_high=0.3)
    torch.testing.assert_close(outcome.loss, torch.tensor(expected, dtype=torch.float64))
    assert outcome.clipped.tolist() == [False, True, False, False, True, False, True]
    assert outcome.ratio[1].item() == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("k1", lambda p, q: p - q),
        ("k2", lambda p, q: (p - q) ** 2 / 2),
        ("k3", lambda p, q: math.exp(q - p) - 1 - (q - p)),
    ],
)
def test_kl_estimators(kind: str, reference: object) -> None:
    current, ref = [-1.0, -2.0, -0.3], [-1.5, -1.0, -0.3]
    expected = [reference(p, q) for p, q in zip(current, ref, strict=True)]
    torch.testing.assert_close(kl_loss(*tensors(current, ref), kind), torch.tensor(expected, dtype=torch.float64))


def test_k3_is_unbiased_for_the_kl_between_two_categoricals() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_loss(p.log(), q.log(), "k3")).sum(), exact)
    # mismatch_kl(current, behaviour) estimates KL(behaviour || current) from tokens of the behaviour policy
    torch.testing.assert_close((p * mismatch_kl(q.log(), p.log())).sum(), exact)


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    behaviour = torch.randn(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)

    def policy(log_probs: torch.Tensor) -> torch.Tensor:
        return clipped_policy_loss(log_probs, behaviour, advantages, clip_ratio_low=0.2, clip_ratio_high=0.3).loss

    assert torch.autograd.gradcheck(policy, (current,))
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda log_probs, kind=kind: kl_loss(log_probs, behaviour, kind), (current,))
