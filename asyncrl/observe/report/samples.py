"""Trace samples and trajectories: where their time went, their turns, and which of them held up the Trainer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.requests import (
    CLOCK_SKEW_S,
    PHASES,
    TRAJECTORY_KEYS,
    completed_trajectories,
    newest,
)
from asyncrl.observe.report.statistics import Intervals, histogram, spans, summarize

KINDS = {
    "permit": "waiting for a permit",
    "slot": "waiting for a generation slot",
    "gate": "held back while weights were loaded",
    "queued": "queued in the engine",
    "prefill": "prefill",
    "decode": "decode",
    "paused": "engine paused for a weight sync",
    "tool": "in tools",
    "user": "in users and environments",
    "handling": "handling of its conversation (templates, parsing, waits)",
    "siblings": "waiting for the rest of its group",
    "reward": "being scored",
    "payload": "being written and offered to the queue",
    "ready": "waiting in the queue",
    "leased": "leased, before its step began",
    "training": "in its training step",
    "other": "anything else",
}
"""The kinds of a trajectory's time, from the request for a permit until its gradient is in a step; they are
disjoint."""
MAX_PERIODS = 120
"""Largest number of periods, each of consecutive steps, for the shares over the course of a run."""
MAX_TURNS = 50
"""Largest number of turns that have a row."""
UNKNOWN_TOOLS = "(unknown tools)"
"""Replaces the names of tools that do not exist, because a model may invent any number of names."""
_SLOT_WAIT_S = 0.1
"""A sample that gets its permit or slot sooner did not wait for it."""
_ROUNDING_S = 1e-3


@dataclass(frozen=True, slots=True)
class TracedSamples:
    """The histories of trained samples and their trajectories, and all steps."""

    steps: pd.DataFrame
    """The `step` events of the final steps, those that were not abandoned, by step."""
    abandoned: pd.DataFrame
    """Steps that were undone when training went back to a checkpoint."""
    trained_in: pd.Series
    """Feed index → the final step that trained the sample."""
    samples: pd.DataFrame
    """Rows by feed index: `sample, step`, the times `begin, admitted, generated, ready, leased, trained`, and the waits
    between them."""
    trajectories: pd.DataFrame
    """`index, trajectory, step, end, lifetime`, and seconds by `KINDS`, which add up to `lifetime`."""

    def step_of(self, index: pd.Series, current: pd.Series) -> pd.Series:
        """Return the step that trained each sample, or else the step current at the time."""
        return index.map(self.trained_in).fillna(current).astype("int64")


def trace_samples(events: Events, requests: pd.DataFrame) -> TracedSamples:
    """Trace each trained sample; `requests` as from `logical_requests`."""
    steps, abandoned = _split_lineages(events["step"])
    trained = _finally_trained(events["sample.trained"], events["step"])
    samples = _samples(events, trained)
    trained_in = trained.set_index("index")["step"]
    return TracedSamples(steps, abandoned, trained_in, samples, _trajectories(events, samples, requests))


def _split_lineages(steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return final and abandoned steps: a step is abandoned once a later lineage starts at it or before it."""
    lineage = steps["lineage"].fillna(0)
    abandoned = np.zeros(len(steps), dtype=bool)
    for later, first_step in steps.groupby(lineage)["step"].min().items():
        abandoned |= ((lineage < later) & (steps["step"] >= first_step)).to_numpy()
    final = steps[~abandoned].drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)
    return final, steps[abandoned].reset_index(drop=True)


