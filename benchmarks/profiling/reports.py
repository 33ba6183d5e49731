"""Measure the time and the peak memory of a report of many events."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.profiling.synthetic import write_run


def measure_report(directory: Path, num_events: int) -> list[dict[str, Any]]:
    """Measure `asyncrl report` on a synthetic run with at least `num_events` events."""
    run_dir = directory / "run"
    written = write_run(run_dir, num_events=num_events)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "report", str(run_dir), "--out", str(directory / "report")],
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"asyncrl report failed:\n{(done.stdout + done.stderr)[-4000:]}")
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
