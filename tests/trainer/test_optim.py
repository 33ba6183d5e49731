"""The learning-rate schedule, written out."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.schema import OptimConfig
from trainer.engine.optim import learning_rate


def rates(total: int = 10, beyond: int = 2, **fields: object) -> list[float]:
    optim = OptimConfig(lr=1.0, **fields)
    return [learning_rate(step, total, optim) for step in range(1, total + beyond + 1)]


def test_constant() -> None:
    assert rates() == [1.0] * 12


def test_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    assert rates(warmup_steps=4)[:6] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_minimum() -> None:
    expected = [0.5, 1.0, *(1 - 0.9 * k / 8 for k in range(1, 9)), 0.1, 0.1]
    assert rates(warmup_steps=2, decay="linear", min_lr_ratio=0.1) == pytest.approx(expected)


def test_cosine_decay() -> None:
    expected = [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(1, 11)] + [0.0, 0.0]
    assert rates(decay="cosine") == pytest.approx(expected)


def test_a_warm_up_longer_than_the_run() -> None:
    assert rates(total=3, beyond=0, warmup_steps=6, decay="cosine") == pytest.approx([1 / 6, 2 / 6, 3 / 6])
