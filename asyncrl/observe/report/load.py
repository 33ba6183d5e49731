"""Load the events of a run as one pandas frame for each kind of event. Blocking.

pyarrow parses the files in batches. A batch that it refuses, or that has anything odd (a torn line, a field of another
type, an impossible time), is parsed line by line. A run may have 1,000,000 events; to limit memory, a
frame has only the columns that its event can have. Of a longer run, the oldest events were replaced by sums.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from numpy.typing import NDArray

from asyncrl.core.types import SampleId
from asyncrl.profiling.catalog import EVENTS, FIELDS, is_own_event
from asyncrl.profiling.files import (
    EARLIEST_S,
    INTEGER_FIELDS,
    LATEST_S,
    MAX_NUMBER,
    event_files,
    is_number,
    parse_event,
)
from asyncrl.profiling.rotation import EventSummary, read_event_summary, unfolded_files
from asyncrl.storage.run_dir import reading

BATCH_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
"""Size of the blocks that pyarrow's threads parse."""
_TEXT = {
    *("event", "replica", "request", "sample", "trajectory"),
    *("tool", "status", "finish_reason", "interaction", "reason", "role", "method", "part", "cause", "error"),
}
"""Fields that are text; all others are numbers."""
_NUMBER_OR_NAME = ("trajectory", "replica")
_BASE = ("timestamp", "duration_s", *FIELDS, "error")
_COLUMNS = tuple(dict.fromkeys(("event", *_BASE, *sorted({name for info in EVENTS.values() for name in info.extras}))))
_REPLICA_PART = re.compile(r"replica-(.+)")

Progress = Callable[[int, int], None]
"""Receives the bytes read so far and in total."""


@dataclass(slots=True)
class Events:
    """The events of a run: `events["request"]` is the frame of all `request` events, sorted by `timestamp`.

    Frames have `timestamp, duration_s, end`, the fields of `profiling.catalog.FIELDS`, `error`, the extras of their
    event, and

    - `index`: the feed index of the sample; 0 without one, and in the validation set,
    - `trajectory` and `turn` as integers; -1 without one, and for the greedy baseline.
    """

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    num_events: int = 0
    num_torn: int = 0
    """Lines that are not events: cut short by a kill, or damaged."""
    num_unfinished: int = 0
    """Torn lines at the end of a file, which a running process may still complete."""
    num_unknown: int = 0
    """Events with names of asyncrl that this version does not have."""
    own: dict[str, list[NDArray[np.float64]]] = field(default_factory=lambda: defaultdict(list))
    """Durations of the events of the user's code, by name."""
    num_files: int = 0
    folded: EventSummary | None = None
    """Sums over the oldest events, which were deleted; None: none were."""

    def __getitem__(self, name: str) -> pd.DataFrame:
        """Return the frame of an event; without such events it is empty and has the right columns."""
        if name not in self.frames:
            empty = {column: pd.Series([], dtype="str" if column in _TEXT else "float64") for column in _columns(name)}
            return _finish(name, pd.DataFrame(empty))
        return self.frames[name]

    def __contains__(self, name: str) -> bool:
        return name in self.frames

    def window(self) -> tuple[float, float]:
        """Return the start of the first event and the end of the last one; zeros without events."""
        if not self.frames:
            return 0.0, 0.0
        start = min(float(frame["timestamp"].iloc[0]) for frame in self.frames.values())
        return start, max(float(frame["end"].max()) for frame in self.frames.values())


def load(run_dir: Path, progress: Progress = lambda _done, _total: None) -> Events:
    """Load `events/` of a run directory; a run without events has no frames. Raises `OSError`."""
    by_part: dict[str, list[Path]] = defaultdict(list)
    size = 0
    files = list(event_files(run_dir))
    folded = read_event_summary(run_dir)
    for file in (*unfolded_files(run_dir, folded), *files):
        with suppress(FileNotFoundError):  # a live run has deleted it
            size += file.stat().st_size
            by_part[file.stem].append(file)
    events = Events(num_files=sum(map(len, by_part.values())), folded=folded)
    tables: dict[str, list[pa.Table]] = defaultdict(list)
    done = 0
    for part, files in by_part.items():
        for data in _batches(files, events):
            _split(events, tables, _parse(data, events), part)
            done += len(data)
            progress(min(done, size), size)
    pool = pa.default_memory_pool()
    for name in list(tables):
        table = pa.concat_tables(tables.pop(name)).unify_dictionaries()
        events.frames[name] = _finish(name, table.to_pandas(self_destruct=True, split_blocks=True))
        del table
        pool.release_unused()
    return events


def _batches(files: Sequence[Path], events: Events) -> Iterator[bytes]:
    """Concatenate files, so that many small files are as fast as a few large ones. A line longer than pyarrow's blocks,
    which is damaged, may be divided."""
    batch: list[bytes] = []
    size = 0
    for file in files:
        with suppress(FileNotFoundError), reading(file) as opened:  # a live run may have deleted it
            while data := opened.read(BATCH_BYTES) + opened.readline(_BLOCK_BYTES):
                if not data.endswith(b"\n"):
                    data += b"\n"
                    events.num_unfinished += 1
                batch.append(data)
                size += len(data)
                if size >= BATCH_BYTES:
                    yield b"".join(batch)
                    batch, size = [], 0
    if batch:
        yield b"".join(batch)


# ---------------------------------------------------------------------------------------------- parsing


