"""Compute the durations of steps, what held up the steps that stand out, and the idle time of both sides. Pure.

An event is written when it ends, so the events of a run that is live or was killed lack whatever was still running. A
sample that was admitted and did not end counts as in generation, and so does a validation set that is being answered.
What the Trainer does after its last event is unknown, so its idle figures end there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.requests import request_row
from asyncrl.observe.report.samples import KINDS, TracedSamples
from asyncrl.observe.report.statistics import (
    EMPTY,
    Intervals,
    clip,
    complement,
    coverage,
    difference,
    done_early,
    intersection,
    robust_sigma,
    spans,
    summarize,
    total,
    union,
)
from asyncrl.profiling.rotation import EventSummary

SIGMAS, MIN_RATIO = 5.0, 1.25
"""An outlier exceeds the median by this many robust standard deviations, and by this ratio."""
MAX_OUTLIERS = 20
NUM_BINS = 240
OUTAGE_S = 60.0
"""During a longer time without any event, the run may have been down."""
_BUBBLE_S = 1.0
_ROUNDING_S = 1e-3
_PARTS = {
    "trainer.experience": "log-probs and advantages",
    "trainer.critic": "the critic",
    "trainer.update": "the update of the policy",
    "trainer.publish": "publishing weights",
}
_WAIT, _CHECKPOINT = "waiting for samples", "a checkpoint after it"
_CANDIDATES = (
    *("tool.execute", "user.step", "reward.score", "agent.run", "request", "sync.load", "sync.pause", "sync.fetch"),
    *(*_PARTS, "trainer.checkpoint", "loop.stall"),
)
"""Events that may have held up a step."""
_TRAINER_ACTIVITIES = ("step", "trainer.wait_samples", *_PARTS, "trainer.checkpoint")
"""A Trainer that trains is always in one of these."""
_TRAINER_EVENTS = (*_TRAINER_ACTIVITIES, "trainer.fetch", "trainer.commit", "sample.leased", "sample.trained")
MAX_POINTS = 1000
"""Most points of a curve."""
_ENDS_OF_GENERATION = ("sample.generate", "sample.dropped", "sample.ready")


# ---------------------------------------------------------------------------------------------- steps


def step_figures(events: Events, histories: TracedSamples, requests: pd.DataFrame, start: float) -> dict[str, Any]:
    """Return the duration of each step, its parts and the outliers; times are seconds since `start`.

    Training stands still while a checkpoint is saved between two steps. This time counts as part of the step before it,
    whose duration is therefore longer here than in its event.

    Args:
        requests: those that ended, with the `step` that trained their sample.
    """
    steps = _with_checkpoints(events, histories)
    parts = _parts(events, steps)
    durations = steps["duration_s"].to_numpy()
    median = float(np.median(durations)) if len(steps) else 0.0
    threshold = max(median + SIGMAS * robust_sigma(durations), MIN_RATIO * median)
    is_outlier = steps.loc[durations > threshold, "duration_s"].nlargest(MAX_OUTLIERS).index
    by_step = {step: frame for step, frame in requests.groupby("step")}
    table, outliers = [], []
    typical = {event: _typical(events[event]) for event in _CANDIDATES} if len(is_outlier) else {}
    for place, row in steps.iterrows():
        own = by_step.get(row["step"], requests.iloc[:0])
        table.append(
            {
                "step": row["step"],
                "at_s": max(0.0, row["timestamp"] - start),  # the first one begins before the first sample is fed
                **{name: row[name] for name in ("duration_s", "samples", "tokens", "reward")},
                "requests": len(own),
                "done_early": done_early(own["duration_s"].to_numpy()) if len(own) else None,
                "parts": parts.loc[place].to_dict(),
                "outlier": place in is_outlier,
            }
        )
        if place in is_outlier:
            outliers.append(_outlier(events, histories, own, row, parts.loc[place], parts.median(), typical))
    return {
        "durations": summarize(durations),
        "threshold_s": threshold,
        "rule": f"longer than the median by {SIGMAS:g} robust standard deviations and by {MIN_RATIO - 1:.0%}",
        "by_step": table,
        "outliers": outliers,
        "abandoned": histories.abandoned[["step", "lineage", "duration_s"]].to_dict("records"),
    }


def folded_figures(folded: EventSummary) -> dict[str, Any]:
    """Return what is left of the steps whose events were deleted, in spans of consecutive steps. Work that a rewind
    repeated is included."""
    spans = sorted(folded.spans, key=lambda span: span.first_step)
    return {
        "first_step": min(max(1, span.first_step) for span in spans),
        "last_step": max(span.last_step for span in spans),
        "events": sum(each.count for each in folded.events.values()),
        "samples": sum(span.samples for span in spans),
        "tokens": sum(span.tokens for span in spans),
        "spans": [
            {
                **{name: getattr(span, name) for name in ("first_step", "last_step", "samples", "tokens", "dropped")},
                "wall_s": span.end - span.begin,
                "step_s": span.duration_s / span.steps if span.steps else None,
                "wait_share": span.wait_samples_s / span.duration_s if span.duration_s else None,
                "reward": span.reward / span.samples if span.samples else None,
                "staleness": span.staleness / span.samples if span.samples else None,
                "requests": span.requests,
            }
            for span in spans
        ],
        "by_event": [
            {"event": name, "count": each.count, "mean_s": each.duration_s / max(1, each.count), "max_s": each.max_s}
            for name, each in sorted(folded.events.items())
        ],
    }


def _with_checkpoints(events: Events, histories: TracedSamples) -> pd.DataFrame:
    """Return the final steps, extended by `checkpoint_s` of the checkpoint after each."""
    steps = histories.steps.assign(checkpoint_s=0.0)
    # A checkpoint after an abandoned step belongs to no final one.
    ends = pd.concat([steps["end"], histories.abandoned["end"].set_axis([-1] * len(histories.abandoned))]).sort_values()
    checkpoints = events["trainer.checkpoint"]
    place = np.searchsorted(ends.to_numpy(), checkpoints["timestamp"].to_numpy() + _ROUNDING_S, side="right") - 1
    step = pd.Series(np.append(ends.index.to_numpy(dtype="int64"), -1)[place], index=checkpoints.index)
    by_step = checkpoints[step >= 0].groupby(step)
    steps.loc[by_step.size().index, "checkpoint_s"] = by_step["duration_s"].sum()
    steps.loc[by_step.size().index, "end"] = by_step["end"].max()
    return steps.assign(duration_s=steps["duration_s"] + steps["checkpoint_s"])


def _parts(events: Events, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds that the Trainer spent on each activity, for each row of `steps`."""
    parts = pd.DataFrame({_WAIT: steps["wait_samples_s"].fillna(0.0)}, index=steps.index)
    for event, name in _PARTS.items():
        own = events[event]
        place = np.searchsorted(steps["end"].to_numpy(), own["timestamp"].to_numpy(), side="right")
        # The events of a step lie within it; those of an abandoned step with the same number do not.
        inside = place < len(steps)
        own, place = own[inside], place[inside]
        within = own["timestamp"].to_numpy() >= steps["timestamp"].to_numpy()[place] - _ROUNDING_S
        seconds = np.bincount(place[within], own["duration_s"].to_numpy()[within], minlength=len(steps))
        parts[name] = seconds[: len(steps)]
    parts[_CHECKPOINT] = steps["checkpoint_s"]
    parts["the rest"] = (steps["duration_s"] - parts.sum(axis=1)).clip(lower=0.0)
    return parts


