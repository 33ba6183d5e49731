"""Sinks of a run's rows, as `logging.sinks` names them. They block; the recorder calls them off the event loop.

Files of the run directory (`file_sinks`) are written as the rows come, and a full disk ends the run. Libraries that may
block on a network (`trackers`) run on a thread of their own each: one that blocks, fails or falls behind loses only
its own rows, which are counted, and one warning. At the end the run waits `CLOSE_S` at most for all of them together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncrl.config.import_path import load_object
from asyncrl.config.schema import Config
from asyncrl.observe.metrics.file_sinks import JsonlSink, TensorBoardSink
from asyncrl.observe.metrics.rows import MetricsRow, finite
from asyncrl.storage.run_dir import RunDir

logger = logging.getLogger(__name__)

TRACKERS: Mapping[str, str] = {
    "wandb": "asyncrl.observe.metrics.trackers:WandbTracker",
    "mlflow": "asyncrl.observe.metrics.trackers:MlflowTracker",
    "trackio": "asyncrl.observe.metrics.trackers:TrackioTracker",
    "prometheus": "asyncrl.observe.metrics.prometheus:PrometheusTracker",
}
"""Import paths of `Tracker` classes by name."""
MAX_ROWS = 1_000
"""A row is about 10 KB."""
CLOSE_S = 10.0


class Sink(Protocol):
    reads_back: bool
    """`rewind` returns the rows that remain."""

    def write(self, row: MetricsRow) -> None:
        """Write a row. On return the operating system has it, so that it is not lost if the process is killed.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """

    def rewind(self, step: int, version: int) -> Sequence[MetricsRow]:
        """Remove the rows beyond a checkpoint that training goes back to.

        Returns:
            The remaining rows in order, if it `reads_back`.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """

    def close(self) -> None: ...


class TrackedRun(NamedTuple):
    """The properties of the run that a tracker records."""

    project: str
    experiment: str
    name: str
    """Name of the run directory, which a resumed run keeps."""
    directory: Path
    config: dict[str, Any]
    """As plain JSON values."""
    resumed: bool

    @property
    def title(self) -> str:
        return f"{self.experiment}-{self.name}"

    def saved_id(self, library: str) -> str | None:
        """The id of the library's run that an earlier process of this run wrote to."""
        path = self.directory / f"{library}.id"
        return path.read_text(encoding="utf-8").strip() or None if self.resumed and path.exists() else None

    def save_id(self, library: str, run_id: str) -> None:
        (self.directory / f"{library}.id").write_text(f"{run_id}\n", encoding="utf-8")


class Tracker:
    """A library that keeps metrics. One thread calls it; it may raise any exception and take its time.

    No library can remove rows that it has, so a step that is trained again after a rewind is there twice; `lineage`,
    which is part of every row, distinguishes them.
    """

    refresh_s: float | None = None
    """Interval at which `refresh` is called while no row comes; None: never."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run

    def open(self) -> None:
        """Import the library and begin a run, or continue it."""

    def write(self, row: MetricsRow) -> None:
        raise NotImplementedError

    def rewind(self) -> None:
        """Training went back to a checkpoint; rows of the next lineage follow."""

    def refresh(self) -> None:
        """Publish the current values again."""

    def close(self, *, ok: bool) -> None:
        """`ok`: the run completed."""

    def abandon(self) -> None:
        """Called from another thread while another method takes too long at the end of the run. Returns at once."""


def open_sinks(config: Config, run_dir: RunDir, resumed_step: int | None) -> list[Sink]:
    """Open the configured sinks. Blocking.

    Args:
        resumed_step: the step from which the run resumes; its files have been cut back to it.

    Raises:
        InfraError, ConfigError: a file cannot be written.
    """
    run = TrackedRun(
        project=config.project_name,
        experiment=config.experiment_name,
        name=run_dir.path.name,
        directory=run_dir.path,
        config=config.model_dump(mode="json"),
        resumed=resumed_step is not None,
    )
    sinks: list[Sink] = []
    with ExitStack() as opened:
        for name in config.logging.sinks:
            sink: Sink
            if name == "jsonl":
                sink = JsonlSink(run_dir.metrics)
            elif name == "tensorboard":
                sink = TensorBoardSink(run_dir.tensorboard, unix_s=time.time(), resumed_step=resumed_step)
            else:
                sink = RemoteSink(name, open_tracker(name, run))
            opened.callback(sink.close)
            sinks.append(sink)
        opened.pop_all()
    return sinks


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker that is registered as `name`, or that the import path `name` refers to."""
    tracker: Tracker = load_object(TRACKERS.get(name, name), "logging.sinks")(run)
    return tracker


