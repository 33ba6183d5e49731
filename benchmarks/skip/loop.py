"""Measure what recording adds to the lag of an event loop, and the cost of a disabled annotation."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asyncrl.core.trajectory import Generated, SampleRequest
from asyncrl.core.types import SampleId
from benchmarks.report import Table
from benchmarks.running import print_progress
from benchmarks.skip.samples import ROLE, SampleSize, make_generated, recording, truncate_files
from skip.manager import SkipManager

TICK_S = 0.001
IN_FLIGHT = 64


def measure_loop(directory: Path, sizes: Sequence[SampleSize], rounds: int) -> Table:
    """Return two rows for each size: an idle loop, and a loop that records."""
    return [row for size in sizes for row in anyio.run(partial(_loop_rows, directory / "loop", size, rounds))]


async def _loop_rows(directory: Path, size: SampleSize, rounds: int) -> Table:
    print_progress(f"loop, {size.name}")
    samples = [make_generated(size, seed) for seed in range(min(size.records, IN_FLIGHT))]
    late: dict[str, list[float]] = {"nothing": [], "recording": []}
    rates: list[float] = []
    for number in range(rounds):
        late["nothing"] += await _lateness(size.loop_s)
        place = directory / f"{size.name}-{number}"
        with SkipManager.session(recording(place)):
            times, rate = await _while_recording(samples, size.loop_s)
        truncate_files(place)
        late["recording"] += times
        rates.append(rate)
    p99 = {name: 1e3 * float(np.percentile(times, 99)) for name, times in late.items()}
    return [
        {
            "sample": size.name,
            "beside": name,
            "records/s": statistics.median(rates) if name == "recording" else 0.0,
            "p50 ms": 1e3 * float(np.percentile(times, 50)),
            "p99 ms": p99[name],
            "max ms": 1e3 * max(times),
            "p99 added ms": p99[name] - p99["nothing"],
        }
        for name, times in late.items()
    ]


async def _while_recording(samples: Sequence[Generated], seconds: float) -> tuple[list[float], float]:
    """Return lateness and records per second while `IN_FLIGHT` samples are recorded continuously."""
    steps = itertools.count()
    ended = False

    @SkipManager.annotate(ROLE)
    async def generate(request: SampleRequest) -> Generated:
        assert isinstance(request.sample_id, SampleId)
        return samples[request.sample_id.index % len(samples)]

    async def keep_on() -> None:
        while not ended:
            index = next(steps)
            prompt = samples[index % len(samples)].prompt
            await generate(
                SampleRequest(SampleId(0, index), prompt, {"temperature": 1.0}, len(samples[0].trajectories))
            )

    # The first call reads the files of the model for the fingerprint.
    await generate(SampleRequest(SampleId(0, next(steps)), samples[0].prompt, {}, 1))
    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.start_soon(keep_on)
        before, started = SkipManager.status()[ROLE]["recorded"], time.perf_counter()
        late = await _lateness(seconds)
        rate = (SkipManager.status()[ROLE]["recorded"] - before) / (time.perf_counter() - started)
        ended = True
    counts = SkipManager.status()[ROLE]
    if set(counts) != {"recorded"}:
        raise SystemExit(f"not all calls were recorded: {counts}")
    return late, rate


async def _lateness(seconds: float) -> list[float]:
    """Return how late each of consecutive timers of `TICK_S` was."""
    late: list[float] = []
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - now - TICK_S)
    return late


def measure_disabled(rounds: int, calls: int) -> Table:
    """Return a row for a plain function and one for an async function."""

    def plain(request: int) -> int:
        return request

    async def awaited(request: int) -> int:
        return request

    async def await_all(function: Callable[[int], Awaitable[int]]) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            await function(1)
        return (time.perf_counter_ns() - started) / calls

    def call_all(function: Callable[[int], int]) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            function(1)
        return (time.perf_counter_ns() - started) / calls

    def row(name: str, measure: Callable[[Any], float], function: Callable[[int], Any]) -> dict[str, Any]:
        annotated = SkipManager.annotate(ROLE)(function)
        bare, wrapped = zip(*((measure(function), measure(annotated)) for _ in range(rounds)), strict=True)
        return {
            "function": name,
            "bare ns": statistics.median(bare),
            "annotated ns": statistics.median(wrapped),
            "added ns": statistics.median(b - a for a, b in zip(bare, wrapped, strict=True)),
        }

    SkipManager.reset()
    return [
        row("def", call_all, plain),
        row("async def", lambda function: asyncio.run(await_all(function)), awaited),
    ]
