"""Where `rollout.dump_dir` has the trajectories of a sample. Blocking.

    trajectories-1-1000.jsonl      samples by feed index, a thousand a file; a line is a trajectory

All trajectories of a sample are appended in one write. A sample that is generated again, after a restart, is appended
again, and its last lines count. Several runs may write into one directory: a line names its run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from asyncrl.segments import write_all
from asyncrl.trajectory_lines import DumpedTrajectory, parse

SAMPLES_PER_FILE = 1000


def file_name(index: int) -> str:
    """Where a sample is, by its feed index."""
    first = (index - 1) // SAMPLES_PER_FILE * SAMPLES_PER_FILE + 1
    return f"trajectories-{first}-{first + SAMPLES_PER_FILE - 1}.jsonl"


def append(directory: Path, index: int, lines: Iterable[bytes]) -> None:
    """Put the lines of one sample behind what is there, in one write. The directory is made if it is not there.

    What a write that was cut off has left of a line stays a line of its own.

    Raises:
        OSError: not all of it could be written.
    """
    path, data = directory / file_name(index), b"".join(lines)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        write_all(descriptor, [memoryview(data)])
    finally:
        os.close(descriptor)


class Found(NamedTuple):
    trajectories: tuple[DumpedTrajectory, ...]
    """By number; empty: there are none."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what else is to be known of them."""


def find(directory: Path, index: int, run_dir: Path) -> Found:
    """What was dumped last of a sample of that run.

    Raises:
        OSError: the file cannot be read; none is there: `FileNotFoundError`.
    """
    path, notes = directory / file_name(index), []
    found: list[DumpedTrajectory] = []
    with path.open("rb") as file:
        for number, line in _lines_of(file, index):
            try:
                found.append(parse(line))
            except ValueError as error:
                torn = "was cut off" if not line.endswith(b"}\n") else f"is damaged: {error}"
                notes.append(f"line {number} of {path} {torn}")
    of_run = [one for one in found if _same_place(one.run, run_dir)]
    if found and not of_run:
        others = sorted({one.run for one in found})
        if len(others) > 1 or os.path.isdir(others[0]):
            return Found((), (*notes, f"{path} has this sample of another run only: {', '.join(others)}"))
        of_run = found
        notes.append(f"it was dumped by the run in {others[0]}, which is not there any more: taken to be this one")
    last = {one.number: one for one in of_run if one.at == of_run[-1].at}
    if last and len(last) < of_run[-1].num_trajectories:
        notes.append(f"{len(last)} of its {of_run[-1].num_trajectories} trajectories could be read")
    return Found(tuple(last[number] for number in sorted(last)), tuple(notes))


def _lines_of(file: Iterable[bytes], index: int) -> Iterator[tuple[int, bytes]]:
    begin = re.compile(rb'\{"sample_id": "sample_\d+_%d"' % index)
    return ((number, line) for number, line in enumerate(file, 1) if begin.match(line))


def _same_place(one: str, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
