"""Tokens that were sampled and thrown away, and what a lower limit of the response length would cost and save. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from asyncrl.report.lives import Lives
from asyncrl.report.load import Events
from asyncrl.report.requests import attempts, whole_trajectories

FRACTIONS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Of the longest response."""


def thrown_away(events: Events, lives: Lives) -> dict[str, Any]:
    """What engines sampled in this run and is in no sample that was trained or may still be: of dropped samples, of
    over-sampled generation that was cut, of trajectories beyond those that were asked for, and of those that count what
    was sampled again. Of one out of a record engines sampled nothing.
    """
    requests, goes_on = attempts(events)
    requests["response_tokens"] = requests["response_tokens"].fillna(0.0)
    sampled = requests.groupby("index")["response_tokens"].sum()
    dropped = events.of("sample.dropped")
    dropped = dropped[(dropped["index"] > 0) & ~dropped["index"].isin(lives.trained_in.index)]
    dropped = dropped.drop_duplicates("index", keep="last")
    cost = dropped["index"].map(sampled).fillna(0.0)
    reasons = [
        {"reason": reason, "samples": len(own), "tokens": cost[own.index].sum()}
        for reason, own in dropped.groupby("reason", observed=True)
    ]
    cut = events.of("sample.cut")
    # What was cut as surplus is mostly dropped as surplus too: its tokens are counted once.
    lost_cut = cut[(cut["kept"].fillna(0) != 1) & ~cut["index"].isin(dropped["index"])]
    cut_tokens = lost_cut.groupby("index")["tokens"].sum()
    cut_tokens = np.minimum(cut_tokens, sampled.reindex(cut_tokens.index).fillna(0.0)).sum()
    gone = dropped["index"].tolist() + lost_cut["index"].tolist()
    surplus, again = _beside(events, lives, requests[~requests["index"].isin(gone)])
    tokens, whole = cost.sum() + cut_tokens + surplus.sum() + again.sum(), requests["response_tokens"].sum()
    aborted = requests[requests["finish_reason"] == "aborted"]
    resumed = requests[goes_on]
    return {
        "sampled_tokens": whole,
        "thrown_away_tokens": tokens,
        "share": tokens / whole if whole > 0 else None,
        "dropped": sorted(reasons, key=lambda row: -row["tokens"]),
        "cut": {"groups": len(cut), "thrown_away_tokens": cut_tokens,
                "kept_tokens": cut.loc[cut["kept"] == 1, "tokens"].sum()},
        "surplus_trajectories": {"trajectories": len(surplus), "tokens": surplus.sum()},
        "sampled_again": {"trajectories": int((again > 0).sum()), "tokens": again.sum()},
        "aborted": {
            "attempts": len(aborted),
            "share_of_attempts": len(aborted) / len(requests) if len(requests) else None,
            "tokens": aborted["response_tokens"].sum(),
            "resumed": len(resumed),
            "prefill_again_s": resumed["prefill_s"].sum(),
        },
    }  # fmt: skip