def _finally_trained(trained: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return `sample.trained` of the final steps; these events have no lineage, but their time implies it."""
    trained = trained[trained["index"] > 0]
    lineages = steps.groupby(steps["lineage"].fillna(0)).agg(at=("timestamp", "min"), step=("step", "min"))
    abandoned = np.zeros(len(trained), dtype=bool)
    for _, later in lineages.iloc[1:].iterrows():
        abandoned |= ((trained["timestamp"] < later["at"]) & (trained["step"] >= later["step"])).to_numpy()
    return trained[~abandoned].drop_duplicates("index", keep="last")


def _samples(events: Events, trained: pd.DataFrame) -> pd.DataFrame:
    samples = trained[["index", "sample", "step"]].set_index("index")
    samples["trained"] = trained.set_index("index")["timestamp"]
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
        samples[name] = newest(events[event], column).reindex(samples.index)
    waits = ["permit", "slot", "reward_s", "payload_s", "offer_s"]
    samples[waits] = samples[waits].fillna(0.0).clip(lower=0.0)
    samples["admitted"] = samples["admitted"].fillna(samples["begun"])
    samples["begin"] = samples["admitted"] - samples["permit"]
    samples["ready"] = samples["ready"].fillna(samples["generated"] + samples["reward_s"])
    samples["leased"] = samples["leased"].where(samples["leased"] <= samples["trained"]).fillna(samples["trained"])
    # The last update of its step that had begun when the sample was trained.
    updates = events["trainer.update"][["step", "timestamp"]].assign(
        training_from=events["trainer.update"]["timestamp"]
    )
    trained_at = samples[["step", "trained"]].reset_index().sort_values("trained")
    began = pd.merge_asof(trained_at, updates, left_on="trained", right_on="timestamp", by="step").set_index("index")
    samples["training_from"] = np.fmax(began["training_from"].reindex(samples.index), samples["leased"])
    return samples[samples["begin"].notna()]


def _trajectories(events: Events, samples: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    rows = completed_trajectories(events)
    rows = rows[rows["index"].isin(samples.index)].reset_index(drop=True)
    of_sample = samples.reindex(rows["index"]).reset_index(drop=True)
    sums = requests[requests["of_last_generation"]].groupby(TRAJECTORY_KEYS)[[f"{phase}_s" for phase in PHASES]].sum()
    phases = rows[TRAJECTORY_KEYS].merge(sums, left_on=TRAJECTORY_KEYS, right_index=True, how="left").fillna(0.0)
    kinds = pd.DataFrame({"permit": of_sample["permit"], "slot": of_sample["slot"]}, index=rows.index)
    for phase in PHASES:
        kinds[phase] = phases[f"{phase}_s"].to_numpy()
    kinds["tool"], kinds["user"] = rows["tool_s"].fillna(0.0), rows["user_s"].fillna(0.0)
    kinds["handling"] = _generation_s(events, rows) - kinds[[*PHASES, "tool", "user"]].fillna(0.0).sum(axis=1)
    kinds["siblings"] = of_sample["generated"] - rows["end"]
    kinds["reward"] = of_sample["reward_s"]
    kinds["payload"] = of_sample["payload_s"] + of_sample["offer_s"]
    kinds["ready"] = of_sample["leased"] - of_sample["ready"]
    kinds["leased"] = of_sample["training_from"] - of_sample["leased"]
    kinds["training"] = of_sample["trained"] - of_sample["training_from"]
    kinds = kinds.fillna(0.0).clip(lower=0.0)
    known = kinds.sum(axis=1)
    trajectories = rows[[*TRAJECTORY_KEYS, "end"]].assign(step=of_sample["step"].astype("int64"))
    # The known kinds may overlap a little where the clocks of several machines differ.
    trajectories["lifetime"] = np.maximum(of_sample["trained"] - of_sample["begin"], known)
    kinds["other"] = trajectories["lifetime"] - known
    return pd.concat([trajectories, kinds[list(KINDS)]], axis=1)


def _generation_s(events: Events, rows: pd.DataFrame) -> pd.Series:
    """Return the duration of each trajectory, including the parts before its generation was cut and resumed."""
    cut = events["trajectory"]
    cut = cut[(cut["finish_reason"] == "aborted") & cut["index"].isin(rows["index"])]
    admitted = cut["index"].map(newest(events["sample.admitted"], "timestamp"))
    before = cut[cut["timestamp"] >= admitted - CLOCK_SKEW_S].groupby(TRAJECTORY_KEYS)["duration_s"].sum()
    keys = pd.MultiIndex.from_frame(rows[TRAJECTORY_KEYS])
    return rows["duration_s"] + before.reindex(keys).fillna(0.0).to_numpy()


# ---------------------------------------------------------------------------------------------- shares


def share_figures(histories: TracedSamples) -> dict[str, Any]:
    """Return the shares of each kind, in percent of a trajectory's lifetime, averaged over trajectories."""
    rows = histories.trajectories[histories.trajectories["lifetime"] > 0]
    kinds = list(KINDS)
    percent = rows[kinds].div(rows["lifetime"], axis=0) * 100
    columns = {"percent": percent.mean(), "mean_s": rows[kinds].mean(), "p95_s": rows[kinds].quantile(0.95)}
    table = pd.DataFrame({"meaning": KINDS, **columns, "max_s": rows[kinds].max()}).rename_axis("kind").reset_index()
    by_period = []
    for period in _periods(rows["step"]):
        means = percent[rows["step"].isin(period)].mean().to_dict()
        by_period.append({"first_step": period[0], "last_step": period[-1], "percent": means})
    return {
        "trajectories": len(rows),
        "lifetime_s_mean": rows["lifetime"].mean() if len(rows) else None,
        "table": table.sort_values("percent", ascending=False, kind="stable").to_dict("records") if len(rows) else [],
        "by_step": by_period,
        "lifetimes": _lifetimes(rows),
    }


def _periods(steps: pd.Series) -> list[list[int]]:
    """Return the steps in ascending order, in at most `MAX_PERIODS` parts."""
    found = sorted(steps.unique())
    size = max(1, math.ceil(len(found) / MAX_PERIODS))
    return [found[start : start + size] for start in range(0, len(found), size)]


def _lifetimes(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the mean seconds of each kind for samples with about the median lifetime, and with about the 95th
    percentile.

    The lifetime of a sample is that of the trajectory for which the rest of its group waited.
    """
    longest = rows.sort_values("end", kind="stable").drop_duplicates("index", keep="last")
    longest = longest.sort_values("lifetime", kind="stable", ignore_index=True)
    result = []
    for name, quantile, low, high in (("median", 0.5, 0.45, 0.55), ("p95", 0.95, 0.93, 0.97)):
        first = min(int(low * len(longest)), len(longest) - 1)
        near = longest.iloc[max(0, first) : max(first + 1, int(high * len(longest)))]
        if len(near):
            result.append(
                {
                    "which": name,
                    "samples": len(near),
                    "lifetime_s": near["lifetime"].mean(),
                    "quantile_s": longest["lifetime"].quantile(quantile),
                    "seconds": near[list(KINDS)].mean().to_dict(),
                }
            )
    return result


# ---------------------------------------------------------------------------------------------- turns


def turn_figures(events: Events, requests: pd.DataFrame, histories: TracedSamples) -> dict[str, Any]:
    """Return how many turns trajectories take, and what each costs on average over the trajectories that take it: over
    the run, by number of turns, and by the step that trained them."""
    trajectories = completed_trajectories(events)
    trajectories = trajectories[trajectories["turns"].notna()]
    trajectories = trajectories.assign(step=histories.step_of(trajectories["index"], trajectories["step"]))
    turns = trajectories["turns"].to_numpy()
    requests = requests[requests["turn"] >= 0]
    by_turn = requests.groupby("turn").agg(
        requests=("duration_s", "size"),
        generation_s=("duration_s", "mean"),
        generation_s_p95=("duration_s", lambda values: values.quantile(0.95)),
        generation_s_max=("duration_s", "max"),
    )
    between: dict[str, pd.DataFrame] = {}
    for name, event in (("tool_s", "tool.execute"), ("user_s", "user.step")):
        calls = events[event]
        calls = calls[calls["index"] > 0]
        between[name] = calls.assign(step=histories.step_of(calls["index"], calls["step"]))
        by_turn[name] = calls.groupby("turn")["duration_s"].sum() / by_turn["requests"]
    by_turn["tokens"] = requests.groupby("turn")["response_tokens"].mean()
    counts = histogram(turns)
    return {
        "trajectories": len(turns),
        "turns": summarize(turns),
        "by_turn": by_turn.fillna(0.0).head(MAX_TURNS).reset_index().to_dict("records"),
        "by_number": _by_number_of_turns(trajectories),
        "by_step": _turns_by_step(trajectories, requests, between),
        "histogram": counts,
        "percent": {turn: 100 * number / len(turns) for turn, number in counts.items()},
        "tools": _tools(events["tool.execute"]),
    }


def _by_number_of_turns(trajectories: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the mean seconds of the trajectories that take a number of turns, and the parts of that time."""
    rows = trajectories.assign(turns=trajectories["turns"].astype("int64"))
    rows[["tool_s", "user_s"]] = rows[["tool_s", "user_s"]].fillna(0.0)
    found = rows.groupby("turns").agg(
        trajectories=("duration_s", "size"),
        duration_s=("duration_s", "mean"),
        duration_s_p95=("duration_s", lambda values: values.quantile(0.95)),
        tool_s=("tool_s", "mean"),
        user_s=("user_s", "mean"),
    )
    found["generation_s"] = (found["duration_s"] - found["tool_s"] - found["user_s"]).clip(lower=0.0)
    return found.head(MAX_TURNS).reset_index().to_dict("records")


def _turns_by_step(
    trajectories: pd.DataFrame, requests: pd.DataFrame, between: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """Return for each period of steps the mean seconds of each turn, with the tools and users after it, and how many
    percent of the trajectories take each number of turns."""
    result = []
    for period in _periods(trajectories["step"]):
        own = requests[requests["step"].isin(period)].groupby("turn")["duration_s"]
        turns = pd.DataFrame({"requests": own.size(), "generation_s": own.mean()})
        for name, calls in between.items():
            turns[name] = calls[calls["step"].isin(period)].groupby("turn")["duration_s"].sum() / turns["requests"]
        counts = histogram(trajectories.loc[trajectories["step"].isin(period), "turns"].to_numpy())
        total = sum(counts.values())
        result.append(
            {
                "first_step": period[0],
                "last_step": period[-1],
                "trajectories": total,
                "turns": turns.fillna(0.0).head(MAX_TURNS).reset_index().to_dict("records"),
                "percent": {number: 100 * count / total for number, count in counts.items()},
            }
        )
    return result


def _tools(calls: pd.DataFrame) -> list[dict[str, Any]]:
    existing = calls.loc[(calls["duration_s"] > 0) | ~calls["status"].isin(("unknown_tool", "too_many")), "tool"]
    names = calls["tool"].astype("str").where(calls["tool"].isin(existing) & (calls["tool"] != ""), UNKNOWN_TOOLS)
    rows = []
    for tool, own in calls.groupby(names):
        statuses = own["status"].value_counts().loc[lambda counts: counts > 0].to_dict()
        durations = summarize(own["duration_s"].to_numpy()) or {}
        rows.append({"tool": tool, **durations, "wait_s": own["wait_s"].sum(), "status": statuses})
    return sorted(rows, key=lambda row: -row["sum"])


# ---------------------------------------------------------------------------------------------- the critical path


class CriticalPath:
    """The samples that the Trainer waited for, from its last wait back to the start of the run.

        wait ◀─ reward ◀─ generation ◀─┬─ a permit ◀─ the Trainer's work ◀─ the wait before it ◀─ …
                                       └─ a slot ◀─ generation of the sample that had the slot ◀─ …

    With many samples in flight, some reward is running at nearly every moment, and the Trainer would have waited
    without it too: only a faster call on this path would have shortened the run.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._scored: list[int] = []
        self._generated: list[int] = []
        self._walk()
        trajectories = completed_trajectories(events).sort_values("end", kind="stable")
        longest = trajectories.drop_duplicates("index", keep="last")
        self._longest = pd.MultiIndex.from_frame(longest[TRAJECTORY_KEYS])

    def rewards(self) -> Intervals:
        """Return when samples on the path were scored."""
        rows = self._events["sample.reward"].drop_duplicates("index", keep="last")
        return spans(rows[rows["index"].isin(self._scored)])

    def calls(self, calls: pd.DataFrame) -> Intervals:
        """Return when trajectories on the path made these calls; of a group, only its last trajectory counts."""
        of_longest = pd.MultiIndex.from_frame(calls[TRAJECTORY_KEYS]).isin(self._longest)
        return spans(calls[of_longest & calls["index"].isin(self._generated)])

    def _walk(self) -> None:
        waits, leased = self._events["trainer.wait_samples"], self._events["sample.leased"]
        begins, ends = waits["timestamp"].to_numpy(), waits["end"].to_numpy()
        leased_at, leased_index = leased["timestamp"].to_numpy(), leased["index"].to_numpy()
        ready_by_index = newest(self._events["sample.ready"], "timestamp")
        ready_at = leased["index"].map(ready_by_index).to_numpy(dtype="float64")
        samples = self._by_end_of_generation()
        place = len(waits) - 1
        while place >= 0:
            begin, end = begins[place], ends[place]
            place -= 1
            first, behind = np.searchsorted(leased_at, [begin - _ROUNDING_S, end + _ROUNDING_S])
            ready = ready_at[first:behind]
            late = np.flatnonzero((ready > begin) & (ready <= end + CLOCK_SKEW_S))
            if not len(late):
                continue  # all of its samples were ready before
            index = int(leased_index[first + late[ready[late].argmax()]])
            self._scored.append(index)
            generated, permitted_at = _generation_chain(samples, index)
            self._generated += generated
            # The permit came from the work that followed an earlier wait.
            place = min(place, int(np.searchsorted(ends, permitted_at + _ROUNDING_S, side="right")) - 1)

    def _by_end_of_generation(self) -> pd.DataFrame:
        generated, admitted = self._events["sample.generate"], self._events["sample.admitted"]
        samples = pd.DataFrame({"begun": newest(generated, "timestamp"), "generated": newest(generated, "end")})
        samples["admitted"] = newest(admitted, "timestamp").reindex(samples.index).fillna(samples["begun"])
        samples["permit_s"] = newest(admitted, "permit_wait_s").reindex(samples.index).fillna(0.0)
        return samples.sort_values("generated", kind="stable")


def _generation_chain(samples: pd.DataFrame, index: int) -> tuple[list[int], float]:
    """Return this sample and those that had its slot before it, back to one that waited for a permit.

    Also returns the time when that one received its permit; -inf if none waited for a permit.
    """
    if index not in samples.index:
        return [], -np.inf
    begun, generated, admitted, permit_s = (samples[name].to_numpy() for name in samples.columns)
    chain = [int(samples.index.get_loc(index))]
    while True:
        at = chain[-1]
        had_slot = begun[at] - admitted[at] <= max(_SLOT_WAIT_S, permit_s[at])
        if had_slot and permit_s[at] > _SLOT_WAIT_S:
            return samples.index[chain].tolist(), float(admitted[at])
        freed_at = admitted[at] if had_slot else begun[at]
        before = int(np.searchsorted(generated, freed_at + _ROUNDING_S, side="right")) - 1
        while before >= 0 and begun[before] >= begun[at]:
            before -= 1
        if before < 0:
            return samples.index[chain].tolist(), -np.inf
        chain.append(before)
