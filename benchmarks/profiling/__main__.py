"""Measure the cost of profiling: of one span, of a launch, and of a report of a million events.

spans      by level: microseconds that one span costs its caller, and microseconds of CPU until it is in the file
launches   the quickstart with profiler.level=full against off, alternating: wall time from the end of the first step to
           the end of the last step
report     seconds and peak memory of `asyncrl report` on a synthetic run with 1,000,000 events
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.profiling.launches import measure_launches
from benchmarks.profiling.reports import measure_report
from benchmarks.profiling.spans import measure_spans
from benchmarks.report import Table, arguments, positive, report_tables

AIMS = {
    "spans": "less than 5 us in summary, 15 us in full",
    "launches": "wall with full at most 1.03 of off",
    "report": "1,000,000 events in less than 30 s and 1 GB",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "profiling")
    parser.add_argument("--only", choices=list(AIMS), help="measure only this part")
    parser.add_argument("--rounds", type=positive, default=5, help="pairs of launches (default 5, about 4 min each)")
    parser.add_argument("--events", type=positive, default=1_000_000, help="events of the report (default 1,000,000)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides of the launches")
    options = parser.parse_args(argv)
    tables: dict[str, Table] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-profiling-") as scratch:
        directory = Path(scratch)
        # The report comes before the launches, because peak memory is measured as that of the largest child so far.
        if options.only in (None, "report"):
            tables["report"] = measure_report(directory, options.events)
        if options.only in (None, "spans"):
            tables["spans"] = measure_spans(directory, 10)
        if options.only in (None, "launches"):
            tables["launches"] = measure_launches(directory, options.rounds, options.overrides)
    report_tables("profiling", tables, options.json, aims=AIMS)


if __name__ == "__main__":
    main()
