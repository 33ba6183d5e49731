"""Requests to the engines: how long they take and how long their responses are, by step and by replica. Pure.

An aborted attempt and the attempt that resumed it are one request, whose times and tokens add up. Requests of the
validation set are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.statistics import (
    QUANTILES,
    TAIL_AT,
    cdf,
    done_early,
    evenly_spaced,
    spans,
    summarize,
    total,
)

PHASES = ("gate", "queued", "prefill", "decode", "paused")
SUMS = ("duration_s", "response_tokens", *(f"{phase}_s" for phase in PHASES))
MAX_CURVES = 40
"""Largest number of steps with a CDF in report.json; in a longer run, they are evenly spaced."""
NUM_SLOWEST = 20
CLOCK_SKEW_S = 0.5
"""Largest expected difference between the clocks of a replica and of the Rollouter."""
TRAJECTORY_KEYS = ["index", "trajectory"]
_TURN_KEYS = [*TRAJECTORY_KEYS, "turn"]


def newest(events: pd.DataFrame, column: str) -> pd.Series:
    """Return a column by feed index, from the last event of each sample."""
    return events[events["index"] > 0].drop_duplicates("index", keep="last").set_index("index")[column]


def attempts(events: Events) -> tuple[pd.DataFrame, NDArray[np.bool_]]:
    """Return all requests of training samples, sorted by turn and time, and whether each resumed the one before it.

    A request resumed the one before it if that was aborted and its tokens are in the new prompt. Any other second
    request of a turn belongs to a sample that is generated again.
    """
    frame = events["request"]
    frame = frame[frame["index"] > 0].sort_values([*_TURN_KEYS, "timestamp"], ignore_index=True)
    resumes = np.zeros(len(frame), dtype=bool)
    if len(frame):
        key, prompt = frame[_TURN_KEYS].to_numpy(), frame["prompt_tokens"].to_numpy()
        grown = prompt[1:] - prompt[:-1] - frame["response_tokens"].fillna(0.0).to_numpy()[:-1]
        aborted = (frame["finish_reason"] == "aborted").to_numpy()
        resumes[1:] = (key[1:] == key[:-1]).all(axis=1) & aborted[:-1] & (np.isnan(grown) | (grown == 0))
    return frame, resumes


def logical_requests(events: Events) -> pd.DataFrame:
    """Return one row for each request: `index, trajectory, turn, sample, request, replica` (of its last attempt),
    `timestamp, end, step` (current when it began), `attempts`, `aborted` (and not resumed), `SUMS`, and
    `of_last_generation`: whether it belongs to the sample's last generation.
    """
    frame, resumes = attempts(events)
    frame[list(SUMS)] = frame[list(SUMS)].fillna(0.0)
    requests = frame[~resumes].reset_index(drop=True)
    last = np.append(~resumes[1:], True)[: len(frame)]
    by_request = frame.groupby(np.cumsum(~resumes))
    requests[list(SUMS)] = by_request[list(SUMS)].sum().reset_index(drop=True)
    requests["attempts"] = by_request.size().reset_index(drop=True)
    for column in ("replica", "end", "finish_reason"):
        requests[column] = frame.loc[last, column].reset_index(drop=True)
    requests["aborted"] = requests["finish_reason"] == "aborted"
    requests["request"] = requests["request"].str.replace(r"-\d+$", "", regex=True)
    requests["of_last_generation"] = _is_of_last_generation(events, requests)
    columns = ["index", "trajectory", "turn", "sample", "request", "replica", "timestamp", "end", "step"]
    return requests[[*columns, "attempts", "aborted", "of_last_generation", *SUMS]]


def completed_trajectories(events: Events) -> pd.DataFrame:
    """Return the `trajectory` events of training samples that ended without being aborted, surplus or failed; of a
    repeated trajectory, the last one."""
    rows = events["trajectory"]
    rows = rows[(rows["index"] > 0) & ~rows["finish_reason"].isin(("aborted", "surplus")) & rows["error"].isna()]
    return rows.drop_duplicates(TRAJECTORY_KEYS, keep="last")


def _is_of_last_generation(events: Events, requests: pd.DataFrame) -> pd.Series:
    """Return whether each request lies between the sample's last admission and the end of its trajectory, if it
    ended."""
    trajectories = completed_trajectories(events).set_index(TRAJECTORY_KEYS)[["timestamp", "end"]]
    own = trajectories.reindex(pd.MultiIndex.from_frame(requests[TRAJECTORY_KEYS]))
    admitted = requests["index"].map(newest(events["sample.admitted"], "timestamp"))
    admitted = admitted.to_numpy(dtype="float64", na_value=-np.inf)
    begin = np.where(np.isfinite(admitted), admitted, own["timestamp"].fillna(-np.inf).to_numpy())
    end = own["end"].fillna(np.inf).to_numpy()
    end = np.where(admitted > end, np.inf, end)  # the sample is being generated again
    middle = (requests["timestamp"] + requests["end"]) / 2
    return (middle >= begin - CLOCK_SKEW_S) & (middle <= end + CLOCK_SKEW_S)


def request_figures(requests: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of `logical_requests`, whose `step` is the one that trained the sample."""
    done = requests[~requests["aborted"]]
    return {
        "count": len(done),
        "unfinished": int(requests["aborted"].sum()),
        "tail_at": TAIL_AT,
        "quantiles_percent": list(QUANTILES),
        "time": _distributions(done, "duration_s"),
        "length": _distributions(done, "response_tokens"),
        "by_replica": _replicas(done),
        "slowest": [request_row(row) for _, row in done.nlargest(NUM_SLOWEST, "duration_s").iterrows()],
    }


