"""Interval sets, distributions, outlying calls, and numbers as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Values = NDArray[np.float64]
Intervals = NDArray[np.float64]
"""A set of intervals in time: starts and ends as an array `[n, 2]`, sorted and disjoint."""
EMPTY: Intervals = np.empty((0, 2))

QUANTILES = (0, 1, 2, *range(5, 96, 5), 97, 98, 99, 100)
"""The percentiles of every CDF."""
TAIL_AT = 0.4
"""Fraction of the duration of a step's longest request; the share of requests done by then measures the tail."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""
OUTLIER_RATIO = 5.0
OUTLIER_SIGMAS = 4.0
"""Least distance of an outlier from the median, in standard deviations of the logarithm of the duration; calls whose
duration varies widely therefore need a larger excess."""
OUTLIER_MIN_S = 1.0
"""Least excess of an outlier beyond the median."""


# ---------------------------------------------------------------------------------------------- intervals


def union(starts: Values, ends: Values) -> Intervals:
    """Return the time covered by at least one interval; the input may be in any order, empty intervals are ignored."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    return np.column_stack((starts[first], reach[np.append(first[1:], True)]))


def spans(events: pd.DataFrame) -> Intervals:
    """Return the time covered by these events."""
    return union(events["timestamp"].to_numpy(), events["end"].to_numpy())


def total(intervals: Intervals) -> float:
    """Return the covered seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    return union(np.clip(intervals[:, 0], start, end), np.clip(intervals[:, 1], start, end))


def complement(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return the part of `start` to `end` that is not covered."""
    inner = clip(intervals, start, end)
    return union(np.append(start, inner[:, 1]), np.append(inner[:, 0], end))


def difference(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the part of `intervals` that `others` does not cover."""
    if not len(intervals) or not len(others):
        return intervals
    return intersection(intervals, complement(others, float(intervals[0, 0]), float(intervals[-1, 1])))


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Return the time that both cover."""
    if not len(left) or not len(right):
        return EMPTY
    edges = np.unique(np.concatenate((left.ravel(), right.ravel())))
    middles = (edges[1:] + edges[:-1]) / 2
    both = _contains(left, middles) & _contains(right, middles)
    return union(edges[:-1][both], edges[1:][both])


def coverage(intervals: Intervals, edges: Values) -> Values:
    """Return the covered share of each bin between consecutive `edges`."""
    if not len(intervals):
        return np.zeros(len(edges) - 1)
    lengths = intervals[:, 1] - intervals[:, 0]
    place = np.searchsorted(intervals[:, 0], edges, side="right") - 1
    inside = np.where(place >= 0, np.clip(edges - intervals[place, 0], 0, lengths[place]), 0)
    until = np.append(0.0, np.cumsum(lengths))[np.maximum(place, 0)] + inside
    width = np.diff(edges)
    return np.divide(np.diff(until), width, out=np.zeros(len(width)), where=width > 0)


def _contains(intervals: Intervals, times: Values) -> NDArray[np.bool_]:
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1])


# ---------------------------------------------------------------------------------------------- distributions


def summarize(values: Values) -> dict[str, Any] | None:
    """Return count, sum and quantiles; None without values."""
    if not len(values):
        return None
    p50, p90, p95, p99 = np.quantile(values, [0.5, 0.9, 0.95, 0.99])
    return {
        "count": len(values), "sum": values.sum(), "mean": values.mean(), "min": values.min(),
        "median": p50, "p90": p90, "p95": p95, "p99": p99, "max": values.max(),
    }  # fmt: skip


def cdf(values: Values) -> list[float]:
    """Return the values at `QUANTILES`."""
    return [float(each) for each in np.percentile(values, QUANTILES)]


def done_early(values: Values) -> float:
    """Return the share of values that are at most `TAIL_AT` of the largest one."""
    return float((values <= TAIL_AT * values.max()).mean())


def robust_sigma(values: Values) -> float:
    """Return the standard deviation as estimated by the median absolute deviation, which ignores a few outliers."""
    return NORMAL_MAD * float(np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def histogram(values: Values) -> dict[str, int]:
    """Return how often each whole number occurs, ascending."""
    numbers, counts = np.unique(values[np.isfinite(values)].astype("int64"), return_counts=True)
    return {str(number): int(count) for number, count in zip(numbers, counts, strict=True)}


@dataclass(frozen=True, slots=True)
class Outliers:
    """Calls that took far longer than calls of their kind usually do."""

    calls: pd.DataFrame
    median_s: float
    num_calls: int
    """All calls of the kind."""
    lost: Intervals
    """Time in which at least one outlier was running beyond the median."""

    @property
    def worst(self) -> pd.Series:
        return self.calls.loc[self.calls["duration_s"].idxmax()]


def find_outliers(calls: pd.DataFrame) -> Outliers | None:
    durations = calls["duration_s"].to_numpy()
    if len(durations) < 3:
        return None
    median = float(np.median(durations))
    excess = np.log(np.maximum(durations, 1e-4) / max(median, 1e-4))
    # If many calls are very fast, only the slower half shows how far calls usually exceed the median.
    sigma = NORMAL_MAD * min(np.median(np.abs(excess)), np.median(excess[excess >= 0]))
    ratio = max(OUTLIER_RATIO, float(np.exp(OUTLIER_SIGMAS * sigma)))
    late = calls[durations > max(median + OUTLIER_MIN_S, median * ratio)]
    if not len(late):
        return None
    return Outliers(
        late, median, len(durations), union((late["timestamp"] + median).to_numpy(), late["end"].to_numpy())
    )


# ---------------------------------------------------------------------------------------------- JSON


def to_json(value: Any) -> Any:
    """Convert numpy values to JSON values, and values that are not finite to None.

    Whole numbers are exact; others keep three decimals from 1000 on (timestamps too), and six digits below.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1000 or value.is_integer() else float(f"{value:.6g}")
    return value


def evenly_spaced(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` of the items, the first and the last included."""
    if len(items) <= limit:
        return list(items)
    return [items[round(place * (len(items) - 1) / (limit - 1))] for place in range(limit)]
