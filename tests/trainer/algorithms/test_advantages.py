"""Advantage estimators compared with plain loops in float64, for trajectories of one row and of several rows."""

from __future__ import annotations

from typing import NamedTuple

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


class Lease(NamedTuple):
    """The rows of a lease. Fields of trajectories are in the order in which the trajectories begin."""

    mask: list[list[int]]
    labels: list[int]
    """The trajectory of each row."""
    group_of: list[int]
    """The sample of each trajectory."""
    scores: list[float]
    """The score of each trajectory."""
    token_rewards: Matrix
    values: Matrix
    baselines: list[float]
    """The score of the greedy response for each row."""

    @property
    def lengths(self) -> list[int]:
        """Number of sampled tokens of each trajectory."""
        rows = list(zip(self.labels, self.mask, strict=True))
        return [sum(sum(sampled) for other, sampled in rows if other == label) for label in dict.fromkeys(self.labels)]

    def spread(self, of_trajectories: list[float]) -> Matrix:
        rows = zip(self.labels, self.mask, strict=True)
        return [[one * of_trajectories[label] for one in sampled] for label, sampled in rows]

    @property
    def references(self) -> dict[str, list[float]]:
        return outcomes(self.scores, self.group_of, self.lengths)

    def estimate(self, name: str, **keys: object) -> Advantages:
        def tensor(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64)

        inputs = AdvantageInputs(
            token_rewards=tensor(self.token_rewards),
            scores=tensor(self.scores),
            response_mask=torch.tensor(self.mask).bool(),
            groups=torch.tensor([self.group_of[label] for label in self.labels]),
            trajectories=Trajectories.of(torch.tensor(self.labels)),
            values=tensor(self.values) if self.values else None,
            baseline_rewards=tensor(self.baselines) if self.baselines else None,
        )
        return advantage_estimator(AlgorithmConfig(adv_estimator=name, **keys))(inputs)


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
GROUPS = [0, 0, 0, 1, 1, 1, 1]
SCORES = [1.0, 0.0, 0.25, -0.5, 2.0, 2.0, 0.7]
VALUES = [[0.1 * (row + 1) - 0.07 * token for token in range(5)] for row in range(8)]
BASELINES = [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
OUTCOME = ["grpo", "grpo_passk", "rloo", "opo"]
NEED_GROUPS = [*OUTCOME, "reinforce_plus_plus_baseline"]


def single_rows(
    scores: list[float] = SCORES,
    mask: list[list[int]] = MASK,
    groups: list[int] = GROUPS,
    *,
    penalty: float = 0.0,
    values: Matrix = VALUES[:7],
    baselines: list[float] = BASELINES,
) -> Lease:
    """Return trajectories of one row with the score on the last sampled token and a different small penalty on each
    sampled token.
    """
    table = []
    for row, (score, sampled) in enumerate(zip(scores, mask, strict=True)):
        last = max(t for t, one in enumerate(sampled) if one)
        table.append([one * (-penalty * (row + t)) + (score if t == last else 0.0) for t, one in enumerate(sampled)])
    return Lease(mask, list(range(len(mask))), groups, [sum(row) for row in table], table, values, baselines)


def forked() -> Lease:
    """Return two groups with three and two trajectories. Rows 1 to 3 are the second trajectory, 6 and 7 the last
    one."""
    labels, scores = [0, 1, 1, 1, 2, 3, 4, 4], [1.0, 0.0, 0.25, -0.5, 2.0]
    mask = [
        [1, 1, 1, 0],
        [1, 1, 0, 1],
        [0, 0, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [0, 1, 1, 0],
        [1, 1, 0, 0],
    ]
    table = [[0.0] * 4 for _ in mask]
    table[1][1], table[3][0], table[5][3], table[6][2] = 0.5, -0.75, 0.1, 0.2
    # The reward of a turn is on its token, and the rest is on the row's last sampled token.
    of_rows = [sum(row) for row in table]
    for row, label in enumerate(labels):
        if any(mask[row]):
            earned = sum(of_rows[other] for other in range(row + 1) if labels[other] == label)
            table[row][max(t for t, one in enumerate(mask[row]) if one)] += scores[label] - earned
    values = [row[:4] for row in VALUES]
    return Lease(mask, labels, [0, 0, 0, 1, 1], scores, table, values, [0.5] * 5 + [1.0] * 3)


LEASES = pytest.mark.parametrize(
    "lease", [single_rows(), single_rows(penalty=0.01), forked()], ids=["scores", "penalties", "forked trajectories"]
)


@LEASES
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
def test_outcome_estimators_equal_their_references(
    name: str, keys: dict[str, object], reference: str, lease: Lease
) -> None:
    """Penalties on single tokens are part of the score, and each trajectory counts once."""
    actual = lease.estimate(name, **keys)
    close(actual.advantages, lease.spread(lease.references[reference]))
    close(actual.returns, discounted(lease.token_rewards, lease.mask, 1.0))


@LEASES
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_discounted_returns_of_each_row(gamma: float, lease: Lease) -> None:
    returns = discounted(lease.token_rewards, lease.mask, gamma)
    actual = lease.estimate("reinforce_plus_plus", gamma=gamma)
    close(actual.returns, returns)
    close(actual.advantages, whitened(returns, lease.mask))


@LEASES
def test_reinforce_plus_plus_baseline_whitens_centred_scores(lease: Lease) -> None:
    centred = lease.spread(lease.references["centred"])
    close(lease.estimate("reinforce_plus_plus_baseline").advantages, whitened(centred, lease.mask))


@LEASES
def test_remax_subtracts_the_greedy_response(lease: Lease) -> None:
    returns = discounted(lease.token_rewards, lease.mask, 1.0)
    expected = [
        [one * (value - baseline) for value, one in zip(row, sampled, strict=True)]
        for row, sampled, baseline in zip(returns, lease.mask, lease.baselines, strict=True)
    ]
    actual = lease.estimate("remax")
    close(actual.advantages, expected)
    close(actual.returns, returns)


@LEASES
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_follows_its_definition_on_the_sampled_tokens_of_a_row(gamma: float, lam: float, lease: Lease) -> None:
    advantages, returns = gae(lease.token_rewards, lease.mask, lease.values, gamma, lam)
    actual = lease.estimate("gae", gamma=gamma, lam=lam)
    close(actual.advantages, advantages)
    close(actual.returns, returns)


def test_exact_values_of_the_critic_give_zero_advantages() -> None:
    assert not single_rows([0.5] * 7, values=[[0.5] * 5] * 7).estimate("gae").advantages.any()


def test_missing_inputs_of_an_estimator_are_refused() -> None:
    with pytest.raises(BugError, match="without values"):
        single_rows(values=[]).estimate("gae")
    with pytest.raises(BugError, match="no greedy response"):
        single_rows(baselines=[]).estimate("remax")


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 2, 2]], ids=["one row", "two rows"])
@pytest.mark.parametrize("name", NEED_GROUPS)
def test_a_group_of_one_trajectory_is_refused(name: str, labels: list[int]) -> None:
    lease = Lease([[1]] * len(labels), labels, [0, 0, 1], [1.0, 0.0, 1.0], [[1.0]] * len(labels), [], [])
    with pytest.raises(ConfigError, match=rf"rollout\.n=1 with algorithm\.adv_estimator={name}:.*set rollout\.n to 2"):
        lease.estimate(name)


