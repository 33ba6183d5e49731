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
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from asyncrl.config.sections.run import ProfilerConfig
from asyncrl.profiling.events import EVENTS, Level, describe, enabled
from asyncrl.profiling.files import DIRECTORY, EventFiles, Line
from asyncrl.profiling.otlp import OtlpSink

logger = logging.getLogger(__name__)

BUFFER_EVENTS = 100_000
WRITE_EVERY_S = 0.5
CLOSE_S = 5.0
"""For what is left to get onto the disk at the end."""
MAX_DRAINED = 5_000
"""Events in one answer."""

_context: ContextVar[Mapping[str, Any]] = ContextVar("profile_context", default={})  # noqa: B039  never changed


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


class _Raw(NamedTuple):
    """As recorded; encoded later, in another thread."""

    name: str
    start: float
    """`perf_counter`, or Unix seconds if `wall`."""
    duration_s: float
    place: tuple[int | None, int | None]
    """Step and version."""
    context: Mapping[str, Any]
    fields: Mapping[str, Any]
    wall: bool = False


class Span:
    """What is under way; `add` fields that are known only later. Works with `with` and with `async with`."""

    __slots__ = ("_fields", "_name", "_profiler", "_start", "_sync")

    def __init__(self, profiler: Profiler, name: str, fields: dict[str, Any], sync: bool) -> None:
        self._profiler = profiler
        self._name = name
        self._fields = fields
        self._sync = sync
        self._start = 0.0

    def add(self, **fields: Any) -> None:
        self._fields.update(fields)

    def __enter__(self) -> Self:
        if self._sync:
            self._profiler.synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sync and kind is None:
            self._profiler.synchronize()
        end = time.perf_counter()
        if kind is not None:
            self._fields["error"] = kind.__name__
        self._profiler._put(
            _Raw(self._name, self._start, end - self._start, self._profiler.place, _context.get(), self._fields)
        )

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class _Nothing(Span):
    """A span that nobody wants."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def add(self, **fields: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NOTHING = _Nothing()
_NO_CONTEXT = nullcontext()


class _Context(AbstractContextManager[None]):
    """A class, as a generator takes three times as long."""

    __slots__ = ("_fields", "_token")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _context.set({**_context.get(), **self._fields})

    def __exit__(self, *error: object) -> None:
        _context.reset(self._token)


class Profiler:
    """The events of one process. Any thread may record."""

    def __init__(self) -> None:
        self.place: tuple[int | None, int | None] = (None, None)
        self.synchronize: Callable[[], None] = _do_nothing
        """Called around spans with `sync=True`: on a GPU, waits until it is done."""
        self._enabled: frozenset[str] = frozenset()
        self._buffer: deque[_Raw | Line] = deque()
        self._most = 0
        self._part = ""
        self._recorded = 0
        self._dropped = 0
        self._dropped_told = 0
        self._dropped_elsewhere = 0
        self._files: EventFiles | None = None
        self._sinks: list[Callable[[Sequence[Line]], None]] = []
        self._otlp: OtlpSink | None = None
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = False

    # ------------------------------------------------------------------------------------------------ setting up

    def configure(self, part: str, setup: Setup) -> None:
        """From now on this process records as `part`, which names its file. Calling it again starts anew."""
        self.close()
        self._part = part
        self._most = setup.buffer_events
        self._enabled = enabled(setup.level)
        self.place = (None, None)
        self._recorded = self._dropped = self._dropped_told = self._dropped_elsewhere = 0
        self._buffer.clear()
        self._sinks.clear()
        self._files = None
        if setup.level != "off" and setup.directory is not None:
            self._files = EventFiles(setup.directory)
            if setup.otlp_endpoint is not None:
                self._otlp = OtlpSink(setup.otlp_endpoint, part, setup.run)
                self._sinks.append(self._otlp)
            self._ending = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
            self._thread.start()

    def add_sink(self, sink: Callable[[Sequence[Line]], None]) -> None:
        """Is given everything that is written, in the writing thread."""
        self._sinks.append(sink)

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
        return _NOTHING

    def note(self, name: str, **fields: Any) -> None:
        """A moment. Raises as `span`."""
        if name in self._enabled:
            self._put(_Raw(name, time.perf_counter(), 0.0, self.place, _context.get(), fields))
        elif name not in EVENTS:
            describe(name)

    def record(self, name: str, started_at: float, duration_s: float, **fields: Any) -> None:
        """What was timed elsewhere, from `started_at` (Unix seconds) on. Raises as `span`."""
        if name in self._enabled:
            self._put(_Raw(name, started_at, duration_s, self.place, _context.get(), fields, wall=True))
        elif name not in EVENTS:
            describe(name)

    def took(self, name: str, duration_s: float, **fields: Any) -> None:
        """What was timed elsewhere and has ended just now. Raises as `span`."""
        if name in self._enabled:
            start = time.perf_counter() - duration_s
            self._put(_Raw(name, start, duration_s, self.place, _context.get(), fields))
        elif name not in EVENTS:
            describe(name)

    def context(self, **fields: Any) -> AbstractContextManager[None]:
        """Events inside, in this task and those it starts, carry these fields too, unless they have their own."""
        return _Context(fields) if self._enabled else _NO_CONTEXT

    def _put(self, raw: _Raw) -> None:
        if len(self._buffer) >= self._most:
            self._dropped += 1
            return
        self._recorded += 1
        self._buffer.append(raw)

    # ------------------------------------------------------------------------------------------------ away, and home

    def drain(self) -> list[Mapping[str, Any]]:
        """Events to send home, oldest first; at most `MAX_DRAINED`. Empty at home: they are written there anyhow."""
        if self._files is not None:
            return []
        return [line.event for line in self._take_lines(MAX_DRAINED)]

    def take(self, part: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Events that `part` sent. Those without a step or a version belong to what is under way here."""
        if not self._enabled or self._files is None:
            return
        for event in events:
            if len(self._buffer) >= self._most:
                self._dropped += 1
                continue
            if event["event"] == "profiler.dropped":
                self._dropped_elsewhere += int(event.get("events", 0))
            self._recorded += 1
            step, version = self.place
            placed = {**event}
            if step is not None:
                placed.setdefault("step", step)
            if version is not None:
                placed.setdefault("version", version)
            self._buffer.append(Line(part, placed))

    def status(self) -> dict[str, int]:
        """`events` and `dropped`, of this process and of what was sent to it, since `configure`."""
        return {"events": self._recorded, "dropped": self._dropped + self._dropped_elsewhere}

    # ------------------------------------------------------------------------------------------------ writing

    def flush(self) -> None:
        """What was recorded until now is in the files, as far as the disk takes it. Blocking."""
        self._write()

    def close(self) -> None:
        """Flush and stop; nothing is recorded any more. Blocking, for some seconds at most."""
        thread, self._thread = self._thread, None
        self._enabled = frozenset()
        if thread is not None:
            self._ending = True
            self._wake.set()
            thread.join(CLOSE_S)
        otlp, self._otlp = self._otlp, None
        if otlp is not None:
            otlp.close()

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(WRITE_EVERY_S)
            self._write()
        if self._files is not None:
            self._files.close()

    def _write(self) -> None:
        with self._writing:
            if self._files is None:
                return
            lines = self._take_lines(len(self._buffer))
            if not lines:
                return
            self._dropped += self._files.write(lines)
            for sink in self._sinks:
                try:
                    sink(lines)
                except Exception:
                    logger.warning("events could not be sent on; no more are", exc_info=True)
                    self._sinks.remove(sink)
                    break

    def _take_lines(self, most: int) -> list[Line]:
        offset = time.time() - time.perf_counter()
        lines: list[Line] = []
        for _ in range(min(most, len(self._buffer))):
            try:
                raw = self._buffer.popleft()
            except IndexError:  # another thread has taken it
                break
            lines.append(raw if isinstance(raw, Line) else Line(self._part, _encoded(raw, offset)))
        if (lost := self._dropped - self._dropped_told) > 0:
            self._dropped_told = self._dropped
            raw = _Raw("profiler.dropped", time.time(), 0.0, self.place, {}, {"events": lost}, wall=True)
            lines.append(Line(self._part, _encoded(raw, offset)))
        return lines


def _encoded(raw: _Raw, offset: float) -> dict[str, Any]:
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
