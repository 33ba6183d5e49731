"""Policy objectives compared with plain loops in float64, and gradient checks of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import AlgorithmConfig
from trainer.algorithms.losses import POLICY_OBJECTIVES, PolicyTerms, Rows

OLD = [-1.0, -2.0, -0.5, -3.0, -0.1, -1.0, -0.7, -400.0]
LOG_RATIOS = [0.0, 0.5, 0.5, -0.5, -0.5, 0.25, 1.4, 300.0]
ADVANTAGES = [1.0, 1.0, -1.0, 1.0, -2.0, 1.0, -1.5, 1.0]
ROW = [0, 0, 0, 1, 1, 3, 3, 3]
"""Row 2 has no trained token."""
KEYS: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def current() -> list[float]:
    return [old + ratio for old, ratio in zip(OLD, LOG_RATIOS, strict=True)]


def terms(name: str, log_probs: torch.Tensor, **keys: Any) -> PolicyTerms:
    algorithm = AlgorithmConfig(policy_loss=name, **(KEYS | keys))
    return POLICY_OBJECTIVES[name](log_probs, tensor(OLD), tensor(ADVANTAGES), Rows(torch.tensor(ROW), 4), algorithm)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-11, atol=1e-12)


def clipped(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)


@pytest.mark.parametrize("bound", [3.0, None])
def test_ppo_follows_its_formula(bound: float | None) -> None:
    expected = []
    for log_ratio, advantage in zip(LOG_RATIOS, ADVANTAGES, strict=True):
        loss = clipped(math.exp(min(log_ratio, 20.0)), advantage)
        expected.append(min(loss, -advantage * bound) if bound and advantage < 0 else loss)
    actual = terms("ppo", tensor(current()), clip_ratio_c=bound)
    close(actual.loss, expected)
    close(actual.ratio, [math.exp(min(log_ratio, 20.0)) for log_ratio in LOG_RATIOS])
    assert actual.clipped.tolist() == [False, True, False, False, True, False, False, True]
    assert actual.dual_clipped.tolist() == [False] * 6 + [bound is not None, False]


def test_a_token_has_no_gradient_only_if_it_is_dual_clipped() -> None:
    for bound, moved in ((3.0, False), (None, True)):
        log_probs = tensor(current()).requires_grad_()
        (gradient,) = torch.autograd.grad(terms("ppo", log_probs, clip_ratio_c=bound).loss[6], log_probs)
        assert bool(gradient.any()) is moved


def gspo_ratio(row: int) -> float:
    mine = [log_ratio for log_ratio, other in zip(LOG_RATIOS, ROW, strict=True) if other == row]
    return math.exp(min(sum(mine) / len(mine), 20.0))


def test_gspo_clips_the_geometric_mean_of_a_rows_ratios() -> None:
    actual = terms("gspo", tensor(current()))
    close(actual.ratio, [gspo_ratio(row) for row in ROW])
    close(actual.loss, [clipped(gspo_ratio(row), advantage) for row, advantage in zip(ROW, ADVANTAGES, strict=True)])
    assert not actual.dual_clipped.any()


def test_the_gradient_of_gspo_is_that_of_the_sequence_ratio() -> None:
    """With one advantage per row and token means, this is the paper's loss: L = -A · s(θ), s = exp(mean log ratio)."""
    log_probs = tensor([-1.0, -2.1, -0.6]).requires_grad_()
    old, rows = tensor([-1.1, -2.0, -0.65]), Rows(torch.zeros(3, dtype=torch.int64), 1)
    algorithm = AlgorithmConfig(policy_loss="gspo", **KEYS)
    token_level = POLICY_OBJECTIVES["gspo"](log_probs, old, tensor([0.7] * 3), rows, algorithm).loss.mean()
    sequence_level = -0.7 * torch.exp((log_probs - old).mean())
    (actual,), (expected_gradient,) = (torch.autograd.grad(loss, log_probs) for loss in (token_level, sequence_level))
    torch.testing.assert_close(token_level, sequence_level)
    torch.testing.assert_close(actual, expected_gradient)


