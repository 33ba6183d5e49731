"""The conversion of scores to token rewards, compared with plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import KlControlConfig
from asyncrl.config.sections.reward import OverlongBufferConfig
from trainer.algorithms.rewards import (
    Trajectories,
    combined_scores,
    kl_penalised,
    laid_out,
    next_kl_coefficient,
    overlong_penalty,
    scores_of,
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


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), numbers=st.randoms(use_true_random=False))
def test_values_are_summed_over_the_rows_of_trajectories(sizes: list[int], numbers: object) -> None:
    labels = [7 * number for number, size in enumerate(sizes) for _ in range(size)]
    values = [numbers.uniform(-2, 2) for _ in labels]  # type: ignore[attr-defined]
    rows_of = {label: [row for row, one in enumerate(labels) if one == label] for label in dict.fromkeys(labels)}
    found, tensor = Trajectories.of(torch.tensor(labels)), torch.tensor(values, dtype=torch.float64)
    assert len(found) == len(sizes) and found.forked == (max(sizes) > 1)
    assert found.number.tolist() == [label // 7 for label in labels]
    assert found.first.tolist() == [rows[0] for rows in rows_of.values()]
    assert found.last.tolist() == [rows[-1] for rows in rows_of.values()]
    sums = [sum(values[row] for row in rows) for rows in rows_of.values()]
    assert found.sum(tensor).tolist() == pytest.approx(sums)
    assert found.spread(found.sum(tensor)).tolist() == pytest.approx([sums[label // 7] for label in labels])
    so_far = [sum(values[other] for other in rows_of[labels[row]] if other <= row) for row in range(len(labels))]
    later = [sum(values[other] for other in rows_of[labels[row]] if other > row) for row in range(len(labels))]
    assert found.so_far(tensor).tolist() == pytest.approx(so_far)
    assert found.later(tensor).tolist() == pytest.approx(later)


def test_sums_of_one_row_trajectories_are_exact() -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = Trajectories.of(torch.arange(50))
    assert torch.equal(alone.sum(values), values) and torch.equal(alone.so_far(values), values)
    assert not alone.later(values).any()


MASK = [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_the_reward_is_on_the_last_sampled_token() -> None:
    expected = tensor([[0, 1.5, 0, 0], [0, 0, -2.0, 0], [0, 0, 0, 0.1], [3.0, 0, 0, 0]])
    rewards, alone = tensor([1.5, -2.0, 0.1, 3.0]), Trajectories.of(torch.arange(4))
    found = laid_out(rewards, torch.tensor(MASK).bool(), alone)
    torch.testing.assert_close(found, (expected, expected), rtol=0, atol=0)
    torch.testing.assert_close(scores_of(found, alone), rewards, rtol=0, atol=0)


def test_turn_rewards_are_on_their_tokens_and_the_rest_on_the_last_one() -> None:
    turns = tensor([[0.25, 0, 0, 0], [0.5, 0, -0.125, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    rewards, alone = tensor([1.5, -2.0, 0.1, 3.0]), Trajectories.of(torch.arange(4))
    found = laid_out(rewards, torch.tensor(MASK).bool(), alone, turns)
    expected = tensor([[0.25, 1.25, 0, 0], [0.5, 0, -2.5, 0], [0, 0, 0, 0.1], [3.0, 0, 0, 0]])
    torch.testing.assert_close(found.tokens, expected, rtol=0, atol=0)


def test_a_score_equals_the_reward_bit_for_bit_for_any_split_into_turns() -> None:
    """0.1 + 0.2 differs from 0.3, but a group of equal rewards must give advantages of exactly 0."""
    mask, turns = torch.ones(3, 2).bool(), tensor([[0.1, 0.2], [0.0, 0.0], [0.7, 0.0]])
    trajectories = Trajectories.of(torch.tensor([0, 1, 1]))
    found = laid_out(tensor([0.3, 0.3, 0.3]), mask, trajectories, turns)
    assert scores_of(found, trajectories).tolist() == [0.3, 0.3]


def test_rewards_from_a_token_on_add_up_to_the_remaining_reward_of_the_trajectory() -> None:
    """Rows 0 to 2 are one trajectory, in which row 1 has no sampled token. Row 3 is another trajectory."""
    mask = [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]
    turns = [[0, 0.5, 0, 0.25], [0, 0, 0, 0], [-1.0, 0, 2.0, 0], [0, 0, 0, 0]]
    rewards, labels = [3.0, 3.0, 3.0, -1.0], [0, 0, 0, 1]
    expected = []
    for row in range(4):
        before = sum(sum(turns[other]) for other in range(row) if labels[other] == labels[row])
        expected.append([one * (rewards[row] - before - sum(turns[row][:t])) for t, one in enumerate(mask[row])])
    trajectories = Trajectories.of(torch.tensor(labels))
    found = laid_out(tensor(rewards), torch.tensor(mask).bool(), trajectories, tensor(turns))
    to_come = found.tokens.flip(1).cumsum(1).flip(1) * torch.tensor(mask)
    torch.testing.assert_close(to_come, tensor(expected), rtol=1e-14, atol=1e-14)
    assert expected[2][:3] == [2.25, 0.0, 3.25]
    assert scores_of(found, trajectories).tolist() == [3.0, -1.0]


KINDS = pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
        ("low_var_kl", lambda d: min(math.exp(-d) - 1 + d, 10.0)),
        ("abs", abs),
    ],
)


@KINDS
@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 0, 1]])
def test_the_kl_penalty_is_on_sampled_tokens(kind: str, formula: Callable[[float], float], labels: list[int]) -> None:
    """The last sampled token of a row includes the KL of the trajectory's later rows."""
    mask = [[1, 0, 1], [1, 1, 0], [1, 1, 1]]
    old, ref = [[-1, -9, -2], [-0.5, -4, -7], [-1, -1, -1]], [[-1.5, -1, -2], [-0.25, -0.5, -1], [-1, -2, -4]]
    rewards = [2.0, 2.0, -1.0]
    kl = [[one * formula(x - y) for one, x, y in zip(*rows, strict=True)] for rows in zip(mask, old, ref, strict=True)]
    to_come = []
    for row in range(3):
        later = sum(sum(kl[other]) for other in range(row + 1, 3) if labels[other] == labels[row])
        to_come.append([one * (rewards[row] - 0.3 * (sum(kl[row][t:]) + later)) for t, one in enumerate(mask[row])])
    sums = {label: sum(sum(kl[row]) for row in range(3) if labels[row] == label) for label in dict.fromkeys(labels)}
    scores = [rewards[labels.index(label)] - 0.3 * total for label, total in sums.items()]

    trajectories, sampled = Trajectories.of(torch.tensor(labels)), torch.tensor(mask).bool()
    plain = laid_out(tensor(rewards), sampled, trajectories)
    found = kl_penalised(plain, tensor(old), tensor(ref), sampled, trajectories, kind=kind, coefficient=0.3)
    came = found.rewards.tokens.flip(1).cumsum(1).flip(1) * sampled
    torch.testing.assert_close(came, tensor(to_come), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores_of(found.rewards, trajectories), tensor(scores), rtol=1e-12, atol=1e-12)
    assert found.kl == pytest.approx(sum(sums.values()) / len(sums))


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (5.4, -0.1)])
def test_the_adaptive_controller_follows_the_bounded_error(kl: float, error: float) -> None:
    control = KlControlConfig(type="adaptive", target_kl=6.0, horizon=1000)
    assert next_kl_coefficient(0.05, kl, 250, control) == pytest.approx(0.05 * (1 + error * 250 / 1000))


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (1e9, 1.2)])
def test_a_lease_larger_than_the_horizon_keeps_the_coefficient_positive(kl: float, factor: float) -> None:
    control = KlControlConfig(type="adaptive", target_kl=6.0, horizon=10)
    assert next_kl_coefficient(0.05, kl, 64, control) == pytest.approx(0.05 * factor)


def test_the_adaptive_controller_converges_to_the_target() -> None:
    control, coefficient = KlControlConfig(type="adaptive", target_kl=2.0, horizon=200), 0.5
    for _ in range(200):
        coefficient = next_kl_coefficient(coefficient, 0.1 / coefficient, 64, control)
    assert 0.1 / coefficient == pytest.approx(2.0, rel=1e-3)
