"""Events as OpenTelemetry spans, over HTTP to a collector (`profiler.otlp_endpoint`).

All events of a sample form one trace, whichever process they happened in; those without a sample, one per step. A span
is called as its event is, has the event's fields as attributes `asyncrl.<field>`, and the part as a resource. The
trace of a sample is found by its id: `trace_id` derives it from the run's name and the sample's.

A collector that is slow or gone costs spans, which are counted, and one warning. The writing thread never waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.profiling.files import Line

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

MAX_EVENTS = 20_000
"""Waiting to be sent; an event is less than 1 KB."""
MAX_BATCH = 512
EXPORT_S = 10.0
"""For one batch, with everything that is tried again."""
CLOSE_S = 5.0
_OWN_WORDS = ("timestamp", "event", "duration_s")


def trace_id(run: str, sample: str | None, step: int) -> int:
    """Of the events of `sample`; None: of those that have none, in `step`."""
    name = f"{run}/{sample}" if sample is not None else f"{run}/step {step}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big") or 1


class OtlpSink:
    """Call it with lines from any thread."""

    def __init__(
        self,
        endpoint: str,
        part: str,
        run: str,
        *,
        max_events: int = MAX_EVENTS,
        make_exporter: Callable[[], SpanExporter] | None = None,
    ) -> None:
        """`make_exporter`: called in the sending thread; by default one over HTTP to `endpoint`."""
        self._endpoint = endpoint
        self._run = run
        self._most = max_events
        self._make_exporter = make_exporter or self._over_http
        self._exporter: SpanExporter | None = None
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque()
        self._sending = False
        self._ending = False
        self._unusable = False
        self._told = False
        self.lost = 0
        """Events that were not sent."""
        self._thread = threading.Thread(target=self._send_all, name=f"otlp-{part}", daemon=True)
        self._thread.start()

    def __call__(self, lines: Sequence[Line]) -> None:
        """At once; what does not fit is lost."""
        with self._changed:
            if self._unusable:
                self.lost += len(lines)
                return
            room = 0 if self._ending else max(0, self._most - len(self._lines))
            self._lines.extend(lines[:room])
            missed = len(lines) - room if len(lines) > room else 0
            self._changed.notify_all()
        if missed:
            self._lose(missed, "more events come than it takes")

    def settle(self, limit_s: float = CLOSE_S) -> None:
        """What was given until now is sent, or lost. Blocking, for `limit_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._unusable or not (self._lines or self._sending), limit_s)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Send what is left; what cannot be is lost. Blocking, for `limit_s` at most."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        until = time.monotonic() + limit_s
        self._thread.join(limit_s)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # it gives up trying again
            self._thread.join(max(0.0, until + 1.0 - time.monotonic()))
        self.lost += len(self._lines)
        if self.lost and not self._unusable:
            logger.warning("%s lacks %d events of this run", self._endpoint, self.lost)

    # ------------------------------------------------------------------------------------------- the sending thread

    def _send_all(self) -> None:
        try:
            exporter = self._exporter = self._make_exporter()
            spans = _Spans(self._run)
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
                done = exporter.export([spans.of(line) for line in lines]).name == "SUCCESS"
            except Exception as error:  # noqa: BLE001
                self._lose(len(lines), f"{type(error).__name__}: {error}")
            else:
                if not done:
                    self._lose(len(lines), "it does not take them")
        exporter.shutdown()

    def _next(self) -> list[Line]:
        """Empty: there will be none."""
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._ending)
            self._sending = bool(self._lines)
            return [self._lines.popleft() for _ in range(min(MAX_BATCH, len(self._lines)))]

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        if not self._told:
            self._told = True
            logger.warning("profiler.otlp_endpoint: events for %s are lost: %s", self._endpoint, why)

    def _over_http(self) -> SpanExporter:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # it tells of each try
        return OTLPSpanExporter(endpoint=self._endpoint, timeout=EXPORT_S)


class _Spans:
    """Events as spans. Imports OpenTelemetry when it is made."""

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
        self._failed: Callable[[str], Status] = lambda told: Status(StatusCode.ERROR, told)
        self._ids = RandomIdGenerator()
        self._resources: dict[str, Resource] = {}

    def of(self, line: Line) -> ReadableSpan:
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
    """The fields, as values that OpenTelemetry takes; numpy's numbers are turned into Python's."""
    found: dict[str, str | bool | int | float] = {}
    for name, value in event.items():
        if name not in _OWN_WORDS:
            item = getattr(value, "item", None)
            plain = item() if callable(item) else value
            told = plain if isinstance(plain, (str, bool, int, float)) else str(plain)
            # Half a character, as a model may write one, would cost its whole batch.
            found[f"asyncrl.{name}"] = told.encode(errors="replace").decode() if isinstance(told, str) else told
    return found
