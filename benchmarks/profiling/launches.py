"""Measure quickstart launches with all events recorded, against launches without events."""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.running import run_asyncrl

LEVELS = ("off", "full")


class ProfiledLaunch(NamedTuple):
    wall_s: float
    """Time from the end of the first step to the end of the last one, since start-up varies by seconds."""
    whole_s: float
    cpu_s: float
    """CPU time of the processes of the launch that have ended by its end."""
    events: int


def measure_launches(directory: Path, rounds: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, list[ProfiledLaunch]] = {level: [] for level in LEVELS}
    for number in range(rounds):
        # The order alternates, so that neither level always profits from the warm machine.
        for level in LEVELS if number % 2 == 0 else LEVELS[::-1]:
            found[level].append(_launch(directory / f"{level}-{number}", level, overrides))
    ratios = [full.wall_s / off.wall_s for full, off in zip(found["full"], found["off"], strict=True)]
    return [
        {
            "level": level,
            "wall_s": statistics.median(one.wall_s for one in found[level]),
            "whole_s": statistics.median(one.whole_s for one in found[level]),
            "cpu_s": statistics.median(one.cpu_s for one in found[level]),
            "events": statistics.median(one.events for one in found[level]),
            "wall_to_off": statistics.median(ratios) if level == "full" else 1.0,
            "rounds": " ".join(f"{one.wall_s:.1f}" for one in found[level]),
        }
        for level in LEVELS
    ]


def _launch(run_dir: Path, level: str, overrides: Sequence[str]) -> ProfiledLaunch:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    settings = (f"run_dir={run_dir}", f"profiler.level={level}", "logging.console=plain", "trainer.save_last=false")
    run_asyncrl("launch", "fully_async", *settings, *overrides)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [row["time_s"] for row in rows if row["kind"] == "step"]
    events = sum(path.read_bytes().count(b"\n") for path in run_dir.glob("events/*/*.jsonl"))
    if (events > 0) != (level != "off"):
        raise RuntimeError(f"profiler.level={level} recorded {events} events")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ProfiledLaunch(times[-1] - times[0], summary["wall_s"], cpu_s, events)