def _parse(data: bytes, events: Events) -> pa.Table:
    """Return a table of `_COLUMNS`; lines that are not events are counted and left out."""
    # A block that begins with `null` would end the process within pyarrow (26.0), which divides lines at \r, too.
    if data.count(b"\n{") + data.startswith(b"{") != data.count(b"\n") or b"\r" in data:
        return _parse_lines(data, events)
    numeric = [name for name in _NUMBER_OR_NAME if re.search(rb'"%b":-?\d' % name.encode(), data)]
    types = {name: pa.string() if name in _TEXT and name not in numeric else pa.float64() for name in _COLUMNS}
    options = pj.ParseOptions(explicit_schema=pa.schema(list(types.items())), unexpected_field_behavior="ignore")
    try:
        data.decode()  # pyarrow does not check the encoding
        table = pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=_BLOCK_BYTES), options)
    except (UnicodeDecodeError, pa.ArrowInvalid):
        return _parse_lines(data, events)
    if table.num_rows != data.count(b"}\n") or not _is_valid(table):  # pyarrow accepts two objects on a line
        return _parse_lines(data, events)
    for name in numeric:
        text = pc.cast(pc.cast(table[name], pa.int64()), pa.string())
        table = table.set_column(table.schema.get_field_index(name), name, text)
    return table


def _is_valid(table: pa.Table) -> bool:
    """Return whether every row is an event by the rules of `profiling.files`."""
    if any(table[column].null_count for column in ("event", "timestamp", "duration_s")):
        return False
    start, duration = table["timestamp"].to_numpy(), table["duration_s"].to_numpy()
    if not ((start >= EARLIEST_S) & (start + duration <= LATEST_S)).all():
        return False
    for column in table.column_names:
        if pa.types.is_floating(table[column].type):
            values = table[column].drop_null().to_numpy()
            if not (np.abs(values) < MAX_NUMBER).all() or (
                column in (*INTEGER_FIELDS, "replica") and (values % 1).any()
            ):
                return False
    return True


def _parse_lines(data: bytes, events: Events) -> pa.Table:
    lines = [line for line in data.split(b"\n") if line.strip()]
    rows = [row for row in map(parse_event, lines) if row is not None]
    events.num_torn += len(lines) - len(rows)
    arrays = []
    for name in _COLUMNS:
        values = [row.get(name) for row in rows]
        if name in _TEXT:
            arrays.append(pa.array([None if value is None else str(value) for value in values], pa.string()))
        else:
            arrays.append(pa.array([float(value) if is_number(value) else None for value in values], pa.float64()))
    return pa.Table.from_arrays(arrays, names=list(_COLUMNS))


def _columns(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_BASE, *EVENTS[name].extras)))


def _split(events: Events, tables: dict[str, list[pa.Table]], table: pa.Table, part: str) -> None:
    """Add the rows of a table to `tables`, by the name of their event."""
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
        if is_own_event(name):
            events.own[name].append(np.nan_to_num(table["duration_s"].to_numpy()[rows]))
            continue
        if name not in EVENTS:
            events.num_unknown += len(rows)
            continue
        own = table.select(list(_columns(name))).take(pa.array(np.sort(rows)))
        if replica is not None and own["replica"].null_count == own.num_rows:
            own = own.set_column(
                own.schema.get_field_index("replica"), "replica", pa.array([replica[1]] * own.num_rows)
            )
        for column in _TEXT.intersection(own.column_names) - {"request"}:
            own = own.set_column(own.schema.get_field_index(column), column, pc.dictionary_encode(own[column]))
        tables[name].append(own)


# ---------------------------------------------------------------------------------------------- frames


def _finish(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    frame["duration_s"] = frame["duration_s"].fillna(0.0).clip(lower=0.0)
    frame["end"] = frame["timestamp"] + frame["duration_s"]
    frame["step"] = frame["step"].fillna(0).astype("int64")
    frame["turn"] = frame["turn"].fillna(-1).astype("int64")
    if name == "request":
        frame = _complete_from_request_id(frame)
    for column in ("sample", "replica", *(_TEXT & set(EVENTS[name].extras))):
        frame[column] = frame[column].astype("category")
    frame["index"] = _map_categories(frame["sample"], _feed_index)
    frame["trajectory"] = _map_categories(frame["trajectory"].astype("category"), _integer)
    return frame.sort_values("timestamp", ignore_index=True, kind="stable")


def _complete_from_request_id(frame: pd.DataFrame) -> pd.DataFrame:
    """Fill in missing fields from the request's id, `<sample>/<trajectory>[.<turn>][-<attempt>]`."""
    no_sample, no_trajectory, no_turn = frame["sample"].isna(), frame["trajectory"].isna(), frame["turn"] < 0
    missing = (no_sample | no_trajectory | no_turn) & frame["request"].notna()
    if missing.any():
        sample = frame.loc[missing, "request"].str.replace(r"-\d+$", "", regex=True).str.partition("/")
        place = sample[2].str.partition(".")
        frame["sample"] = frame["sample"].astype("str").where(~(missing & no_sample), sample[0])
        frame["trajectory"] = frame["trajectory"].astype("str").where(~(missing & no_trajectory), place[0])
        turns = place[2].map(_integer).clip(lower=0)
        frame["turn"] = frame["turn"].where(~(missing & no_turn), turns).astype("int64")
    return frame


def _map_categories(column: pd.Series, convert: Callable[[str], int]) -> pd.Series:
    numbers = np.array([convert(str(each)) for each in column.cat.categories] + [convert("")], dtype="int64")
    return pd.Series(numbers[column.cat.codes.to_numpy()], index=column.index)  # code -1, missing, is the last one


def _feed_index(sample: str) -> int:
    try:
        index = SampleId.parse(sample).index
    except ValueError:
        return 0
    return index if index < MAX_NUMBER else 0


def _integer(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        return -1
    return int(number) if is_number(number) else -1
