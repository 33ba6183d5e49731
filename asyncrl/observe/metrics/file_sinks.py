"""Sinks that write files in the run directory: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.core.text import parse_json
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.storage.run_dir import disk_error, read_lines, replacing

logger = logging.getLogger(__name__)

NUM_BUCKETS = 30


class AppendFile:
    """An append-only file without a buffer, so that closing it does not retry a failed write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise disk_error(path, error) from error

    def write(self, data: bytes) -> None:
        """Write all of `data` or raise."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise disk_error(self._path, error) from error

    def flush(self) -> None:
        """Do nothing; file-like objects have this method."""

    def close(self) -> None:
        os.close(self._descriptor)


class JsonlSink:
    """Appends one line per row to metrics.jsonl."""

    reads_back = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendFile(path)

    def rewind(self, step: int, version: int, add: Callable[[MetricsRow], None]) -> None:
        rewind_jsonl(self._path, step, version, add)
        self._file.close()
        self._file = AppendFile(self._path)  # the path refers to a new file

    def write(self, row: MetricsRow) -> None:
        self._file.write((json.dumps(row.as_json(), allow_nan=False, default=str) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes TensorBoard event files: scalars, and histograms of each step's rewards and staleness.

    It uses the record writer of tensorboard, because the writer of torch would import torch.
    """

    reads_back = False

    def __init__(self, directory: Path, *, unix_s: float, resumed_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._histogram_of = summary_pb2.HistogramProto
        # The process id distinguishes two processes of a run that start in the same second.
        name = f"events.out.tfevents.{int(unix_s)}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(AppendFile(directory / name))
        self._put(self._event(wall_time=unix_s, file_version="brain.Event:2"))
        self._start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        if resumed_step is not None:
            self._discard_after(unix_s, resumed_step)

    def rewind(self, step: int, version: int, add: Callable[[MetricsRow], None]) -> None:
        self._discard_after(time.time(), step)

    def _discard_after(self, unix_s: float, step: int) -> None:
        """Start a session at the next step, which makes TensorBoard discard earlier values from that step on."""
        self._put(self._event(wall_time=unix_s, step=step + 1, session_log=self._start))

    def write(self, row: MetricsRow) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
        for name, edges in (("rewards", _reward_edges), ("staleness", _staleness_edges)):
            values_of_row = [value for value in row.extra.get(name, ()) if math.isfinite(value)]
            if values_of_row:
                values.append(self._summary.Value(tag=name, histo=self._histogram(values_of_row, edges(values_of_row))))
        self._put(self._event(wall_time=row.unix_s, step=row.step, summary=self._summary(value=values)))

    def _histogram(self, values: Sequence[float], edges: Sequence[float]) -> Any:
        counts = [0] * len(edges)
        for value in values:
            counts[bisect_left(edges, value)] += 1
        return self._histogram_of(
            min=min(values),
            max=max(values),
            num=len(values),
            sum=math.fsum(values),
            sum_squares=math.fsum(value * value for value in values),
            bucket_limit=edges,
            bucket=counts,
        )

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        self._writer.close()


def _reward_edges(values: Sequence[float]) -> list[float]:
    """Return the upper ends of buckets of equal width."""
    low, high = min(values), max(values)
    width = (high - low) / NUM_BUCKETS
    return [low + width * number for number in range(1, NUM_BUCKETS)] + [high] if width > 0 else [high]


def _staleness_edges(values: Sequence[float]) -> list[float]:
    """Return the upper ends of buckets, one for each version."""
    return [float(number) for number in range(int(max(values)) + 1)]


def rewind_jsonl(path: Path, step: int, version: int, add: Callable[[MetricsRow], None]) -> None:
    """Cut metrics.jsonl back to a checkpoint, so that no step is recorded twice.

    Lines of later steps or versions and torn lines are removed. The file is replaced atomically. One line at a time is
    in memory, because the file of a long run is large.

    Args:
        add: gets the remaining rows in order, one at a time.

    Raises:
        InfraError, ConfigError: it cannot be read or rewritten.
    """
    if not path.exists():
        return
    try:
        with replacing(path, durable=True) as rewound:
            for number, line in enumerate(read_lines(path), start=1):
                if (row := _row_within(line, step, version, f"{path}, line {number}")) is not None:
                    rewound.write(line if line.endswith(b"\n") else line + b"\n")
                    add(row)
    except OSError as error:
        raise disk_error(path, error) from error


def _row_within(line: bytes, step: int, version: int, place: str) -> MetricsRow | None:
    """Return the row of a line; None if it is damaged or beyond the checkpoint."""
    try:
        row = MetricsRow.from_json(parse_json(line, finite=True))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        logger.warning("%s is torn or damaged, as after a crash; it is left out", place)
        return None
    return row if row.is_within(step, version) else None
