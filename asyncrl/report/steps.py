"""Steps: how long each took, which stand out, and what held them up. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from asyncrl.report.lives import KINDS, Lives
from asyncrl.report.load import Events
from asyncrl.report.numbers import done_early, robust_sigma, spread
from asyncrl.report.requests import row as request_row

SIGMAS = 5.0
LEAST_RATIO = 1.25
"""An outlier is longer than the median by so many robust standard deviations, and by so much at least."""
MOST_OUTLIERS = 20
_CLOCK_S = 1e-3
"""By which the end of an event and the begin of the next may seem to overlap."""
_PARTS = {
    "trainer.experience": "log-probs and advantages",
    "trainer.critic": "the critic",
    "trainer.update": "the update of the policy",
    "trainer.publish": "publishing weights",
}
_CHECKPOINT = "a checkpoint behind it"
_LEAVES = ("tool.execute", "user.step", "reward.score", "agent.run", "request", "sync.load", "sync.pause", "sync.fetch",
           *_PARTS, "trainer.checkpoint", "loop.stall")  # fmt: skip
"""Events that may be the one that a step waited for."""


def analyse(events: Events, lives: Lives, requests: pd.DataFrame, start: float) -> dict[str, Any]:
    """`requests`: with `step` as the report counts it. Times are seconds since `start`.

    Training stands still for a checkpoint between two steps: it counts for the one before it, whose duration here is
    longer by it than that of its event.
    """
    steps = _with_checkpoints(events, lives)
    parts = _parts(events, steps)
    durations = steps["duration_s"].to_numpy()
    median = float(np.median(durations)) if len(steps) else 0.0
    threshold = max(median + SIGMAS * robust_sigma(durations), LEAST_RATIO * median)
    outliers = steps[steps["duration_s"] > threshold].nlargest(MOST_OUTLIERS, "duration_s")["step"].tolist()
    of_step = {step: frame for step, frame in requests.groupby("step")}
    table = []
    for place, row in steps.iterrows():
        own = of_step.get(row["step"])
        table.append(
            {
                "step": row["step"],
                "at_s": row["timestamp"] - start,
                "duration_s": row["duration_s"],
                "samples": row["samples"],
                "tokens": row["tokens"],
                "reward": row["reward"],
                "requests": 0 if own is None else len(own),
                "done_early": None if own is None else done_early(own["duration_s"].to_numpy()),
                "parts": parts.loc[place].to_dict(),
                "outlier": row["step"] in outliers,
            }
        )
    chosen = steps[steps["step"].isin(outliers)]
    typical = {event: _typical(events.of(event)) for event in _LEAVES} if len(chosen) else {}
    return {
        "durations": spread(durations),
        "threshold_s": threshold,
        "rule": f"longer than the median by {SIGMAS:g} robust standard deviations and by {LEAST_RATIO - 1:.0%}",
        "by_step": table,
        "outliers": [
            _outlier(events, lives, of_step.get(row["step"]), row, parts.loc[place], parts.median(), typical)
            for place, row in chosen.iterrows()
        ],
        "abandoned": [
            {"step": row["step"], "lineage": row["lineage"], "duration_s": row["duration_s"]}
            for _, row in lives.abandoned.iterrows()
        ],
    }


def _with_checkpoints(events: Events, lives: Lives) -> pd.DataFrame:
    """The steps that survived, with `checkpoint_s` of the checkpoint behind each, and longer by it."""
    steps = lives.steps.assign(checkpoint_s=0.0)
    # A checkpoint behind an abandoned step is of no other one.
    ends = pd.concat([steps["end"], lives.abandoned["end"].set_axis([-1] * len(lives.abandoned))]).sort_values()
    own = events.of("trainer.checkpoint")
    place = np.searchsorted(ends.to_numpy(), own["timestamp"].to_numpy() + _CLOCK_S, side="right") - 1
    behind = pd.Series(np.append(ends.index.to_numpy(dtype="int64"), -1)[place], index=own.index)
    by = own[behind >= 0].groupby(behind)
    steps.loc[by.size().index, "checkpoint_s"] = by["duration_s"].sum()
    steps.loc[by.size().index, "end"] = by["end"].max()
    return steps.assign(duration_s=steps["duration_s"] + steps["checkpoint_s"])


def _parts(events: Events, steps: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each step by what the Trainer did, by row of `steps`."""
    found = pd.DataFrame(index=steps.index)
    found["waiting for samples"] = steps["wait_samples_s"].fillna(0.0)
    for event, name in _PARTS.items():
        own = events.of(event)
        place = np.searchsorted(steps["end"].to_numpy(), own["timestamp"].to_numpy(), side="right")
        # The events of a step lie within it; those of an abandoned one of the same number do not.
        inside = place < len(steps)
        own, place = own[inside], place[inside]
        within = own["timestamp"].to_numpy() >= steps["timestamp"].to_numpy()[place] - _CLOCK_S
        seconds = np.bincount(place[within], own["duration_s"].to_numpy()[within], minlength=len(steps))
        found[name] = seconds[: len(steps)]
    found[_CHECKPOINT] = steps["checkpoint_s"]
    known = found.sum(axis=1)
    found["the rest"] = (steps["duration_s"] - known).clip(lower=0.0)
    return found


