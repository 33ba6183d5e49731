"""Trajectories of several rows against plain loops: each trajectory counts once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import ConfigError
from tests.fakes.advantage_references import close, discounted, gae, outcomes, whitened
from trainer.algorithms.advantages import AdvantageInputs, Advantages, advantage_estimator
from trainer.algorithms.rewards import Trajectories, laid_out, scores_of


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), numbers=st.randoms(use_true_random=False))
def test_sums_over_rows(sizes: list[int], numbers: object) -> None:
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


def test_trajectories_of_one_row_are_exact() -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = Trajectories.of(torch.arange(50))
    assert torch.equal(alone.sum(values), values) and torch.equal(alone.so_far(values), values)
    assert not alone.later(values).any()


# Two groups, of three and of two trajectories. The second trajectory is rows 1 to 3, the last one rows 6 and 7.
LABELS = [0, 1, 1, 1, 2, 3, 4, 4]
GROUPS = [0, 0, 0, 0, 0, 1, 1, 1]
MASK = [
    [1, 1, 1, 0],
    [1, 1, 0, 1],
    [0, 0, 0, 0],
    [1, 0, 1, 0],
    [1, 1, 0, 0],
    [1, 1, 1, 1],
    [0, 1, 1, 0],
    [1, 1, 0, 0],
]
REWARDS = [1.0, 0.0, 0.25, -0.5, 2.0]
"""Of the trajectories."""
TURNS = [[0.0] * 4 for _ in MASK]
TURNS[1][1], TURNS[3][0], TURNS[5][3], TURNS[6][2] = 0.5, -0.75, 0.1, 0.2
VALUES = [[0.1 * (row + 1) - 0.07 * token for token in range(4)] for row in range(8)]
GROUP_OF = [0, 0, 0, 1, 1]
"""Of the trajectories."""
LENGTHS = [3, 5, 2, 4, 4]
"""Of the trajectories, in sampled tokens."""


def estimate(name: str, **keys: object) -> Advantages:
    trajectories, mask = Trajectories.of(torch.tensor(LABELS)), torch.tensor(MASK).bool()
    turns = torch.tensor(TURNS, dtype=torch.float64)
    rewards = laid_out(torch.tensor([REWARDS[label] for label in LABELS]), mask, trajectories, turns)
    inputs = AdvantageInputs(
        token_rewards=rewards.tokens,
        scores=scores_of(rewards, trajectories),
        response_mask=mask,
        groups=torch.tensor(GROUPS),
        trajectories=trajectories,
        values=torch.tensor(VALUES, dtype=torch.float64),
        baseline_rewards=torch.tensor([0.5] * 5 + [1.0] * 3, dtype=torch.float64),
    )
    return advantage_estimator(AlgorithmConfig(adv_estimator=name, **keys))(inputs)


def spread(of_trajectories: list[float]) -> list[list[float]]:
    return [[one * of_trajectories[label] for one in row] for label, row in zip(LABELS, MASK, strict=True)]


def token_rewards() -> list[list[float]]:
    """A turn's reward on its token, and the rest on the row's last sampled token."""
    table = [list(row) for row in TURNS]
    for row, label in enumerate(LABELS):
        earned = sum(sum(TURNS[other]) for other in range(row + 1) if LABELS[other] == label)
        sampled = [t for t, one in enumerate(MASK[row]) if one]
        if sampled:
            table[row][sampled[-1]] += REWARDS[label] - earned
    return table


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk"])
def test_baselines_and_deviations_count_a_trajectory_once(name: str) -> None:
    actual = estimate(name)
    close(actual.advantages, spread(outcomes(REWARDS, GROUP_OF, LENGTHS)[name]))
    close(actual.returns, discounted(token_rewards(), MASK))


def test_whitening_is_over_tokens_after_a_baseline_over_trajectories() -> None:
    expected = whitened(spread(outcomes(REWARDS, GROUP_OF, LENGTHS)["centred"]), MASK)
    close(estimate("reinforce_plus_plus_baseline").advantages, expected)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_discounting_ends_with_the_row(gamma: float) -> None:
    actual = estimate("reinforce_plus_plus", gamma=gamma)
    close(actual.returns, discounted(token_rewards(), MASK, gamma))
    close(actual.advantages, whitened(discounted(token_rewards(), MASK, gamma), MASK))


def test_every_row_loses_the_greedy_score_once() -> None:
    baselines = [0.5] * 5 + [1.0] * 3
    expected = [
        [one * (x - baseline) for x, one in zip(row, mask, strict=True)]
        for row, mask, baseline in zip(discounted(token_rewards(), MASK), MASK, baselines, strict=True)
    ]
    close(estimate("remax").advantages, expected)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8)])
def test_gae_takes_turn_rewards_where_they_are_and_no_value_of_the_next_row(gamma: float, lam: float) -> None:
    advantages, returns = gae(token_rewards(), MASK, VALUES, gamma, lam)
    actual = estimate("gae", gamma=gamma, lam=lam)
    close(actual.returns, returns)
    close(actual.advantages, advantages)


def test_a_group_of_one_trajectory_of_two_rows_is_refused() -> None:
    trajectories, mask = Trajectories.of(torch.tensor([0, 0])), torch.ones(2, 1).bool()
    rewards = laid_out(torch.tensor([1.0, 1.0]), mask, trajectories)
    scores = scores_of(rewards, trajectories)
    inputs = AdvantageInputs(rewards.tokens, scores, mask, torch.tensor([0, 0]), trajectories)
    with pytest.raises(ConfigError, match=r"rollout\.n=1"):
        advantage_estimator(AlgorithmConfig())(inputs)
