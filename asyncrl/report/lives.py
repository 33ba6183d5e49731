"""What became of each sample and of each of its trajectories, second by second; which steps survived. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.report.load import Events
from asyncrl.report.requests import CLOCKS_S, whole_trajectories

KINDS = {
    "permit": "waiting for a permit",
    "slot": "waiting for a place in generation",
    "gate": "held back while a version was loaded",
    "queued": "queued in the engine",
    "prefill": "prefill",
    "decode": "decode",
    "paused": "engine paused for a weight sync",
    "tool": "in tools",
    "user": "in users and environments",
    "handling": "handling of its conversation (templates, parsing, waits)",
    "siblings": "waiting for the rest of its group",
    "reward": "being scored",
    "payload": "written, and offered to the queue",
    "ready": "waiting in the queue",
    "leased": "leased, its step had not begun",
    "training": "in its training step",
    "other": "anything else",
}
"""Where a trajectory is, from the ask for a permit until its gradient is in a step; every second is in one of these."""

PHASES = ("gate", "queued", "prefill", "decode", "paused")
"""Of a request."""


@dataclass(frozen=True, slots=True)
class Lives:
    steps: pd.DataFrame
    """The `step` events that survived, by step."""
    abandoned: pd.DataFrame
    """Those from which training went back."""
    trained_in: pd.Series
    """Feed index → the surviving step that trained the sample."""
    samples: pd.DataFrame
    """By feed index, of trained samples: `sample, step`, the times `begin, admitted, generated, ready, leased,
    trained`, and the waits between them."""
    trajectories: pd.DataFrame
    """Of trained samples: `index, trajectory, step, whole` and seconds by `KINDS`; they add up to `whole`."""

    def step_of(self, index: pd.Series, own: pd.Series) -> pd.Series:
        """Of whatever has a sample: the step that trained it, or else the one under way at the time."""
        return index.map(self.trained_in).fillna(own).astype("int64")


def trace(events: Events, requests: pd.DataFrame) -> Lives:
    """`requests`: see `requests.logical`."""
    steps, abandoned = _surviving(events.of("step"))
    trained = _surviving_samples(events.of("sample.trained"), events.of("step"))
    samples = _samples(events, trained, steps)
    trained_in = trained.set_index("index")["step"]
    return Lives(steps, abandoned, trained_in, samples, _trajectories(events, samples, requests))


# ---------------------------------------------------------------------------------------------- lineages


def _surviving(steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Once a later lineage has gone on from before a step, that step is of another future."""
    lineage = steps["lineage"].fillna(0)
    first = steps.groupby(lineage)["step"].min()
    gone = np.zeros(len(steps), dtype=bool)
    for later, begun in first.items():
        gone |= ((lineage < later) & (steps["step"] >= begun)).to_numpy()
    kept = steps[~gone].drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    return kept, steps[gone].reset_index(drop=True)