class RemoteSink:
    """Passes rows to a tracker in a thread of its own."""

    reads_back = False

    def __init__(self, name: str, tracker: Tracker, *, max_rows: int = MAX_ROWS) -> None:
        self.name = name
        self._tracker = tracker
        self._max_rows = max_rows
        self._changed = threading.Condition()
        self._items: deque[MetricsRow | None] = deque()
        """None: training went back to a checkpoint."""
        self._ok: bool | None = None
        """How the run ended; None: it is still running."""
        self._closed = False
        self._joined = False
        self._lost = 0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: MetricsRow) -> None:
        """Returns at once. A full queue drops the row."""
        self._put(row)

    def rewind(self, step: int, version: int) -> Sequence[MetricsRow]:
        self._put(None)
        return ()

    def end(self, *, ok: bool) -> None:
        """Send what is queued and accept nothing more. Returns at once."""
        with self._changed:
            if self._ok is None:
                self._ok = ok
            self._changed.notify()

    def join(self, limit_s: float) -> None:
        """Wait until all rows are sent, and log how many are lost. Only the first call has an effect."""
        with self._changed:
            if self._joined:
                return
            self._joined = True
        self._thread.join(limit_s)
        with self._changed:
            late = self._thread.is_alive()
            unsent = sum(item is not None for item in self._items)
            self._items.clear()
            self._closed = True
        if late:
            self._tracker.abandon()
            logger.warning(
                "%s did not answer within %g s at the end of the run: it lacks %d rows or more of metrics, which the "
                "run directory has",
                *(self.name, limit_s, unsent + self._lost),
            )
        elif self._lost:
            logger.warning("%s lacks %d rows of metrics of this run", self.name, self._lost)

    def close(self) -> None:
        self.end(ok=True)
        self.join(CLOSE_S)

    def _put(self, item: MetricsRow | None) -> None:
        with self._changed:
            if self._ok is not None or self._closed:
                return
            full = len(self._items) >= self._max_rows
            if full:
                self._lost += item is not None
            else:
                self._items.append(item)
                self._changed.notify()
        if full:
            self._warn("is too slow", f"{self._max_rows} rows wait for it already, and more are dropped")

    def _run(self) -> None:
        try:
            self._tracker.open()
        except Exception as error:  # noqa: BLE001  the run continues without it
            self._warn("cannot be used", error)
            with self._changed:
                self._closed = True
                self._items.clear()
            return
        while (items := self._next()) is not None:
            try:
                if not items:
                    self._tracker.refresh()
                elif items[0] is None:
                    self._tracker.rewind()
                else:
                    self._tracker.write(items[0])
            except Exception as error:  # noqa: BLE001  the next row may succeed
                self._lost += any(item is not None for item in items)
                self._warn("does not accept metrics", error)
        try:
            self._tracker.close(ok=self._ok is True)
        except Exception as error:  # noqa: BLE001
            self._warn("did not close", error)

    def _next(self) -> list[MetricsRow | None] | None:
        """A list of one item; an empty list when none came for `refresh_s`; None when the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ok is not None, self._tracker.refresh_s)
            if self._items:
                return [self._items.popleft()]
            return [] if self._ok is None else None

    def _warn(self, what: str, why: Exception | str) -> None:
        if not self._warned and not self._closed:
            self._warned = True
            reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            logger.warning("logging.sinks: %s %s (%s); the run goes on", self.name, what, reason)


def end_remote_sinks(sinks: Iterable[RemoteSink], *, ok: bool, limit_s: float = CLOSE_S) -> None:
    """End all sinks concurrently. Blocks for `limit_s` at most."""
    sinks = list(sinks)
    until = time.monotonic() + limit_s
    for sink in sinks:
        sink.end(ok=ok)
    for sink in sinks:
        sink.join(max(0.0, until - time.monotonic()))


def tracked_values(row: MetricsRow) -> dict[str, float]:
    """Return the values of a row that a tracker records besides its step: finite metrics, `version` and `lineage`."""
    metrics = {name: value for name, value in row.metrics.items() if finite(value) is not None}
    return {**metrics, "version": float(row.version), "lineage": float(row.lineage)}
