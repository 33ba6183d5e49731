"""Off-policy corrections compared with plain loops over rows in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.algorithm import RolloutCorrectionConfig
from trainer.algorithms.corrections import REJECTIONS, Correction, correct, with_sample_size

MASK = [[1, 1, 0, 1, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]
"""Row 3 has no trained token."""
RATIOS = [
    [0.3, -0.2, 99.0, 0.1, 0.0],
    [-1.2, 0.0, 99.0, 0.4, 0.5],
    [0.9, 0.2, 0.1, -0.1, 0.3],
    [0.7, 0.7, 99.0, 0.0, 0.0],
    [5.0, 0.02, -0.01, 0.0, 99.0],
]
"""Log ratios of proximal to behaviour policy. Masked ones must have no effect."""
BEHAVIOUR = [[-0.1 - 0.2 * (row + token) for token in range(5)] for row in range(5)]
AGES = [[0, 0, 1, 1, 1], [2, 2, 2, 5, 9], [1, 1, 1, 1, 1], [4] * 5, [0, 0, 0, 0, 0]]

Row = list[float]


def trained(row: int) -> list[int]:
    return [t for t in range(5) if MASK[row][t]]


def run(ratios: list[Row] = RATIOS, **keys: Any) -> Correction:
    behaviour = torch.tensor(BEHAVIOUR, dtype=torch.float64)
    return correct(
        behaviour + torch.tensor(ratios, dtype=torch.float64),
        behaviour,
        torch.tensor(MASK).bool(),
        torch.tensor(AGES),
        RolloutCorrectionConfig(bypass_mode=False, **keys),
    )


def raw_weights(level: str) -> list[Row]:
    table = []
    for row in range(5):
        whole = sum(RATIOS[row][t] for t in trained(row))
        table.append(
            [math.exp(RATIOS[row][t] if level == "token" else whole) if MASK[row][t] else 0.0 for t in range(5)]
        )
    return table


def flat(table: list[Row]) -> Row:
    return [table[row][t] for row in range(5) for t in trained(row)]


def close(actual: torch.Tensor | None, expected: list[Row]) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("keys", "bounded"),
    [
        ({"rollout_is_threshold": 1.4}, lambda w: min(w, 1.4)),  # TIS
        ({"rollout_is_mode": "mask", "rollout_is_threshold": 1.4}, lambda w: w if w <= 1.4 else 0.0),  # MIS
        (
            {"rollout_is_mode": "mask", "rollout_is_threshold": 1.4, "rollout_is_threshold_low": 0.5},
            lambda w: w if 0.5 <= w <= 1.4 else 0.0,
        ),  # IcePop
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights_are_bounded_and_normalized_as_configured(
    level: str, keys: dict[str, Any], bounded: Callable[[float], float], normalize: bool
) -> None:
    raw = raw_weights(level)
    expected = [[bounded(weight) if MASK[row][t] else 0.0 for t, weight in enumerate(raw[row])] for row in range(5)]
    outside = [weight > 1.4 or weight < keys.get("rollout_is_threshold_low", 0.0) for weight in flat(raw)]
    if normalize:
        ones = flat(expected) if level == "token" else [expected[row][trained(row)[0]] for row in (0, 1, 2, 4)]
        mean = sum(ones) / len(ones)
        expected = [[weight / mean for weight in row] for row in expected]
    actual = run(rollout_is=level, rollout_is_batch_normalize=normalize, **keys)
    close(actual.is_weights, expected)
    assert actual.loss_mask.tolist() == torch.tensor(MASK).bool().tolist(), (
        "weights do not change the loss mask, which gives the denominators"
    )

    weights, truncates = flat(expected), "rollout_is_mode" not in keys
    size = sum(weights) ** 2 / (len(weights) * sum(weight * weight for weight in weights))
    share = sum(outside) / len(outside)
    assert actual.metrics["correction/is_weight_mean"] == pytest.approx(sum(weights) / len(weights))
    assert actual.metrics["correction/effective_sample_size"] == pytest.approx(size)
    assert actual.metrics["correction/clipped_share"] == pytest.approx(share if truncates else 0.0)
    assert actual.metrics["correction/masked_share"] == pytest.approx(0.0 if truncates else share)


STATISTICS = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
NAMES = sorted(REJECTIONS)


def keeps(name: str, row: int, t: int, threshold: float) -> bool:
    if name == "geometric":
        mean = math.exp(sum(RATIOS[row][other] for other in trained(row)) / len(trained(row)))
        return 1 / threshold <= mean <= threshold
    statistic = STATISTICS[name[-2:]]
    values = [statistic(RATIOS[row][other]) for other in trained(row)]
    if name.startswith("token"):
        return abs(statistic(RATIOS[row][t])) <= threshold
    if name.startswith("seq_sum"):
        return abs(sum(values)) <= threshold
    if name.startswith("seq_mean"):
        return abs(sum(values) / len(values)) <= threshold
    return max(abs(value) for value in values) <= threshold


THRESHOLDS = {"k1": 0.25, "k2": 0.03, "k3": 0.03, "ic": 1.15}


@pytest.mark.parametrize("name", NAMES)
def test_rejection_masks_the_tokens_beyond_the_threshold(name: str) -> None:
    threshold = THRESHOLDS[name[-2:]]
    expected = [[bool(MASK[row][t]) and keeps(name, row, t, threshold) for t in range(5)] for row in range(5)]
    actual = run(rollout_rs=name, rollout_rs_threshold=threshold)
    assert actual.loss_mask.tolist() == expected
    assert actual.is_weights is None
    rejected = 1 - sum(map(sum, expected)) / sum(map(sum, MASK))
    assert 0 < rejected < 1, "the case rejects some tokens and keeps others"
    assert actual.metrics["correction/rejected_share"] == pytest.approx(rejected)
    assert actual.metrics["correction/masked_share"] == pytest.approx(rejected)


def test_geometric_rejection_may_have_a_separate_lower_bound() -> None:
    actual = run(rollout_rs="geometric", rollout_rs_threshold=1.5, rollout_rs_threshold_low=1.01)
    # the geometric means are e^(0.2/3), e^-0.1, e^0.28, none, e^0.005
    assert actual.loss_mask.any(dim=1).tolist() == [True, False, True, False, False]


def test_a_chain_rejects_what_any_of_its_statistics_rejects() -> None:
    chain, bounds = ("token_k2", "seq_mean_k1", "geometric"), (0.03, 0.25, 1.15)
    expected = [
        [
            bool(MASK[row][t]) and all(keeps(name, row, t, bound) for name, bound in zip(chain, bounds, strict=True))
            for t in range(5)
        ]
        for row in range(5)
    ]
    assert run(rollout_rs=chain, rollout_rs_threshold=bounds).loss_mask.tolist() == expected
    for name, bound in zip(chain, bounds, strict=True):
        assert run(rollout_rs=name, rollout_rs_threshold=bound).loss_mask.tolist() != expected


@pytest.mark.parametrize(
    ("name", "statistic"),
    [
        ("token_k1", lambda ratios, ratio: ratio),
        ("seq_sum_k1", lambda ratios, ratio: sum(ratios)),
        ("seq_mean_k1", lambda ratios, ratio: sum(ratios) / len(ratios)),
    ],
)
def test_bounds_of_a_signed_statistic_may_differ(name: str, statistic: Callable[[Row, float], float]) -> None:
    expected = []
    for row in range(5):
        ratios = [RATIOS[row][t] for t in trained(row)]
        kept = [bool(MASK[row][t]) and -0.05 <= statistic(ratios, RATIOS[row][t]) <= 0.45 for t in range(5)]
        expected.append(kept)
    actual = run(rollout_rs=name, rollout_rs_threshold=0.45, rollout_rs_threshold_low=0.05).loss_mask.tolist()
    assert actual == expected
    assert actual != run(rollout_rs=name, rollout_rs_threshold=0.45).loss_mask.tolist()


def test_weights_are_computed_before_rejection() -> None:
    both = run(rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=0.25)
    close(both.is_weights, [[min(weight, 2.0) for weight in row] for row in raw_weights("sequence")])
    assert torch.equal(both.loss_mask, run(rollout_rs="token_k1", rollout_rs_threshold=0.25).loss_mask)


def test_metrics_measure_the_mismatch_between_the_policies() -> None:
    metrics = run().metrics
    tokens = [(row, t) for row in range(5) for t in trained(row)]
    kl = {(row, t): STATISTICS["k3"](RATIOS[row][t]) for row, t in tokens}
    gaps = [abs(math.exp(BEHAVIOUR[row][t] + RATIOS[row][t]) - math.exp(BEHAVIOUR[row][t])) for row, t in tokens]
    assert metrics["correction/mismatch_kl"] == pytest.approx(sum(kl.values()) / len(kl))
    assert metrics["correction/prob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert metrics["correction/prob_gap_max"] == pytest.approx(max(gaps))
    for age in range(4):
        mine = [value for (row, t), value in kl.items() if min(AGES[row][t], 3) == age]
        assert metrics[f"correction/mismatch_kl_age_{age}"] == pytest.approx(sum(mine) / len(mine))


def test_an_age_that_does_not_occur_has_no_metric() -> None:
    old = torch.zeros(1, 2, dtype=torch.float64)
    actual = correct(
        old, old, torch.ones(1, 2).bool(), torch.tensor([[1, 1]]), RolloutCorrectionConfig(bypass_mode=False)
    )
    ages = {name for name in actual.metrics if "age" in name}
    assert ages == {"correction/mismatch_kl_age_1"}


def test_bypass_mode_leaves_the_correction_to_the_loss() -> None:
    old, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    actual = correct(
        old, old - 1, mask, mask.long(), RolloutCorrectionConfig(rollout_is="token", rollout_rs="geometric")
    )
    assert actual == (None, mask, {})


def test_a_batch_without_trained_tokens_is_accepted() -> None:
    zeros, mask = torch.zeros(2, 3), torch.zeros(2, 3).bool()
    config = RolloutCorrectionConfig(
        bypass_mode=False, rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs="seq_max_k3"
    )
    actual = correct(zeros, zeros, mask, zeros, config)
    assert not actual.loss_mask.any()
    assert actual.is_weights is not None
    assert not actual.is_weights.any()


def test_extreme_ratios_give_finite_results() -> None:
    far = [[300.0 * (-1) ** t for t in range(5)] for _ in range(5)]
    for name in ("token", "sequence"):
        actual = run(far, rollout_is=name, rollout_rs="seq_mean_k3", rollout_rs_threshold=1e12)
        assert actual.is_weights is not None
        assert torch.isfinite(actual.is_weights).all()
        assert all(math.isfinite(value) for value in actual.metrics.values())


@given(
    ratios=st.lists(st.lists(st.floats(-3, 3), min_size=5, max_size=5), min_size=5, max_size=5),
    noise=st.floats(-50, 50),
    level=st.sampled_from(["token", "sequence"]),
    rejection=st.sampled_from(NAMES),
)
def test_masked_tokens_have_no_effect(ratios: list[Row], noise: float, level: str, rejection: str) -> None:
    noisy = [[ratios[row][t] if MASK[row][t] else noise for t in range(5)] for row in range(5)]
    keys = {"rollout_is": level, "rollout_rs": rejection, "rollout_rs_threshold": 1.2}
    one, other = run(ratios, **keys), run(noisy, **keys)
    assert torch.equal(one.loss_mask, other.loss_mask)
    assert one.is_weights is not None
    assert other.is_weights is not None
    assert torch.equal(one.is_weights, other.is_weights)
    assert one.metrics == other.metrics
    assert not (one.loss_mask & ~torch.tensor(MASK).bool()).any()


def test_equal_policies_are_not_corrected() -> None:
    same = [[0.0] * 5 for _ in range(5)]
    for name in NAMES:
        actual = run(same, rollout_is="sequence", rollout_is_batch_normalize=True, rollout_rs=name)
        close(actual.is_weights, [[float(one) for one in row] for row in MASK])
        assert actual.loss_mask.tolist() == torch.tensor(MASK).bool().tolist()
        assert actual.metrics["correction/effective_sample_size"] == pytest.approx(1.0)
        assert actual.metrics["correction/mismatch_kl"] == 0.0


def test_the_effective_sample_size_is_computed_from_means() -> None:
    finished = with_sample_size({"correction/is_weight_mean": 0.5, "correction/is_weight_mean_square": 0.5, "x": 1.0})
    assert finished == {"correction/is_weight_mean": 0.5, "correction/effective_sample_size": 0.5, "x": 1.0}
    assert with_sample_size({"x": 1.0}) == {"x": 1.0}