def _outlier(
    events: Events,
    histories: TracedSamples,
    requests: pd.DataFrame,
    step: pd.Series,
    parts: pd.Series,
    usual: pd.Series,
    typical: dict[str, pd.Series],
) -> dict[str, Any]:
    part = str((parts - usual).sort_values(ascending=False).index[0])
    cause = f"{part} took {parts[part]:.1f} s, usually {usual[part]:.1f} s"
    begin, last_sample = float(step["timestamp"]), None
    samples = histories.samples[(histories.samples["step"] == step["step"]) & histories.samples["ready"].notna()]
    if len(samples):
        last = samples.loc[samples["ready"].idxmax()]
        begin, last_sample = min(begin, float(last["begin"])), last["sample"]
        if part == _WAIT:
            cause += f": {last_sample} came last{_slowest_kind(histories, last.name)}"
    return {
        "step": step["step"],
        "duration_s": step["duration_s"],
        "cause": cause,
        "part": part,
        "last_sample": last_sample,
        "replica": _slowest_replica(requests),
        "request": request_row(requests.loc[requests["duration_s"].idxmax()]) if len(requests) else None,
        "turn": _slowest_turn(events, histories, requests, step["step"]),
        "event": _slowest_event(events, begin, float(step["end"]), typical),
    }


