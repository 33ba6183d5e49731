"""Measure what a span costs its caller and its process."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from asyncrl.profiling import Profiler, ProfilerSettings
from asyncrl.profiling.catalog import LEVELS, EventLevel

BURST = 50_000
"""Consecutive spans; the buffer holds all of them, so that no span is cheap because it is dropped."""


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
