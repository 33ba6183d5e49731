"""Measure the cost of profiling: of one span, of a launch, and of a report of a million events.

spans      microseconds of one span for its caller, and of CPU until it is in the file, by level
launches   the quickstart with profiler.level=full against off, alternating: wall time from the end of the first step to
           the end of the last step
report     seconds and peak memory of `asyncrl report` on a synthetic run with 1,000,000 events
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.profiling.launches import measure_launches
from benchmarks.profiling.reports import measure_report
from benchmarks.profiling.spans import measure_spans
from benchmarks.report import arguments, machine, report

AIMS = {
    "spans": "less than 5 us in summary, 15 us in full",
    "launches": "wall with full at most 1.03 of off",
    "report": "1,000,000 events in less than 30 s and 1 GB",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(AIMS), help="measure only this")
    parser.add_argument("--rounds", type=_positive, default=5, help="pairs of launches (default 5, about 4 min each)")
    parser.add_argument("--events", type=_positive, default=1_000_000, help="events of the report (default 1,000,000)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides of the launches")
    options = parser.parse_args(argv)
    tables: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-profiling-") as scratch:
        directory = Path(scratch)
        # The report's peak memory is that of the largest child so far: before the launches.
        if options.only in (None, "report"):
            tables["report"] = measure_report(directory, options.events)
        if options.only in (None, "spans"):
            tables["spans"] = measure_spans(directory, 10)
        if options.only in (None, "launches"):
            tables["launches"] = measure_launches(directory, options.rounds, options.overrides)
    for name, rows in tables.items():
        report(f"profiling, {name}", rows, aim=f"aim: {AIMS[name]}")
    if options.json is not None:
        result = {"name": "profiling", "aims": AIMS, **tables, "machine": machine()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
