"""The events of a run as one pandas frame for each name. Blocking.

Files are parsed in batches by pyarrow; a batch that it refuses, or that has anything odd (a torn line, a field of
another type, a time that cannot be), is read line by line. At 1,000,000 events memory is what counts, so a frame has
only the columns that its event can have.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from asyncrl.profiling.events import EVENTS, FIELDS
from asyncrl.profiling.files import event_files
from asyncrl.profiling.reading import LATEST, MOST, SOONEST, WHOLE, is_number, parsed
from asyncrl.types import SampleId

BATCH_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
"""What a thread parses at once."""
_TEXT = {
    *("event", "replica", "request", "sample", "trajectory"),
    *("tool", "status", "finish_reason", "interaction", "reason", "role", "method", "part", "cause", "error"),
}
"""Fields that are text; all others are numbers."""
_BASE = ("timestamp", "duration_s", *FIELDS, "error")
_EXTRAS = sorted({name for info in EVENTS.values() for name in info.extras})
_COLUMNS = tuple(dict.fromkeys(("event", *_BASE, *_EXTRAS)))
_REPLICA_PART = re.compile(r"replica-(.+)")
_ATTEMPT = r"-\d+$"

Progress = Callable[[int, int], None]
"""Bytes read, and of how many."""


@dataclass(slots=True)
class Events:
    """All events of a run. Frames are sorted by `timestamp` and have `timestamp, duration_s, end`, the fields of
    `profiling.events.FIELDS`, `error`, the extras of their event, and

    - `index`: the feed index of the sample; 0: none, or of the validation set,
    - `trajectory` and `turn` as integers; -1: none, or the greedy baseline.
    """

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    num_events: int = 0
    num_torn: int = 0
    """Lines that are no event: cut short by a kill, or damaged."""
    num_unfinished: int = 0
    """Of these, last lines of files, which may still be written."""
    num_unknown: int = 0
    """Events of a name that this version of asyncrl does not know."""
    num_files: int = 0

    def of(self, name: str) -> pd.DataFrame:
        """The frame of one event; empty with the right columns if there are none."""
        if name not in self.frames:
            return _finish(name, pd.DataFrame({column: _typed([], column) for column in _columns_of(name)}))
        return self.frames[name]

    def has(self, name: str) -> bool:
        return name in self.frames

    def window(self) -> tuple[float, float]:
        """Start of the first event and end of the last; zeros if there are none."""
        if not self.frames:
            return 0.0, 0.0
        starts = min(float(frame["timestamp"].iloc[0]) for frame in self.frames.values())
        return starts, max(float(frame["end"].max()) for frame in self.frames.values())


def load(run_dir: Path, progress: Progress = lambda _done, _total: None) -> Events:
    """Read `events/` of a run directory; no events at all is an empty answer. Raises `OSError`."""
    by_part: dict[str, list[Path]] = defaultdict(list)
    total = 0
    for file in event_files(run_dir):
        by_part[file.stem].append(file)
        total += file.stat().st_size
    events = Events(num_files=sum(map(len, by_part.values())))
    pieces: dict[str, list[pa.Table]] = defaultdict(list)
    done = 0
    for part, files in by_part.items():
        for data in _batches(files, events):
            _add(events, pieces, _parsed(data, events), part)
            done += len(data)
            progress(min(done, total), total)
    pool = pa.default_memory_pool()
    for name in list(pieces):
        table = pa.concat_tables(pieces.pop(name)).unify_dictionaries()
        events.frames[name] = _finish(name, table.to_pandas(self_destruct=True, split_blocks=True))
        del table
        pool.release_unused()
    return events


def _batches(files: Sequence[Path], events: Events) -> Iterator[bytes]:
    """Whole files put together, so that a run of many small ones costs as little as one of a few."""
    held: list[bytes] = []
    size = 0
    for file in files:
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            data += b"\n"
            events.num_unfinished += 1
        held.append(data)
        size += len(data)
        if size >= BATCH_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


# ---------------------------------------------------------------------------------------------- parsing


def _type(column: str) -> pa.DataType:
    return pa.string() if column in _TEXT else pa.float64()


def _parsed(data: bytes, events: Events) -> pa.Table:
    """A table of `_COLUMNS`; lines that are no event are counted and left out."""
    types = {column: _type(column) for column in _COLUMNS}
    for column in ("trajectory", "replica"):
        if re.search(rb'"%b":-?\d' % column.encode(), data):
            types[column] = pa.float64()
    schema = pa.schema(list(types.items()))
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        data.decode()  # pyarrow does not look
        table = pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=BLOCK_BYTES), parse)
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return _parsed_by_line(data, events)
    if table.num_rows != data.count(b"\n") or not _is_sound(table):
        return _parsed_by_line(data, events)
    for column in ("trajectory", "replica"):
        if types[column] == pa.float64():
            text = pc.cast(pc.cast(table[column], pa.int64()), pa.string())
            table = table.set_column(table.schema.get_field_index(column), column, text)
    return table


def _is_sound(table: pa.Table) -> bool:
    """Every row is an event by `profiling.reading`, and all of its numbers can have been measured."""
    if any(table[column].null_count for column in ("event", "timestamp", "duration_s")):
        return False
    at, took = table["timestamp"].to_numpy(), table["duration_s"].to_numpy()
    if not ((at >= SOONEST) & (at + took <= LATEST)).all():
        return False
    for column in table.column_names:
        if pa.types.is_floating(table[column].type):
            values = table[column].drop_null().to_numpy()
            if not (np.abs(values) < MOST).all() or (column in (*WHOLE, "replica") and (values % 1).any()):
                return False
    return True


def _parsed_by_line(data: bytes, events: Events) -> pa.Table:
    rows: dict[str, list[Any]] = {column: [] for column in _COLUMNS}
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        event = parsed(line)
        if event is None:
            events.num_torn += 1
            continue
        for column, values in rows.items():
            values.append(_plain(event.get(column), column))
    arrays = [pa.array(values, _type(column)) for column, values in rows.items()]
    return pa.Table.from_arrays(arrays, names=list(rows))


def _plain(value: Any, column: str) -> str | float | None:
    if value is None:
        return None
    if column in _TEXT:
        return str(value)
    return float(value) if is_number(value) else None


def _columns_of(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_BASE, *EVENTS[name].extras)))


def _add(events: Events, pieces: dict[str, list[pa.Table]], table: pa.Table, part: str) -> None:
    """Split a table by event."""
    events.num_events += table.num_rows
    if not table.num_rows:
        return
    names = pc.dictionary_encode(table["event"]).combine_chunks()
    codes = names.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1))
    replica = _REPLICA_PART.fullmatch(part)
    for code, name in enumerate(names.dictionary.to_pylist()):
        rows = order[bounds[code] : bounds[code + 1]]
        if name not in EVENTS:
            events.num_unknown += len(rows)
            continue
        piece = table.select(list(_columns_of(name))).take(pa.array(np.sort(rows)))
        if replica is not None and piece["replica"].null_count == piece.num_rows:
            known = pa.array([replica[1]] * piece.num_rows)
            piece = piece.set_column(piece.schema.get_field_index("replica"), "replica", known)
        for column in _TEXT.intersection(piece.column_names) - {"request"}:
            place = piece.schema.get_field_index(column)
            piece = piece.set_column(place, column, pc.dictionary_encode(piece[column]))
        pieces[name].append(piece)


# ---------------------------------------------------------------------------------------------- frames


def _typed(values: Sequence[Any], column: str) -> pd.Series:
    return pd.Series(values, dtype=("str" if column in _TEXT else "float64"))


def _finish(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    frame["duration_s"] = frame["duration_s"].fillna(0.0).clip(lower=0.0)
    frame["end"] = frame["timestamp"] + frame["duration_s"]
    frame["step"] = frame["step"].fillna(0).astype("int64")
    frame["turn"] = frame["turn"].fillna(-1).astype("int64")
    if name == "request":
        frame = _with_request_parts(frame)
    for column in ("sample", "replica", *(_TEXT & set(EVENTS[name].extras))):
        frame[column] = frame[column].astype("category")
    frame["index"] = _by_category(frame["sample"], _feed_index)
    frame["trajectory"] = _by_category(frame["trajectory"].astype("category"), _number)
    return frame.sort_values("timestamp", ignore_index=True, kind="stable")


def _with_request_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """What an event leaves out can be read from its id: `<sample>/<trajectory>[.<turn>][-<attempt>]`."""
    no_sample, no_trajectory, no_turn = frame["sample"].isna(), frame["trajectory"].isna(), frame["turn"] < 0
    missing = (no_sample | no_trajectory | no_turn) & frame["request"].notna()
    if missing.any():
        parts = frame.loc[missing, "request"].str.replace(_ATTEMPT, "", regex=True).str.partition("/")
        place = parts[2].str.partition(".")
        turns = place[2].map(_number).clip(lower=0)
        frame["sample"] = frame["sample"].astype("str").where(~(missing & no_sample), parts[0])
        frame["trajectory"] = frame["trajectory"].astype("str").where(~(missing & no_trajectory), place[0])
        frame["turn"] = frame["turn"].where(~(missing & no_turn), turns).astype("int64")
    return frame


def _by_category(column: pd.Series, read: Callable[[str], int]) -> pd.Series:
    numbers = np.array([read(str(each)) for each in column.cat.categories] + [read("")], dtype="int64")
    return pd.Series(numbers[column.cat.codes.to_numpy()], index=column.index)  # code -1, none, is the last one


def _feed_index(sample: str) -> int:
    try:
        index = SampleId.parse(sample).index
    except ValueError:
        return 0
    return index if index < MOST else 0


def _number(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        return -1
    return int(number) if is_number(number) else -1


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object, or nothing if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