def _slowest_kind(histories: TracedSamples, index: Any) -> str:
    """Describe what took longer in the sample's longest trajectory than in other trajectories."""
    own = histories.trajectories[histories.trajectories["index"] == index]
    if not len(own):
        return ""
    slow = own.loc[own["end"].idxmax()]
    kinds = [kind for kind in KINDS if kind not in ("siblings", "ready", "leased", "training")]
    excess = (slow[kinds].astype("float64") - histories.trajectories[kinds].median()).sort_values(ascending=False)
    kind = str(excess.index[0])
    return f", after {slow[kind]:.1f} s {KINDS[kind]}"


def _slowest_replica(requests: pd.DataFrame) -> dict[str, Any] | None:
    by_replica = requests.groupby("replica", observed=True)[["decode_s", "response_tokens"]].sum()
    if not (by_replica["response_tokens"] > 0).any():
        return None
    rates = (by_replica["decode_s"] / by_replica["response_tokens"].clip(lower=1)).sort_values()
    peers = float(rates.iloc[:-1].median()) if len(rates) > 1 else None
    return {"replica": rates.index[-1], "decode_s_per_token": rates.iloc[-1], "peers_s_per_token": peers}


def _slowest_turn(events: Events, histories: TracedSamples, requests: pd.DataFrame, step: int) -> dict[str, Any] | None:
    """Return the slowest turn of the step's samples: generation, and the tools and users that answered it."""
    keys = ["index", "trajectory", "turn"]
    samples = histories.samples.index[histories.samples["step"] == step]
    calls = [requests[[*keys, "duration_s"]].assign(kind="generation")]
    for event, kind in (("tool.execute", "tool"), ("user.step", "user")):
        own = events[event]
        calls.append(own.loc[own["index"].isin(samples), [*keys, "duration_s"]].assign(kind=kind))
    rows = pd.concat(calls, ignore_index=True)
    if not len(rows):
        return None
    turns = rows.pivot_table(index=keys, columns="kind", values="duration_s", aggfunc="sum", fill_value=0.0)
    index, trajectory, turn = place = turns.sum(axis=1).idxmax()
    return {
        "sample": histories.samples["sample"].get(index, f"feed index {index}"),
        "trajectory": trajectory,
        "turn": turn,
        "seconds": turns.loc[place].to_dict(),
        "total_s": turns.loc[place].sum(),
    }


def _subject(events: pd.DataFrame) -> pd.Series:
    return events["tool"].astype("str").fillna("") if "tool" in events else pd.Series("", index=events.index)


def _typical(events: pd.DataFrame) -> pd.Series:
    """Return the median duration by tool, or of all these events."""
    return events["duration_s"].groupby(_subject(events)).median()


def _slowest_event(events: Events, begin: float, end: float, typical: dict[str, pd.Series]) -> dict[str, Any] | None:
    """Return the event overlapping the step that took longest beyond what is usual for its kind."""
    slowest: dict[str, Any] | None = None
    for name in _CANDIDATES:
        frame = events[name]
        frame = frame[(frame["timestamp"] < end) & (frame["end"] > begin)]
        if not len(frame):
            continue
        usual = _subject(frame).map(typical[name])
        excess = frame["duration_s"] - usual
        place = excess.idxmax()
        if slowest is None or excess[place] > slowest["excess_s"]:
            row = frame.loc[place]
            slowest = {
                "event": name,
                "name": str(row["tool"]) if "tool" in frame else name,
                "duration_s": row["duration_s"],
                "usual_s": usual[place],
                "excess_s": excess[place],
                **{key: None if pd.isna(row[key]) else row[key] for key in ("sample", "trajectory", "turn", "replica")},
            }
    return slowest


# ---------------------------------------------------------------------------------------------- idle time


