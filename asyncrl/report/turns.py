"""Turns: how many a trajectory takes, and what each of them costs. Pure."""

from __future__ import annotations

from typing import Any

import pandas as pd

from asyncrl.report.load import Events
from asyncrl.report.numbers import histogram, spread
from asyncrl.report.requests import whole_trajectories

MOST = 50
"""Turns that are told one by one."""
UNKNOWN = "(unknown tools)"
"""Stands for all names that only models use: there is no end to what they make up."""
_OF_NO_TOOL = ("unknown_tool", "too_many")
"""How calls of any name end."""


def analyse(events: Events, requests: pd.DataFrame) -> dict[str, Any]:
    """`requests`: see `requests.logical`. Seconds of a turn are means over the trajectories that took it."""
    turns = whole_trajectories(events)["turns"].dropna()
    requests = requests[requests["turn"] >= 0]
    generation = requests.groupby("turn")["duration_s"].agg(["sum", "count", "max"])
    p95 = requests.groupby("turn")["duration_s"].quantile(0.95)
    tokens = requests.groupby("turn")["response_tokens"].mean()
    tool = _by_turn(events.of("tool.execute"))
    user = _by_turn(events.of("user.step"))
    by_turn = []
    for turn, made in generation.head(MOST).iterrows():
        count = made["count"]
        by_turn.append(
            {
                "turn": turn,
                "requests": count,
                "generation_s": made["sum"] / count,
                "generation_s_p95": p95[turn],
                "generation_s_max": made["max"],
                "tool_s": tool.get(turn, 0.0) / count,
                "user_s": user.get(turn, 0.0) / count,
                "tokens": tokens[turn],
            }
        )
    counts = histogram(turns.to_numpy())
    return {
        "trajectories": len(turns),
        "turns": spread(turns.to_numpy()),
        "by_turn": by_turn,
        "histogram": counts,
        "percent": {turn: 100 * count / len(turns) for turn, count in counts.items()},
        "tools": _tools(events),
    }


def _by_turn(frame: pd.DataFrame) -> dict[int, float]:
    return frame[frame["index"] > 0].groupby("turn")["duration_s"].sum().to_dict()


def _tools(events: Events) -> list[dict[str, Any]]:
    calls = events.of("tool.execute")
    known = calls.loc[(calls["duration_s"] > 0) | ~calls["status"].isin(_OF_NO_TOOL), "tool"]
    names = calls["tool"].astype("str").where(calls["tool"].isin(known) & (calls["tool"] != ""), UNKNOWN)
    told = []
    for tool, own in calls.groupby(names):
        told.append(
            {
                "tool": tool,
                **(spread(own["duration_s"].to_numpy()) or {}),
                "wait_s": own["wait_s"].sum(),
                "status": own["status"].value_counts().loc[lambda counts: counts > 0].to_dict(),
            }
        )
    return sorted(told, key=lambda row: -row["sum"])
