"""Read the new events in the event files of a run. Blocking; one thread at a time.

An incomplete last line is read once it is complete. Any other torn line, or a line that is no event, is counted and
left out. Of a long run, a reader with a limit reads only the newest steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.profiling.files import EVENTS_DIRECTORY, parse_event, step_dir

_CHUNK_BYTES = 4 << 20
FULL_SCAN_S = 60.0
"""Interval between scans of all files. Old steps may still get events: from a part that sends its events late, or after
training went back to them."""
_NUM_NEWEST = 4
_WATCH_S = 1.5 * FULL_SCAN_S


class StepRange(NamedTuple):
    """The steps whose events are read, both ends included."""

    first: int = 0
    last: int = sys.maxsize


ALL_STEPS = StepRange()


class TimelineEvent(NamedTuple):
    """One line."""

    start: int
    """Unix microseconds."""
    end: int
    name: str
    fields: Mapping[str, Any]
    """All fields of the line."""
    offset: int
    """The position of the line in its file."""
    length: int
    """Bytes of the line."""


class EventChunk(NamedTuple):
    """Events of one part, in the order of their file."""

    part: str
    file: int
    """The number of the file, for `EventReader.read_lines`."""
    events: list[TimelineEvent]


class LinePosition(NamedTuple):
    file: int
    offset: int
    length: int


@dataclass(slots=True)
class _File:
    path: Path
    size: int = 0
    read_to: int = 0


class EventReader:
    """Reads the new events at each call. Of thousands of directories, it scans only those that may have changed."""

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        steps: StepRange = ALL_STEPS,
        max_bytes: int | None = None,
    ) -> None:
        """
        Args:
            max_bytes: size of the events that exist at the first scan above which the oldest steps are left out, except
                for the newest step; None: everything is read.
        """
        self._directory = run_dir / EVENTS_DIRECTORY
        self._clock = clock
        self._steps = steps
        self._max_bytes = max_bytes
        self.left_out_before: int | None = None
        """The first step that is read, if earlier ones are left out because of `max_bytes`."""
        self._next_full_scan = -math.inf
        self._modified: dict[str, int] = {}
        """Directory → its modification time."""
        self._watched: dict[str, float] = {}
        """Directory → until when every scan includes it."""
        self._files: list[_File] = []
        self._numbers: dict[Path, int] = {}
        self._unreadable: dict[int, str] = {}
        self.num_damaged = 0
        """Lines left out."""

    @property
    def unreadable(self) -> list[str]:
        """Files that could not be read at the last attempt, each with the reason."""
        return list(self._unreadable.values())

    @property
    def read_share(self) -> float:
        """Share of the known bytes that have been read."""
        total = sum(file.size for file in self._files)
        return sum(file.read_to for file in self._files) / total if total else 1.0

    def read_new(self, *, everything: bool = False) -> Iterator[EventChunk]:
        """Read the events that are new at the call, in the order of steps.

        The first two scans cover all files, and so does one every `FULL_SCAN_S`; others cover the newest steps, events
        without a step, and directories with a new file or recent growth. A file that cannot be read is skipped until
        the next scan that covers it.

        Args:
            everything: cover all files.
        """
        now = self._clock()
        is_first = not self._modified
        if is_full := everything or now >= self._next_full_scan:
            self._next_full_scan = -math.inf if is_first else now + FULL_SCAN_S
            self._unreadable.clear()
        for name in self._directories(now, is_full=is_full):
            grown = [number for number in self._scan(name) if self._files[number].size > self._files[number].read_to]
            for number in grown:
                file = self._files[number]
                before = file.read_to
                try:
                    yield from self._read_file(number, file.size)
                except FileNotFoundError:  # a live run has deleted it
                    file.size = file.read_to
                except OSError as error:
                    self._unreadable[number] = f"{file.path}: {error.strerror or error}"
                else:
                    self._unreadable.pop(number, None)
                # After the first scan, a file that has grown may grow further.
                if file.read_to > before and not is_first:
                    self._watched[name] = now + _WATCH_S

    def read_lines(self, positions: Mapping[int, LinePosition]) -> dict[int, Mapping[str, Any]]:
        """Return the fields of events that were read before; empty if the file has changed or is gone. Thread-safe.

        Args:
            positions: the position of each line, by any key.
        """
        fields: dict[int, Mapping[str, Any]] = {key: {} for key in positions}
        by_position = sorted(positions.items(), key=lambda each: each[1])
        for number, lines in groupby(by_position, key=lambda each: each[1].file):
            with contextlib.suppress(OSError), self._files[number].path.open("rb", buffering=0) as file:
                for key, position in lines:
                    fields[key] = parse_event(os.pread(file.fileno(), position.length, position.offset)) or {}
        return fields

    def _directories(self, now: float, *, is_full: bool) -> list[str]:
        """Return the names of the directories to scan, by step."""
        try:
            with os.scandir(self._directory) as entries:
                modified = {each.name: each.stat().st_mtime_ns for each in entries if each.name.startswith("step_")}
        except FileNotFoundError:
            return []
        names = sorted(modified, key=lambda name: (len(name), name))
        names = [name for name in names if self._steps.first <= _step_of(name) <= self._steps.last]
        if not self._modified and self._max_bytes is not None:
            names = self._newest(names, self._max_bytes)
        if not is_full:
            self._watched = {name: until for name, until in self._watched.items() if until > now}
            active = {step_dir(self._directory, 0).name, *names[-_NUM_NEWEST:], *self._watched}
            names = [name for name in names if name in active or modified[name] != self._modified.get(name)]
        self._modified = modified
        return names

    def _newest(self, names: list[str], max_bytes: int) -> list[str]:
        """Return the newest directories with at most `max_bytes` of events, at least one, and read no earlier ones."""
        size, place = 0, len(names)
        while place and (size := size + sum(self._sizes(names[place - 1]).values())) <= max_bytes:
            place -= 1
        place = min(place, len(names) - 1)
        if place > 0:
            self.left_out_before = _step_of(names[place])
            self._steps = self._steps._replace(first=self.left_out_before)
        return names[max(0, place) :]

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of the files in a directory."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(self._directory / name) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.endswith(".jsonl") and entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    def _scan(self, name: str) -> list[int]:
        """Update the sizes of the files in a directory, and return their numbers by name."""
        numbers = []
        for file, size in sorted(self._sizes(name).items()):
            path = self._directory / name / file
            number = self._numbers.setdefault(path, len(self._files))
            if number == len(self._files):
                self._files.append(_File(path))
            self._files[number].size = size
            numbers.append(number)
        return numbers

    def _read_file(self, number: int, size: int) -> Iterator[EventChunk]:
        file = self._files[number]
        with file.path.open("rb") as opened:
            opened.seek(file.read_to)
            rest = b""
            while file.read_to + len(rest) < size:
                data = rest + opened.read(min(_CHUNK_BYTES, size - file.read_to - len(rest)))
                if len(data) == len(rest):
                    return
                complete = data.rfind(b"\n") + 1
                if not complete and len(data) > _CHUNK_BYTES:  # no event is that long
                    complete = len(data)
                rest = data[complete:]
                if complete:
                    offset = file.read_to
                    file.read_to += complete
                    yield EventChunk(file.path.stem, number, self._parse(data[:complete], offset))

    def _parse(self, data: bytes, offset: int) -> list[TimelineEvent]:
        events = []
        for line in data.split(b"\n")[:-1]:
            if line.strip():
                fields = parse_event(line)
                if fields is None:
                    self.num_damaged += 1
                else:
                    start = round(fields["timestamp"] * 1_000_000)
                    end = start + max(0, round(fields["duration_s"] * 1_000_000))
                    events.append(TimelineEvent(start, end, fields["event"], fields, offset, len(line)))
            offset += len(line) + 1
        return events


def _step_of(directory: str) -> int:
    digits = directory.removeprefix("step_")
    return int(digits) if digits.isdecimal() else 0
