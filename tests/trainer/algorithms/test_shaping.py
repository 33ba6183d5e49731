"""Scores → token rewards against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.config.schema import KlControlConfig, OverlongBufferConfig
from trainer.algorithms.shaping import (
    combined_scores,
    kl_penalised,
    next_kl_coefficient,
    overlong_penalty,
    token_rewards,
)


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scores_are_combined_by_weight() -> None:
    combined = combined_scores(tensor([1.0, 0.0]), tensor([-0.5, 3.0]), model_weight=0.2)
    torch.testing.assert_close(combined, tensor([0.9, 0.6]))


def test_overlong_punishment_is_dapos_equation_13() -> None:
    def reference(length: int, longest: int, cache: int) -> float:
        if length <= longest - cache:
            return 0.0
        return ((longest - cache) - length) / cache if length <= longest else -1.0

    lengths = [1, 79, 80, 81, 90, 99, 100, 130]
    buffer = OverlongBufferConfig(enable=True, len=20, penalty_factor=0.5)
    expected = tensor([0.5 * reference(length, 100, 20) for length in lengths])
    torch.testing.assert_close(overlong_penalty(torch.tensor(lengths), 100, buffer), expected)


def test_the_reward_is_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    expected = tensor([[0, 1.5, 0, 0], [0, 0, -2.0, 0], [0, 0, 0, 0.1], [3.0, 0, 0, 0]])
    torch.testing.assert_close(token_rewards(tensor([1.5, -2.0, 0.1, 3.0]), mask), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
        ("low_var_kl", lambda d: min(math.exp(-d) - 1 + d, 10.0)),
        ("abs", abs),
    ],
)
def test_kl_penalty_on_sampled_tokens(kind: str, formula: object) -> None:
    mask = [[1, 0, 1], [1, 1, 0]]
    rewards, old, ref = [[0, 0, 2.0], [0, -1.0, 0]], [[-1, -9, -2], [-0.5, -4, -7]], [[-1.5, -1, -2], [-0.25, -0.5, -1]]
    expected, total = [], 0.0
    for row in range(2):
        expected.append([])
        for t in range(3):
            divergence = formula(old[row][t] - ref[row][t]) if mask[row][t] else 0.0
            expected[-1].append(rewards[row][t] - 0.3 * divergence)
            total += divergence
    actual = kl_penalised(
        tensor(rewards), tensor(old), tensor(ref), torch.tensor(mask).bool(), kind=kind, coefficient=0.3
    )
    torch.testing.assert_close(actual.token_rewards, tensor(expected), rtol=1e-12, atol=1e-12)
    assert actual.kl == pytest.approx(total / 2)


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (5.4, -0.1)])
def test_the_adaptive_controller_follows_the_bounded_error(kl: float, error: float) -> None:
    control = KlControlConfig(type="adaptive", target_kl=6.0, horizon=1000)
    assert next_kl_coefficient(0.05, kl, 250, control) == pytest.approx(0.05 * (1 + error * 250 / 1000))


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (1e9, 1.2)])
def test_a_lease_beyond_the_horizon_counts_as_one_so_the_coefficient_stays_positive(kl: float, factor: float) -> None:
    control = KlControlConfig(type="adaptive", target_kl=6.0, horizon=10)
    assert next_kl_coefficient(0.05, kl, 64, control) == pytest.approx(0.05 * factor)


def test_the_adaptive_controller_finds_the_coefficient_that_holds_the_target() -> None:
    control, coefficient = KlControlConfig(type="adaptive", target_kl=2.0, horizon=200), 0.5
    for _ in range(200):
        coefficient = next_kl_coefficient(coefficient, 0.1 / coefficient, 64, control)
    assert 0.1 / coefficient == pytest.approx(2.0, rel=1e-3)