def _surviving_samples(trained: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`sample.trained` says no lineage: it is the one that was under way at its time."""
    trained = trained[trained["index"] > 0]
    lineage = steps["lineage"].fillna(0)
    begun = steps.groupby(lineage).agg(at=("timestamp", "min"), step=("step", "min"))
    gone = np.zeros(len(trained), dtype=bool)
    for later, row in begun.iterrows():
        if later > begun.index[0]:
            gone |= ((trained["timestamp"] < row["at"]) & (trained["step"] >= row["step"])).to_numpy()
    return trained[~gone].drop_duplicates("index", keep="last")


# ---------------------------------------------------------------------------------------------- samples


def newest(frame: pd.DataFrame, column: str) -> pd.Series:
    """By feed index; of a sample that was generated twice, the second time."""
    frame = frame[frame["index"] > 0].drop_duplicates("index", keep="last")
    return frame.set_index("index")[column]


def _samples(events: Events, trained: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    found = trained[["index", "sample", "step"]].set_index("index")
    found["trained"] = trained.set_index("index")["timestamp"]
    for name, event, column in (
        ("admitted", "sample.admitted", "timestamp"),
        ("permit", "sample.admitted", "permit_wait_s"),
        ("slot", "sample.slot", "duration_s"),
        ("begun", "sample.generate", "timestamp"),
        ("generated", "sample.generate", "end"),
        ("reward_s", "sample.reward", "duration_s"),
        ("payload_s", "sample.payload", "duration_s"),
        ("offer_s", "sample.offer", "duration_s"),
        ("ready", "sample.ready", "timestamp"),
        ("leased", "sample.leased", "timestamp"),
    ):
        found[name] = newest(events.of(event), column).reindex(found.index)
    waits = ["permit", "slot", "reward_s", "payload_s", "offer_s"]
    found[waits] = found[waits].fillna(0.0).clip(lower=0.0)
    found["admitted"] = found["admitted"].fillna(found["begun"])
    found["begin"] = found["admitted"] - found["permit"]
    found["ready"] = found["ready"].fillna(found["generated"] + found["reward_s"])
    found["leased"] = found["leased"].where(found["leased"] <= found["trained"]).fillna(found["trained"])
    update = events.of("trainer.update")
    begins = _last_before(update, found["step"], found["trained"])
    found["training_from"] = np.fmax(begins, found["leased"])
    return found[found["begin"].notna()]


def _last_before(update: pd.DataFrame, steps: pd.Series, times: pd.Series) -> NDArray[np.float64]:
    """When the update of each step began, of the last one that had begun by `times`; nan: there is none."""
    starts = {step: own.to_numpy() for step, own in update.groupby("step")["timestamp"]}
    told = np.full(len(steps), np.nan)
    for place, (step, time) in enumerate(zip(steps, times, strict=True)):
        found = starts.get(step, ())
        at = np.searchsorted(found, time, side="right")
        if at:
            told[place] = found[at - 1]
    return told


def _with_legs(events: Events, rows: pd.DataFrame) -> pd.Series:
    """How long each of these trajectories took, with what came before its generation was cut and gone on with."""
    keys = ["index", "trajectory"]
    legs = events.of("trajectory")
    legs = legs[(legs["finish_reason"] == "aborted") & legs["index"].isin(rows["index"])]
    admitted = legs["index"].map(newest(events.of("sample.admitted"), "timestamp"))
    before = legs[legs["timestamp"] >= admitted - CLOCKS_S].groupby(keys)["duration_s"].sum()
    return rows["duration_s"] + before.reindex(pd.MultiIndex.from_frame(rows[keys])).fillna(0.0).to_numpy()


def _trajectories(events: Events, samples: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    rows = whole_trajectories(events)
    rows = rows[rows["index"].isin(samples.index)].reset_index(drop=True)
    of_sample = samples.reindex(rows["index"]).reset_index(drop=True)
    keys = ["index", "trajectory"]
    phases = requests[requests["counts"]].groupby(keys)[[f"{phase}_s" for phase in PHASES]].sum()
    inside = rows[keys].merge(phases, left_on=keys, right_index=True, how="left").fillna(0.0)
    found = rows[keys].copy()
    found["step"] = of_sample["step"].astype("int64")
    found["end"] = rows["end"]
    kinds = pd.DataFrame(index=found.index)
    kinds["permit"], kinds["slot"] = of_sample["permit"], of_sample["slot"]
    for phase in PHASES:
        kinds[phase] = inside[f"{phase}_s"].to_numpy()
    kinds["tool"], kinds["user"] = rows["tool_s"].fillna(0.0), rows["user_s"].fillna(0.0)
    inside_s = kinds[[*PHASES, "tool", "user"]].fillna(0.0).sum(axis=1)
    kinds["handling"] = _with_legs(events, rows) - inside_s
    kinds["siblings"] = of_sample["generated"] - rows["end"]
    kinds["reward"] = of_sample["reward_s"]
    kinds["payload"] = of_sample["payload_s"] + of_sample["offer_s"]
    kinds["ready"] = of_sample["leased"] - of_sample["ready"]
    kinds["leased"] = of_sample["training_from"] - of_sample["leased"]
    kinds["training"] = of_sample["trained"] - of_sample["training_from"]
    kinds = kinds.fillna(0.0).clip(lower=0.0)
    known = kinds.sum(axis=1)
    # What is known may overlap a little, by the clocks of several machines.
    found["whole"] = np.maximum(of_sample["trained"] - of_sample["begin"], known)
    kinds["other"] = found["whole"] - known
    return pd.concat([found, kinds[list(KINDS)]], axis=1)
