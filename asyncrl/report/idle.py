"""Idle bubbles: the Trainer waits for samples, or nothing is in generation, no sample and no validation set. Pure.

A span is written when it ends. So of a run that lives, or was killed, what was under way at the last event is missing:
a sample that was admitted and came to no end is in generation, a validation set that is being answered too; what the
Trainer does after its last event is not known, and its figures end there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.report.intervals import NONE, Intervals, clip, complement, covered, intersection, total, union, without
from asyncrl.report.load import Events

BINS = 240
OUTAGE_S = 60.0
"""If no event of any kind covers so long a time, the run may have been down."""
_BUBBLE_S = 1.0
_OF_TRAINER = (
    "step", "trainer.wait_samples", "trainer.fetch", "trainer.experience", "trainer.critic", "trainer.update",
    "trainer.commit", "trainer.publish", "trainer.checkpoint", "sample.leased", "sample.trained",
)  # fmt: skip
_TURNS = (
    "step", "trainer.wait_samples", "trainer.experience", "trainer.critic", "trainer.update", "trainer.publish",
    "trainer.checkpoint",
)  # fmt: skip
"""A Trainer that trains is always in one of these."""
_ENDS_OF_SAMPLES = ("sample.generate", "sample.dropped", "sample.ready")


def window(events: Events, *, over: bool, launched_at: float | None = None) -> tuple[float, float, Intervals]:
    """From the first sample's admission to the end of the last event, and when the run was down within it.

    Time that no event covers is an outage if the run is over, for then all that it did is recorded. Of one that lives
    or died, whatever covers that time may not have ended. There it is an outage only if something has begun anew since:

    - the Trainer is at something that it began later: had it lived through that time, its event would cover it;
    - a sample that came to no end is admitted again, though the Rollouter was not replaced;
    - the run was launched or resumed in that time.

    Args:
        over: the run has ended in good order.
        launched_at: when it was launched or last resumed, as far as known.
    """
    start, end = events.window()
    for name in ("sample.admitted", "sample.generate", "trainer.wait_samples"):
        if events.has(name):
            start = float(events.of(name)["timestamp"].iloc[0])
            break
    starts = np.concatenate([frame["timestamp"].to_numpy() for frame in events.frames.values()] or [np.empty(0)])
    ends = np.concatenate([frame["end"].to_numpy() for frame in events.frames.values()] or [np.empty(0)])
    silent = complement(union(starts, ends + 1e-6), start, end) if end > start else NONE
    silent = silent[silent[:, 1] - silent[:, 0] > OUTAGE_S]
    if over or not len(silent):
        return start, end, silent
    first, last = silent.T
    anew = last <= max((float(events.of(name)["timestamp"].max()) for name in _TURNS if events.has(name)), default=0.0)
    admitted, again = _open_admissions(events)
    replaced = _replaced(events)
    lost = np.isfinite(again) & (np.searchsorted(replaced, admitted) == np.searchsorted(replaced, again))
    for begin, until in zip(admitted[lost], again[lost], strict=True):
        anew |= (begin <= first) & (last <= until)
    if launched_at is not None:
        anew |= (first <= launched_at) & (launched_at <= last)
    return start, end, silent[anew]


class _Generation(NamedTuple):
    busy: Intervals
    until: float
    """It is known up to there."""
    under_way: int
    """Samples at the end."""


def analyse(events: Events, start: float, end: float, down: Intervals, *, over: bool) -> dict[str, Any]:
    """Shares are of the time in which the run was up, and for which a side is known. `over`: the run has ended in good
    order, so nothing was under way at its last event."""
    waits = events.of("trainer.wait_samples")
    trainer = without(clip(union(waits["timestamp"].to_numpy(), waits["end"].to_numpy()), start, end), down)
    trainer_until = end if over else min(end, max(start, _last(events, _OF_TRAINER, start)))
    made = _generation(events, start, end, down, over=over)
    idle = without(complement(made.busy, start, made.until), down) if len(made.busy) else NONE
    wall = end - start - total(down)
    edges = np.linspace(start, end, BINS + 1) if end > start else np.array([0.0, 0.0])
    return {
        "start": start,
        "wall_s": wall,
        "down_s": total(down),
        "outages": [{"start_s": first - start, "duration_s": last - first} for first, last in down],
        "bin_s": float(edges[1] - edges[0]),
        "trainer": _side(trainer, trainer_until, down, edges),
        "rollouter": _side(idle, made.until, down, edges) if len(made.busy) else None,
        "under_way": made.under_way,
        "both_s": total(intersection(trainer, idle)),
        "first_wait_s": float(waits["duration_s"].iloc[0]) if len(waits) else None,
        "down": covered(down, edges),
    }


def _generation(events: Events, start: float, end: float, down: Intervals, *, over: bool) -> _Generation:
    frames = [events.of(name) for name in ("sample.generate", "validation")]
    starts = np.concatenate([frame["timestamp"].to_numpy() for frame in frames])
    ends = np.concatenate([frame["end"].to_numpy() for frame in frames])
    unended, under_way = _unended(events, end, down)
    busy = union(np.concatenate((starts, unended[:, 0])), np.concatenate((ends, unended[:, 1])))
    answering = None if over else _validating(events)
    if answering is not None:
        # Nothing is known of it before its first answer; it may have begun when generation last ended.
        before = busy[busy[:, 1] <= answering, 1]
        begun = float(before.max()) if len(before) else min(start, answering)
        busy = union(np.append(busy[:, 0], begun), np.append(busy[:, 1], end))
    if over or under_way or answering is not None:
        return _Generation(busy, end, 0 if over else under_way)
    return _Generation(busy, min(end, max(start, _last(events, (*_ENDS_OF_SAMPLES, "validation"), start))), 0)


def _unended(events: Events, end: float, down: Intervals) -> tuple[Intervals, int]:
    """From each admission that no end of its sample follows until the sample is admitted again, the Rollouter is
    replaced, or the run is down; if none of that follows either it is under way: until `end`, and counted."""
    begins, again = _open_admissions(events)
    stops = np.sort(np.concatenate((_replaced(events), down[:, 0], [np.inf])))
    until = np.minimum(again, stops[np.searchsorted(stops, begins, side="right").clip(max=len(stops) - 1)])
    under_way = int(np.isinf(until).sum())
    return np.column_stack((begins, np.minimum(until, end))), under_way


def _open_admissions(events: Events) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Admissions that no end of their sample follows, and when it was admitted again: inf, it was not."""
    admitted = events.of("sample.admitted")
    admitted = admitted[admitted["index"] > 0][["index", "timestamp"]]
    done = [events.of(name)[["index", "end"]].rename(columns={"end": "timestamp"}) for name in _ENDS_OF_SAMPLES]
    rows = pd.concat([admitted.assign(ends=False), *(frame.assign(ends=True) for frame in done)], ignore_index=True)
    rows = rows[rows["index"] > 0].sort_values(["index", "timestamp"], kind="stable", ignore_index=True)
    following = rows.shift(-1)
    has_next = following["index"] == rows["index"]
    open_ = ~rows["ends"] & ~(has_next & (following["ends"] == True))  # noqa: E712 (nan behind the last row)
    again = following["timestamp"].where(has_next)[open_].fillna(np.inf)
    return rows.loc[open_, "timestamp"].to_numpy(), again.to_numpy()


