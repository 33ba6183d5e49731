"""The event files of a run, from where they were last read to. Blocking; one thread at a time.

A line that is not whole waits until it is. One that was cut off for good, or is no event, is counted and left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.profiling.files import DIRECTORY, step_dir
from asyncrl.profiling.reading import parsed

CHUNK_BYTES = 4 << 20
"""Read at a time."""
FULL_LOOK_S = 60.0
"""A step that is long over may still get events: of a part that was slow to send its own, or after going back to it."""
_NEWEST = 4
_WARM_S = 1.5 * FULL_LOOK_S


class Event(NamedTuple):
    """One line."""

    start: int
    """Unix microseconds."""
    end: int
    name: str
    fields: Mapping[str, Any]
    """All of the line."""
    offset: int
    """Where its line is in its file."""
    length: int
    """Bytes of it."""


class Chunk(NamedTuple):
    """Events of one part, in the order of its file."""

    part: str
    file: int
    """Its number, for `EventReader.read_lines`."""
    events: list[Event]


class EventReader:
    """Of a run of thousands of steps most directories no longer change, so most looks leave them out."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = run_dir / DIRECTORY
        self._clock = clock
        self._next_full = -math.inf
        self._changed: dict[str, int] = {}
        """Directory → when it changed, as its file system tells it."""
        self._warm: dict[str, float] = {}
        """Directory → until when it is looked at every time."""
        self._files: list[Path] = []
        self._sizes: list[int] = []
        self._read_to: list[int] = []
        self._numbers: dict[Path, int] = {}
        self._unread: dict[int, str] = {}
        self.damaged = 0
        """Lines left out."""
        self.total_bytes = 0
        """Of all files, when `new` last looked."""
        self.read_bytes = 0

    @property
    def unread(self) -> list[str]:
        """Files that could not be read when they were last tried, and why."""
        return list(self._unread.values())

    def new(self, *, everything: bool = False) -> Iterator[Chunk]:
        """What has come since; in the order of steps, as far as it was there at the call.

        The first two looks are at all files, and so is one every `FULL_LOOK_S`; others are at the newest steps, at what
        is of no step, and at directories that have a new file or have grown lately. A file that cannot be read is left
        out until the next look at it.

        Args:
            everything: look at all files.
        """
        now = self._clock()
        is_first = not self._changed
        if full := everything or now >= self._next_full:
            self._next_full = -math.inf if is_first else now + FULL_LOOK_S
            self._unread.clear()
        for name in self._to_look_at(now, full=full):
            grown = [number for number in self._look_into(name) if self._sizes[number] > self._read_to[number]]
            for number in grown:
                before = self._read_to[number]
                try:
                    yield from self._new_of(number, self._sizes[number])
                except OSError as error:
                    self._unread[number] = f"{self._files[number]}: {error.strerror or error}"
                else:
                    self._unread.pop(number, None)
                # What the first look finds tells nothing of what still grows; the second one's does.
                if self._read_to[number] > before and not is_first:
                    self._warm[name] = now + _WARM_S

    def read_lines(self, places: Mapping[int, tuple[int, int, int]]) -> dict[int, Mapping[str, Any]]:
        """The fields of events that were read before; of one whose file has changed or is gone: none. From any thread.

        Args:
            places: by whatever key, the file, offset and length of a line.
        """
        found: dict[int, Mapping[str, Any]] = {}
        by_place = sorted(places.items(), key=lambda each: each[1])
        for file, events in groupby(by_place, key=lambda each: each[1][0]):
            with contextlib.suppress(OSError), self._files[file].open("rb", buffering=0) as opened:
                for key, (_, offset, length) in events:
                    found[key] = parsed(os.pread(opened.fileno(), length, offset)) or {}
        return {key: found.get(key, {}) for key in places}

    def _to_look_at(self, now: float, *, full: bool) -> list[str]:
        """Names of directories, by step."""
        try:
            with os.scandir(self._directory) as entries:
                changed = {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.name.startswith("step_")}
        except FileNotFoundError:
            return []
        names = sorted(changed, key=lambda name: (len(name), name))
        if not full:
            self._warm = {name: until for name, until in self._warm.items() if until > now}
            wanted = {step_dir(self._directory, 0).name, *names[-_NEWEST:], *self._warm}
            names = [name for name in names if name in wanted or changed[name] != self._changed.get(name)]
        self._changed = changed
        return names

    def _look_into(self, name: str) -> list[int]:
        """Its files by name, with their sizes as of now."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(self._directory / name) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl"):
                    with contextlib.suppress(OSError):
                        sizes[entry.name] = entry.stat().st_size
        return [self._number(self._directory / name / file, size) for file, size in sorted(sizes.items())]

    def _number(self, path: Path, size: int) -> int:
        number = self._numbers.setdefault(path, len(self._files))
        if number == len(self._files):
            self._files.append(path)
            self._sizes.append(0)
            self._read_to.append(0)
        self.total_bytes += size - self._sizes[number]
        self._sizes[number] = size
        return number

    def _new_of(self, number: int, size: int) -> Iterator[Chunk]:
        path = self._files[number]
        with path.open("rb") as file:
            file.seek(self._read_to[number])
            rest = b""
            while (at := self._read_to[number]) + len(rest) < size:
                data = rest + file.read(min(CHUNK_BYTES, size - at - len(rest)))
                if len(data) == len(rest):
                    return
                whole = data.rfind(b"\n") + 1
                rest = data[whole:]
                if whole:
                    self._read_to[number] = at + whole
                    self.read_bytes += whole
                    yield Chunk(path.stem, number, self._events(data[:whole], at))

    def _events(self, data: bytes, offset: int) -> list[Event]:
        events = []
        for line in data.split(b"\n")[:-1]:
            if line.strip():
                fields = parsed(line)
                if fields is None:
                    self.damaged += 1
                else:
                    events.append(_event(fields, offset, len(line)))
            offset += len(line) + 1
        return events


def _event(fields: Mapping[str, Any], offset: int, length: int) -> Event:
    start = round(fields["timestamp"] * 1_000_000)
    end = start + max(0, round(fields["duration_s"] * 1_000_000))
    return Event(start, end, fields["event"], fields, offset, length)
