"""pass@k, best@k and maj@k against all subsets of the answers, and the bootstrap intervals."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.answer_statistics import (
    Graded,
    best_at_k,
    estimates,
    majority_at_k,
    pass_at_k,
    prompt_figures,
    sizes,
    summarize,
)

ANSWERS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4)), min_size=1, max_size=8)
DRAWN = st.integers(1, 8)


def subsets(items: Sequence[tuple[str, int]], k: int) -> list[tuple[tuple[str, int], ...]]:
    return list(itertools.combinations(items, k))


def winner_value(drawn: Sequence[tuple[str, int]], everyone: Sequence[tuple[str, int]]) -> float:
    """Return the mean value of the most frequent answers, each of which is as likely to win as the others."""
    votes = Counter(answer for answer, _ in drawn)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(fmean(value for answer, value in everyone if answer == winner) for winner in winners)


@given(ANSWERS, DRAWN)
def test_all_figures_equal_the_means_over_all_subsets(items: list[tuple[str, int]], k: int) -> None:
    k = min(k, len(items))
    every = subsets(items, k)
    rewards, answers = [value / 4 for _, value in items], [answer for answer, _ in items]
    correct = [value >= 3 for _, value in items]
    passed = fmean(any(value >= 3 for _, value in one) for one in every)
    assert pass_at_k(len(items), sum(correct), k) == pytest.approx(passed, abs=1e-12)
    assert best_at_k(rewards, k) == pytest.approx(fmean(max(value for _, value in one) / 4 for one in every))
    won = fmean(winner_value(one, items) for one in every)
    assert majority_at_k(answers, [float(value) for _, value in items], k) == pytest.approx(won)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 40))
def test_best_of_binary_rewards_is_pass(correct: list[bool], k: int) -> None:
    k = min(k, len(correct))
    assert best_at_k([float(one) for one in correct], k) == pytest.approx(pass_at_k(len(correct), sum(correct), k))


@given(ANSWERS)
def test_one_answer_is_the_mean_and_more_answers_are_never_worse(items: list[tuple[str, int]]) -> None:
    rewards, answers = [float(value) for _, value in items], [answer for answer, _ in items]
    assert best_at_k(rewards, 1) == pytest.approx(fmean(rewards))
    assert majority_at_k(answers, rewards, 1) == pytest.approx(fmean(rewards))
    best = [best_at_k(rewards, k) for k in range(1, len(items) + 1)]
    assert all(less <= more + 1e-9 for less, more in itertools.pairwise(best))
    assert best[-1] == pytest.approx(max(rewards))


def test_many_answers_are_computed_without_overflow() -> None:
    """The subsets of 2,048 answers are far more than a float can count."""
    n = 2048
    assert pass_at_k(n, 1, 1024) == 0.5
    assert best_at_k([0.0] * (n - 1) + [1.0], 1024) == pytest.approx(0.5)
    answers = ["right"] * 24 + list(range(40))
    values = [1.0] * 24 + [0.0] * 40
    generator = np.random.default_rng(0)
    draws = [generator.permutation(64)[:32] for _ in range(2000)]
    won = [Counter(answers[place] for place in one).most_common(1)[0][0] == "right" for one in draws]
    assert majority_at_k(answers, values, 32) == pytest.approx(fmean(won), abs=0.01)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_more_answers_than_there_are_cannot_be_drawn(k: int) -> None:
    for call in (
        lambda: pass_at_k(3, 1, k),
        lambda: best_at_k([1, 2, 3], k),
        lambda: majority_at_k("abc", [1, 2, 3], k),
    ):
        with pytest.raises(ValueError, match=f"k={k} of 3"):
            call()
    with pytest.raises(ValueError, match="4 of 3"):
        pass_at_k(3, 4, 1)


def test_sizes_are_powers_of_two_and_the_number_of_answers() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


# ------------------------------------------------------------------------------------------------ intervals


@settings(max_examples=30)
@given(st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=30))
def test_an_interval_contains_the_mean_and_lies_within_the_values(values: list[float]) -> None:
    found = estimates({"reward": values})["reward"]
    assert found.low is not None and found.high is not None
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert found.value == pytest.approx(fmean(values), abs=1e-9)
    assert estimates({"reward": values})["reward"] == found, "the resamples are seeded"


def test_an_interval_is_that_of_a_plain_bootstrap() -> None:
    """Of 400 prompts, 30 % are solved: the standard error of the mean is sqrt(0.3 * 0.7 / 400)."""
    values = [1.0] * 120 + [0.0] * 280
    found = estimates({"pass": values})["pass"]
    generator = np.random.default_rng(1)
    means = [np.mean(generator.choice(values, 400)) for _ in range(4000)]
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.006)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(0.3 * 0.7 / 400), rel=0.15)


def test_intervals_cover_the_true_mean_about_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        found = estimates({"x": generator.binomial(4, 0.6, size=80) / 4})["x"]
        covered += found.low <= 0.6 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_one_prompt_has_no_interval_and_none_has_no_figures() -> None:
    assert estimates({"x": [0.5]})["x"] == (0.5, None, None)
    assert estimates({}) == {}
    assert prompt_figures([]) == {}


# ------------------------------------------------------------------------------------------------ figures of a set


def graded(reward: float, answer: str | None = None, tokens: int = 3, reason: str = "stop") -> Graded:
    return Graded(reward, reward >= 1, answer, tokens, reason)


def test_the_figures_of_prompts() -> None:
    prompts = [
        [graded(1, "4"), graded(0, "5"), graded(1, "4"), graded(0.5, "6")],
        [graded(0, "a"), graded(0, "a"), graded(1, "b"), graded(0)],
    ]
    found = estimates(prompt_figures(prompts))
    assert list(found) == ["mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4"]
    values = {name: estimate.value for name, estimate in found.items()}
    assert values["mean@4"] == (0.625 + 0.25) / 2
    assert values["pass@1"] == (0.5 + 0.25) / 2
    assert values["pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert (values["pass@4"], values["best@4"], values["maj@4"]) == (1.0, 1.0, 0.5)


def test_a_single_answer_has_no_best_and_no_majority() -> None:
    assert list(prompt_figures([[graded(1, "x")], [graded(0, "y")]])) == ["mean@1", "pass@1"]
    assert list(prompt_figures([[graded(1), graded(0)]])) == ["mean@2", "pass@1", "pass@2", "best@2"], (
        "nothing was extracted"
    )


def test_data_sources_are_told_apart() -> None:
    found = summarize(
        [
            ("b", [graded(1, tokens=4), graded(0, tokens=10, reason="length")]),
            ("a", [graded(0, tokens=1), graded(0, tokens=1)]),
            ("a", [graded(1, tokens=2), graded(1, tokens=2)]),
        ]
    )
    own = found["sources"]
    assert list(own) == ["a", "b"]
    assert own["a"]["prompts"] == 2 and own["b"]["answers"] == 2 and found["all"]["answers"] == 6
    assert own["a"]["figures"]["mean@2"]["value"] == 0.5
    assert own["b"]["figures"]["mean@2"] == {"value": 0.5, "low": None, "high": None}
    assert own["b"]["finish_reasons"] == {"length": 1, "stop": 1}
    assert own["b"]["tokens"] == {"mean": 7.0, "median": 7.0, "p95": 9.7, "max": 10, "sum": 14}
