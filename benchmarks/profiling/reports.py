"""Measure the time and the peak memory of a report of many events."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.profiling.synthetic import write_run
from benchmarks.running import run_asyncrl


def measure_report(directory: Path, num_events: int) -> list[dict[str, Any]]:
    """Measure `asyncrl report` on a synthetic run with at least `num_events` events."""
    run_dir = directory / "run"
    written = write_run(run_dir, num_events=num_events)
    started = time.perf_counter()
    run_asyncrl("report", str(run_dir), "--out", str(directory / "report"))
    wall_s = time.perf_counter() - started
    report = json.loads((directory / "report" / "report.json").read_text(encoding="utf-8"))
    page = (directory / "report" / "index.html").stat().st_size
    return [
        {
            "events": written,
            "wall_s": wall_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
            "events_per_s": written / wall_s,
            "page_mb": page / 1e6,
            "findings": len(report["findings"]),
        }
    ]
