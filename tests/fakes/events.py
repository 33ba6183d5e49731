"""Write event files of a synthetic run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from asyncrl.observe.report.analysis import analyse
from asyncrl.observe.report.load import load
from asyncrl.observe.status.summary import SavedSummary
from asyncrl.profiling.files import EVENTS_DIRECTORY, EventFiles, EventLine
from benchmarks.synthetic_run import START

EventTuple = tuple[str, float, float, dict[str, Any]]
"""Name, seconds since `START`, duration, other fields."""


def write_events(run_dir: Path, *lines: EventTuple, part: str = "all") -> None:
    """Append events to the files of a run."""
    files = EventFiles(run_dir / EVENTS_DIRECTORY)
    lost = files.write(
        [
            EventLine(part, {"timestamp": START + at, "event": name, "duration_s": duration, **fields})
            for name, at, duration, fields in lines
        ]
    )
    files.close()
    assert not lost


def report_of(run_dir: Path, *lines: EventTuple, summary: dict[str, Any] | None = None, **about: Any) -> dict[str, Any]:
    """Write events, and return the run's report as in report.json."""
    write_events(run_dir, *lines)
    saved = TypeAdapter(SavedSummary).validate_python({"status": "completed", **summary}) if summary else None
    return analyse(load(run_dir), {"name": "run", **about}, saved)
