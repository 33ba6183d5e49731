"""Measure writing and reading records, against `torch.save` and `torch.load(weights_only=True)`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import asyncrl
from asyncrl.core.trajectory import Generated
from benchmarks.report import Table
from benchmarks.running import print_progress, ratio
from benchmarks.skip.samples import ROLE, SampleSize, array_bytes, make_generated, truncate_files
from skip.file_thread import file_thread
from skip.generation import from_content, to_content
from skip.record import Content, Origin, Record
from skip.store import RecordFiles, record_name


class SampleFormat(Protocol):
    """Writes samples to a directory and reads them."""

    def write(self, step: int) -> None: ...

    def read(self, step: int) -> None: ...


class SkipRecords:
    """Records as the role writes them, with checksums."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        self.directory = directory
        self._files = RecordFiles(directory)
        self._samples = samples

    def record(self, step: int) -> Record:
        origin = Origin(time.time(), socket.gethostname(), 0, 0, asyncrl.__version__)
        return Record(ROLE, step, FINGERPRINT, origin, to_content([self._samples[step]]))

    def write(self, step: int) -> None:
        self._files.write(record_name(step), self.record(step))

    def read(self, step: int) -> None:
        from_content(self._files.read(record_name(step)).content)


class TorchArrays:
    """Saves the same arrays and metadata with torch, from tensors created beforehand; reading returns tensors."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        import torch

        self._torch = torch
        self._directory = directory
        self._values = [self.value(to_content([sample])) for sample in samples]
        directory.mkdir(parents=True)

    def value(self, content: Content) -> dict[str, Any]:
        tensors = {name: self._torch.from_numpy(array) for name, array in content.arrays.items()}
        return {"tensors": tensors, "data": dict(content.data), "fingerprint": FINGERPRINT}

    def write(self, step: int) -> None:
        self.save(step, self._values[step])

    def read(self, step: int) -> None:
        self.load(step)

    def save(self, step: int, value: Mapping[str, Any]) -> None:
        temporary = self._directory / f".{step}.new"
        self._torch.save(value, temporary)
        os.rename(temporary, self._directory / f"{step}.pt")

    def load(self, step: int) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._torch.load(self._directory / f"{step}.pt", weights_only=True)
        return value


class TorchSamples(TorchArrays):
    """Saves the same files, but converts from and to samples, as `SkipRecords` does."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        super().__init__(directory, samples)
        self._samples = samples

    def write(self, step: int) -> None:
        self.save(step, self.value(to_content([self._samples[step]])))

    def read(self, step: int) -> None:
        value = self.load(step)
        from_content(Content({name: tensor.numpy() for name, tensor in value["tensors"].items()}, value["data"]))


FINGERPRINT = {name: "sha256:" + 32 * "0" for name in ("prompt_ids", "sampling", "model", "tokenizer")} | {"n": "8"}
FORMATS: dict[str, Callable[[Path, Sequence[Generated]], SampleFormat]] = {
    "skip": SkipRecords,
    "torch arrays": TorchArrays,
    "torch samples": TorchSamples,
}
OPS = ("write", "read")


def measure_files(directory: Path, sizes: Sequence[SampleSize], rounds: int) -> Table:
    """Return a row for each format, size, operation and caller."""
    rows: Table = []
    for size in sizes:
        samples = [make_generated(size, seed) for seed in range(size.records)]
        megabytes = statistics.fmean(map(array_bytes, samples)) / 1e6
        for by, timed in CALLERS.items():
            print_progress(f"files, {size.name}, by the {by}")
            times: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(OPS, FORMATS)}
            for number in range(-1, rounds):  # the first round is a warm-up
                for format_name in sorted(FORMATS, reverse=bool(number % 2)):
                    place = directory / f"{size.name}-{by}-{number}-{format_name}"
                    made = FORMATS[format_name](place, samples)
                    for op, one in zip(OPS, (made.write, made.read), strict=True):
                        seconds = timed(op, one, size.records)
                        if number >= 0:
                            times[op, format_name].append(seconds / size.records)
                    truncate_files(place)
            for (op, format_name), taken in times.items():
                rate = 1 / statistics.median(taken)
                row = {"sample": size.name, "by": by, "what": op, "format": format_name, "per s": rate}
                rows.append({**row, "MB/s": rate * megabytes, "skip faster": ratio(taken, times[op, "skip"])})
    return rows


def _by_caller(op: str, one: Callable[[int], None], count: int) -> float:
    """Return the seconds of `count` direct calls."""
    started = time.perf_counter()
    for step in range(count):
        one(step)
    return time.perf_counter() - started


def _by_file_thread(op: str, one: Callable[[int], None], count: int) -> float:
    """Return the seconds of `count` concurrent calls through a file thread."""

    async def run() -> float:
        await file_thread(op).run(lambda: None)
        started = time.perf_counter()
        await asyncio.gather(*(file_thread(op).run(partial(one, step)) for step in range(count)))
        return time.perf_counter() - started

    return asyncio.run(run())


CALLERS = {"caller": _by_caller, "file thread": _by_file_thread}


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "of unknown kind"
    on = [(len(mount[1]), mount[2]) for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return max(on)[1] if on else "of unknown kind"


def empty_file_us(directory: Path) -> float:
    """Return the median microseconds to create an empty file in a new directory."""
    place = directory / "empty"
    place.mkdir()
    times = []
    for number in range(200):
        started = time.perf_counter()
        os.close(os.open(place / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)
