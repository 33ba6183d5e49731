"""Record events: the caller appends a tuple to a bounded buffer, and a thread does everything else.

    span, note, record ─▶ EventBuffer ─┬─ with a directory: a thread ─▶ JSON lines ─▶ events/step_…/<part>.jsonl
                             (deque)   └─ without one (replicas, ranks): `drain` with the next answer ─▶ `ingest`

A process without a directory, perhaps on another machine, attaches its events to the answers of other calls; if it
dies, events that it has not sent are lost. A full buffer drops the newest events and counts them, and a
`profiler.dropped` event reports the number. Recording never fails and never blocks the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.profiling.background import BackgroundSender
from asyncrl.profiling.catalog import EVENTS, EventLevel, describe, enabled
from asyncrl.profiling.files import EVENTS_DIRECTORY, MAX_TEXT, EventFiles, EventLine
from asyncrl.profiling.otlp import otlp_sender
from asyncrl.profiling.rotation import EventRotation

logger = logging.getLogger(__name__)

BUFFER_EVENTS = 100_000
WRITE_EVERY_S = 0.5
ROTATE_EVERY_S = 0.02
"""Pause between two pieces of work of `EventRotation`."""
CLOSE_S = 5.0
"""Limit for writing the remaining events when the profiler closes."""
MAX_SENDERS = 1_000
"""Forwarding processes whose events are counted, those that have sent most recently."""
MAX_DRAINED = 5_000
"""Largest number of events in one answer."""

ForwardedEvents = tuple[str, Sequence[Mapping[str, Any]], int | None]
"""The arguments of `Profiler.ingest`."""

_context: ContextVar[Mapping[str, Any]] = ContextVar("profile_context", default={})  # noqa: B039  never mutated


class ProfilerSettings(NamedTuple):
    """How a process records its events."""

    level: EventLevel = "off"
    directory: Path | None = None
    """`events/` of the run directory; None if the process forwards its events with its answers."""
    buffer_events: int = BUFFER_EVENTS
    otlp_endpoint: str | None = None
    """The collector that also receives the events (`profiling.otlp`)."""
    run: str = ""
    """Name of the run, the same in all parts."""
    keep_bytes: int | None = None
    """Size of all event files of the run above which this process deletes the oldest ones
    (`asyncrl.profiling.rotation`); None: it deletes none."""

    @classmethod
    def of(cls, config: ProfilerConfig, run_dir: Path | None, *, rotates: bool = False) -> ProfilerSettings:
        """Return the settings of a process.

        Args:
            run_dir: None in a process that does not write to it.
            rotates: whether this is the one process of the run that deletes old events.
        """
        if run_dir is None:
            return cls(config.level, None, config.buffer_events)
        directory, keep_bytes = run_dir / EVENTS_DIRECTORY, round(config.keep_gb * 1e9) if rotates else None
        return cls(config.level, directory, config.buffer_events, config.otlp_endpoint, run_dir.name, keep_bytes)


PROFILING_OFF = ProfilerSettings()


# ------------------------------------------------------------------------------------------------ spans


class RecordedEvent(NamedTuple):
    """An event as recorded; another thread encodes it later."""

    name: str
    start: float
    """`perf_counter`, or Unix seconds if `wall`."""
    duration_s: float
    place: tuple[int | None, int | None]
    """Step and version."""
    context: Mapping[str, Any]
    fields: Mapping[str, Any]
    wall: bool = False


@dataclass(slots=True, eq=False)
class ProfilerSpan:
    """Times a `with` or `async with` block; `add` sets fields that are known only later."""

    _profiler: Profiler
    _name: str
    _fields: dict[str, Any]
    _sync: bool
    _start: float = 0.0

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
        duration_s, place = time.perf_counter() - self._start, self._profiler.place
        if kind is not None:
            self._fields["error"] = kind.__name__
        self._profiler.put(RecordedEvent(self._name, self._start, duration_s, place, _context.get(), self._fields))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class DisabledSpan(ProfilerSpan):
    """A span of an event that is not recorded."""

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


class FieldContext(AbstractContextManager[None]):
    """Adds fields to all events inside the block. It is a class, because a generator takes three times as long."""

    __slots__ = ("_fields", "_token")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _context.set({**_context.get(), **self._fields})

    def __exit__(self, *error: object) -> None:
        _context.reset(self._token)


DISABLED_SPAN = DisabledSpan()
_NO_CONTEXT = nullcontext()


# ------------------------------------------------------------------------------------------------ buffer


class EventBuffer:
    """A bounded buffer of events that are not yet written or sent, with counts of the lost ones.

    Any thread may use it. Each `configure` makes a new one, so that a late writer of the previous run keeps
    the previous buffer.
    """

    def __init__(self, part: str = "", max_events: int = 0) -> None:
        self.waiting: deque[RecordedEvent | EventLine] = deque()
        self.max_events = max_events
        self.num_taken = 0
        self.dropped = 0
        """Events that this process lost."""
        self.dropped_elsewhere = 0
        """Events that forwarding processes lost, or that were lost while they were forwarded."""
        self._part = part
        self._unreported = 0
        self._lock = threading.Lock()
        self._senders: dict[str, _SenderCount] = {}
        self._warned = False

    def put_line(self, line: EventLine) -> None:
        if len(self.waiting) >= self.max_events:
            self.drop_line(line)
        else:
            self.waiting.append(line)

    def count_lost(self, count: int) -> None:
        with self._lock:
            self.dropped += count
            self._unreported += count

    def drop_line(self, line: EventLine) -> None:
        """Count a line as lost. If it reports other losses, these are reported again."""
        with self._lock:
            self.dropped += 1
            self._unreported += 1 + _num_dropped(line.event)

    def received(self, part: str, events: Sequence[Mapping[str, Any]], num_sent: int | None) -> None:
        """Count the events that arrived from `part`, which has sent `num_sent` until now."""
        with self._lock:
            sender = self._senders.pop(part) if part in self._senders else _SenderCount()
            self._senders[part] = sender
            if len(self._senders) > MAX_SENDERS:  # replicas that have ended
                del self._senders[next(iter(self._senders))]
            lost = sender.num_lost(len(events), num_sent)
            self.dropped_elsewhere += sum(map(_num_dropped, events)) + lost
            self._unreported += lost

    def take(self, limit: int) -> list[EventLine]:
        """Remove the oldest events. An event that cannot be encoded is lost."""
        offset = time.time() - time.perf_counter()
        lines: list[EventLine] = []
        for _ in range(min(limit, len(self.waiting))):
            try:
                event = self.waiting.popleft()
            except IndexError:  # another thread has taken it
                break
            try:
                lines.append(event if isinstance(event, EventLine) else EventLine(self._part, _encode(event, offset)))
            except Exception:
                self.count_lost(1)
                if not self._warned:
                    logger.warning("an event cannot be encoded; it and others like it are lost", exc_info=True)
                self._warned = True
        self.num_taken += len(lines)
        return lines

    def loss_report(self, place: tuple[int | None, int | None]) -> EventLine | None:
        """Return an event with the number of events lost since the last report, or None if no event was lost."""
        with self._lock:
            unreported, self._unreported = self._unreported, 0
        if not unreported:
            return None
        report = RecordedEvent("profiler.dropped", time.time(), 0.0, place, {}, {"events": unreported}, wall=True)
        return EventLine(self._part, _encode(report, 0.0))

    def report_again(self, report: EventLine) -> None:
        """Repeat a loss report that could not be written."""
        with self._lock:
            self._unreported += _num_dropped(report.event)


class _SenderCount:
    """Compares the number of events that a part has sent with the number that arrived.

    Answers may overtake each other, so only events that are missing at two answers in a row count as lost; if they
    arrive later, the next loss is reduced by their number.
    """

    def __init__(self) -> None:
        self._num_arrived = 0
        self._num_sent: int | None = None
        self._missing = 0

    def num_lost(self, num_arrived: int, num_sent: int | None) -> int:
        """Return the newly discovered losses. `num_sent`: total of the part, including these; None if not reported."""
        self._num_arrived += num_arrived
        if num_sent is None:
            return 0
        if self._num_sent is None:  # a previous receiver got the earlier events
            self._num_arrived = self._num_sent = num_sent
        self._num_sent = max(self._num_sent, num_sent)
        missing = self._num_sent - self._num_arrived
        lost = max(0, min(self._missing, missing))
        self._num_arrived += lost
        self._missing = missing - lost
        return lost


def _num_dropped(event: Mapping[str, Any]) -> int:
    """Return the losses that a loss report contains; 0 for other events."""
    return int(event.get("events", 0)) if event["event"] == "profiler.dropped" else 0


def _encode(recorded: RecordedEvent, offset: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "timestamp": round(recorded.start if recorded.wall else recorded.start + offset, 6),
        "event": recorded.name,
        "duration_s": round(recorded.duration_s, 6),
    }
    step, version = recorded.place
    if step is not None:
        event["step"] = step
    if version is not None:
        event["version"] = version
    for fields in (recorded.context, recorded.fields):
        for name, value in fields.items():
            if value is not None:
                event[name] = value
    return event


# ------------------------------------------------------------------------------------------------ writing


class _EventWriter:
    """The thread that moves events from a buffer to files and, if configured, to an OTLP collector. In one process of
    the run, it also deletes the oldest events of all processes."""

    def __init__(
        self,
        profiler: Profiler,
        buffer: EventBuffer,
        directory: Path,
        keep_bytes: int | None,
        otlp: BackgroundSender[EventLine] | None,
    ) -> None:
        self.otlp = otlp
        self._profiler = profiler
        self._buffer = buffer
        self._files = EventFiles(directory)
        self._rotation = EventRotation(directory, keep_bytes) if keep_bytes is not None else None
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        self._write()
        if self.otlp is not None:
            self.otlp.settle(CLOSE_S)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(CLOSE_S)
        if self.otlp is not None:
            self.otlp.close(CLOSE_S)

    def _run(self) -> None:
        pause_s = WRITE_EVERY_S
        while not self._ended.wait(pause_s):
            self._write()
            has_more = self._rotation is not None and self._rotation.work(self._profiler.place[0])
            pause_s = ROTATE_EVERY_S if has_more else WRITE_EVERY_S
        self._write()
        with self._writing:
            self._files.close()

    def _write(self) -> None:
        buffer = self._buffer
        with self._writing:
            lines = buffer.take(len(buffer.waiting))
            if lines:
                for line in self._write_files(lines):
                    buffer.drop_line(line)
                if self.otlp is not None:
                    self.otlp.put(lines)
            report = buffer.loss_report(self._profiler.place)
            if report is not None and self._write_files([report]):
                buffer.report_again(report)

    def _write_files(self, lines: Sequence[EventLine]) -> Sequence[EventLine]:
        """Write lines, and return the lost ones. The thread continues after any error."""
        try:
            return self._files.write(lines)
        except Exception:
            if not self._warned:
                logger.warning("events cannot be written: reports of this run will lack some", exc_info=True)
            self._warned = True
            return lines


class Profiler:
    """Records the events of one process. Any thread may record."""

    def __init__(self) -> None:
        self.place: tuple[int | None, int | None] = (None, None)
        """Step and version of the events recorded now."""
        self.synchronize: Callable[[], None] = _do_nothing
        """Called around spans with `sync=True`; on a GPU it waits until the GPU is done."""
        self._enabled: frozenset[str] = frozenset()
        self._buffer = EventBuffer()
        self._writer: _EventWriter | None = None
        self._forwarded: deque[ForwardedEvents] = deque(maxlen=MAX_DRAINED)

    def configure(self, part: str, settings: ProfilerSettings) -> None:
        """Start recording as `part`, the name of its file. Calling it again discards the previous state."""
        self.close()
        self._buffer = EventBuffer(part, settings.buffer_events)
        self._enabled = enabled(settings.level)
        self.place = (None, None)
        self.synchronize = _do_nothing
        if settings.level != "off" and settings.directory is not None:
            endpoint = settings.otlp_endpoint
            otlp = otlp_sender(endpoint, settings.run) if endpoint is not None else None
            self._writer = _EventWriter(self, self._buffer, settings.directory, settings.keep_bytes, otlp)

    def set_position(self, *, step: int | None = None, version: int | None = None) -> None:
        """Set the step and the version of the following events; None leaves the value unchanged."""
        before = self.place
        self.place = (before[0] if step is None else step, before[1] if version is None else version)

    @property
    def enabled(self) -> bool:
        return bool(self._enabled)

    def records(self, name: str) -> bool:
        """Return whether events of this name are recorded; ask before collecting fields that are expensive."""
        return name in self._enabled

    # ------------------------------------------------------------------------------------------------ recording

    def span(self, name: str, *, sync: bool = False, **fields: Any) -> ProfilerSpan:
        """Time a `with` block. The class of an exception becomes the field `error`.

        Args:
            name: see `catalog`.
            sync: wait for the GPU at both ends, if `profiler.synchronize` is set.
            fields: those of `catalog.FIELDS` and the extra fields of the event; values are numbers or text.

        Raises:
            BugError: `name` is not registered.
        """
        if name in self._enabled:
            return ProfilerSpan(self, name, fields, sync)
        if name not in EVENTS:
            describe(name)
        return DISABLED_SPAN

    def note(self, name: str, **fields: Any) -> None:
        """Record an event without duration. Raises as `span`."""
        self.record_ended(name, 0.0, **fields)

    def record(self, name: str, started_at: float, duration_s: float, **fields: Any) -> None:
        """Record an event that was timed elsewhere and started at `started_at` (Unix seconds). Raises as `span`."""
        if name in self._enabled:
            self.put(RecordedEvent(name, started_at, duration_s, self.place, _context.get(), fields, wall=True))
        elif name not in EVENTS:
            describe(name)

    def record_ended(self, name: str, duration_s: float, **fields: Any) -> None:
        """Record an event that was timed elsewhere and has just ended. Raises as `span`."""
        if name in self._enabled:
            start = time.perf_counter() - duration_s
            self.put(RecordedEvent(name, start, duration_s, self.place, _context.get(), fields))
        elif name not in EVENTS:
            describe(name)

    def context(self, **fields: Any) -> AbstractContextManager[None]:
        """Add fields to all events inside, in this task and those it starts. An event's own fields take precedence."""
        return FieldContext(fields) if self._enabled else _NO_CONTEXT

    def put(self, event: RecordedEvent) -> None:
        """Append an event; outside this class, only spans call it."""
        try:
            for value in event.fields.values():
                if type(value) is str and len(value) > MAX_TEXT:
                    event = event._replace(fields=_shorten(event.fields))
                    break
        except RuntimeError:  # another thread adds fields to the span that ends in this one
            pass
        buffer = self._buffer
        if len(buffer.waiting) >= buffer.max_events:
            buffer.count_lost(1)
        else:
            buffer.waiting.append(event)

    def count_lost(self, count: int) -> None:
        """Count events as lost that were recorded here and drained but could not be forwarded."""
        self._buffer.count_lost(count)

    # ------------------------------------------------------------------------------------------------ forwarding

    def drain(self) -> list[Mapping[str, Any]]:
        """Remove up to `MAX_DRAINED` events for forwarding, oldest first. Empty in a process that writes files."""
        if self._writer is not None:
            return []
        lines = self._buffer.take(MAX_DRAINED)
        if report := self._buffer.loss_report(self.place):
            lines.append(report)
        return [line.event for line in lines]

    def drain_forwarded(self) -> list[ForwardedEvents]:
        """Remove the events that other processes have forwarded to this one, in a process that does not write files."""
        forwarded = list(self._forwarded)
        self._forwarded.clear()
        return forwarded

    def ingest(self, part: str, events: Sequence[Mapping[str, Any]], *, sent: int | None = None) -> None:
        """Write events that `part` forwarded. Those without a step or a version get the current ones. A process that
        does not write files keeps them for `drain_forwarded`.

        `sent`: the total that `part` has forwarded, including these. Events that never arrive are counted and reported.
        """
        if not self._enabled:
            return
        if self._writer is None:
            self._forwarded.append((part, events, sent))
            return
        step, version = self.place
        buffer = self._buffer
        buffer.received(part, events, sent)
        for event in events:
            placed = {**event}
            if step is not None:
                placed.setdefault("step", step)
            if version is not None:
                placed.setdefault("version", version)
            buffer.put_line(EventLine(part, placed))

    def status(self) -> dict[str, int]:
        """Return counts since `configure`: `events` and `dropped` of this process and of those that forward to it,
        `own_dropped` of this process alone, and `unsent`, the events that the OTLP endpoint did not accept."""
        otlp = self._writer.otlp if self._writer is not None else None
        buffer = self._buffer
        return {
            "events": buffer.num_taken + len(buffer.waiting),
            "dropped": buffer.dropped + buffer.dropped_elsewhere,
            "own_dropped": buffer.dropped,
            "unsent": otlp.lost if otlp is not None else 0,
        }

    def flush(self) -> None:
        """Write all recorded events to the files and the OTLP endpoint, as far as these accept them. Blocks; raises
        nothing."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and stop recording. Blocks for some seconds at most; raises nothing."""
        self._enabled = frozenset()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _shorten(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}


def _do_nothing() -> None:
    pass


profile = Profiler()
"""The profiler of this process."""
