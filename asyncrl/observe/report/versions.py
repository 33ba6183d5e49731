"""Weight versions and waste: staleness, weight syncs, wasted tokens, and what lower response limits would do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.requests import TRAJECTORY_KEYS, attempts, completed_trajectories
from asyncrl.observe.report.samples import TracedSamples
from asyncrl.observe.report.statistics import histogram, spans, summarize, total

SYNC_PHASES = {
    "sync.gather": "gather on rank 0",
    "sync.put": "transfer of a bucket to the weight store",
    "trainer.publish": "publish, including gather and transfers",
    "sync.fetch": "fetch, while generation continues",
    "sync.drain": "drain before the pause",
    "sync.pause": "pause, including the load",
    "sync.load": "load",
    "sync.verify": "verify, while generation continues",
    "sync.apply": "apply, until every replica serves it",
}
_REPLICA_EVENTS = ("request", "sync.fetch", "sync.drain", "sync.pause", "sync.load", "sync.verify")
FRACTIONS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Response limits to evaluate, as fractions of the longest response."""


def staleness_figures(events: Events, histories: TracedSamples) -> dict[str, Any]:
    """Return the staleness of the samples of final steps, and newest minus oldest version that sampled each."""
    trained = events["sample.trained"]
    trained = trained[trained["index"].isin(histories.trained_in.index)].drop_duplicates("index", keep="last")
    figures: dict[str, Any] = {"samples": len(trained)}
    for name, column in (("staleness", "staleness"), ("version_span", "versions")):
        values = trained[column].dropna().to_numpy()
        mean, largest = (values.mean(), values.max()) if len(values) else (None, None)
        figures[name] = {"mean": mean, "max": largest, "histogram": histogram(values)}
    return figures


def weight_sync_figures(events: Events) -> dict[str, Any]:
    """Return the durations of each phase, over all syncs and by replica, and the bytes that the Trainer stored."""
    phases = []
    for name, meaning in SYNC_PHASES.items():
        if len(frame := events[name]):
            by_replica = frame.groupby("replica", observed=True)["duration_s"].agg(["count", "median", "max"])
            durations = summarize(frame["duration_s"].to_numpy()) or {}
            rows = by_replica.reset_index().to_dict("records")
            phases.append({"phase": name, "meaning": meaning, **durations, "by_replica": rows})
    return {
        "syncs": len(events["sync.apply"]),
        "phases": phases,
        "paused_share": _paused_share(events),
        "sent_bytes": events["sync.put"]["bytes"].sum(),
    }


def _paused_share(events: Events) -> float | None:
    """Return the paused share of the replicas' lifetimes, each of which lasts from first to last event."""
    rows = pd.concat([events[name][["replica", "timestamp", "end"]] for name in _REPLICA_EVENTS])
    lifetimes = rows.astype({"replica": "str"}).dropna().groupby("replica").agg({"timestamp": "min", "end": "max"})
    lived = (lifetimes["end"] - lifetimes["timestamp"]).sum()
    paused = sum(total(spans(own)) for _, own in events["sync.pause"].groupby("replica", observed=True))
    return paused / lived if lived > 0 else None


# ---------------------------------------------------------------------------------------------- waste


def waste_figures(events: Events, histories: TracedSamples) -> dict[str, Any]:
    """Return the wasted tokens: engines sampled them, but no sample that was or may still be trained contains them.

    They belong to dropped samples, to over-sampled generation that was cut, or to surplus trajectories, or they were
    sampled again for a trajectory that counts. Engines sample no tokens for samples that are replayed from a record.
    """
    requests, resumes = attempts(events)
    requests["response_tokens"] = requests["response_tokens"].fillna(0.0)
    sampled = requests.groupby("index")["response_tokens"].sum()
    dropped = events["sample.dropped"]
    dropped = dropped[(dropped["index"] > 0) & ~dropped["index"].isin(histories.trained_in.index)]
    dropped = dropped.drop_duplicates("index", keep="last")
    dropped_tokens = dropped["index"].map(sampled).fillna(0.0)
    by_reason = [
        {"reason": reason, "samples": len(own), "tokens": dropped_tokens[own.index].sum()}
        for reason, own in dropped.groupby("reason", observed=True)
    ]
    cut = events["sample.cut"]
    # Most of what was cut as surplus is dropped as surplus too: its tokens count once.
    lost_cut = cut[(cut["kept"].fillna(0) != 1) & ~cut["index"].isin(dropped["index"])]
    cut_tokens = lost_cut.groupby("index")["tokens"].sum()
    cut_tokens = np.minimum(cut_tokens, sampled.reindex(cut_tokens.index).fillna(0.0)).sum()
    lost = [*dropped["index"], *lost_cut["index"]]
    surplus, repeated = _surplus_and_repeated(events, histories, requests[~requests["index"].isin(lost)])
    wasted = dropped_tokens.sum() + cut_tokens + surplus.sum() + repeated.sum()
    all_tokens = requests["response_tokens"].sum()
    aborted, resumed = requests[requests["finish_reason"] == "aborted"], requests[resumes]
    return {
        "sampled_tokens": all_tokens,
        "wasted_tokens": wasted,
        "share": wasted / all_tokens if all_tokens > 0 else None,
        "dropped": sorted(by_reason, key=lambda row: -row["tokens"]),
        "cut": {"groups": len(cut), "wasted_tokens": cut_tokens,
                "kept_tokens": cut.loc[cut["kept"] == 1, "tokens"].sum()},
        "surplus_trajectories": {"trajectories": len(surplus), "tokens": surplus.sum()},
        "sampled_again": {"trajectories": int((repeated > 0).sum()), "tokens": repeated.sum()},
        "aborted": {
            "attempts": len(aborted),
            "share_of_attempts": len(aborted) / len(requests) if len(requests) else None,
            "tokens": aborted["response_tokens"].sum(),
            "resumed": len(resumed),
            "prefill_again_s": resumed["prefill_s"].sum(),
        },
    }  # fmt: skip