def request_row(request: pd.Series) -> dict[str, Any]:
    """Return one request as it appears in report.json."""
    names = ("request", "sample", "trajectory", "turn", "replica", "step", "attempts", *SUMS)
    return {name: None if pd.isna(request[name]) else request[name] for name in names}


def _distributions(done: pd.DataFrame, column: str) -> dict[str, Any]:
    if not len(done):
        return {"all": None, "cdf": None, "done_early": None, "by_step": [], "by_replica": []}
    steps = {step: own.to_numpy() for step, own in done.groupby("step")[column]}
    with_curve = set(evenly_spaced(sorted(steps), MAX_CURVES))
    by_step = [
        {"step": step, **_distribution(values), "cdf": cdf(values) if step in with_curve else None}
        for step, values in steps.items()
    ]
    by_replica = [
        {"replica": replica, **_distribution(values.to_numpy()), "cdf": cdf(values.to_numpy())}
        for replica, values in done.groupby("replica", observed=True)[column]
    ]
    return {
        "all": summarize(done[column].to_numpy()),
        "cdf": cdf(done[column].to_numpy()),
        "done_early": float(
            np.average([row["done_early"] for row in by_step], weights=[row["count"] for row in by_step])
        ),
        "by_step": by_step,
        "by_replica": by_replica,
    }


def _distribution(values: NDArray[np.float64]) -> dict[str, Any]:
    return {**(summarize(values) or {}), "done_early": done_early(values)}


def _replicas(done: pd.DataFrame) -> list[dict[str, Any]]:
    """Return requests, tokens, busy time and seconds per token of each replica."""
    by_replica = done.groupby("replica", observed=True)
    sums, means = by_replica[list(SUMS)].sum(), by_replica[["queued_s", "prefill_s"]].mean()
    busy = pd.Series([total(spans(own)) for _, own in by_replica], index=sums.index, dtype="float64")
    tokens = sums["response_tokens"].where(sums["response_tokens"] > 0)
    columns = {
        "requests": by_replica.size(),
        "tokens": sums["response_tokens"],
        "busy_s": busy,
        "tokens_per_s": sums["response_tokens"] / busy.where(busy > 0),
        "decode_s": sums["decode_s"],
        "decode_s_per_token": sums["decode_s"] / tokens,
        "work_s_per_token": (sums["duration_s"] - sums["gate_s"] - sums["paused_s"]) / tokens,
        "queued_s_mean": means["queued_s"],
        "prefill_s_mean": means["prefill_s"],
        "paused_s": sums["paused_s"],
    }
    return pd.DataFrame(columns).reset_index().to_dict("records")
