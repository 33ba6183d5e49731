"""Send events as OpenTelemetry spans over HTTP to a collector (`profiler.otlp_endpoint`).

All events of a sample form one trace across processes; events without a sample form one trace per step. A span has the
name of its event, the event's fields as attributes `asyncrl.<field>`, and the part as its resource. `trace_id` derives
the trace of a sample from the names of the run and the sample.

If the collector is slow or dead, spans are lost: they are counted, and the first loss is logged as a warning.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from asyncrl.core.text import encodable
from asyncrl.profiling.background import BackgroundSender, Receiver
from asyncrl.profiling.files import EventLine

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_EVENTS = 20_000
"""Bound of the queue; an event is less than 1 KB."""
MAX_BATCH = 512
EXPORT_S = 10.0
"""Limit for one batch, retries included."""
_SPAN_FIELDS = ("timestamp", "event", "duration_s")


def trace_id(run: str, sample: str | None, step: int) -> int:
    """Return the trace of `sample`, or of the events of `step` that have no sample."""
    name = f"{run}/{sample}" if sample is not None else f"{run}/step {step}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big") or 1


def otlp_sender(
    endpoint: str, run: str, *, max_events: int = MAX_EVENTS, make_exporter: Callable[[], SpanExporter] | None = None
) -> BackgroundSender[EventLine]:
    """Return a sender of events as spans to `endpoint`; `make_exporter` replaces the export over HTTP."""
    collector = _Collector(run, make_exporter or partial(_over_http, endpoint))
    return BackgroundSender(
        collector, "profiler.otlp_endpoint", endpoint, "events", max_items=max_events, max_batch=MAX_BATCH
    )


class _Collector(Receiver[EventLine]):
    def __init__(self, run: str, make_exporter: Callable[[], SpanExporter]) -> None:
        self._run = run
        self._make_exporter = make_exporter

    def open(self) -> None:
        self._exporter = self._make_exporter()

    def send(self, items: Sequence[EventLine]) -> None:
        if self._exporter.export([_span(line, self._run) for line in items]).name != "SUCCESS":
            raise ConnectionError("it answered with an error, or not at all")

    def close(self, *, ok: bool) -> None:
        self._exporter.shutdown()

    def abandon(self) -> None:
        self._exporter.shutdown()  # it stops retrying


def _over_http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # it logs each attempt
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)


def _span(line: EventLine, run: str) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    event = line.event
    sample, error = event.get("sample"), event.get("error")
    trace = trace_id(run, None if sample is None else str(sample), int(event.get("step", 0)))
    flags, span_id = TraceFlags(TraceFlags.SAMPLED), random.getrandbits(64) or 1
    start_ns = int(event["timestamp"] * 1e9)
    return ReadableSpan(
        name=event["event"],
        context=SpanContext(trace, span_id, is_remote=False, trace_flags=flags),
        resource=_resource(line.part, run),
        attributes=_attributes(event),
        start_time=start_ns,
        end_time=start_ns + int(event["duration_s"] * 1e9),
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, str(error)),
    )


@cache
def _resource(part: str, run: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource({"service.name": "asyncrl", "service.instance.id": part, "asyncrl.run": run, "asyncrl.part": part})


def _attributes(event: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """Return the fields as values that OpenTelemetry accepts; numpy numbers become Python numbers."""
    attributes: dict[str, str | bool | int | float] = {}
    for name, value in event.items():
        if name not in _SPAN_FIELDS:
            item = getattr(value, "item", None)
            plain = item() if callable(item) else value
            if not isinstance(plain, (bool, int, float)):
                plain = encodable(str(plain))  # a lone surrogate would make the whole batch fail
            attributes[f"asyncrl.{name}"] = plain
    return attributes