def reasons_of(waste: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Why tokens were thrown away, and how many; none is zero. `waste`: see `thrown_away`."""
    told = [(f"dropped: {row['reason']}", row["tokens"]) for row in waste["dropped"]]
    told.append(("cut as surplus", waste["cut"]["thrown_away_tokens"]))
    told.append(("surplus trajectories", waste["surplus_trajectories"]["tokens"]))
    told.append(("sampled again or given up", waste["sampled_again"]["tokens"]))
    return [(reason, tokens) for reason, tokens in told if tokens]


def _beside(events: Events, lives: Lives, requests: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Of samples that are not lost, tokens by trajectory: of those that do not count, as enough others had ended
    before; and what was sampled for those that count beyond what is in them.

    `requests`: attempts; a trajectory that is under way is in neither.
    """
    keys = ["index", "trajectory"]
    sampled = requests.groupby(keys)["response_tokens"].sum()
    ended = pd.MultiIndex.from_frame(events.of("trajectory")[keys])
    whole = whole_trajectories(events).set_index(keys)
    done = events.of("sample.ready")["index"].tolist() + lives.trained_in.index.tolist()
    of_done = sampled.index.get_level_values("index").isin(done)
    surplus = sampled[of_done & sampled.index.isin(ended) & ~sampled.index.isin(whole.index)]
    own = sampled[sampled.index.isin(whole.index)]
    used = whole["sampled_tokens"].fillna(whole["tokens"]).reindex(own.index)
    return surplus, (own - used.fillna(own)).clip(lower=0.0)


def lower_limits(events: Events, lives: Lives, requests: pd.DataFrame, configured: int | None) -> dict[str, Any]:
    """What would have been if responses had been cut at a lower limit, and what is cut were worth nothing.

    A limit saves the decoding of what it cuts, and nothing of waits, prefill and tools. Lengths are those that
    rollout.response_length bounds: tokens of a whole trajectory, tools' answers included. The reward of a trajectory
    is that of its own `reward.score`, or else the mean of its sample; its worth is what it is above 0, or above the
    least reward of a run that has negative ones. Where no reward is known, or none is worth more than another's
    nothing, `reward_lost_share` is None.
    """
    rows = whole_trajectories(events)
    rows = rows[rows["tokens"] > 0]
    keys = ["index", "trajectory"]
    rows = rows.set_index(keys)
    made = requests[requests["counts"]].groupby(keys)[["decode_s", "duration_s"]].sum()
    made = made.reindex(rows.index).fillna(0.0)
    reward, source = _rewards(events, rows.index)
    worth = (reward - min(0.0, reward.min())).fillna(0.0)
    steps = lives.step_of(pd.Series(rows.index.get_level_values(0), index=rows.index), rows["step"])
    length = rows["tokens"]
    longest = float(length.max()) if len(rows) else 0.0
    limits = []
    for limit in sorted({max(1, round(longest * fraction)) for fraction in FRACTIONS}) if len(rows) else ():
        left = np.minimum(1.0, limit / length)
        cut = length > limit
        decode, time = made["decode_s"], made["duration_s"]
        saved = np.minimum(decode * (1 - left), time)
        slowest = time.groupby(steps).max().sum()
        rest = (time - saved).groupby(steps).max().sum()
        limits.append(
            {
                "limit": limit,
                "cut_share": cut.mean(),
                "reward_lost_share": worth[cut].sum() / worth.sum() if worth.sum() > 0 else None,
                "decode_saved_share": (decode * (1 - left)).sum() / decode.sum() if decode.sum() > 0 else None,
                "longest_trajectory_saved_share": 1 - rest / slowest if slowest > 0 else None,
            }
        )
    return {"configured": configured, "longest": longest, "trajectories": len(rows), "reward_from": source,
            "limits": limits}  # fmt: skip


def _rewards(events: Events, wanted: pd.MultiIndex) -> tuple[pd.Series, str | None]:
    """By trajectory, nan where it is not known; and where it is from, None: no reward is among the events."""
    scored = events.of("reward.score")
    own = scored[(scored["index"] > 0) & (scored["trajectory"] >= 0) & scored["reward"].notna()]
    own = own.drop_duplicates(["index", "trajectory"], keep="last").set_index(["index", "trajectory"])["reward"]
    known = own.reindex(wanted)
    if known.notna().any():
        return known, "the reward of each trajectory"
    for name in ("sample.trained", "sample.ready"):
        means = events.of(name)
        means = means[(means["index"] > 0) & means["reward"].notna()].drop_duplicates("index", keep="last")
        found = wanted.get_level_values(0).map(means.set_index("index")["reward"])
        if pd.notna(found).any():
            return pd.Series(found, index=wanted, dtype="float64"), "the mean reward of its sample, for each trajectory"
    return pd.Series(np.nan, index=wanted), None
