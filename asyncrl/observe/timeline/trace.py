"""Export a run as a trace for https://ui.perfetto.dev and chrome://tracing: JSON of the Trace Event Format. Blocking.

Processes are the parts of the run, threads their tracks; a request contains its phases; versions are lines across
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

from asyncrl.observe.timeline.layout import REQUEST, STATES, PlacedEvent, TrackAssigner, block_order, group_order
from asyncrl.observe.timeline.reader import ALL_STEPS, EventReader, StepRange

_GZIP_LEVEL = 1
_FLOWS = {"sample.ready": "s", "sample.trained": "f"}
"""Event → phase of its arrow."""
_SHOWN_OTHERWISE = ("timestamp", "event", "duration_s")


class ExportResult(NamedTuple):
    num_events: int
    num_damaged: int
    """Lines left out."""
    unreadable: list[str]
    """Files left out, each with the reason."""


def export_trace(run_dir: Path, target: Path, steps: StepRange = ALL_STEPS) -> ExportResult:
    """Write the trace of a run, compressed if the name of `target` ends in `.gz`.

    Only the times of events stay in memory once they are written. Raises `OSError`.
    """
    reader, count = EventReader(run_dir, steps=steps), 0
    assigner, pids, tids = TrackAssigner(), dict[str, int](), dict[tuple[str, str, int], int]()
    with _open_atomically(target) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for chunk in reader.read_new():
            for placed in assigner.place(chunk):
                block, group = placed.place.block, placed.place.group
                pid = pids.setdefault(block, len(pids) + 1)
                tid = tids.setdefault((block, group, placed.track), len(tids) + 1)
                for entry in _entries(placed):
                    _write(file, entry | {"pid": pid, "tid": tid})
                    file.write(",\n")
            count += len(chunk.events)
        for place, entry in enumerate(_names(pids, tids)):
            file.write(",\n" if place else "")
            _write(file, entry)
        file.write("\n]}\n")
    return ExportResult(count, reader.num_damaged, reader.unreadable)


@contextmanager
def _open_atomically(target: Path) -> Iterator[IO[str]]:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with (
            gzip.open(temporary, "wt", _GZIP_LEVEL, encoding="utf-8")
            if target.suffix == ".gz"
            else temporary.open("w", encoding="utf-8")
        ) as file:
            yield file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: IO[str], entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry, separators=(",", ":")))


def _entries(placed: PlacedEvent) -> Iterator[dict[str, Any]]:
    event, fields = placed.event, placed.event.fields
    # The value that distinguishes bars of one kind.
    subject = fields.get("tool") or fields.get("method") or fields.get("sample")
    yield {
        "name": event.name if subject is None else f"{event.name} {subject}",
        "cat": event.name,
        "ph": "X",
        "ts": event.start,
        "dur": event.end - event.start,
        "args": {key: value for key, value in fields.items() if key not in _SHOWN_OTHERWISE},
    }
    if event.name == REQUEST and len(placed.bars) > 1:
        for bar in placed.bars:
            name = STATES[bar.state].name
            yield {"name": name, "cat": "phase", "ph": "X", "ts": bar.start, "dur": bar.end - bar.start}
    elif event.name == "sync.apply" and "version" in fields:
        yield {"name": f"version {fields['version']}", "cat": "version", "ph": "i", "s": "g", "ts": event.end}
    elif event.name in _FLOWS and "sample" in fields:
        flow = {"name": "sample", "cat": "flow", "ph": _FLOWS[event.name], "bp": "e", "id": str(fields["sample"])}
        yield flow | {"ts": event.start}


def _names(pids: Mapping[str, int], tids: Mapping[tuple[str, str, int], int]) -> Iterator[dict[str, Any]]:
    """Name and order all processes and threads."""
    blocks = sorted(pids, key=block_order)
    tracks = sorted(tids, key=lambda track: (track[0], group_order(track[1]), track[2]))
    names = [("process", pids[block], 0, block, place) for place, block in enumerate(blocks)]
    for place, (block, group, track) in enumerate(tracks):
        name = f"{group} {track + 1}" if (block, group, 1) in tids else group
        names.append(("thread", pids[block], tids[block, group, track], name, place))
    for kind, pid, tid, name, place in names:
        entry = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
        yield entry | {"name": f"{kind}_name", "args": {"name": name}}
        yield entry | {"name": f"{kind}_sort_index", "args": {"sort_index": place}}
