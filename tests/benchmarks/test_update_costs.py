"""How the time of a training update is split, and how two variants are compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks.update_costs import ELEMENT_WISE, KINDS, mismatch, split


def test_the_time_is_split_by_kind_of_operation() -> None:
    matrix = torch.rand(600, 600)
    shares = split(lambda: [torch.mm(matrix, matrix) for _ in range(20)])
    assert set(shares) == {*KINDS, ELEMENT_WISE, "python"} and sum(shares.values()) == pytest.approx(1.0)
    assert shares["matrix products"] > 0.5
    shares = split(lambda: [matrix.log_softmax(1) for _ in range(20)])
    assert shares["loss"] > 0.5 and shares["matrix products"] == 0.0
    shares = split(lambda: [matrix.exp() for _ in range(50)])
    assert shares[ELEMENT_WISE] > 0.5


def test_the_mismatch_is_that_of_the_log_probs() -> None:
    ours = torch.tensor([[-1.0, -2.0]])
    assert mismatch(ours, ours) == 0.0
    assert mismatch(ours, ours + 0.1) == pytest.approx(0.1**2 / 2, rel=0.05)