def find_outages(
    events: Events, *, completed: bool, launched_at: float | None = None
) -> tuple[float, float, Intervals]:
    """Return the first sample's admission, the end of the last event, and when the run was down in between.

    If the run has shut down cleanly, all of its work is recorded, so any time that no event covers is an outage. If the
    run is live or died, work that did not end may fill that time, which is an outage only if a restart is evident:

    - the Trainer began an activity later: without a restart, an event of its earlier activity would cover that time;
    - a sample that did not end is admitted again although the Rollouter was not replaced;
    - the run was launched or resumed in that time.
    """
    start, end = events.window()
    for name in ("sample.admitted", "sample.generate", "trainer.wait_samples"):
        if name in events:
            start = float(events[name]["timestamp"].iloc[0])
            break
    starts = np.concatenate([np.empty(0), *(frame["timestamp"].to_numpy() for frame in events.frames.values())])
    ends = np.concatenate([np.empty(0), *(frame["end"].to_numpy() for frame in events.frames.values())])
    silent = complement(union(starts, ends + 1e-6), start, end) if end > start else EMPTY
    silent = silent[silent[:, 1] - silent[:, 0] > OUTAGE_S]
    if completed or not len(silent):
        return start, end, silent
    first, last = silent.T
    activities = [float(events[name]["timestamp"].max()) for name in _TRAINER_ACTIVITIES if name in events]
    began_anew = last <= max(activities, default=0.0)
    admitted, readmitted = _open_admissions(events)
    replaced = _rollouter_replacements(events)
    lost = np.isfinite(readmitted) & (np.searchsorted(replaced, admitted) == np.searchsorted(replaced, readmitted))
    for begin, until in zip(admitted[lost], readmitted[lost], strict=True):
        began_anew |= (begin <= first) & (last <= until)
    if launched_at is not None:
        began_anew |= (first <= launched_at) & (launched_at <= last)
    return start, end, silent[began_anew]


def idle_figures(events: Events, start: float, end: float, down: Intervals, *, completed: bool) -> dict[str, Any]:
    """Return the idle time of both sides. Shares refer to the time in which the run was up and the side is known.

    Args:
        completed: the run has shut down cleanly, so nothing was running at its last event.
    """
    waits = events["trainer.wait_samples"]
    trainer = difference(clip(spans(waits), start, end), down)
    trainer_until = end if completed else min(end, max(start, _last_end(events, _TRAINER_EVENTS, start)))
    generation, generation_until, in_flight = _generation(events, start, end, down, completed=completed)
    idle = difference(complement(generation, start, generation_until), down) if len(generation) else EMPTY
    edges = np.linspace(start, end, NUM_BINS + 1) if end > start else np.array([0.0, 0.0])
    return {
        "start": start,
        "wall_s": end - start - total(down),
        "down_s": total(down),
        "outages": [{"start_s": first - start, "duration_s": last - first} for first, last in down],
        "bin_s": float(edges[1] - edges[0]),
        "trainer": _side(trainer, trainer_until, down, edges),
        "rollouter": _side(idle, generation_until, down, edges) if len(generation) else None,
        "in_flight": in_flight,
        "both_s": total(intersection(trainer, idle)),
        "first_wait_s": float(waits["duration_s"].iloc[0]) if len(waits) else None,
        "lent_s": total(difference(clip(spans(events["gpus.lent"]), start, end), down)),
        "down": coverage(down, edges),
    }


def _generation(
    events: Events, start: float, end: float, down: Intervals, *, completed: bool
) -> tuple[Intervals, float, int]:
    """Return when samples or the validation set were generated, until when that is known, and the samples in flight
    then."""
    unended, in_flight = _unended_generation(events, end, down)
    ended = pd.concat([events["sample.generate"][["timestamp", "end"]], events["validation"][["timestamp", "end"]]])
    busy = union(np.append(ended["timestamp"], unended[:, 0]), np.append(ended["end"], unended[:, 1]))
    if completed:
        return busy, end, 0
    validating_at = _open_validation(events)
    if validating_at is not None:
        # The validation may have begun before its first answer: at the earliest, when generation last ended.
        before = busy[busy[:, 1] <= validating_at, 1]
        begin = float(before.max()) if len(before) else min(start, validating_at)
        busy = union(np.append(busy[:, 0], begin), np.append(busy[:, 1], end))
    if in_flight or validating_at is not None:
        return busy, end, in_flight
    return busy, min(end, max(start, _last_end(events, (*_ENDS_OF_GENERATION, "validation"), start))), 0


