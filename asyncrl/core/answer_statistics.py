"""mean@n, pass@k, best@k and maj@k of several graded answers to each prompt, with bootstrap intervals. Pure.

Each prompt has n answers. mean@n is the mean reward. The others are expectations over k of the n answers, drawn without
replacement, and are computed exactly, without drawing:

    pass@k   the share of prompts with a correct answer among k
    best@k   the mean of the greatest reward among k
    maj@k    the share of prompts whose most frequent answer among k is correct

An interval is the central 95 % of the mean under resampling of the prompts with all their answers, because the answers
to one prompt are not independent (cluster bootstrap).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95
_CHUNK = 100
"""Resamples that are computed at once, to limit memory."""


class Graded(NamedTuple):
    """One scored answer."""

    reward: float
    is_correct: bool
    answer: Hashable | None
    """The final answer, as the reward function extracted it from the response; None: it has none."""
    num_tokens: int
    """Tokens that the policy sampled."""
    finish_reason: str


class Estimate(NamedTuple):
    """A mean over prompts."""

    value: float
    low: float | None
    """Lower end of the interval; None with fewer than two prompts."""
    high: float | None


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Return the probability that k of the answers, drawn without replacement, include a correct one.

    This is the unbiased estimator of pass@k, 1 - C(n - c, k) / C(n, k), of Chen et al., "Evaluating Large Language
    Models Trained on Code" (https://arxiv.org/abs/2107.03374), equation 1.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    _check(num_answers, k)
    if not 0 <= num_correct <= num_answers:
        raise ValueError(f"{num_correct} of {num_answers} answers cannot be correct")
    return 1.0 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the rewards, drawn without replacement.

    best@k is a metric of verl's `process_validation_metrics`, which estimates it by 1,000 draws with replacement; for
    k = n, about a third of such draws miss the best answer. The expectation without replacement is a sum over order
    statistics: the i-th smallest reward is the greatest of C(i - 1, k - 1) of the C(n, k) subsets. With rewards of 0
    and 1 it equals `pass_at_k`.

    Raises:
        ValueError: k is not in 1..n.
    """
    total = math.comb(_check(len(rewards), k), k)
    return math.fsum(
        reward * (math.comb(place, k - 1) / total) for place, reward in enumerate(sorted(rewards)) if place >= k - 1
    )


def majority_at_k(answers: Sequence[Hashable], values: Sequence[float], k: int) -> float:
    """Return the expected value of the most frequent answer among k, drawn without replacement.

    maj@k is the metric of verl's `process_validation_metrics` (`calc_maj_val`), there estimated by 1,000 draws with
    replacement. Equally frequent answers win with equal probability, as in verl, where the first one in a random order
    wins. The value of an answer is the mean of `values` over its occurrences.

    Raises:
        ValueError: k is not in 1..n.
    """
    _check(len(answers), k)
    sums: dict[Hashable, float] = defaultdict(float)
    for answer, value in zip(answers, values, strict=True):
        sums[answer] += value
    return _majority(tuple(sorted((count, sums[one] / count) for one, count in Counter(answers).items())), k)


@lru_cache(maxsize=10_000)
def _majority(classes: tuple[tuple[int, float], ...], k: int) -> float:
    """Return maj@k for distinct answers with these numbers of occurrences and values, which many prompts share.

    The sum over all subsets is a coefficient of a polynomial. For each number of votes j of the winner, an answer with
    m occurrences contributes the factor sum_{i<j} b(i) x^i + b(j) x^j y, where y counts answers with exactly j votes.
    The b are binomial probabilities with p = k/n instead of numbers of subsets, so that nothing overflows; they change
    all subsets of size k by the same factor.
    """
    n = sum(count for count, _ in classes)
    p, expected = k / n, 0.0
    for votes in range(1, min(k, classes[-1][0]) + 1):
        ties = k // votes
        weight = np.zeros((ties + 1, k + 1))  # [answers with `votes` votes, all votes]: probability
        weight[0, 0] = 1.0
        value_sum = np.zeros_like(weight)  # the same, times the sum of the values of the answers that tie
        for count, mean in classes:
            next_weight, next_sum = np.zeros_like(weight), np.zeros_like(weight)
            for drawn in range(min(count, votes) + 1):
                chance = math.comb(count, drawn) * p**drawn * (1 - p) ** (count - drawn)
                top = int(drawn == votes)
                into = np.s_[top:, drawn:]
                out_of = np.s_[: ties + 1 - top, : k + 1 - drawn]
                next_weight[into] += chance * weight[out_of]
                next_sum[into] += chance * (value_sum[out_of] + top * mean * weight[out_of])
            weight, value_sum = next_weight, next_sum
        expected += float((value_sum[1:, k] / np.arange(1, ties + 1)).sum())
    return expected / (math.comb(n, k) * p**k * (1 - p) ** (n - k))


