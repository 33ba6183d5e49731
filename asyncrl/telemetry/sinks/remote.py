"""Rows to libraries that may talk to a server: each has a bounded queue and a thread of its own.

A library that is slow, hangs or fails costs its own rows, which are counted, and one warning. It never holds up the
run's own files, and the end of the run waits for all of them together `CLOSE_S` at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.telemetry.rows import Row, finite

logger = logging.getLogger(__name__)

MAX_ROWS = 1_000
"""A row is about 10 KB."""
CLOSE_S = 10.0


class TrackedRun(NamedTuple):
    """What a library is told of a run."""

    project: str
    experiment: str
    name: str
    """Of the run directory: the same when the run goes on."""
    directory: Path
    config: dict[str, Any]
    """As plain JSON values."""
    resumed: bool

    @property
    def title(self) -> str:
        return f"{self.experiment}-{self.name}"

    def kept_id(self, library: str) -> str | None:
        """Of the library's run that an earlier process of this one wrote to."""
        path = self.directory / f"{library}.id"
        return path.read_text(encoding="utf-8").strip() or None if self.resumed and path.exists() else None

    def keep_id(self, library: str, run_id: str) -> None:
        (self.directory / f"{library}.id").write_text(f"{run_id}\n", encoding="utf-8")


class Tracker:
    """A library that keeps metrics. One thread calls it; it may raise what it likes and take its time.

    None of them can take back what it was told, so a step that is trained again after training went back is there
    twice: `lineage`, which goes along with every row, tells them apart.
    """

    refresh_s: float | None = None
    """`refresh` is called so often while no row comes; None: never."""

    def open(self) -> None:
        """Import the library and begin a run, or go on with it."""

    def write(self, row: Row) -> None:
        raise NotImplementedError

    def rewind(self) -> None:
        """Training went back to a checkpoint; rows of the next lineage follow."""

    def refresh(self) -> None:
        """Say again what was told."""

    def close(self, *, ok: bool) -> None:
        """`ok`: the run has ended as it should."""

    def abandon(self) -> None:
        """From another thread, while one of the others takes too long at the end of the run. Returns at once."""


class RemoteSink:
    reads_back = False

    def __init__(self, name: str, tracker: Tracker, *, max_rows: int = MAX_ROWS) -> None:
        self.name = name
        self._tracker = tracker
        self._most = max_rows
        self._changed = threading.Condition()
        self._items: deque[Row | None] = deque()
        """None: training went back."""
        self._ok: bool | None = None
        """How the run ended; None: it goes on."""
        self._over = False
        self._joined = False
        self._lost = 0
        self._told = False
        """One warning is enough."""
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """At once. A full queue drops the row."""
        self._put(row)

    def rewind(self, step: int, version: int) -> Sequence[Row]:
        self._put(None)
        return ()

    def end(self, *, ok: bool) -> None:
        """What is queued is still sent, and nothing after it. Returns at once."""
        with self._changed:
            if self._ok is None:
                self._ok = ok
            self._changed.notify()

    def join(self, limit_s: float) -> None:
        """Wait until it is sent, and say how much is lost. Only the first call counts."""
        with self._changed:
            if self._joined:
                return
            self._joined = True
        self._thread.join(limit_s)
        with self._changed:
            late = self._thread.is_alive()
            unsent = sum(item is not None for item in self._items)
            self._items.clear()
            self._over = True
        if late:
            self._tracker.abandon()
            logger.warning(
                "%s did not answer within %g s at the end of the run: it lacks %d rows or more of %s",
                *(self.name, limit_s, unsent + self._lost, "metrics, which the run directory has"),
            )
        elif self._lost:
            logger.warning("%s lacks %d rows of metrics of this run", self.name, self._lost)

    def close(self) -> None:
        self.end(ok=True)
        self.join(CLOSE_S)

    def _put(self, item: Row | None) -> None:
        with self._changed:
            if self._ok is not None or self._over:
                return
            full = len(self._items) >= self._most
            if full:
                self._lost += item is not None
            else:
                self._items.append(item)
                self._changed.notify()
        if full:
            self._tell("is too slow", f"{self._most} rows wait for it already, and more are dropped")

    def _run(self) -> None:
        try:
            self._tracker.open()
        except Exception as error:  # noqa: BLE001  the run goes on without it
            self._tell("cannot be used", error)
            with self._changed:
                self._over = True
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
            except Exception as error:  # noqa: BLE001  the next row may go through
                self._lost += any(item is not None for item in items)
                self._tell("does not take metrics", error)
        try:
            self._tracker.close(ok=self._ok is True)
        except Exception as error:  # noqa: BLE001
            self._tell("did not close", error)

    def _next(self) -> list[Row | None] | None:
        """One item, as a list; an empty one: none came for `refresh_s`; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ok is not None, self._tracker.refresh_s)
            if self._items:
                return [self._items.popleft()]
            return [] if self._ok is None else None

    def _tell(self, what: str, why: Exception | str) -> None:
        if not self._told and not self._over:
            self._told = True
            told = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            logger.warning("logging.sinks: %s %s (%s); the run goes on", self.name, what, told)


def end_all(sinks: Iterable[RemoteSink], *, ok: bool, limit_s: float = CLOSE_S) -> None:
    """End them together. Blocking, for `limit_s` at most."""
    sinks = list(sinks)
    until = time.monotonic() + limit_s
    for sink in sinks:
        sink.end(ok=ok)
    for sink in sinks:
        sink.join(max(0.0, until - time.monotonic()))


def values(row: Row) -> dict[str, float]:
    """What libraries are told of a row besides its step: its finite metrics, `version` and `lineage`."""
    metrics = {name: value for name, value in row.metrics.items() if finite(value) is not None}
    return {**metrics, "version": float(row.version), "lineage": float(row.lineage)}
