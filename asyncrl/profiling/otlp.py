"""Send events as OpenTelemetry spans over HTTP to a collector (`profiler.otlp_endpoint`).

All events of a sample form one trace across processes; events without a sample form one trace per step. A span has the
name of its event, the event's fields as attributes `asyncrl.<field>`, and the part as its resource. `trace_id` derives
the trace of a sample from the names of the run and the sample.

A slow or dead collector costs spans, which are counted, and one warning. The writing thread never waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.profiling.files import EventLine

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

MAX_EVENTS = 20_000
"""Bound of the queue; an event is less than 1 KB."""
MAX_BATCH = 512
EXPORT_S = 10.0
"""Limit for one batch, retries included."""
CLOSE_S = 5.0
_SPAN_FIELDS = ("timestamp", "event", "duration_s")


def trace_id(run: str, sample: str | None, step: int) -> int:
    """The trace of `sample`, or of the events of `step` that have no sample."""
    name = f"{run}/{sample}" if sample is not None else f"{run}/step {step}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big") or 1


class OtlpSink:
    """A bounded queue of events and the thread that sends them. Call it with lines from any thread."""

    def __init__(
        self,
        endpoint: str,
        part: str,
        run: str,
        *,
        max_events: int = MAX_EVENTS,
        make_exporter: Callable[[], SpanExporter] | None = None,
    ) -> None:
        """`make_exporter`: called in the sending thread; the default exports over HTTP to `endpoint`."""
        self._endpoint = endpoint
        self._run = run
        self._max_events = max_events
        self._make_exporter = make_exporter or self._over_http
        self._exporter: SpanExporter | None = None
        self._changed = threading.Condition()
        self._lines: deque[EventLine] = deque()
        self._sending = False
        self._ending = False
        self._unusable = False
        self._warned = False
        self.lost = 0
        """Events that were not sent."""
        self._thread = threading.Thread(target=self._send_all, name=f"otlp-{part}", daemon=True)
        self._thread.start()

    def __call__(self, lines: Sequence[EventLine]) -> None:
        """Returns at once; lines that do not fit are lost."""
        with self._changed:
            if self._unusable:
                self.lost += len(lines)
                return
            room = 0 if self._ending else max(0, self._max_events - len(self._lines))
            self._lines.extend(lines[:room])
            missed = max(0, len(lines) - room)
            self._changed.notify_all()
        if missed:
            self._lose(missed, "events come faster than it accepts them")

    def settle(self, limit_s: float = CLOSE_S) -> None:
        """Wait until the queued events are sent or lost. Blocks for `limit_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._unusable or not (self._lines or self._sending), limit_s)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Send the queued events; those that cannot be sent are lost. Blocks for `limit_s` at most."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        until = time.monotonic() + limit_s
        self._thread.join(limit_s)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # it stops retrying
            self._thread.join(max(0.0, until + 1.0 - time.monotonic()))
        self.lost += len(self._lines)
        if self.lost and not self._unusable:
            logger.warning("%s lacks %d events of this run", self._endpoint, self.lost)

    # ------------------------------------------------------------------------------------------- the sending thread

    def _send_all(self) -> None:
        try:
            exporter = self._exporter = self._make_exporter()
            spans = _SpanConverter(self._run)
        except Exception as error:  # noqa: BLE001  events are no reason to end a run
            logger.warning("no events are sent to %s: %s: %s", self._endpoint, type(error).__name__, error)
            with self._changed:
                self._unusable = True
                self.lost += len(self._lines)
                self._lines.clear()
                self._changed.notify_all()
            return
        while lines := self._next():
            try:
                accepted = exporter.export([spans.convert(line) for line in lines]).name == "SUCCESS"
            except Exception as error:  # noqa: BLE001
                self._lose(len(lines), f"{type(error).__name__}: {error}")
            else:
                if not accepted:
                    self._lose(len(lines), "it does not accept them")
        exporter.shutdown()

    def _next(self) -> list[EventLine]:
        """The next batch; empty when the sink is closed."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._ending)
            self._sending = bool(self._lines)
            return [self._lines.popleft() for _ in range(min(MAX_BATCH, len(self._lines)))]

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        if not self._warned:
            self._warned = True
            logger.warning("profiler.otlp_endpoint: events for %s are lost: %s", self._endpoint, why)

    def _over_http(self) -> SpanExporter:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # it logs each try
        return OTLPSpanExporter(endpoint=self._endpoint, timeout=EXPORT_S)


class _SpanConverter:
    """Converts events to spans. Its constructor imports OpenTelemetry."""

    def __init__(self, run: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        self._run = run
        self._make_resource = Resource
        self._make_span = ReadableSpan
        self._make_context = SpanContext
        self._sampled = TraceFlags(TraceFlags.SAMPLED)
        self._fine = Status(StatusCode.UNSET)
        self._failed: Callable[[str], Status] = lambda message: Status(StatusCode.ERROR, message)
        self._ids = RandomIdGenerator()
        self._resources: dict[str, Resource] = {}

    def convert(self, line: EventLine) -> ReadableSpan:
        event = line.event
        sample, error = event.get("sample"), event.get("error")
        trace = trace_id(self._run, None if sample is None else str(sample), int(event.get("step", 0)))
        start_ns = int(event["timestamp"] * 1e9)
        return self._make_span(
            name=event["event"],
            context=self._make_context(trace, self._ids.generate_span_id(), is_remote=False, trace_flags=self._sampled),
            resource=self._resource(line.part),
            attributes=_attributes(event),
            start_time=start_ns,
            end_time=start_ns + int(event["duration_s"] * 1e9),
            status=self._fine if error is None else self._failed(str(error)),
        )

    def _resource(self, part: str) -> Resource:
        if part not in self._resources:
            names = {"service.name": "asyncrl", "service.instance.id": part, "asyncrl.run": self._run}
            self._resources[part] = self._make_resource({**names, "asyncrl.part": part})
        return self._resources[part]


def _attributes(event: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """The fields as values that OpenTelemetry accepts; numpy numbers become Python numbers."""
    attributes: dict[str, str | bool | int | float] = {}
    for name, value in event.items():
        if name not in _SPAN_FIELDS:
            item = getattr(value, "item", None)
            plain = item() if callable(item) else value
            if not isinstance(plain, (bool, int, float)):
                # A lone surrogate, as a model may write one, would cost the whole batch.
                plain = str(plain).encode(errors="replace").decode()
            attributes[f"asyncrl.{name}"] = plain
    return attributes
