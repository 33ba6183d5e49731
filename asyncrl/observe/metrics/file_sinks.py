"""Files of the run directory that take its rows: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.run_dir import disk_error
from asyncrl.telemetry.rows import Row

logger = logging.getLogger(__name__)

NUM_BUCKETS = 30


class AppendFile:
    """A file that only grows, unbuffered: what a failed write left behind is not tried again at close."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise disk_error(path, error) from error

    def write(self, data: bytes) -> None:
        """All of `data`; a disk with room for a part of it raises."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise disk_error(self._path, error) from error

    def flush(self) -> None:
        """Nothing is held back; file-like objects have this."""

    def close(self) -> None:
        os.close(self._descriptor)


class JsonlSink:
    """One line a row, appended."""

    reads_back = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendFile(path)

    def rewind(self, step: int, version: int) -> Sequence[Row]:
        kept = rewind_jsonl(self._path, step, version)
        self._file.close()
        self._file = AppendFile(self._path)  # the path names another file now
        return kept

    def write(self, row: Row) -> None:
        self._file.write((json.dumps(row.as_json(), allow_nan=False, default=str) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars, and histograms of each step's rewards and staleness, as TensorBoard event files; by tensorboard's own
    record writer: torch's would load torch."""

    reads_back = False

    def __init__(self, directory: Path, *, unix_s: float, resumed_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._histogram_of = summary_pb2.HistogramProto
        # The process id keeps two parts of a run that start in the same second apart.
        name = f"events.out.tfevents.{int(unix_s)}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(AppendFile(directory / name))
        self._put(self._event(wall_time=unix_s, file_version="brain.Event:2"))
        self._start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        if resumed_step is not None:
            self._forget(unix_s, resumed_step)

    def rewind(self, step: int, version: int) -> Sequence[Row]:
        self._forget(time.time(), step)
        return ()

    def _forget(self, unix_s: float, step: int) -> None:
        """A session that starts at a step makes TensorBoard forget that step and later ones of what came before."""
        self._put(self._event(wall_time=unix_s, step=step + 1, session_log=self._start))

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
        for name, edges in (("rewards", _reward_edges), ("staleness", _staleness_edges)):
            found = [value for value in row.more.get(name, ()) if math.isfinite(value)]
            if found:
                values.append(self._summary.Value(tag=name, histo=self._histogram(found, edges(found))))
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
    """Upper ends of buckets: equally wide ones, the last one up to the greatest value."""
    low, high = min(values), max(values)
    width = (high - low) / NUM_BUCKETS
    return [low + width * number for number in range(1, NUM_BUCKETS)] + [high] if width > 0 else [high]


def _staleness_edges(values: Sequence[float]) -> list[float]:
    """The same, one bucket for each version."""
    return [float(number) for number in range(int(max(values)) + 1)]


def rewind_jsonl(path: Path, step: int, version: int) -> list[Row]:
    """Cut metrics.jsonl back to a checkpoint, so that no step is recorded twice; the rows that stay, in order.

    Lines of later steps or versions go, and so do torn ones. The file changes whole or not at all.

    Raises:
        InfraError, ConfigError: it cannot be rewritten.
    """
    if not path.exists():
        return []
    kept: list[tuple[str, Row]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = Row.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            logger.warning("%s, line %d is not a whole record (a run was cut off there); it is left out", path, number)
            continue
        if row.is_within(step, version):
            kept.append((line if line.endswith("\n") else f"{line}\n", row))
    text = "".join(line for line, _ in kept)
    if text != "".join(lines):
        _replace(path, text)
    return [row for _, row in kept]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise disk_error(path, error) from error
