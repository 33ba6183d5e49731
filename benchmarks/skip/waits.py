"""Measure the files that an event loop waits for: a thread of one's own against `aiofiles`.

With `aiofiles`, every open, read, write, seek and close is a switch to a thread and back; with a thread, only a whole
record or a batch of turns is. So `aiofiles` takes up to 2 times as much CPU for records and turns, and 5 to 40 times as
much on the event loop, and asyncrl uses threads there. It uses `aiofiles` for the trajectory dump, where decoding
tokens costs most. Records are converted and checked off the event loop in either case.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
import numpy as np
from anyio import CapacityLimiter, to_thread

from asyncrl.core.call_batcher import CallBatcher
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Generated
from asyncrl.core.types import FinishReason, SampleId, Turn
from asyncrl.queue.turn_log import FileTurns, encode_frame
from asyncrl.storage.segments import write_all
from asyncrl.storage.trajectory_files import file_name
from benchmarks.report import Table
from benchmarks.running import print_progress, ratio
from benchmarks.skip.files import SkipRecords
from benchmarks.skip.samples import SampleSize, make_generated
from rollouter.sample_runner import pack_sample
from rollouter.trajectory_dump import TrajectoryDump
from skip.file_thread import file_thread
from skip.generation import from_content
from skip.record import MANIFEST, TENSORS, from_files, to_files

TURNS = 8
"""Turns of a sample in the turn log."""


class FileJob(ABC):
    """One sample's files, in either way."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        self.directory, self.samples = directory, samples
        directory.mkdir(parents=True)

    @abstractmethod
    async def prepare(self) -> None:
        """Called once, on the event loop, before the clock starts."""

    @abstractmethod
    async def by_thread(self, step: int) -> None: ...

    @abstractmethod
    async def by_aiofiles(self, step: int) -> None: ...


class WriteRecord(FileJob):
    """Write a record."""

    async def prepare(self) -> None:
        self.records = SkipRecords(self.directory / "thread", self.samples)
        await file_thread("write").run(lambda: self.records.directory.mkdir(parents=True))

    async def by_thread(self, step: int) -> None:
        await file_thread("write").run(partial(self.records.write, step))

    async def by_aiofiles(self, step: int) -> None:
        manifest, buffers = await asyncio.to_thread(lambda: to_files(self.records.record(step)))
        new = self.directory / f".{step}.new"
        await aiofiles.os.mkdir(new)
        for name, data in ((TENSORS, b"".join(buffers)), (MANIFEST, manifest)):
            async with aiofiles.open(new / name, "xb", buffering=0) as file:
                await file.write(data)
        await aiofiles.os.rename(new, self.directory / str(step))


class ReadRecord(FileJob):
    """Read a record and check it."""

    async def prepare(self) -> None:
        self.records = SkipRecords(self.directory / "records", self.samples)
        for step in range(len(self.samples)):
            await asyncio.to_thread(self.records.write, step)
        await file_thread("read").run(lambda: None)

    async def by_thread(self, step: int) -> None:
        await file_thread("read").run(partial(self.records.read, step))

    async def by_aiofiles(self, step: int) -> None:
        data = []
        for name in (MANIFEST, TENSORS):
            async with aiofiles.open(self.records.directory / str(step) / name, "rb", buffering=0) as file:
                data.append(await file.read())
        manifest, tensors = data
        await asyncio.to_thread(lambda: from_content(from_files(manifest, np.frombuffer(tensors, np.uint8)).content))