def _unended_generation(events: Events, end: float, down: Intervals) -> tuple[Intervals, int]:
    """Return when samples that did not end were in generation, and how many still were at `end`: each from its
    admission until it is admitted again, the Rollouter is replaced, or the run is down."""
    begins, readmitted = _open_admissions(events)
    stops = np.sort(np.concatenate((_rollouter_replacements(events), down[:, 0], [np.inf])))
    until = np.minimum(readmitted, stops[np.searchsorted(stops, begins, side="right").clip(max=len(stops) - 1)])
    return np.column_stack((begins, np.minimum(until, end))), int(np.isinf(until).sum())


def _open_admissions(events: Events) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return admissions of samples that did not end afterwards, and when each was admitted again (inf: never)."""
    times = [events["sample.admitted"][["index", "timestamp"]].assign(ends=False)]
    for name in _ENDS_OF_GENERATION:
        times.append(events[name][["index", "end"]].rename(columns={"end": "timestamp"}).assign(ends=True))
    rows = pd.concat(times, ignore_index=True)
    rows = rows[rows["index"] > 0].sort_values(["index", "timestamp"], kind="stable", ignore_index=True)
    following = rows.shift(-1)
    has_next = following["index"] == rows["index"]
    is_open = ~rows["ends"] & ~(has_next & (following["ends"] == True))  # noqa: E712 (nan after the last row)
    readmitted = following["timestamp"].where(has_next)[is_open].fillna(np.inf)
    return rows.loc[is_open, "timestamp"].to_numpy(), readmitted.to_numpy()


def _rollouter_replacements(events: Events) -> NDArray[np.float64]:
    restarted = events["part.restarted"]
    return restarted.loc[restarted["part"] == "rollouter", "timestamp"].to_numpy()


def _open_validation(events: Events) -> float | None:
    """Return the first known time of a validation that has not ended; None if there is none."""
    last = events["validation"]["end"].max()
    frames = [events[name] for name in ("trajectory", "request")]
    later = pd.concat(
        [frame.loc[(frame["index"] == 0) & ~(frame["timestamp"] <= last), "timestamp"] for frame in frames]
    )
    return float(later.min()) if len(later) else None


def _last_end(events: Events, names: tuple[str, ...], default: float) -> float:
    return max((float(events[name]["end"].max()) for name in names if name in events), default=default)


def _side(idle: Intervals, until: float, down: Intervals, edges: NDArray[np.float64]) -> dict[str, Any]:
    lengths = idle[:, 1] - idle[:, 0]
    start = float(edges[0])
    known = until - start - total(clip(down, start, until))
    strip = coverage(idle, edges)
    return {
        "known_s": known,
        "idle_s": total(idle),
        "share": total(idle) / known if known > 0 else None,
        "bubbles": int((lengths >= _BUBBLE_S).sum()),
        "longest_s": float(lengths.max()) if len(lengths) else 0.0,
        "longest_at_s": float(idle[lengths.argmax(), 0] - start) if len(lengths) else None,
        "strip": [share if begin < until else None for share, begin in zip(strip, edges[:-1], strict=True)],
    }


# ---------------------------------------------------------------------------------------------- memory


def gpu_memory_figures(events: Events, start: float) -> list[dict[str, Any]]:
    """Return for the GPU of each rank how many bytes are used, by all processes, `at_s` seconds after `start`."""
    rows = []
    for (role, rank), own in events["gpu.memory"].groupby(["role", "rank"], observed=True):
        thinned = own.iloc[:: 1 + len(own) // MAX_POINTS]
        rows.append(
            {
                "rank": f"{role} {rank:.0f}",
                "total_bytes": own["total_bytes"].max(),
                "at_s": (thinned["timestamp"] - start).round(1).to_list(),
                "used_bytes": thinned["used_bytes"].to_list(),
            }
        )
    return rows
