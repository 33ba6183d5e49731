"""Where the time of a trajectory and of a sample goes, by kind. Pure."""

from __future__ import annotations

from typing import Any

import pandas as pd

from asyncrl.report.lives import KINDS, Lives
from asyncrl.report.numbers import groups

MOST_GROUPS = 120
"""Of steps, over the course of a run."""
_AROUND = {"median": (0.45, 0.55), "p95": (0.93, 0.97)}


def analyse(lives: Lives) -> dict[str, Any]:
    """Shares are percent of a trajectory's whole time, averaged over trajectories: they add up to 100."""
    rows = lives.trajectories[lives.trajectories["whole"] > 0]
    kinds = list(KINDS)
    percent = rows[kinds].div(rows["whole"], axis=0) * 100
    table = [
        {
            "kind": kind,
            "meaning": KINDS[kind],
            "percent": percent[kind].mean(),
            "mean_s": rows[kind].mean(),
            "p95_s": rows[kind].quantile(0.95),
            "max_s": rows[kind].max(),
        }
        for kind in kinds
    ]
    course = []
    for steps in groups(sorted(rows["step"].unique()), MOST_GROUPS):
        means = percent[rows["step"].isin(steps)].mean()
        course.append({"first_step": steps[0], "last_step": steps[-1], "percent": means.to_dict()})
    return {
        "trajectories": len(rows),
        "whole_s_mean": rows["whole"].mean() if len(rows) else None,
        "table": sorted(table, key=lambda row: -row["percent"]) if len(rows) else [],
        "course": course,
        "life": _life(rows),
    }


def longest(trajectories: pd.DataFrame) -> pd.DataFrame:
    """Of each sample, the trajectory that its group waited for."""
    return trajectories.sort_values("end", kind="stable").drop_duplicates("index", keep="last")


def _life(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The samples whose whole life is about the median, and about the 95th percentile, each told by the trajectory that
    its group waited for."""
    lives = longest(rows).sort_values("whole", kind="stable", ignore_index=True)
    told = []
    for name, (low, high) in _AROUND.items():
        if not len(lives):
            continue
        first = min(int(low * len(lives)), len(lives) - 1)
        near = lives.iloc[first : max(first + 1, int(high * len(lives)))]
        seconds = near[list(KINDS)].mean()
        told.append(
            {
                "which": name,
                "samples": len(near),
                "whole_s": near["whole"].mean(),
                "quantile_s": lives["whole"].quantile(0.5 if name == "median" else 0.95),
                "seconds": seconds.to_dict(),
            }
        )
    return told