class LogTurns(FileJob):
    """Log the turns of a sample, and forget them."""

    async def prepare(self) -> None:
        self.log = FileTurns(self.directory, 1)
        await self.log.forget(SampleId(0, 1))  # reads the directory
        self.path = self.directory / "turns.log"
        self.path.touch()
        self.end = 0
        self.frames: CallBatcher[bytes, int] = CallBatcher(self._append, max_weight=32 << 20)

    def turns(self, step: int) -> list[Turn]:
        rows = [trajectory.rows[0] for trajectory in self.samples[step].trajectories[:TURNS]]
        return [Turn(row.response_ids, row.rollout_log_probs, row.spans, FinishReason.STOP) for row in rows]

    async def by_thread(self, step: int) -> None:
        for number, turn in enumerate(self.turns(step)):
            await self.log.record(SampleId(0, step + 1), {str(number): turn})
        await self.log.forget(SampleId(0, step + 1))

    async def by_aiofiles(self, step: int) -> None:
        places = []
        for number, turn in enumerate(self.turns(step)):
            frame = b"".join(encode_frame(SampleId(0, step + 1), str(number), turn))
            places.append(await self.frames.submit(frame, weight=len(frame)))
        for place in places:
            async with aiofiles.open(self.path, "r+b", buffering=0) as file:
                await file.seek(place)
                await file.write(b"F")

    async def _append(self, frames: Sequence[bytes]) -> list[int]:
        starts = []
        for frame in frames:
            starts.append(self.end)
            self.end += len(frame)
        async with aiofiles.open(self.path, "ab", buffering=0) as file:
            await file.write(b"".join(frames))
        return starts


class DumpSample(FileJob):
    """Describe the trajectories of a sample and append them to the dump."""

    async def prepare(self) -> None:
        scores = [[Score(1.0)] * len(sample.trajectories) for sample in self.samples]
        packed = [pack_sample(SampleId(0, n + 1), one, scores[n], 0.1, None) for n, one in enumerate(self.samples)]
        self.args = [
            (sample, one.prompt, one.trajectories, score)
            for sample, one, score in zip(packed, self.samples, scores, strict=True)
        ]
        self.dump = TrajectoryDump(self.directory / "aiofiles", self.directory, str)
        self.limiter = CapacityLimiter(1)

    async def by_thread(self, step: int) -> None:
        def work() -> None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.directory / file_name(step + 1), flags, 0o644)
            try:
                write_all(descriptor, [memoryview(self.dump.lines(*self.args[step]))])
            finally:
                os.close(descriptor)

        await to_thread.run_sync(work, abandon_on_cancel=True, limiter=self.limiter)

    async def by_aiofiles(self, step: int) -> None:
        await self.dump.write(*self.args[step])


JOBS: dict[str, Callable[[Path, Sequence[Generated]], FileJob]] = {
    "record write": WriteRecord,
    "record read": ReadRecord,
    "turns": LogTurns,
    "dump": DumpSample,
}
VARIANTS = ("thread", "aiofiles")


def measure_waits(directory: Path, sizes: Sequence[SampleSize], rounds: int) -> Table:
    """Return a row for each size, job and variant, with microseconds per sample: until all are done, of CPU in the
    process, and of CPU on the event loop's thread."""
    rows: Table = []
    for size in sizes:
        samples = [make_generated(size, seed) for seed in range(min(size.records, 24))]
        for what, job in JOBS.items():
            print_progress(f"waits, {size.name}, {what}")
            taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
            for number in range(-1, rounds):  # the first round is a warm-up
                for name in sorted(VARIANTS, reverse=bool(number % 2)):
                    place = directory / "waits" / f"{size.name}-{what}-{number}-{name}"
                    times = asyncio.run(_timed(job(place, samples), name))
                    if number >= 0:
                        taken[name].append(times)
            for name in VARIANTS:
                row: dict[str, Any] = {"sample": size.name, "what": what, "by": name}
                for part, label in enumerate(("time us", "CPU us", "loop us")):
                    each, thread = ([one[part] / len(samples) for one in taken[key]] for key in (name, "thread"))
                    row[label] = 1e6 * statistics.median(each)
                    row[f"{label.split()[0]} / thread"] = ratio(each, thread)
                rows.append(row)
    return rows


async def _timed(job: FileJob, name: str) -> tuple[float, float, float]:
    """Return the seconds of all samples at once, and the CPU seconds of the process and of the event loop's thread."""
    await job.prepare()
    call = job.by_thread if name == "thread" else job.by_aiofiles
    before = time.perf_counter(), time.process_time(), time.thread_time()
    await asyncio.gather(*map(call, range(len(job.samples))))
    after = time.perf_counter(), time.process_time(), time.thread_time()
    seconds, cpu, loop = (end - start for start, end in zip(before, after, strict=True))
    return seconds, cpu, loop
