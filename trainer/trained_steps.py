"""The Trainer's own account of what it trained: one line of JSON for each step, in the run directory.

trained.jsonl
  {"lineage": 0, "step": 7, "version": 3, "samples": ["sample_0_13", ...]}   committed with this step, which began from
                                                                             version 3
  {"lineage": 1, "rewound_to_step": 5}                                       what was beyond it is in no weights now

It is written beside the journal and by another process, so that each can be held against the other. A line comes once
the queue has acknowledged the commit. A process that is killed loses none that it wrote. A machine that dies may (there
is no fsync), but only of steps that no checkpoint covers, if its disk keeps the order of what is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyio import to_thread

from asyncrl.failures import ConfigError
from asyncrl.run_dir import TRAINED, disk_error
from asyncrl.types import SampleId


class TrainedFile:
    """`loop.TrainedRecord`. One call at a time.

    All raise `DiskFullError` (or another `InfraError`, or `ConfigError`) if the line cannot be written; a part of it is
    taken back then.
    """

    def __init__(self, run_dir: Path, lineage: int) -> None:
        self._path = run_dir / TRAINED
        self._lineage = lineage

    async def rewound(self, step: int) -> None:
        """First of all, where training goes on from a checkpoint: it is at `step`, 0 being the initial model.

        What a process that was killed left of a line is taken away: its step is beyond every checkpoint.
        """
        await to_thread.run_sync(_cut_tail, self._path)
        await self._append({"lineage": self._lineage, "rewound_to_step": step})

    async def put(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        """See `loop.TrainedRecord`."""
        samples = [str(sample_id) for sample_id in sample_ids]
        await self._append({"lineage": self._lineage, "step": step, "version": version, "samples": samples})

    async def _append(self, line: Mapping[str, Any]) -> None:
        await to_thread.run_sync(_append, self._path, (json.dumps(line) + "\n").encode())


def read_trained(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run, also of one that is at work; a last one that is not whole yet is left out. Blocking.

    Raises:
        ConfigError: one of them is damaged. The message names it.
    """
    path = run_dir / TRAINED
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield _read_line(path, number, line)


def _read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        read = json.loads(line)
        if isinstance(read, dict):
            return read
    except ValueError:
        pass
    raise ConfigError(
        f"line {number} of {path} is damaged: what was trained in that step cannot be told from it. The run does not "
        "need the file; the journal (`asyncrl status`) has the books."
    )


def _append(path: Path, line: bytes) -> None:
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = 0
                while written < len(line):
                    written += file.write(line[written:])
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        raise disk_error(path, error) from error


def _cut_tail(path: Path) -> None:
    """Take away what is behind the last newline."""
    try:
        if path.is_file():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
    except OSError as error:
        raise disk_error(path, error) from error