def _replaced(events: Events) -> NDArray[np.float64]:
    """When the Rollouter was, ascending."""
    restarted = events.of("part.restarted")
    return restarted.loc[restarted["part"] == "rollouter", "timestamp"].to_numpy()


def _validating(events: Events) -> float | None:
    """When the validation set that is being answered was begun at the latest; None: none is, as far as known."""
    last = events.of("validation")["end"].max()
    begun = [
        float(late["timestamp"].min())
        for frame in (events.of("trajectory"), events.of("request"))
        if len(late := frame[(frame["index"] == 0) & ~(frame["timestamp"] <= last)])
    ]
    return min(begun, default=None)


def _last(events: Events, names: tuple[str, ...], least: float) -> float:
    """When the last of these events ended."""
    return max((float(events.of(name)["end"].max()) for name in names if events.has(name)), default=least)


def _side(idle: Intervals, until: float, down: Intervals, edges: Any) -> dict[str, Any]:
    lengths = idle[:, 1] - idle[:, 0]
    start = float(edges[0])
    known = until - start - total(clip(down, start, until))
    strip = [share if begin < until else None for share, begin in zip(covered(idle, edges), edges[:-1], strict=True)]
    return {
        "known_s": known,
        "idle_s": total(idle),
        "share": total(idle) / known if known > 0 else None,
        "bubbles": int((lengths >= _BUBBLE_S).sum()),
        "longest_s": float(lengths.max()) if len(lengths) else 0.0,
        "longest_at_s": float(idle[lengths.argmax(), 0] - edges[0]) if len(lengths) else None,
        "strip": strip,
    }