def waste_by_reason(waste: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the wasted tokens of `waste_figures` by reason, without zeros."""
    reasons = [(f"dropped: {row['reason']}", row["tokens"]) for row in waste["dropped"]]
    reasons.append(("cut as surplus", waste["cut"]["wasted_tokens"]))
    reasons.append(("surplus trajectories", waste["surplus_trajectories"]["tokens"]))
    reasons.append(("sampled again or abandoned", waste["sampled_again"]["tokens"]))
    return [(reason, tokens) for reason, tokens in reasons if tokens]


def _surplus_and_repeated(
    events: Events, histories: TracedSamples, requests: pd.DataFrame
) -> tuple[pd.Series, pd.Series]:
    """Return two series of tokens by trajectory: those of surplus trajectories, and those that the other trajectories
    sampled beyond their final tokens.

    A trajectory that is still in generation is in neither. `requests`: attempts for samples that are not lost.
    """
    sampled = requests.groupby(TRAJECTORY_KEYS)["response_tokens"].sum()
    ended = pd.MultiIndex.from_frame(events["trajectory"][TRAJECTORY_KEYS])
    completed = completed_trajectories(events).set_index(TRAJECTORY_KEYS)
    finished = [*events["sample.ready"]["index"], *histories.trained_in.index]
    of_finished = sampled.index.get_level_values("index").isin(finished)
    surplus = sampled[of_finished & sampled.index.isin(ended) & ~sampled.index.isin(completed.index)]
    own = sampled[sampled.index.isin(completed.index)]
    used = completed["sampled_tokens"].fillna(completed["tokens"]).reindex(own.index)
    return surplus, (own - used.fillna(own)).clip(lower=0.0)


def limit_figures(
    events: Events, histories: TracedSamples, requests: pd.DataFrame, configured: int | None
) -> dict[str, Any]:
    """Return what lower response limits would have cut, lost and saved, if a response that is cut were worth nothing.

    A limit saves the decoding of what it cuts, but no waits, prefill or tools. A length is, as for
    rollout.response_length, the number of tokens of a whole trajectory, including tool results. The reward of a
    trajectory is from its `reward.score` event, or else the mean of its sample; its worth is the part above 0, or above
    the least reward if that is negative. If no reward is known, or all are worth 0, `reward_lost_share` is None.
    """
    rows = completed_trajectories(events)
    rows = rows[rows["tokens"] > 0].set_index(TRAJECTORY_KEYS)
    times = requests[requests["of_last_generation"]].groupby(TRAJECTORY_KEYS)[["decode_s", "duration_s"]].sum()
    times = times.reindex(rows.index).fillna(0.0)
    decode, duration = times["decode_s"], times["duration_s"]
    reward, source = _rewards(events, rows.index)
    worth = (reward - min(0.0, reward.min())).fillna(0.0)
    steps = histories.step_of(pd.Series(rows.index.get_level_values(0), index=rows.index), rows["step"])
    length = rows["tokens"]
    longest = float(length.max()) if len(rows) else 0.0
    slowest = duration.groupby(steps).max().sum()
    limits = []
    for limit in sorted({max(1, round(longest * fraction)) for fraction in FRACTIONS}) if len(rows) else ():
        cut = length > limit
        saved = decode * (1 - np.minimum(1.0, limit / length))
        remaining = (duration - np.minimum(saved, duration)).groupby(steps).max().sum()
        limits.append(
            {
                "limit": limit,
                "cut_share": cut.mean(),
                "reward_lost_share": worth[cut].sum() / worth.sum() if worth.sum() > 0 else None,
                "decode_saved_share": saved.sum() / decode.sum() if decode.sum() > 0 else None,
                "longest_trajectory_saved_share": 1 - remaining / slowest if slowest > 0 else None,
            }
        )
    return {"configured": configured, "longest": longest, "trajectories": len(rows), "reward_from": source,
            "limits": limits}  # fmt: skip


def _rewards(events: Events, trajectories: pd.MultiIndex) -> tuple[pd.Series, str | None]:
    """Return the reward of each trajectory, nan where it is unknown, and its source; None if no event has a reward."""
    scored = events["reward.score"]
    scored = scored[(scored["index"] > 0) & (scored["trajectory"] >= 0) & scored["reward"].notna()]
    own = scored.drop_duplicates(TRAJECTORY_KEYS, keep="last").set_index(TRAJECTORY_KEYS)["reward"]
    if (known := own.reindex(trajectories)).notna().any():
        return known, "the reward of each trajectory"
    for name in ("sample.trained", "sample.ready"):
        means = events[name]
        means = means[(means["index"] > 0) & means["reward"].notna()].drop_duplicates("index", keep="last")
        rewards = trajectories.get_level_values(0).map(means.set_index("index")["reward"])
        if pd.notna(rewards).any():
            return pd.Series(rewards, index=trajectories, dtype="float64"), "the mean reward of its sample"
    return pd.Series(np.nan, index=trajectories), None
