"""The Trainer's log of trained samples in the run directory, with one line of JSON per step.

trained.jsonl
  {"lineage": 0, "step": 7, "version": 3, "samples": ["sample_0_13", ...]}   committed with this step, which started
                                                                               from version 3
  {"lineage": 1, "rewound_to_step": 5}                                       later steps are undone

The log can be compared with the queue's journal, which another process writes. A line is written once the queue has
acknowledged the commit. If the process is killed, no written line is lost. If the machine crashes, lines may be lost,
since there is no fsync; these belong only to steps that no checkpoint covers, if the disk preserves the order of
writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import Any

from anyio import to_thread

from asyncrl.core.failures import ConfigError
from asyncrl.core.text import parse_json
from asyncrl.core.types import SampleId
from asyncrl.storage.run_dir import TRAINED, disk_error, read_lines

READ_BYTES = 1 << 16
"""Read at once, from the end of the log."""


class TrainedStepsFile:
    """Appends to the log. Calls must not overlap.

    Both methods raise `DiskFullError` (or another `InfraError`, or `ConfigError`) if the line cannot be written; a
    partially written line is removed.
    """

    def __init__(self, run_dir: Path, lineage: int) -> None:
        self._path = run_dir / TRAINED
        self._lineage = lineage

    async def append_rewind(self, step: int) -> None:
        """Log that training continues from the checkpoint of `step` (0: the initial model). Call it before any
        `append`.

        The partial line of a killed process is removed; its step is later than every checkpoint.
        """
        await to_thread.run_sync(_remove_partial_line, self._path)
        await self._write({"lineage": self._lineage, "rewound_to_step": step})

    async def append(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        """Log samples whose commit the queue has acknowledged. Their first gradient is in `step`, which started from
        `version`."""
        samples = [str(sample_id) for sample_id in sample_ids]
        await self._write({"lineage": self._lineage, "step": step, "version": version, "samples": samples})

    async def _write(self, line: Mapping[str, Any]) -> None:
        await to_thread.run_sync(_append, self._path, (json.dumps(line) + "\n").encode())


def read_trained(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Read the log of a run, live or ended; a partial last line is left out. Blocking.

    Raises:
        ConfigError: a line is damaged. The message names it.
    """
    path = run_dir / TRAINED
    if path.is_file():
        for number, line in enumerate(read_lines(path), 1):
            if line.endswith(b"\n"):
                yield _parse(path, number, line)


def surviving_steps(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of the steps that are in the surviving model, in order."""
    steps: list[Mapping[str, Any]] = []
    for line in lines:
        if "rewound_to_step" in line:
            steps = [step for step in steps if step["step"] <= line["rewound_to_step"]]
        else:
            steps.append(line)
    return steps


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(content := parse_json(line), dict):
            return content
    raise ConfigError(
        f"line {number} of {path} is damaged, so the samples of that step are unknown. The run does not need the file; "
        "the journal (`asyncrl status`) has the sample counts."
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


def _remove_partial_line(path: Path) -> None:
    try:
        if path.is_file():
            with path.open("rb+") as file:
                end, newline = file.seek(0, SEEK_END), -1
                while end and newline < 0:
                    start = max(0, end - READ_BYTES)
                    file.seek(start)
                    newline = file.read(end - start).rfind(b"\n")
                    end = start + newline + 1
                file.truncate(end)
    except OSError as error:
        raise disk_error(path, error) from error
