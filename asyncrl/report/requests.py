"""Requests: how long they took and how long their responses are, by step and by replica. Pure.

An attempt that was aborted and gone on with is part of the same request; their times and tokens add up. Requests of
the validation set are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.report.intervals import total, union
from asyncrl.report.load import Events
from asyncrl.report.numbers import QUANTILES, TAIL, cdf, done_early, evenly, spread

SUMS = ("duration_s", "response_tokens", "gate_s", "queued_s", "prefill_s", "decode_s", "paused_s")
CURVES = 40
"""Steps whose CDF is told; of a longer run, evenly chosen ones."""
SLOWEST = 20
CLOCKS_S = 0.5
"""By which the clocks of a replica and of the Rollouter may differ."""
_TURN = ["index", "trajectory", "turn"]


def attempts(events: Events) -> tuple[pd.DataFrame, NDArray[np.bool_]]:
    """Every request of training samples, by turn and time, and whether it went on with the one before it: that was
    aborted, and its tokens are in the prompt. Any other second request of a turn is of a sample that is made again."""
    frame = events.of("request")
    frame = frame[frame["index"] > 0].sort_values([*_TURN, "timestamp"], ignore_index=True)
    goes_on = np.zeros(len(frame), dtype=bool)
    if len(frame):
        key, prompt = frame[_TURN].to_numpy(), frame["prompt_tokens"].to_numpy()
        grown = prompt[1:] - prompt[:-1] - frame["response_tokens"].fillna(0.0).to_numpy()[:-1]
        aborted = (frame["finish_reason"] == "aborted").to_numpy()
        goes_on[1:] = (key[1:] == key[:-1]).all(axis=1) & aborted[:-1] & (np.isnan(grown) | (grown == 0))
    return frame, goes_on


def logical(events: Events) -> pd.DataFrame:
    """One row a request: `index, trajectory, turn, sample, request, replica` (of its last attempt), `timestamp, end,
    step` (under way when it came), `attempts`, `aborted` (its last attempt was, and none followed), `SUMS`, and
    `counts`: it is of the sample as it was made last."""
    frame, goes_on = attempts(events)
    fresh = ~goes_on
    frame[list(SUMS)] = frame[list(SUMS)].fillna(0.0)
    ended = (frame["finish_reason"] != "aborted").to_numpy()
    numbers = pd.Series(np.cumsum(fresh))
    found = frame[fresh].reset_index(drop=True)
    last = np.concatenate((fresh[1:], [True])) if len(frame) else fresh
    by = frame.groupby(numbers.to_numpy())
    found[list(SUMS)] = by[list(SUMS)].sum().reset_index(drop=True)
    found["attempts"] = by.size().reset_index(drop=True)
    for column in ("replica", "end", "finish_reason"):
        found[column] = frame.loc[last, column].reset_index(drop=True)
    found["aborted"] = ~ended[last]
    found["request"] = found["request"].str.replace(r"-\d+$", "", regex=True)
    found["counts"] = _counts(events, found)
    columns = ["index", "trajectory", "turn", "sample", "request", "replica", "timestamp", "end", "step", "version"]
    return found[[*columns, "attempts", "aborted", "counts", "finish_reason", "prompt_tokens", *SUMS]]


def whole_trajectories(events: Events) -> pd.DataFrame:
    """`trajectory` events of training samples that came to their end; of what was made twice, the second."""
    rows = events.of("trajectory")
    rows = rows[(rows["index"] > 0) & ~rows["finish_reason"].isin(("aborted", "surplus")) & rows["error"].isna()]
    return rows.drop_duplicates(["index", "trajectory"], keep="last")


def _counts(events: Events, requests: pd.DataFrame) -> pd.Series:
    """Those since the sample was last admitted, until their trajectory ended, if it has. What was cut and gone on with
    is of one life."""
    keys = ["index", "trajectory"]
    whole = whole_trajectories(events).set_index(keys)[["timestamp", "end"]]
    begun = events.of("sample.admitted")
    admitted = begun[begun["index"] > 0].drop_duplicates("index", keep="last").set_index("index")["timestamp"]
    own = whole.reindex(pd.MultiIndex.from_frame(requests[keys]))
    after = requests["index"].map(admitted).to_numpy(dtype="float64", na_value=-np.inf)
    begin = np.where(np.isfinite(after), after, own["timestamp"].fillna(-np.inf).to_numpy())
    end = own["end"].fillna(np.inf).to_numpy()
    end = np.where(after > end, np.inf, end)  # it is being made again
    middle = (requests["timestamp"] + requests["end"]) / 2
    return (middle >= begin - CLOCKS_S) & (middle <= end + CLOCKS_S)


def analyse(requests: pd.DataFrame) -> dict[str, Any]:
    """`requests`: see `logical`, with `step` as the report counts it."""
    done = requests[~requests["aborted"]]
    return {
        "count": len(done),
        "unfinished": int(requests["aborted"].sum()),
        "tail_at": TAIL,
        "quantiles_percent": list(QUANTILES),
        "time": _distributions(done, "duration_s"),
        "length": _distributions(done, "response_tokens"),
        "by_replica": replicas(done),
        "slowest": slowest(done),
    }


def _distributions(done: pd.DataFrame, column: str) -> dict[str, Any]:
    if not len(done):
        return {"all": None, "cdf": None, "done_early": None, "by_step": [], "by_replica": []}
    by_step = []
    steps = done.groupby("step")[column]
    with_curve = set(evenly(sorted(steps.groups), CURVES))
    for step, values in steps:
        row = _row(values.to_numpy())
        by_step.append({"step": step, **row, "cdf": cdf(values.to_numpy()) if step in with_curve else None})
    by_replica = [
        {"replica": replica, **_row(values.to_numpy()), "cdf": cdf(values.to_numpy())}
        for replica, values in done.groupby("replica", observed=True)[column]
    ]
    weights = [row["count"] for row in by_step]
    return {
        "all": spread(done[column].to_numpy()),
        "cdf": cdf(done[column].to_numpy()),
        "done_early": float(np.average([row["done_early"] for row in by_step], weights=weights)),
        "by_step": by_step,
        "by_replica": by_replica,
    }  # fmt: skip


def _row(values: Any) -> dict[str, Any]:
    return {**(spread(values) or {}), "done_early": done_early(values)}


def replicas(requests: pd.DataFrame) -> list[dict[str, Any]]:
    """Each replica's requests, tokens, busy time and seconds per token."""
    told = []
    for replica, own in requests.groupby("replica", observed=True):
        tokens = own["response_tokens"].sum()
        busy = total(union(own["timestamp"].to_numpy(), own["end"].to_numpy()))
        work = (own["duration_s"] - own["gate_s"] - own["paused_s"]).sum()
        told.append(
            {
                "replica": replica,
                "requests": len(own),
                "tokens": tokens,
                "busy_s": busy,
                "tokens_per_s": tokens / busy if busy > 0 else None,
                "decode_s": own["decode_s"].sum(),
                "decode_s_per_token": own["decode_s"].sum() / tokens if tokens > 0 else None,
                "work_s_per_token": work / tokens if tokens > 0 else None,
                "queued_s_mean": own["queued_s"].mean(),
                "prefill_s_mean": own["prefill_s"].mean(),
                "paused_s": own["paused_s"].sum(),
            }
        )
    return told


def slowest(done: pd.DataFrame) -> list[dict[str, Any]]:
    """The requests that took longest."""
    return [row(each) for _, each in done.nlargest(SLOWEST, "duration_s").iterrows()]


def row(request: pd.Series) -> dict[str, Any]:
    """One request, as it goes into report.json."""
    names = ("request", "sample", "trajectory", "turn", "replica", "step", "attempts", *SUMS)
    return {name: _none(request[name]) for name in names}


def _none(value: Any) -> Any:
    return None if pd.isna(value) else value