def test_a_bounded_ratio_of_gspo_has_no_gradient() -> None:
    """Row 3 has a mean log ratio of 100.55, which is bounded by 20; its positive advantages would be clipped anyway."""
    log_probs = tensor(current()).requires_grad_()
    algorithm = AlgorithmConfig(policy_loss="gspo", **KEYS)
    against = tensor([-1.0] * len(OLD))
    loss = POLICY_OBJECTIVES["gspo"](log_probs, tensor(OLD), against, Rows(torch.tensor(ROW), 4), algorithm).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert gradient[5:].tolist() == [0.0] * 3
    assert bool((gradient[:3] != 0).all())
    close(loss[5:], [math.exp(20.0)] * 3)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    log_probs = tensor(current()).requires_grad_()
    actual = terms("cispo", log_probs)
    weights = [min(max(math.exp(min(log_ratio, 20.0)), 0.8), 1.3) for log_ratio in LOG_RATIOS]
    close(actual.loss.detach(), [-w * a * p for w, a, p in zip(weights, ADVANTAGES, current(), strict=True)])
    (gradient,) = torch.autograd.grad(actual.loss.sum(), log_probs)
    close(gradient, [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)])
    assert actual.clipped.tolist() == [False, True, True, True, True, False, True, True]


def test_reinforce_follows_its_formula() -> None:
    log_probs = tensor(current()).requires_grad_()
    actual = terms("reinforce", log_probs)
    close(actual.loss.detach(), [-a * p for a, p in zip(ADVANTAGES, current(), strict=True)])
    (gradient,) = torch.autograd.grad(actual.loss.sum(), log_probs)
    close(gradient, [-a for a in ADVANTAGES])
    assert not actual.clipped.any()


@pytest.mark.parametrize("name", sorted(POLICY_OBJECTIVES))
def test_gradients_of_the_objectives_equal_finite_differences(name: str) -> None:
    """A stop-gradient makes the gradient differ from that of the loss, so the check uses a constant for that factor."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, generator=generator, dtype=torch.float64)
    old, advantages = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2))
    rows, algorithm = Rows(torch.arange(12) // 4, 3), AlgorithmConfig(policy_loss=name, **KEYS)

    def surrogate(log_probs: torch.Tensor) -> torch.Tensor:
        if name == "cispo":
            fixed = (start - old).exp().clamp(0.8, 1.3)
            return -fixed * advantages * log_probs
        if name == "gspo":
            sequence = (start - old).reshape(3, 4).mean(1).repeat_interleave(4).exp()
            ratio = sequence * (log_probs - start).exp()
            return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
        return POLICY_OBJECTIVES[name](log_probs, old, advantages, rows, algorithm).loss

    log_probs = start.clone().requires_grad_()
    assert torch.autograd.gradcheck(surrogate, (log_probs,))
    loss = POLICY_OBJECTIVES[name](log_probs, old, advantages, rows, algorithm).loss
    torch.testing.assert_close(loss, surrogate(log_probs))
    probe = torch.arange(1.0, 13.0, dtype=torch.float64)
    (actual,) = torch.autograd.grad(loss, log_probs, probe)
    (expected_gradient,) = torch.autograd.grad(surrogate(log_probs), log_probs, probe)
    torch.testing.assert_close(actual, expected_gradient)


finite = st.floats(-30, 0)


@pytest.mark.parametrize("name", sorted(POLICY_OBJECTIVES))
@given(log_probs=st.lists(finite, min_size=8, max_size=8), silent=st.integers(0, 7))
def test_zero_advantage_means_exactly_zero_gradient(name: str, log_probs: list[float], silent: int) -> None:
    """The engines skip the backward pass of rows without an advantage, so the gradient must be exactly 0."""
    values = tensor(log_probs).requires_grad_()
    advantages = tensor(ADVANTAGES)
    advantages[silent] = 0.0
    rows, algorithm = Rows(torch.tensor(ROW), 4), AlgorithmConfig(policy_loss=name, **KEYS)
    loss = POLICY_OBJECTIVES[name](values, tensor(OLD), advantages, rows, algorithm).loss
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert torch.isfinite(gradient).all()
    assert gradient[silent] == 0.0


@pytest.mark.parametrize("name", sorted(POLICY_OBJECTIVES))
def test_an_objective_of_no_tokens_is_empty(name: str) -> None:
    nothing, rows = torch.zeros(0, requires_grad=True), Rows(torch.zeros(0, dtype=torch.int64), 2)
    loss = POLICY_OBJECTIVES[name](nothing, nothing.detach(), nothing.detach(), rows, AlgorithmConfig()).loss
    loss.sum().backward()
    assert loss.shape == (0,)