@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, -7.3])
@pytest.mark.parametrize("name", OUTCOME)
def test_equal_rewards_give_exact_zeros_beside_a_group_that_learns(name: str, score: float) -> None:
    mask = [[1, 1]] * 7 + [[1, 0]] * 2
    actual = single_rows([score] * 7 + [1.0, 0.0], mask, [0] * 7 + [1] * 2, values=[]).estimate(name).advantages
    assert not actual[:7].any()
    assert actual[7:].any()


def test_two_equally_good_best_responses_get_no_advantage_in_passk() -> None:
    lease = single_rows([1.0, 1.0, 0.0], [[1]] * 3, [0] * 3, values=[])
    assert not lease.estimate("grpo_passk").advantages.any()


scores_strategy = st.lists(st.floats(-3, 3, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=7, max_size=7)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline"])
@given(scores=scores_strategy, shift=st.sampled_from([-4.0, 0.5, 16.0]))
def test_a_shift_of_all_rewards_changes_nothing(name: str, scores: list[float], shift: float) -> None:
    plain = single_rows(scores).estimate(name)
    shifted = single_rows([score + shift for score in scores]).estimate(name)
    torch.testing.assert_close(shifted.advantages, plain.advantages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=scores_strategy, order=st.permutations(range(7)))
def test_the_order_of_rows_changes_nothing(name: str, scores: list[float], order: list[int]) -> None:
    lease = single_rows(scores, penalty=0.01)
    plain = lease.estimate(name)
    shuffled = lease._replace(
        mask=[MASK[row] for row in order],
        group_of=[1 - GROUPS[row] for row in order],
        scores=[lease.scores[row] for row in order],
        token_rewards=[lease.token_rewards[row] for row in order],
        values=[VALUES[row] for row in order],
        baselines=[BASELINES[row] for row in order],
    ).estimate(name)
    torch.testing.assert_close(shuffled.advantages, plain.advantages[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shuffled.returns, plain.returns[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=scores_strategy, noise=st.floats(-5, 5))
def test_masked_tokens_have_no_advantage_and_their_values_have_no_effect(
    name: str, scores: list[float], noise: float
) -> None:
    lease, mask = single_rows(scores, penalty=0.01), torch.tensor(MASK).bool()
    noisy = [
        [value if one else noise for value, one in zip(row, sampled, strict=True)]
        for row, sampled in zip(VALUES[:7], MASK, strict=True)
    ]
    plain = lease.estimate(name, gamma=0.9)
    other = lease._replace(values=noisy).estimate(name, gamma=0.9)
    assert not plain.advantages[~mask].any()
    assert not plain.returns[~mask].any()
    torch.testing.assert_close(other, plain, rtol=0, atol=0)


def test_groups_of_equal_rewards_are_detected() -> None:
    assert rewards_are_equal([0.1, 0.1, 0.1])
    assert rewards_are_equal([2.0])
    assert not rewards_are_equal([1.0, 1.0, 0.0])
