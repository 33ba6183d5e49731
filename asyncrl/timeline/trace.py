"""A run as a trace for https://ui.perfetto.dev and chrome://tracing: the JSON of the Trace Event Format. Blocking.

Processes are the parts of the run, threads their lanes; a request contains its phases; versions are lines across
everything; an arrow leads from where a sample became ready to where it was trained.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from asyncrl.timeline.kinds import REQUEST, STATES, block_order, group_order
from asyncrl.timeline.placing import Placed, Placing
from asyncrl.timeline.reading import Chunk, EventReader

_COMPRESSION = 1
"""Level of gzip: a trace is read once or twice."""
_FLOWS = {"sample.ready": "s", "sample.trained": "f"}
"""Event → phase of its arrow."""
_SAID = ("timestamp", "event", "duration_s")


class Exported(NamedTuple):
    events: int
    """In the trace."""
    damaged: int
    """Lines left out."""
    unread: list[str]
    """Files left out, and why."""


def export(run_dir: Path, target: Path) -> Exported:
    """Write the trace of a run; compressed if the name of `target` ends in `.gz`. What is in memory does not grow
    with the number of events, but for those that a lane remembers.

    Raises:
        OSError: it cannot be written.
    """
    reader, writer, count = EventReader(run_dir), _Writer(), 0
    with _opened(target) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for chunk in reader.new():
            for line in writer.events(chunk):
                file.write(separator)
                file.write(line)
                separator = ",\n"
            count += len(chunk.events)
        for line in writer.names():
            file.write(separator)
            file.write(line)
            separator = ",\n"
        file.write("\n]}\n")
    return Exported(count, reader.damaged, reader.unread)


@contextmanager
def _opened(target: Path) -> Iterator[IO[str]]:
    """Under another name until it is whole."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with (
            gzip.open(temporary, "wt", _COMPRESSION, encoding="utf-8")
            if target.suffix == ".gz"
            else temporary.open("w", encoding="utf-8")
        ) as file:
            yield file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class _Writer:
    def __init__(self) -> None:
        self._placing = Placing()
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str, int], int] = {}

    def events(self, chunk: Chunk) -> Iterator[str]:
        for placed in self._placing.place(chunk):
            pid, tid = self._ids(placed)
            for entry in _entries(placed):
                entry["pid"], entry["tid"] = pid, tid
                yield json.dumps(entry, separators=(",", ":"))

    def names(self) -> Iterator[str]:
        """Of processes and threads, and their order; once all events are written."""
        for number, block in enumerate(sorted(self._pids, key=block_order)):
            yield from _named("process", self._pids[block], 0, block, number)
        lanes = sorted(self._tids, key=lambda lane: (lane[0], group_order(lane[1]), lane[2]))
        for number, lane in enumerate(lanes):
            name = f"{lane[1]} {lane[2] + 1}" if (lane[0], lane[1], 1) in self._tids else lane[1]
            yield from _named("thread", self._pids[lane[0]], self._tids[lane], name, number)

    def _ids(self, placed: Placed) -> tuple[int, int]:
        block, group = placed.place.block, placed.place.group
        pid = self._pids.setdefault(block, len(self._pids) + 1)
        return pid, self._tids.setdefault((block, group, placed.lane), len(self._tids) + 1)


def _entries(placed: Placed) -> Iterator[dict[str, Any]]:
    event, fields = placed.event, placed.event.fields
    whole: dict[str, Any] = {
        "name": _title(event.name, fields),
        "cat": event.name,
        "ph": "X",
        "ts": event.start,
        "dur": event.end - event.start,
        "args": {key: value for key, value in fields.items() if key not in _SAID},
    }
    yield whole
    if event.name == REQUEST and len(placed.bars) > 1:
        for bar in placed.bars:
            name = STATES[bar.state].name
            yield {"name": name, "cat": "phase", "ph": "X", "ts": bar.start, "dur": bar.end - bar.start}
    elif event.name == "sync.apply" and "version" in fields:
        yield {"name": f"version {fields['version']}", "cat": "version", "ph": "i", "s": "g", "ts": event.end}
    elif event.name in _FLOWS and "sample" in fields:
        yield {
            "name": "sample",
            "cat": "flow",
            "ph": _FLOWS[event.name],
            "bp": "e",
            "id": str(fields["sample"]),
            "ts": event.start,
        }


def _title(name: str, fields: Mapping[str, Any]) -> str:
    """What tells bars of one kind apart."""
    of = fields.get("tool") or fields.get("method") or fields.get("sample")
    return f"{name} {of}" if of is not None else name


def _named(kind: str, pid: int, tid: int, name: str, order: int) -> Iterator[str]:
    for key, value in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": order})):
        entry = {"name": key, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": value}
        yield json.dumps(entry, separators=(",", ":"))
