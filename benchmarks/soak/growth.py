"""Estimate the growth of processes in percent per hour, with an uncertainty, and judge it. Pure.

Memory is not a line with noise around it: allocators and caches move it in steps, and neighbouring samples resemble
each other. So a series is reduced to medians of a minute or more. The slope is that of Theil and Sen: the median of the
slopes of all pairs of points, here weighted by their distance in time. The interval is from a bootstrap that resamples
the residuals in blocks, because single residuals are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.soak.processes import RunSample

Verdict = Literal["ok", "grows", "unclear", "too short"]
Floats = npt.NDArray[np.float64]

LIMIT_PERCENT = 2.0
"""The most that anything may grow in an hour."""
MIN_SPAN_S = 600.0
"""Shorter series are not judged."""
MEMORY_FLOOR_MB, DESCRIPTORS_FLOOR = 1.0, 2.0
"""Growth below this per hour is none, whatever its percentage: of a process of 15 MB, 2 % are a few pages."""
POINT_S = 60.0
MAX_POINTS = 60
BLOCK = 5
"""Number of neighbouring residuals that the bootstrap moves together."""
ROUNDS = 400


class Lifetime(NamedTuple):
    """The samples of one process from its start to its end."""

    role: str
    """Its last role: a worker of Ray is idle before it becomes an actor."""
    pid: int
    started: float
    """Wall clock."""
    at: Floats
    """Wall clock of each sample."""
    memory_mb: Floats
    descriptors: Floats
    threads: Floats


class Growth(NamedTuple):
    """The slope of a series, and an interval of about 95 %."""

    percent_per_h: float
    low: float
    high: float
    level: float
    """Median of the series, in its own unit."""
    span_s: float
    """Time from the end of the warm-up to the end of the series."""


def lifetimes(samples: Sequence[RunSample]) -> list[Lifetime]:
    """Return the lifetime of each process, ordered by role and start. Its memory is the anonymous one."""
    found = defaultdict(list)
    for sample in samples:
        for process in sample.processes:
            found[process.started, process.pid].append((sample.at, process))
    result = []
    for (started, pid), each in found.items():
        rows = np.array([(at, one.anonymous / 1e6, one.descriptors, one.threads) for at, one in each])
        result.append(Lifetime(each[-1][1].role, pid, started, *rows.T))
    return sorted(result, key=lambda one: (one.role, one.started))


def fit(at: Floats, values: Floats, warm_at: float) -> Growth | None:
    """Return the growth of a series after its warm-up; None if less than `MIN_SPAN_S` are left.

    Args:
        at: wall clock of each value.
        warm_at: wall clock of the end of the warm-up.
    """
    warm = at >= warm_at
    at, values = at[warm], values[warm]
    if len(at) < 2 or at[-1] - at[0] < MIN_SPAN_S:
        return None
    span_s, level = float(at[-1] - at[0]), float(np.median(values))
    hours, points = _medians(at - at[0], values, max(POINT_S, span_s / MAX_POINTS))
    percent = 100.0 * points / max(level, 1e-9)
    first, second = np.triu_indices(len(hours), 1)
    apart = hours[second] - hours[first]

    def slope(series: Floats) -> float:
        return _weighted_median((series[second] - series[first]) / apart, apart)

    estimate = slope(percent)
    residuals = percent - estimate * hours
    rng = np.random.default_rng(0)
    starts = rng.integers(0, max(1, len(hours) - BLOCK + 1), (ROUNDS, -(-len(hours) // BLOCK)))
    picked = (starts[:, :, None] + np.arange(BLOCK)).reshape(ROUNDS, -1)[:, : len(hours)]
    errors = [slope(residuals[row % len(hours)]) for row in picked]
    low, high = (float(estimate + error) for error in np.quantile(errors, (0.025, 0.975)))
    return Growth(estimate, low, high, level, span_s)


def judge(growth: Growth | None, floor: float) -> Verdict:
    """Return `grows` if the growth is over the limit and its interval is above zero, `unclear` if it is over the limit
    but may be chance, and otherwise `ok`. `floor`: growth per hour, in the series' unit, that is none."""
    if growth is None:
        return "too short"
    if growth.percent_per_h <= LIMIT_PERCENT or growth.percent_per_h / 100.0 * growth.level <= floor:
        return "ok"
    return "grows" if growth.low > 0.0 else "unclear"


def _medians(since_s: Floats, values: Floats, width_s: float) -> tuple[Floats, Floats]:
    """Return times in hours and values, each the median of an interval of `width_s`."""
    numbers = (since_s / width_s).astype(int)
    each = [numbers == number for number in np.unique(numbers)]
    return (
        np.array([np.median(since_s[here]) for here in each]) / 3600.0,
        np.array([np.median(values[here]) for here in each]),
    )


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2.0)])
