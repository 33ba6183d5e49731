"""The event files of a run, from where they were last read to. Blocking; one thread at a time.

A line that is not whole waits until it is. One that was cut off for good, or is no event, is counted and left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.profiling.files import event_files

CHUNK_BYTES = 4 << 20
"""Read at a time."""


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
    """See `EventReader.read_line`."""
    events: list[Event]


class EventReader:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: list[Path] = []
        self._read_to: list[int] = []
        self._numbers: dict[Path, int] = {}
        self.damaged = 0
        """Lines left out."""
        self.total_bytes = 0
        """Of all files, when `new` last looked."""

    @property
    def read_bytes(self) -> int:
        return sum(self._read_to)

    def new(self) -> Iterator[Chunk]:
        """What has come since; in the order of steps, as far as it was there at the call."""
        sizes: list[tuple[int, int]] = []
        for path in event_files(self._run_dir):
            number = self._numbers.setdefault(path, len(self._files))
            if number == len(self._files):
                self._files.append(path)
                self._read_to.append(0)
            try:
                sizes.append((number, path.stat().st_size))
            except FileNotFoundError:
                continue
        self.total_bytes = sum(size for _, size in sizes)
        for number, size in sizes:
            if size > self._read_to[number]:
                yield from self._new_of(number, size)

    def read_line(self, file: int, offset: int, length: int) -> Mapping[str, Any]:
        """The fields of an event that was read before; empty: the file has changed or is gone."""
        try:
            with self._files[file].open("rb", buffering=0) as opened:
                found = _parsed(os.pread(opened.fileno(), length, offset))
        except OSError:
            return {}
        return found or {}

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
                    yield Chunk(path.stem, number, self._events(data[:whole], at))

    def _events(self, data: bytes, offset: int) -> list[Event]:
        events = []
        for line in data.split(b"\n")[:-1]:
            if line:
                fields = _parsed(line)
                event = _event(fields, offset, len(line)) if fields is not None else None
                if event is None:
                    self.damaged += 1
                else:
                    events.append(event)
            offset += len(line) + 1
        return events


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _event(fields: Mapping[str, Any], offset: int, length: int) -> Event | None:
    try:
        at, duration, name = fields["timestamp"], fields["duration_s"], fields["event"]
        if not (math.isfinite(at) and math.isfinite(duration) and isinstance(name, str)):
            return None
        start = round(at * 1_000_000)
        return Event(start, start + max(0, round(duration * 1_000_000)), name, fields, offset, length)
    except (KeyError, TypeError, OverflowError):
        return None
