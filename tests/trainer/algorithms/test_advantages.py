"""Advantage estimators against plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import BugError, ConfigError
from tests.fakes.advantage_references import Matrix, close, discounted, gae, outcomes, whitened
from trainer.algorithms.advantages import ESTIMATORS, AdvantageInputs, Advantages, advantage_estimator
from trainer.algorithms.rewards import Trajectories
from trainer.batches import rewards_are_equal

MASK = [
    [1, 1, 1, 0, 0],
    [1, 0, 0, 1, 1],
    [1, 1, 1, 1, 1],
    [0, 1, 1, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 1, 0],
    [1, 0, 1, 0, 0],
]
"""Rows 1, 3 and 6 have tool tokens."""
LENGTHS = [sum(row) for row in MASK]
GROUPS = [0, 0, 0, 1, 1, 1, 1]
SCORES = [1.0, 0.0, 0.25, -0.5, 2.0, 2.0, 0.7]
VALUES = [[0.1 * (row + 1) - 0.07 * token for token in range(5)] for row in range(7)]
BASELINES = [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
OUTCOME = ["grpo", "grpo_passk", "rloo", "opo"]
NEED_GROUPS = [*OUTCOME, "reinforce_plus_plus_baseline"]


def rewards(scores: list[float], mask: list[list[int]], penalty: float = 0.0) -> Matrix:
    """The score on the last sampled token, and a different small penalty on every sampled one."""
    table = []
    for row, (score, sampled) in enumerate(zip(scores, mask, strict=True)):
        last = max(t for t, one in enumerate(sampled) if one)
        table.append([one * (-penalty * (row + t)) + (score if t == last else 0.0) for t, one in enumerate(sampled)])
    return table


def inputs(
    token_rewards: Matrix, mask: list[list[int]] = MASK, groups: list[int] = GROUPS, **more: list
) -> AdvantageInputs:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in more.items()}
    on_tokens = torch.tensor(token_rewards, dtype=torch.float64)
    alone = Trajectories.of(torch.arange(len(mask)))
    return AdvantageInputs(
        on_tokens, on_tokens.sum(dim=1), torch.tensor(mask).bool(), torch.tensor(groups), alone, **tensors
    )


def estimate(name: str, given_inputs: AdvantageInputs, **keys: object) -> Advantages:
    return advantage_estimator(AlgorithmConfig(adv_estimator=name, **keys))(given_inputs)


def spread(per_row: list[float]) -> Matrix:
    return [[one * value for one in sampled] for value, sampled in zip(per_row, MASK, strict=True)]


@pytest.mark.parametrize("penalty", [0.0, 0.01])
@pytest.mark.parametrize(
    ("name", "keys", "reference"),
    [
        ("grpo", {}, "grpo"),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, "centred"),
        ("grpo_passk", {}, "grpo_passk"),
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, "centred_passk"),
        ("rloo", {}, "rloo"),
        ("opo", {}, "opo"),
    ],
)
def test_outcome_estimators(name: str, keys: dict[str, object], reference: str, penalty: float) -> None:
    """A penalty on single tokens counts in the score: the sum of the token rewards."""
    table = rewards(SCORES, MASK, penalty)
    actual = estimate(name, inputs(table), **keys)
    close(actual.advantages, spread(outcomes([sum(row) for row in table], GROUPS, LENGTHS)[reference]))
    close(actual.returns, discounted(table, MASK, 1.0))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_discounted_returns(gamma: float) -> None:
    table = rewards(SCORES, MASK, 0.01)
    returns = discounted(table, MASK, gamma)
    actual = estimate("reinforce_plus_plus", inputs(table), gamma=gamma)
    close(actual.returns, returns)
    close(actual.advantages, whitened(returns, MASK))


def test_reinforce_plus_plus_baseline_whitens_centred_scores() -> None:
    table = rewards(SCORES, MASK, 0.01)
    centred = spread(outcomes([sum(row) for row in table], GROUPS, LENGTHS)["centred"])
    close(estimate("reinforce_plus_plus_baseline", inputs(table)).advantages, whitened(centred, MASK))


def test_remax_subtracts_the_greedy_response() -> None:
    table = rewards(SCORES, MASK, 0.01)
    returns = discounted(table, MASK, 1.0)
    expected = [
        [one * (value - baseline) for value, one in zip(row, sampled, strict=True)]
        for row, sampled, baseline in zip(returns, MASK, BASELINES, strict=True)
    ]
    actual = estimate("remax", inputs(table, baseline_rewards=BASELINES))
    close(actual.advantages, expected)
    close(actual.returns, returns)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_is_its_definition_on_sampled_tokens(gamma: float, lam: float) -> None:
    table = rewards(SCORES, MASK, 0.01)
    advantages, returns = gae(table, MASK, VALUES, gamma, lam)
    actual = estimate("gae", inputs(table, values=VALUES), gamma=gamma, lam=lam)
    close(actual.advantages, advantages)
    close(actual.returns, returns)


def test_a_critic_that_is_right_leaves_no_advantage() -> None:
    table = rewards([0.5] * 7, MASK)
    assert not estimate("gae", inputs(table, values=[[0.5] * 5] * 7)).advantages.any()


def test_missing_inputs_of_an_estimator_are_refused() -> None:
    with pytest.raises(BugError, match="without values"):
        estimate("gae", inputs(rewards(SCORES, MASK)))
    with pytest.raises(BugError, match="no greedy response"):
        estimate("remax", inputs(rewards(SCORES, MASK)))


@pytest.mark.parametrize("name", NEED_GROUPS)
def test_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.n=1 with algorithm\.adv_estimator={name}:.*set rollout\.n to 2"):
        estimate(name, inputs([[1.0], [0.0], [1.0]], [[1]] * 3, [0, 0, 1]))


@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.3])
@pytest.mark.parametrize("name", OUTCOME)
def test_equal_rewards_give_exact_zeros_beside_a_group_that_learns(name: str, score: float) -> None:
    mask = [[1, 1]] * 7 + [[1, 0]] * 2
    actual = estimate(name, inputs(rewards([score] * 7 + [1.0, 0.0], mask), mask, [0] * 7 + [1] * 2)).advantages
    assert not actual[:7].any()
    assert actual[7:].any()


def test_two_equally_good_best_responses_share_nothing_in_passk() -> None:
    assert not estimate("grpo_passk", inputs(rewards([1.0, 1.0, 0.0], [[1]] * 3), [[1]] * 3, [0] * 3)).advantages.any()


scores_strategy = st.lists(st.floats(-3, 3, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=7, max_size=7)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline"])
@given(scores=scores_strategy, shift=st.sampled_from([-4.0, 0.5, 16.0]))
def test_a_shift_of_all_rewards_changes_nothing(name: str, scores: list[float], shift: float) -> None:
    plain = estimate(name, inputs(rewards(scores, MASK)))
    shifted = estimate(name, inputs(rewards([score + shift for score in scores], MASK)))
    torch.testing.assert_close(shifted.advantages, plain.advantages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=scores_strategy, order=st.permutations(range(7)))
def test_the_order_of_rows_changes_nothing(name: str, scores: list[float], order: list[int]) -> None:
    table = rewards(scores, MASK, 0.01)
    plain = estimate(name, inputs(table, values=VALUES, baseline_rewards=BASELINES))
    shuffled = estimate(
        name,
        inputs(
            [table[row] for row in order],
            [MASK[row] for row in order],
            [1 - GROUPS[row] for row in order],
            values=[VALUES[row] for row in order],
            baseline_rewards=[BASELINES[row] for row in order],
        ),
    )
    torch.testing.assert_close(shuffled.advantages, plain.advantages[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shuffled.returns, plain.returns[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=scores_strategy, noise=st.floats(-5, 5))
def test_masked_tokens_get_nothing_and_their_values_do_not_matter(name: str, scores: list[float], noise: float) -> None:
    table, mask = rewards(scores, MASK, 0.01), torch.tensor(MASK).bool()
    noisy = [
        [value if one else noise for value, one in zip(row, sampled, strict=True)]
        for row, sampled in zip(VALUES, MASK, strict=True)
    ]
    plain = estimate(name, inputs(table, values=VALUES, baseline_rewards=BASELINES), gamma=0.9)
    other = estimate(name, inputs(table, values=noisy, baseline_rewards=BASELINES), gamma=0.9)
    assert not plain.advantages[~mask].any()
    assert not plain.returns[~mask].any()
    torch.testing.assert_close(other, plain, rtol=0, atol=0)


def test_flat_groups() -> None:
    assert rewards_are_equal([0.1, 0.1, 0.1])
    assert rewards_are_equal([2.0])
    assert not rewards_are_equal([1.0, 1.0, 0.0])
