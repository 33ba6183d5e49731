"""KL estimates compared with their formulas and with exact divergences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.sections.algorithm import AlgorithmConfig
from trainer.algorithms.losses import KL_ESTIMATES, kl_estimate, mismatch_kl

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda p, q: p - q),
        ("k2", lambda p, q: (p - q) ** 2 / 2),
        ("k3", lambda p, q: math.exp(q - p) - 1 - (q - p)),
        ("low_var_kl", lambda p, q: min(math.exp(q - p) - 1 - (q - p), 10.0)),
        ("abs", lambda p, q: abs(p - q)),
    ],
)
def test_estimates_follow_their_formulas(kind: str, formula: Callable[[float, float], float]) -> None:
    current, ref = [-1.0, -2.0, -0.3, -9.0], [-1.5, -1.0, -0.3, -2.0]
    expected = [formula(p, q) for p, q in zip(current, ref, strict=True)]
    actual = kl_estimate(*(torch.tensor(values, dtype=torch.float64) for values in (current, ref)), kind)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_the_kl_of_two_categoricals(kind: str) -> None:
    torch.testing.assert_close((P * kl_estimate(P.log(), Q.log(), kind)).sum(), (P * (P / Q).log()).sum())


def test_mismatch_is_the_kl_from_the_behaviour_policy() -> None:
    """Tokens are drawn from P and scored by Q."""
    torch.testing.assert_close((P * mismatch_kl(Q.log(), P.log())).sum(), (P * (P / Q).log()).sum())


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, 0)
    exact = (log_probs.exp() * (log_probs - Q.log())).sum()
    sampled = (log_probs.detach().exp() * kl_estimate(log_probs, Q.log(), "k2")).sum()
    (expected_gradient,), (actual,) = (
        torch.autograd.grad(exact, logits, retain_graph=True),
        torch.autograd.grad(sampled, logits),
    )
    torch.testing.assert_close(actual, expected_gradient)


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATES))
def test_extreme_differences_give_finite_results(kind: str) -> None:
    far = torch.tensor([-800.0, 0.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(far, torch.tensor([0.0, -800.0], dtype=torch.float64), kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), far)
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl", "abs"])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(kind: str) -> None:
    current, ref = [-1.0, -2.0, -0.3, -9.0, -40.0], [-1.5, -1.0, -0.3, -2.0, -2.0]
    log_probs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    plain, plus = (kl_estimate(log_probs, torch.tensor(ref, dtype=torch.float64), name) for name in (kind, f"{kind}+"))
    torch.testing.assert_close(plus, plain, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(plus.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([p - q for p, q in zip(current, ref, strict=True)]), "d(d²/2) = d"


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expected_gradient_of_a_plus_is_that_of_the_kl(kind: str) -> None:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, 0)
    exact = (log_probs.exp() * (log_probs - Q.log())).sum()
    sampled = (log_probs.detach().exp() * kl_estimate(log_probs, Q.log(), f"{kind}+")).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], expected)


@pytest.mark.parametrize(
    ("key", "name", "here"), [("kl_loss_type", "kl", "k1"), ("kl_loss_type", "mse", "k2"), ("kl_penalty", "kl+", "k1+")]
)
def test_a_second_name_of_verl_is_an_error_that_gives_ours(key: str, name: str, here: str) -> None:
    with pytest.raises(ValidationError, match=rf"verl's {re.escape(name)} is {re.escape(here)} here"):
        AlgorithmConfig.model_validate({key: name})


@pytest.mark.parametrize("kind", sorted(name for name in KL_ESTIMATES if not name.endswith("+")))
def test_gradients_of_the_estimates_equal_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    current = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(12, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda log_probs: kl_estimate(log_probs, ref, kind), (current,))
