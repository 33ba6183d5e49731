"""The learning-rate schedule, compared with explicit values; norms and clipping, compared with torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from asyncrl.config.sections.trainer import OptimConfig
from trainer.engines.compute.optim import clip_, gradients, learning_rate, squared_norm


@pytest.mark.parametrize(
    ("total", "fields", "expected"),
    [
        (10, {}, [1.0] * 12),
        (10, {"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 9]),
        (
            10,
            {"warmup_steps": 2, "decay": "linear", "min_lr_ratio": 0.1},
            [0.5, 1.0, *(1 - 0.9 * step / 8 for step in range(1, 9)), 0.1, 0.1],
        ),
        (10, {"decay": "cosine"}, [*((1 + math.cos(math.pi * step / 10)) / 2 for step in range(1, 11)), 0.0, 0.0]),
        (3, {"warmup_steps": 6, "decay": "cosine"}, [1 / 6, 2 / 6, 3 / 6]),
    ],
    ids=["constant", "warm-up", "linear decay to a minimum", "cosine", "a warm-up longer than the run"],
)
def test_learning_rates_follow_the_schedule(total: int, fields: dict[str, object], expected: list[float]) -> None:
    optim = OptimConfig(lr=1.0, **fields)
    rates = [learning_rate(step, total, optim) for step in range(1, len(expected) + 1)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_norm_and_clipping_are_those_of_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)), nn.Parameter(torch.randn(5, dtype=torch.float64))]
    frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    ours[0].grad, theirs = torch.randn(3, 4, dtype=torch.float64), [nn.Parameter(p.detach().clone()) for p in ours]
    theirs[0].grad = ours[0].grad.clone()
    parts = gradients([*ours, frozen])
    norm = math.sqrt(squared_norm(parts))
    clip_(parts, norm, max_norm)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, max_norm)), rel=1e-12)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-12, atol=0)
    assert ours[1].grad is not None and not ours[1].grad.any(), "a missing gradient is replaced by zeros"
    assert frozen.grad is None


@pytest.mark.parametrize("parts", [[], [torch.zeros(0)]])
def test_a_rank_without_trained_elements_adds_nothing_to_the_norm(parts: list[torch.Tensor]) -> None:
    assert float(squared_norm(parts)) == 0.0
