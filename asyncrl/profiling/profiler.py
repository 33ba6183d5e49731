"""Recording events: a tuple in a bounded buffer for whoever records, everything else in a thread.

    span, note, record ─▶ buffer ─┬─ at home: a thread ─▶ JSON lines ─▶ events/step_…/<part>.jsonl
                          (deque) └─ away (replicas, ranks): `drain` with the next answer ─▶ `take` at home

A process that writes the run directory is at home. Another one, perhaps on another machine, sends its events along
with answers that it gives anyhow; what it had not sent when it died is lost. A full buffer drops the newest, counts
them, and says so in an event of its own. Nothing here ever fails or holds up the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.sections.run import ProfilerConfig
from asyncrl.profiling.buffer import Buffer, events_dropped
from asyncrl.profiling.events import EVENTS, Level, describe, enabled
from asyncrl.profiling.files import DIRECTORY, MAX_TEXT, EventFiles, Line
from asyncrl.profiling.otlp import OtlpSink
from asyncrl.profiling.spans import NO_CONTEXT, NOTHING, Context, Raw, Span, context

logger = logging.getLogger(__name__)

BUFFER_EVENTS = 100_000
WRITE_EVERY_S = 0.5
CLOSE_S = 5.0
"""For what is left to get onto the disk at the end."""
MAX_DRAINED = 5_000
"""Events in one answer."""


class Setup(NamedTuple):
    """What a process needs to know to record."""

    level: Level = "off"
    directory: Path | None = None
    """`events/` of the run directory; None: this process sends its events along with its answers."""
    buffer_events: int = BUFFER_EVENTS
    otlp_endpoint: str | None = None
    """Where else events go (`profiling.otlp`); None: nowhere."""
    run: str = ""
    """Its name, the same in all parts."""

    @classmethod
    def of(cls, config: ProfilerConfig, run_dir: Path | None) -> Setup:
        """`run_dir`: None where the process does not write it."""
        if run_dir is None:
            return cls(config.level, None, config.buffer_events)
        return cls(config.level, run_dir / DIRECTORY, config.buffer_events, config.otlp_endpoint, run_dir.name)


OFF = Setup()


class _Home(NamedTuple):
    """Where a process at home writes. Each `configure` makes a new one: an old thread that is late ends by itself."""

    buffer: Buffer
    files: EventFiles
    sinks: list[Callable[[Sequence[Line]], None]]
    otlp: OtlpSink | None
    ended: threading.Event
    failed: threading.Event
    """It has been told that something went wrong."""
    writing: threading.Lock


class Profiler:
    """The events of one process. Any thread may record."""

    def __init__(self) -> None:
        self.place: tuple[int | None, int | None] = (None, None)
        self.synchronize: Callable[[], None] = _do_nothing
        """Called around spans with `sync=True`: on a GPU, waits until it is done."""
        self._enabled: frozenset[str] = frozenset()
        self._buffer = Buffer()
        self._home: _Home | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------ setting up

    def configure(self, part: str, setup: Setup) -> None:
        """From now on this process records as `part`, which names its file. Calling it again starts anew."""
        self.close()
        self._buffer = buffer = Buffer(part, setup.buffer_events)
        self._enabled = enabled(setup.level)
        self.place = (None, None)
        self.synchronize = _do_nothing
        if setup.level != "off" and setup.directory is not None:
            otlp = OtlpSink(setup.otlp_endpoint, part, setup.run) if setup.otlp_endpoint is not None else None
            sinks: list[Callable[[Sequence[Line]], None]] = [] if otlp is None else [otlp]
            files = EventFiles(setup.directory)
            self._home = home = _Home(
                buffer, files, sinks, otlp, threading.Event(), threading.Event(), threading.Lock()
            )
            self._thread = threading.Thread(target=self._run, args=(home,), name="profiler", daemon=True)
            self._thread.start()

    def add_sink(self, sink: Callable[[Sequence[Line]], None]) -> None:
        """At home: it is given everything that is written, in the writing thread."""
        if self._home is not None:
            self._home.sinks.append(sink)

    def at(self, *, step: int | None = None, version: int | None = None) -> None:
        """Events from now on belong to this step, and were made with this version; None: as before."""
        before = self.place
        self.place = (before[0] if step is None else step, before[1] if version is None else version)

    @property
    def on(self) -> bool:
        return bool(self._enabled)

    def records(self, name: str) -> bool:
        """Whether events of this name are recorded: where it costs something to know what to say of one."""
        return name in self._enabled

    # ------------------------------------------------------------------------------------------------ recording

    def span(self, name: str, *, sync: bool = False, **fields: Any) -> Span:
        """What happens inside takes this long. An exception's class becomes the field `error`.

        Args:
            name: see `events`.
            sync: wait for the GPU at both ends, if the run asks for it (`profiler.synchronize`).
            fields: those of `events.FIELDS` and the event's own; values are numbers or text.

        Raises:
            BugError: `name` is not registered.
        """
        if name in self._enabled:
            return Span(self, name, fields, sync)
        if name not in EVENTS:
            describe(name)
        return NOTHING

    def note(self, name: str, **fields: Any) -> None:
        """A moment. Raises as `span`."""
        if name in self._enabled:
            self.put(Raw(name, time.perf_counter(), 0.0, self.place, context.get(), fields))
        elif name not in EVENTS:
            describe(name)

    def record(self, name: str, started_at: float, duration_s: float, **fields: Any) -> None:
        """What was timed elsewhere, from `started_at` (Unix seconds) on. Raises as `span`."""
        if name in self._enabled:
            self.put(Raw(name, started_at, duration_s, self.place, context.get(), fields, wall=True))
        elif name not in EVENTS:
            describe(name)

    def took(self, name: str, duration_s: float, **fields: Any) -> None:
        """What was timed elsewhere and has ended just now. Raises as `span`."""
        if name in self._enabled:
            start = time.perf_counter() - duration_s
            self.put(Raw(name, start, duration_s, self.place, context.get(), fields))
        elif name not in EVENTS:
            describe(name)

    def context(self, **fields: Any) -> AbstractContextManager[None]:
        """Events inside, in this task and those it starts, carry these fields too, unless they have their own."""
        return Context(fields) if self._enabled else NO_CONTEXT

    def put(self, raw: Raw) -> None:
        """For spans."""
        try:
            for value in raw.fields.values():
                if type(value) is str and len(value) > MAX_TEXT:
                    raw = raw._replace(fields=_cut(raw.fields))
                    break
        except RuntimeError:  # another thread adds to the span that ends in this one
            pass
        buffer = self._buffer
        if len(buffer.waiting) >= buffer.most:
            buffer.lose(1)
        else:
            buffer.waiting.append(raw)

    def lose(self, count: int) -> None:
        """Count events as lost that were recorded here and drained, and went nowhere."""
        self._buffer.lose(count)

    # ------------------------------------------------------------------------------------------------ away, and home

    def drain(self) -> list[Mapping[str, Any]]:
        """Events to send home, oldest first; at most `MAX_DRAINED`. Empty at home: they are written there anyhow."""
        if self._home is not None:
            return []
        lines = self._buffer.take(MAX_DRAINED)
        if marker := self._buffer.marker(self.place):
            lines.append(marker)
        return [line.event for line in lines]

    def take(self, part: str, events: Sequence[Mapping[str, Any]], *, sent: int | None = None) -> None:
        """Events that `part` sent. Those without a step or a version belong to what is under way here.

        `sent`: how many it has sent until now, with these. Of those since the first such word that never come, it is
        counted and told that they are lost.
        """
        if not self._enabled or self._home is None:
            return
        step, version = self.place
        buffer = self._buffer
        buffer.came(part, len(events), sum(map(events_dropped, events)), sent)
        for event in events:
            placed = {**event}
            if step is not None:
                placed.setdefault("step", step)
            if version is not None:
                placed.setdefault("version", version)
            buffer.put_line(Line(part, placed))

    def status(self) -> dict[str, int]:
        """Since `configure`: `events` and `dropped`, of this process and of what was sent to it, `own_dropped`, by
        this process alone, and `unsent`, which the OTLP endpoint did not take."""
        otlp = self._home.otlp if self._home is not None else None
        buffer = self._buffer
        return {
            "events": buffer.taken + len(buffer.waiting),
            "dropped": buffer.dropped + buffer.dropped_elsewhere,
            "own_dropped": buffer.dropped,
            "unsent": otlp.lost if otlp is not None else 0,
        }

    # ------------------------------------------------------------------------------------------------ writing

    def flush(self) -> None:
        """What was recorded until now is in the files, as far as the disk takes it, and with the OTLP endpoint, as far
        as that takes it. Blocking; it raises nothing."""
        home = self._home
        if home is not None:
            self._write(home)
            if home.otlp is not None:
                home.otlp.settle()

    def close(self) -> None:
        """Flush and stop; nothing is recorded any more. Blocking, for some seconds at most; it raises nothing."""
        self._enabled = frozenset()
        home, self._home = self._home, None
        thread, self._thread = self._thread, None
        if home is None or thread is None:
            return
        home.ended.set()
        thread.join(CLOSE_S)
        if home.otlp is not None:
            home.otlp.close()

    def _run(self, home: _Home) -> None:
        while not home.ended.wait(WRITE_EVERY_S):
            self._write(home)
        self._write(home)
        with home.writing:
            home.files.close()

    def _write(self, home: _Home) -> None:
        buffer = home.buffer
        with home.writing:
            lines = buffer.take(len(buffer.waiting))
            if lines:
                for line in self._file(home, lines):
                    buffer.lose_line(line)
                self._send_on(home, lines)
            marker = buffer.marker(self.place)
            if marker is not None and self._file(home, [marker]):
                buffer.tell_again(marker)  # once there is room

    @staticmethod
    def _file(home: _Home, lines: Sequence[Line]) -> Sequence[Line]:
        """Returns those that are lost. Whatever goes wrong, the thread goes on."""
        try:
            return home.files.write(lines)
        except Exception:
            if not home.failed.is_set():
                logger.warning("events cannot be written: reports of this run will lack some", exc_info=True)
            home.failed.set()
            return lines

    @staticmethod
    def _send_on(home: _Home, lines: Sequence[Line]) -> None:
        for sink in tuple(home.sinks):
            try:
                sink(lines)
            except Exception:
                logger.warning("events could not be sent on; no more are", exc_info=True)
                home.sinks.remove(sink)


def _cut(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}


def _do_nothing() -> None:
    pass


profile = Profiler()
"""Of this process."""