# ---------------------------------------------------------------------------------------------- one that stands out


def _outlier(
    events: Events,
    lives: Lives,
    requests: pd.DataFrame | None,
    step: pd.Series,
    parts: pd.Series,
    usual: pd.Series,
    typical: dict[str, pd.Series],
) -> dict[str, Any]:
    excess = (parts - usual).sort_values(ascending=False)
    part = str(excess.index[0])
    last = _last_sample(lives, int(step["step"]))
    cause = f"{part} took {parts[part]:.1f} s, usually {usual[part]:.1f} s"
    if part == "waiting for samples" and last is not None:
        cause += f": {last['text']}"
    begin = float(step["timestamp"])
    if last is not None:
        begin = min(begin, last["begin"])
    return {
        "step": step["step"],
        "duration_s": step["duration_s"],
        "cause": cause,
        "part": part,
        "last_sample": None if last is None else last["sample"],
        "replica": _slowest_replica(requests),
        "request": None if requests is None else request_row(requests.loc[requests["duration_s"].idxmax()]),
        "turn": _slowest_turn(events, lives, requests, int(step["step"])),
        "event": _event(events, begin, float(step["end"]), typical),
    }


def _last_sample(lives: Lives, step: int) -> dict[str, Any] | None:
    """The one that the step's lease waited for, and what took it longer than others."""
    samples = lives.samples[(lives.samples["step"] == step) & lives.samples["ready"].notna()]
    if not len(samples):
        return None
    last = samples.loc[samples["ready"].idxmax()]
    told = {"sample": last["sample"], "begin": float(last["begin"]), "text": f"{last['sample']} came last"}
    own = lives.trajectories[lives.trajectories["index"] == last.name]
    if len(own):
        slow = own.loc[own["end"].idxmax()]
        kinds = [kind for kind in KINDS if kind not in ("siblings", "ready", "leased", "training")]
        more = (slow[kinds].astype("float64") - lives.trajectories[kinds].median()).sort_values(ascending=False)
        kind = str(more.index[0])
        told["text"] += f", after {slow[kind]:.1f} s {KINDS[kind]}"
    return told


def _slowest_replica(requests: pd.DataFrame | None) -> dict[str, Any] | None:
    if requests is None or not (requests["response_tokens"] > 0).any():
        return None
    by = requests.groupby("replica", observed=True)[["decode_s", "response_tokens"]].sum()
    if not len(by):
        return None
    rates = (by["decode_s"] / by["response_tokens"].clip(lower=1)).sort_values()
    peers = float(rates.iloc[:-1].median()) if len(rates) > 1 else None
    return {"replica": rates.index[-1], "decode_s_per_token": rates.iloc[-1], "peers_s_per_token": peers}


def _slowest_turn(events: Events, lives: Lives, requests: pd.DataFrame | None, step: int) -> dict[str, Any] | None:
    """Of all turns of samples of this step: generation, and the tools and users that answered it."""
    keys = ["index", "trajectory", "turn"]
    pieces = [] if requests is None else [requests[keys].assign(kind="generation", s=requests["duration_s"])]
    members = lives.samples.index[lives.samples["step"] == step]
    for event, kind in (("tool.execute", "tool"), ("user.step", "user")):
        own = events.of(event)
        own = own[own["index"].isin(members)]
        pieces.append(own[keys].assign(kind=kind, s=own["duration_s"]))
    rows = pd.concat(pieces, ignore_index=True)
    if not len(rows):
        return None
    sums = rows.pivot_table(index=keys, columns="kind", values="s", aggfunc="sum", fill_value=0.0)
    index, trajectory, turn = sums.sum(axis=1).idxmax()
    own = sums.loc[(index, trajectory, turn)]
    sample = lives.samples["sample"].get(index, f"feed index {index}")
    return {"sample": sample, "trajectory": trajectory, "turn": turn, "seconds": own.to_dict(), "total_s": own.sum()}


def _typical(frame: pd.DataFrame) -> pd.Series:
    """Median by what the event is about: its tool, or itself."""
    return frame["duration_s"].groupby(_about(frame)).median()


def _about(frame: pd.DataFrame) -> pd.Series:
    return frame["tool"].astype("str").fillna("") if "tool" in frame else pd.Series("", index=frame.index)


def _event(events: Events, begin: float, end: float, typical: dict[str, pd.Series]) -> dict[str, Any] | None:
    """Of everything that overlaps the time of the step, what took longest beyond what is usual for it."""
    best: dict[str, Any] | None = None
    for name in _LEAVES:
        frame = events.of(name)
        frame = frame[(frame["timestamp"] < end) & (frame["end"] > begin)]
        if not len(frame):
            continue
        usual = _about(frame).map(typical[name])
        excess = frame["duration_s"] - usual
        place = excess.idxmax()
        if best is None or excess[place] > best["excess_s"]:
            found = frame.loc[place]
            best = {
                "event": name,
                "name": str(found["tool"]) if "tool" in frame else name,
                "duration_s": found["duration_s"],
                "usual_s": usual[place],
                "excess_s": excess[place],
                "sample": None if pd.isna(found["sample"]) else found["sample"],
                "trajectory": found["trajectory"],
                "turn": found["turn"],
                "replica": None if pd.isna(found["replica"]) else found["replica"],
            }
    return best
