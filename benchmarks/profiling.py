"""Measure the cost of profiling: of one span, of a launch, and of a report of a million events.

spans      by level: microseconds that one span costs its caller, and microseconds of CPU until it is in the file
launches   the quickstart with profiler.level=full against off, alternating: wall time from the end of the first step to
           the end of the last step
report     seconds and peak memory of `asyncrl report` on a synthetic run with 1,000,000 events
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.profiling import Profiler, ProfilerSettings
from asyncrl.profiling.catalog import LEVELS, EventLevel
from benchmarks.report import Table, arguments, positive, report_tables
from benchmarks.running import run_asyncrl
from benchmarks.synthetic_run import write_run

AIMS = {
    "spans": "less than 5 us in summary, 15 us in full",
    "launches": "wall with full at most 1.03 of off",
    "report": "1,000,000 events in less than 30 s and 1 GB",
}
BURST = 50_000
"""Consecutive spans; the buffer holds all of them, so that no span is cheap because it is dropped."""
LAUNCH_LEVELS = ("off", "full")


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


def measure_spans(directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure the microseconds of one tool call's span, with its fields and in a sample's context. Levels alternate.

    `caller`: wall time of the event loop's thread. `process`: CPU time of all threads until the event is in the file.
    """
    callers: dict[EventLevel, list[float]] = {level: [] for level in LEVELS}
    processes: dict[EventLevel, list[float]] = {level: [] for level in LEVELS}
    for number in range(rounds):
        for level in LEVELS:
            caller, process = asyncio.run(_burst(level, directory / f"{level}-{number}"))
            callers[level].append(caller)
            processes[level].append(process)
    return [
        {
            "level": level,
            "caller_us": statistics.median(callers[level]),
            "worst_round_us": max(callers[level]),
            "process_us": statistics.median(processes[level]),
        }
        for level in LEVELS
    ]


async def _burst(level: EventLevel, directory: Path) -> tuple[float, float]:
    profiler = Profiler()
    profiler.configure("benchmark", ProfilerSettings(level, directory, 2 * BURST))
    profiler.set_position(step=1, version=0)
    cpu, started = time.process_time(), time.perf_counter()
    with profiler.context(sample="sample_0_1", trajectory=3):
        for turn in range(BURST):
            with profiler.span("tool.execute", turn=turn, tool="search") as span:
                span.add(status="ok", wait_s=0.0)
    caller = time.perf_counter() - started
    profiler.flush()
    process = time.process_time() - cpu
    status = profiler.status()
    profiler.close()
    expected = 0 if level == "off" else BURST
    if (status["events"], status["dropped"]) != (expected, 0):
        raise RuntimeError(f"{level}: {status}, expected {expected} events")
    return caller / BURST * 1e6, process / BURST * 1e6


class ProfiledLaunch(NamedTuple):
    wall_s: float
    """Time from the end of the first step to the end of the last one, since start-up varies by seconds."""
    whole_s: float
    cpu_s: float
    """CPU time of the processes of the launch that have ended by its end."""
    events: int


def measure_launches(directory: Path, rounds: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, list[ProfiledLaunch]] = {level: [] for level in LAUNCH_LEVELS}
    for number in range(rounds):
        # The order alternates, so that neither level always profits from the warm machine.
        for level in LAUNCH_LEVELS if number % 2 == 0 else LAUNCH_LEVELS[::-1]:
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
        for level in LAUNCH_LEVELS
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


if __name__ == "__main__":
    main()
