"""Measures how fast engines decode, from the requests of a run.

All sequences of an engine decode together, so in each moment the engine gives every sequence tokens at a rate that
depends on their number. The events say from when to when a request decoded, and how many tokens it got:

    tokens of a request = sum over numbers of sequences (seconds that it spent at this number x rate at this number)

With a few hundred requests, least squares give the rates. (Spreading the tokens of each request evenly over its time
instead would make large batches too fast and small ones too slow: a long response gets its first tokens next to many
others, and its last ones almost alone.)
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.statistics import Intervals, spans

Values = NDArray[np.float64]
_SIZES_PER_DOUBLING = 2
"""Numbers of sequences that differ by less are one: the time of a step changes with their ratio."""
_MIN_SIZE_S = 0.2
"""Seconds below which the rate at a number of sequences is not measured."""
_MAX_REQUESTS = 100_000
_SMOOTHNESS = 1e-3
"""Weight of the assumption that rates at neighbouring numbers are equal, which decides where there are few requests."""


def decoding_times(requests: pd.DataFrame) -> tuple[Values, Values]:
    """Return when each request had its first and its last token; pauses in between are included."""
    end = requests["end"].to_numpy()
    return end - requests["decode_s"].fillna(0.0).to_numpy() - requests["paused_s"].fillna(0.0).to_numpy(), end


def decoding_speeds(
    events: Events, computing: Intervals, *, warm_s: float = 0.0, slowdown: float = 1.0
) -> dict[int, float]:
    """Return the time of a decoding step by the number of sequences, while the Trainer computes nothing.

    Args:
        computing: when the Trainer computed.
        warm_s: requests that began before this time are left out, because an engine's first steps are slow.
        slowdown: factor on the time of a step while the Trainer computed.
    """
    requests, pauses = events["request"].tail(_MAX_REQUESTS), events["sync.pause"]
    if not (requests["timestamp"] >= warm_s).any():
        warm_s = 0.0
    parts = [
        _times_by_size(own, spans(pauses[pauses["replica"].astype("str") == str(replica)]), computing, warm_s)
        for replica, own in requests.groupby("replica", observed=True)
    ]
    alone, beside, tokens = (np.concatenate(one) for one in zip(*parts, strict=True))
    used = np.flatnonzero((alone + beside).sum(axis=0) > 0)
    if not len(used):
        return {1: 1e-3}
    times = alone[:, used] + beside[:, used] / slowdown
    sizes = 2.0 ** ((used + 0.5) / _SIZES_PER_DOUBLING)
    rates = _rates(times, tokens, sizes)
    # Each of the sequences counts the same seconds.
    measured = times.sum(axis=0) / sizes >= _MIN_SIZE_S
    if not measured.any():
        measured[:] = True
    return {
        max(1, round(size)): 1.0 / rate
        for size, rate in zip(sizes[measured].tolist(), rates[measured].tolist(), strict=True)
    }


def _rates(times: Values, tokens: Values, sizes: Values) -> Values:
    """Return the tokens per second of a sequence at each size, which fit best and do not rise with the size. Those of
    all sequences together do not fall with it, because a larger batch computes no token more slowly than two halves of
    it after each other."""
    mean = tokens.sum() / max(times.sum(), 1e-9)
    # Errors are relative, so that requests that a stalled machine delayed do not outweigh all others.
    relative = 1.0 / np.maximum(times.sum(axis=1), 1e-9)
    weighted, received = times * relative[:, None], tokens * relative
    matrix = weighted.T @ weighted
    steps = np.diff(np.eye(len(matrix)), axis=0)
    matrix += _SMOOTHNESS * np.trace(matrix) * (steps.T @ steps + 1e-3 * np.eye(len(matrix)))
    wanted = weighted.T @ received + _SMOOTHNESS * np.trace(weighted.T @ weighted) * 1e-3 * mean
    rates = np.clip(np.linalg.solve(matrix, wanted), mean / 10, mean * 10)
    weights = times.sum(axis=0)
    rates = _falling(rates, weights)
    rates = -_falling(-rates * sizes, weights) / sizes
    scaled: Values = rates * tokens.sum() / max(float((times @ rates).sum()), 1e-9)
    return scaled


def _falling(values: Values, weights: Values) -> Values:
    """Return the closest values that do not rise: neighbours that rise are replaced by their mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (one, one_weight, one_count), (other, other_weight, other_count) = pools[-2:]
            weight = one_weight + other_weight
            pools[-2:] = [((one * one_weight + other * other_weight) / weight, weight, one_count + other_count)]
    return np.repeat([value for value, _, _ in pools], [number for _, _, number in pools])


def _times_by_size(
    requests: pd.DataFrame, pauses: Intervals, computing: Intervals, warm_s: float
) -> tuple[Values, Values, Values]:
    """Return for each request of one replica the seconds that it decoded by the number of sequences, without and with
    the Trainer computing, and its tokens after the first one."""
    tokens = requests["response_tokens"].fillna(1.0).to_numpy() - 1
    decodes = (requests["decode_s"].fillna(0.0).to_numpy() > 0) & (tokens > 0)
    start, end = (times[decodes] for times in decoding_times(requests))
    warm = requests["timestamp"].to_numpy()[decodes] >= warm_s
    num_sizes = int(_SIZES_PER_DOUBLING * 20)
    edges = np.unique(np.concatenate((start, end, pauses.ravel(), computing.ravel())))
    if len(edges) < 2:
        return np.zeros((0, num_sizes)), np.zeros((0, num_sizes)), np.empty(0)
    change = np.zeros(len(edges))
    np.add.at(change, np.searchsorted(edges, start), 1.0)
    np.add.at(change, np.searchsorted(edges, end), -1.0)
    batch, seconds, middle = np.cumsum(change)[:-1], np.diff(edges), (edges[1:] + edges[:-1]) / 2
    seconds = np.where(_inside(pauses, middle), 0.0, seconds)
    size = np.floor(_SIZES_PER_DOUBLING * np.log2(np.maximum(batch, 1.0))).astype(int)
    beside = _inside(computing, middle)
    result = []
    for chosen in (~beside, beside):
        passed = np.zeros((len(edges), num_sizes))
        passed[np.arange(1, len(edges)), np.minimum(size, num_sizes - 1)] = seconds * chosen
        passed = np.cumsum(passed, axis=0)
        result.append((passed[np.searchsorted(edges, end)] - passed[np.searchsorted(edges, start)])[warm])
    return result[0], result[1], tokens[decodes][warm]


def _inside(intervals: Intervals, times: Values) -> NDArray[np.bool_]:
    """Return which times are in one of the intervals, which are sorted and disjoint."""
    if not len(intervals):
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    inside: NDArray[np.bool_] = (place >= 0) & (times < intervals[np.maximum(place, 0), 1])
    return inside
