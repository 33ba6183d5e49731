"""The sinks that receive the rows of a run, as selected by `logging.sinks`.

Sinks block, so the recorder calls them in threads. Each row is written at once to the files of the run directory
(`file_sinks`), and a full disk ends the run. Each library that may block on a network (`trackers`) runs on a separate
thread. If it blocks, fails or falls behind, only its rows are lost: they are counted, and the first loss is logged as a
warning. At the end, the run waits at most `CLOSE_S` for all these libraries together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncrl.config.import_path import load_registered
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.observe.metrics.file_sinks import JsonlSink, TensorBoardSink
from asyncrl.observe.metrics.rows import MetricsRow, finite
from asyncrl.profiling.background import BackgroundSender, Receiver
from asyncrl.storage.run_dir import RunDir, read_file

logger = logging.getLogger(__name__)

TRACKERS: Mapping[str, str] = {
    "wandb": "asyncrl.observe.metrics.trackers:WandbTracker",
    "mlflow": "asyncrl.observe.metrics.trackers:MlflowTracker",
    "trackio": "asyncrl.observe.metrics.trackers:TrackioTracker",
    "prometheus": "asyncrl.observe.metrics.prometheus:PrometheusTracker",
}
"""Import paths of `Tracker` classes by name."""
MAX_ROWS = 1_000
"""Limit of the queue of a tracker; a row is about 10 KB."""
CLOSE_S = 10.0


class Sink(Protocol):
    reads_back: bool
    """Whether `rewind` reads the rows that remain. At most one sink of a run does."""

    def write(self, row: MetricsRow) -> None:
        """Write a row. On return, the operating system has it, so that it is not lost if the process is killed.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """

    def rewind(self, step: int, version: int, add: Callable[[MetricsRow], None]) -> None:
        """Remove the rows beyond a checkpoint that training goes back to.

        Args:
            add: gets the remaining rows in order, one at a time, if the sink `reads_back`.

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
    """`Config.public_values`."""
    resumed: bool

    @property
    def title(self) -> str:
        return f"{self.experiment}-{self.name}"

    def saved_id(self, library: str) -> str | None:
        """Return the id of the library's run that an earlier process of this run wrote to."""
        path = self.directory / f"{library}.id"
        try:
            return read_file(path).decode().strip() or None if self.resumed else None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read (%s): %s records the rest as a new run", path, error, library)
            return None

    def save_id(self, library: str, run_id: str) -> None:
        (self.directory / f"{library}.id").write_text(f"{run_id}\n", encoding="utf-8")


class Tracker(Receiver[MetricsRow | None]):
    """The base class of adapters to libraries that record metrics. One thread calls the methods, which may block and
    raise any exception.

    These libraries cannot remove rows, so a step that is trained again after a rewind appears twice. Every row has
    `lineage`, which distinguishes the two.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run

    def write(self, row: MetricsRow) -> None:
        raise NotImplementedError

    def rewind(self) -> None:
        """React to the return of training to a checkpoint; rows of the next lineage follow."""

    def send(self, items: Sequence[MetricsRow | None]) -> None:
        for row in items:
            if row is None:
                self.rewind()
            else:
                self.write(row)


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
        config=config.public_values(),
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
    """Return the tracker that is registered as `name`, or that the import path `name` refers to.

    Raises:
        ConfigError: there is no such class, or it is not a subclass of `Tracker`.
        UserCodeError: its module raised when it was imported.
    """
    kind = load_registered(name, "logging.sinks", TRACKERS, "Tracker")
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise ConfigError(
            f"logging.sinks: {name} is not a subclass of asyncrl.observe.metrics.sinks.Tracker; make it one"
        )
    return kind(run)


class RemoteSink(BackgroundSender[MetricsRow | None]):
    """Passes rows to a tracker on a separate thread. None in the queue means that training went back."""

    reads_back = False

    def __init__(self, name: str, tracker: Tracker, *, max_rows: int = MAX_ROWS) -> None:
        super().__init__(tracker, "logging.sinks", name, "rows of metrics", max_items=max_rows)

    def write(self, row: MetricsRow) -> None:
        """Queue the row and return at once. A full queue drops it."""
        self.put([row])

    def rewind(self, step: int, version: int, add: Callable[[MetricsRow], None]) -> None:
        self.put([None])

    def close(self, limit_s: float = CLOSE_S) -> None:
        super().close(limit_s)


def end_remote_sinks(sinks: Iterable[RemoteSink], *, ok: bool, limit_s: float = CLOSE_S) -> None:
    """End all sinks concurrently. Blocks for `limit_s` at most."""
    sinks = list(sinks)
    until = time.monotonic() + limit_s
    for sink in sinks:
        sink.end(ok=ok)
    for sink in sinks:
        sink.join(max(0.0, until - time.monotonic()))


def close_sinks(sinks: Sequence[Sink], *, ok: bool) -> None:
    """Close all sinks; trackers get the outcome. Blocks for `CLOSE_S` at most."""
    end_remote_sinks([sink for sink in sinks if isinstance(sink, RemoteSink)], ok=ok)
    for sink in sinks:
        sink.close()


def tracked_values(row: MetricsRow) -> dict[str, float]:
    """Return the values of a row that a tracker records besides its step: finite metrics, `version` and `lineage`."""
    metrics = {name: value for name, value in row.metrics.items() if finite(value) is not None}
    return {**metrics, "version": float(row.version), "lineage": float(row.lineage)}
