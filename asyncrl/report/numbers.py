"""Distributions and plain numbers, as they go into report.json. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0, 1, 2, *range(5, 96, 5), 97, 98, 99, 100)
"""Percent; of every CDF."""
TAIL = 0.4
"""Of the longest request of a step: how many are done by then says how long the tail is."""

Values = NDArray[np.float64]


def spread(values: Values) -> dict[str, Any] | None:
    """Count, sum and quantiles; None: no values."""
    if not len(values):
        return None
    p50, p90, p95, p99 = np.quantile(values, [0.5, 0.9, 0.95, 0.99])
    return {
        "count": len(values), "sum": values.sum(), "mean": values.mean(), "min": values.min(),
        "median": p50, "p90": p90, "p95": p95, "p99": p99, "max": values.max(),
    }  # fmt: skip


def cdf(values: Values) -> list[float]:
    """The values at `QUANTILES`."""
    return [float(each) for each in np.percentile(values, QUANTILES)]


def done_early(values: Values) -> float:
    """Share of the values that are at most `TAIL` of the greatest."""
    return float((values <= TAIL * values.max()).mean())


def robust_sigma(values: Values) -> float:
    """Standard deviation by the median absolute deviation: a few outliers do not move it."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def histogram(values: Values) -> dict[str, int]:
    """How often each whole number is there, ascending."""
    found, counts = np.unique(values[np.isfinite(values)].astype("int64"), return_counts=True)
    return {str(value): int(count) for value, count in zip(found, counts, strict=True)}


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def groups(items: Sequence[int], most: int) -> list[list[int]]:
    """Consecutive ones together, so that there are at most so many groups."""
    size = max(1, math.ceil(len(items) / most))
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def plain(value: Any) -> Any:
    """As JSON values: numpy's become Python's, what is not finite becomes None. Whole numbers are exact, from 1000 on
    three decimals are kept (of timestamps too), below six digits."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return _rounded(float(value)) if math.isfinite(value) else None
    return value


def _rounded(value: float) -> float:
    return round(value, 3) if abs(value) >= 1000 or value.is_integer() else float(f"{value:.6g}")
