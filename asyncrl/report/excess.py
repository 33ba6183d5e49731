"""Calls that took far longer than calls of their own kind usually do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from asyncrl.report.intervals import Intervals, union

LEAST_RATIO = 5.0
SIGMAS = 4.0
"""Of the logarithm of the duration: what varies widely anyhow must stand out more."""
LEAST_S = 1.0
"""Beyond the median; less is nobody's concern."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The calls that stand out, and what they took beyond the usual."""

    calls: pd.DataFrame
    median_s: float
    num_calls: int
    lost: Intervals
    """The time in which at least one of them should have been done."""

    @property
    def worst(self) -> pd.Series:
        return self.calls.loc[self.calls["duration_s"].idxmax()]


def excess(frame: pd.DataFrame) -> Excess | None:
    """None: no call stands out."""
    durations = frame["duration_s"].to_numpy()
    if len(durations) < 3:
        return None
    median = float(np.median(durations))
    logs = np.log(np.maximum(durations, 1e-4))
    sigma = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    threshold = max(median + LEAST_S, median * max(LEAST_RATIO, float(np.exp(SIGMAS * sigma))))
    calls = frame[durations > threshold]
    if not len(calls):
        return None
    lost = union((calls["timestamp"] + median).to_numpy(), calls["end"].to_numpy())
    return Excess(calls, median, len(durations), lost)
