"""Advantage estimators as plain loops in float64, over the sampled tokens of each row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

Matrix = list[list[float]]
Mask = Sequence[Sequence[int]]


def close(actual: torch.Tensor, expected: Matrix) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-12)


def sampled_tokens(mask: Mask) -> list[list[int]]:
    return [[token for token, one in enumerate(row) if one] for row in mask]


def whitened(table: Matrix, mask: Mask) -> Matrix:
    flat = [row[token] for row, tokens in zip(table, sampled_tokens(mask), strict=True) for token in tokens]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [
        [one * (value - mean) / math.sqrt(variance + 1e-8) for value, one in zip(row, sampled, strict=True)]
        for row, sampled in zip(table, mask, strict=True)
    ]


def discounted(rewards: Matrix, mask: Mask, gamma: float = 1.0) -> Matrix:
    table = []
    for row, tokens in zip(rewards, sampled_tokens(mask), strict=True):
        returns = [0.0] * len(row)
        for place, token in enumerate(tokens):
            returns[token] = sum(gamma**ahead * row[later] for ahead, later in enumerate(tokens[place:]))
        table.append(returns)
    return table


def gae(rewards: Matrix, mask: Mask, values: Matrix, gamma: float, lam: float) -> tuple[Matrix, Matrix]:
    """Return whitened advantages and returns by the definition A_t = Σ_k (γλ)^k δ_{t+k}."""
    advantages, returns = [], []
    for row, tokens, predicted in zip(rewards, sampled_tokens(mask), values, strict=True):
        following = [*(predicted[token] for token in tokens[1:]), 0.0]
        deltas = [row[t] + gamma * after - predicted[t] for t, after in zip(tokens, following, strict=False)]
        advantage, wanted = [0.0] * len(row), [0.0] * len(row)
        for place, token in enumerate(tokens):
            advantage[token] = sum((gamma * lam) ** ahead * delta for ahead, delta in enumerate(deltas[place:]))
            wanted[token] = advantage[token] + predicted[token]
        advantages.append(advantage)
        returns.append(wanted)
    return whitened(advantages, mask), returns


def outcomes(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> dict[str, list[float]]:
    """Return the advantages of all trajectories by estimator; `centred` and `centred_passk` do not divide by the
    standard deviation."""
    found: dict[str, list[float]] = {
        name: [] for name in ("centred", "grpo", "rloo", "opo", "centred_passk", "grpo_passk")
    }
    for number, reward in enumerate(rewards):
        members = [other for other, group in enumerate(groups) if group == groups[number]]
        group = [rewards[other] for other in members]
        others = [rewards[other] for other in members if other != number]
        deviation = statistics.stdev(group) + 1e-6
        weighted = sum(lengths[other] * rewards[other] for other in members) / sum(lengths[other] for other in members)
        found["centred"].append(reward - statistics.mean(group))
        found["grpo"].append((reward - statistics.mean(group)) / deviation)
        found["rloo"].append(reward - statistics.mean(others))
        found["opo"].append(reward - weighted)
        found["centred_passk"].append(max(group) - max(others))
        found["grpo_passk"].append((max(group) - max(others)) / deviation)
    return found
