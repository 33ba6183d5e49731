"""Idle bubbles: the Trainer waits for samples, or nothing is in generation. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.report.intervals import NONE, Intervals, clip, complement, covered, intersection, total, union, without
from asyncrl.report.load import Events

BINS = 240
OUTAGE_S = 60.0
"""If no event of any kind covers so long a time, the run was down, or stood still altogether."""
_BUBBLE_S = 1.0


def window(events: Events) -> tuple[float, float, Intervals]:
    """From the first sample's admission to the end of the last event, and when the run was down within it."""
    start, end = events.window()
    for name in ("sample.admitted", "sample.generate", "trainer.wait_samples"):
        if events.has(name):
            start = float(events.of(name)["timestamp"].iloc[0])
            break
    starts = np.concatenate([frame["timestamp"].to_numpy() for frame in events.frames.values()] or [np.empty(0)])
    ends = np.concatenate([frame["end"].to_numpy() for frame in events.frames.values()] or [np.empty(0)])
    silent = complement(union(starts, ends + 1e-6), start, end) if end > start else NONE
    return start, end, silent[silent[:, 1] - silent[:, 0] > OUTAGE_S]


def analyse(events: Events, start: float, end: float, down: Intervals) -> dict[str, Any]:
    """Shares are of the time in which the run was up."""
    waits, generating = events.of("trainer.wait_samples"), events.of("sample.generate")
    trainer = clip(union(waits["timestamp"].to_numpy(), waits["end"].to_numpy()), start, end)
    busy = union(generating["timestamp"].to_numpy(), generating["end"].to_numpy())
    idle = without(complement(busy, start, end), down) if len(busy) else NONE
    wall = end - start - total(down)
    edges = np.linspace(start, end, BINS + 1) if end > start else np.array([0.0, 0.0])
    return {
        "start": start,
        "wall_s": wall,
        "down_s": total(down),
        "outages": [{"start_s": first - start, "duration_s": last - first} for first, last in down],
        "bin_s": float(edges[1] - edges[0]),
        "trainer": _side(trainer, wall, edges),
        "rollouter": _side(idle, wall, edges) if len(busy) else None,
        "both_s": total(intersection(trainer, idle)),
        "first_wait_s": float(waits["duration_s"].iloc[0]) if len(waits) else None,
        "down": covered(down, edges),
    }


def _side(idle: Intervals, wall: float, edges: Any) -> dict[str, Any]:
    lengths = idle[:, 1] - idle[:, 0]
    return {
        "idle_s": total(idle),
        "share": total(idle) / wall if wall > 0 else None,
        "bubbles": int((lengths >= _BUBBLE_S).sum()),
        "longest_s": float(lengths.max()) if len(lengths) else 0.0,
        "longest_at_s": float(idle[lengths.argmax(), 0] - edges[0]) if len(lengths) else None,
        "strip": covered(idle, edges),
    }