def sizes(num_answers: int) -> list[int]:
    """Return the k of the figures for n answers: 1, 2, 4, …, and n."""
    return sorted({2**power for power in range(num_answers.bit_length()) if 2**power <= num_answers} | {num_answers})


def estimates(values: Mapping[str, Sequence[float]], seed: int = 0) -> dict[str, Estimate]:
    """Return the mean over prompts of each figure, with its interval. `values`: the figure of each prompt, by name."""
    if not values:
        return {}
    table: NDArray[np.float64] = np.array(list(values.values()), dtype=np.float64)
    means, num_prompts = table.mean(axis=1), table.shape[1]
    if num_prompts < 2:
        return {name: Estimate(float(mean), None, None) for name, mean in zip(values, means, strict=True)}
    generator = np.random.default_rng(seed)
    shares = np.full(num_prompts, 1 / num_prompts)
    resampled = [
        generator.multinomial(num_prompts, shares, size=min(_CHUNK, RESAMPLES - done)) @ table.T / num_prompts
        for done in range(0, RESAMPLES, _CHUNK)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(resampled), [tail, 1 - tail], axis=0)
    return {
        name: Estimate(float(mean), float(below), float(above))
        for name, mean, below, above in zip(values, means, low, high, strict=True)
    }


def prompt_figures(prompts: Sequence[Sequence[Graded]]) -> dict[str, list[float]]:
    """Return the figures of each prompt, by name: `mean@n`, `pass@k`, `best@k`, `maj@k`. All have equally many answers.

    `best@k` and `maj@k` are absent with one answer per prompt, and `maj@k` without an extracted answer. Answers that
    were not extracted are equal to one another.
    """
    n = len(prompts[0]) if prompts else 0
    if not n:
        return {}
    values = {f"mean@{n}": [math.fsum(one.reward for one in own) / n for own in prompts]}
    kinds: dict[str, Callable[[Sequence[Graded], int], float]] = {
        "pass": lambda own, k: pass_at_k(n, sum(one.is_correct for one in own), k)
    }
    if n > 1:
        kinds["best"] = lambda own, k: best_at_k([one.reward for one in own], k)
    if n > 1 and any(one.answer is not None for own in prompts for one in own):
        kinds["maj"] = lambda own, k: majority_at_k(
            [one.answer for one in own], [float(one.is_correct) for one in own], k
        )
    for kind, of in kinds.items():
        for k in sizes(n):
            if k > 1 or kind == "pass":  # best@1 is mean@n, and maj@1 is pass@1
                values[f"{kind}@{k}"] = [of(own, k) for own in prompts]
    return values


def summarize(prompts: Sequence[tuple[str, Sequence[Graded]]]) -> dict[str, Any]:
    """Return figures, lengths and finish reasons: over `all` prompts, and by `sources`.

    Args:
        prompts: the data source and the answers of each prompt; at least one.
    """
    by_source: dict[str, list[Sequence[Graded]]] = defaultdict(list)
    for source, answers in prompts:
        by_source[source].append(answers)
    return {
        "all": _summary([answers for _, answers in prompts]),
        "sources": {source: _summary(own) for source, own in sorted(by_source.items())},
    }


def _summary(prompts: Sequence[Sequence[Graded]]) -> dict[str, Any]:
    answers = [one for own in prompts for one in own]
    tokens = np.array([one.num_tokens for one in answers])
    reasons = Counter(one.finish_reason for one in answers)
    return {
        "prompts": len(prompts),
        "answers": len(answers),
        "figures": {name: each._asdict() for name, each in estimates(prompt_figures(prompts)).items()},
        "tokens": {
            "mean": float(tokens.mean()),
            "median": float(np.median(tokens)),
            "p95": float(np.quantile(tokens, 0.95)),
            "max": int(tokens.max()),
            "sum": int(tokens.sum()),
        },
        "finish_reasons": dict(sorted(reasons.items())),
    }


def _check(num_answers: int, k: int) -> int:
    if not 1 <= k <= num_answers:
        raise ValueError(f"k={k} of {num_answers} answers cannot be drawn")
    return num_answers
