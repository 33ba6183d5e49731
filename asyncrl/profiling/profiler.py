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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.sections.run import ProfilerConfig
from asyncrl.profiling.events import EVENTS, Level, describe, enabled
from asyncrl.profiling.files import DIRECTORY, EventFiles, Line
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

    files: EventFiles
    sinks: list[Callable[[Sequence[Line]], None]]
    otlp: OtlpSink | None
    ended: threading.Event


class Profiler:
    """The events of one process. Any thread may record."""

    def __init__(self) -> None:
        self.place: tuple[int | None, int | None] = (None, None)
        self.synchronize: Callable[[], None] = _do_nothing
        """Called around spans with `sync=True`: on a GPU, waits until it is done."""
        self._enabled: frozenset[str] = frozenset()
        self._buffer: deque[Raw | Line] = deque()
        self._most = 0
        self._part = ""
        self._taken = 0
        """Events that have left the buffer."""
        self._dropping = threading.Lock()
        self._dropped = 0
        self._dropped_told = 0
        self._dropped_elsewhere = 0
        self._home: _Home | None = None
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()

    # ------------------------------------------------------------------------------------------------ setting up

    def configure(self, part: str, setup: Setup) -> None:
        """From now on this process records as `part`, which names its file. Calling it again starts anew."""
        self.close()
        self._part = part
        self._most = setup.buffer_events
        self._enabled = enabled(setup.level)
        self.place = (None, None)
        self.synchronize = _do_nothing
        self._taken = self._dropped = self._dropped_told = self._dropped_elsewhere = 0
        self._buffer.clear()
        if setup.level != "off" and setup.directory is not None:
            otlp = OtlpSink(setup.otlp_endpoint, part, setup.run) if setup.otlp_endpoint is not None else None
            sinks: list[Callable[[Sequence[Line]], None]] = [] if otlp is None else [otlp]
            self._home = home = _Home(EventFiles(setup.directory), sinks, otlp, threading.Event())
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
        if len(self._buffer) >= self._most:
            self._lose(1)
        else:
            self._buffer.append(raw)

    # ------------------------------------------------------------------------------------------------ away, and home

    def drain(self) -> list[Mapping[str, Any]]:
        """Events to send home, oldest first; at most `MAX_DRAINED`. Empty at home: they are written there anyhow."""
        if self._home is not None:
            return []
        lines = self._take_lines(MAX_DRAINED)
        if marker := self._marker():
            lines.append(marker)
        return [line.event for line in lines]

    def take(self, part: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Events that `part` sent. Those without a step or a version belong to what is under way here."""
        if not self._enabled or self._home is None:
            return
        step, version = self.place
        for event in events:
            if event["event"] == "profiler.dropped":
                with self._dropping:
                    self._dropped_elsewhere += int(event.get("events", 0))
            if len(self._buffer) >= self._most:
                self._lose(1)
                continue
            placed = {**event}
            if step is not None:
                placed.setdefault("step", step)
            if version is not None:
                placed.setdefault("version", version)
            self._buffer.append(Line(part, placed))

    def status(self) -> dict[str, int]:
        """Since `configure`: `events` and `dropped`, of this process and of what was sent to it, `own_dropped`, by
        this process alone, and `unsent`, which the OTLP endpoint did not take."""
        otlp = self._home.otlp if self._home is not None else None
        return {
            "events": self._taken + len(self._buffer),
            "dropped": self._dropped + self._dropped_elsewhere,
            "own_dropped": self._dropped,
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
        with self._writing:
            home.files.close()

    def _write(self, home: _Home) -> None:
        with self._writing:
            lines = self._take_lines(len(self._buffer))
            if lines:
                self._lose(home.files.write(lines))
                self._send_on(home, lines)
            marker = self._marker()
            if marker is not None and home.files.write([marker]):
                self._dropped_told -= int(marker.event["events"])  # told again, once there is room

    @staticmethod
    def _send_on(home: _Home, lines: Sequence[Line]) -> None:
        for sink in tuple(home.sinks):
            try:
                sink(lines)
            except Exception:
                logger.warning("events could not be sent on; no more are", exc_info=True)
                home.sinks.remove(sink)

    def _lose(self, count: int) -> None:
        if count:
            with self._dropping:
                self._dropped += count

    def _take_lines(self, most: int) -> list[Line]:
        offset = time.time() - time.perf_counter()
        lines: list[Line] = []
        for _ in range(min(most, len(self._buffer))):
            try:
                raw = self._buffer.popleft()
            except IndexError:  # another thread has taken it
                break
            lines.append(raw if isinstance(raw, Line) else Line(self._part, _encoded(raw, offset)))
        self._taken += len(lines)
        return lines

    def _marker(self) -> Line | None:
        """Tells of what was dropped since the last one."""
        untold = self._dropped - self._dropped_told
        if untold <= 0:
            return None
        self._dropped_told += untold
        raw = Raw("profiler.dropped", time.time(), 0.0, self.place, {}, {"events": untold}, wall=True)
        return Line(self._part, _encoded(raw, 0.0))


def _encoded(raw: Raw, offset: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "timestamp": round(raw.start if raw.wall else raw.start + offset, 6),
        "event": raw.name,
        "duration_s": round(raw.duration_s, 6),
    }
    step, version = raw.place
    if step is not None:
        event["step"] = step
    if version is not None:
        event["version"] = version
    for fields in (raw.context, raw.fields):
        for name, value in fields.items():
            if value is not None:
                event[name] = value
    return event


def _do_nothing() -> None:
    pass


profile = Profiler()
"""Of this process."""
