"""Tokens that were sampled and thrown away, and what a lower limit of the response length would cost and save. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from asyncrl.report.lives import Lives, whole_trajectories
from asyncrl.report.load import Events

FRACTIONS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Of the longest response."""


def thrown_away(events: Events) -> dict[str, Any]:
    """Dropped samples, over-sampled generation that was cut, and attempts that weight syncs aborted."""
    requests = events.of("request")
    requests = requests[requests["index"] > 0]
    aborted = requests[requests["finish_reason"] == "aborted"]
    cut = events.of("sample.cut")
    dropped = events.of("sample.dropped")
    lost_cut = cut[cut["kept"].fillna(0) != 1]
    # What was cut as surplus is dropped as surplus too: its tokens are counted once.
    counted_before = (dropped["reason"] == "surplus") & dropped["index"].isin(lost_cut["index"])
    reasons = []
    for reason, own in dropped.groupby("reason", observed=True):
        tokens = own.loc[~counted_before[own.index], "tokens"].sum()
        reasons.append({"reason": reason, "samples": len(own), "tokens": tokens})
    sampled = requests["response_tokens"].sum()
    tokens = lost_cut["tokens"].sum() + sum(each["tokens"] for each in reasons)
    again = _resumed(requests)
    return {
        "sampled_tokens": sampled,
        "thrown_away_tokens": tokens,
        "share": tokens / sampled if sampled > 0 else None,
        "dropped": sorted(reasons, key=lambda row: -row["tokens"]),
        "cut": {"groups": len(cut), "thrown_away_tokens": lost_cut["tokens"].sum(),
                "kept_tokens": cut.loc[cut["kept"] == 1, "tokens"].sum()},
        "aborted": {
            "attempts": len(aborted),
            "share_of_attempts": len(aborted) / len(requests) if len(requests) else None,
            "tokens": aborted["response_tokens"].sum(),
            "resumed": len(again),
            "prefill_again_s": again["prefill_s"].sum(),
        },
    }  # fmt: skip


def _resumed(requests: pd.DataFrame) -> pd.DataFrame:
    """Attempts that went on with an aborted one: they read its tokens again."""
    keys = ["index", "trajectory", "turn"]
    ordered = requests.sort_values([*keys, "timestamp"])
    before = ordered["finish_reason"].astype("str").shift()
    same = (ordered[keys] == ordered[keys].shift()).all(axis=1)
    return ordered[same & (before == "aborted")]


def lower_limits(events: Events, lives: Lives, requests: pd.DataFrame, configured: int | None) -> dict[str, Any]:
    """What would have been if responses had been cut at a lower limit, and what is cut were worth nothing.

    The reward of a trajectory is that of its own `reward.score`, or else the mean of its sample. It counts from the
    least reward of the run on, so that a run of negative rewards can lose something too.
    """
    rows = whole_trajectories(events)
    rows = rows[rows["tokens"] > 0]
    keys = ["index", "trajectory"]
    rows = rows.set_index(keys)
    made = requests.groupby(keys)[["decode_s", "duration_s"]].sum().reindex(rows.index).fillna(0.0)
    reward, source = _rewards(events, rows.index)
    worth = reward - reward.min()
    steps = lives.step_of(pd.Series(rows.index.get_level_values(0), index=rows.index), rows["step"])
    length = rows["tokens"]
    longest = float(length.max()) if len(rows) else 0.0
    limits = []
    for limit in sorted({max(1, round(longest * fraction)) for fraction in FRACTIONS}) if len(rows) else ():
        left = np.minimum(1.0, limit / length)
        cut = length > limit
        decode, time = made["decode_s"], made["duration_s"]
        slowest = time.groupby(steps).max().sum()
        limits.append(
            {
                "limit": limit,
                "cut_share": cut.mean(),
                "reward_lost_share": worth[cut].sum() / worth.sum() if worth.sum() > 0 else None,
                "decode_saved_share": (decode * (1 - left)).sum() / decode.sum() if decode.sum() > 0 else None,
                "longest_saved_share": 1 - (time * left).groupby(steps).max().sum() / slowest if slowest > 0 else None,
            }
        )
    return {"configured": configured, "longest": longest, "trajectories": len(rows), "reward_from": source,
            "limits": limits}  # fmt: skip


def _rewards(events: Events, wanted: pd.MultiIndex) -> tuple[pd.Series, str]:
    """By trajectory, and where it is from; what is not known counts as the least there is."""
    scored = events.of("reward.score")
    own = scored[(scored["index"] > 0) & (scored["trajectory"] >= 0) & scored["reward"].notna()]
    own = own.drop_duplicates(["index", "trajectory"], keep="last").set_index(["index", "trajectory"])["reward"]
    known = own.reindex(wanted)
    if known.notna().any():
        return known.fillna(known.min()), "the reward of each trajectory"
    for name in ("sample.trained", "sample.ready"):
        means = events.of(name)
        means = means[(means["index"] > 0) & means["reward"].notna()].drop_duplicates("index", keep="last")
        if len(means):
            by_sample = means.set_index("index")["reward"]
            found = pd.Series(wanted.get_level_values(0).map(by_sample), index=wanted, dtype="float64")
            return found.fillna(by_sample.min()), "the mean reward of its sample, for each trajectory"
    return pd.Series(0.0, index=wanted), "nothing: no reward is among the events"
