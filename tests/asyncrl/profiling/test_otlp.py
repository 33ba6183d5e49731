"""Events are exported as OpenTelemetry spans, and a collector that does not answer blocks nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.profiling import Profiler, ProfilerSettings
from asyncrl.profiling.files import EventLine
from asyncrl.profiling.otlp import MAX_BATCH, otlp_sender, trace_id

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A local server that accepts spans at `url` and answers with `status`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest()
                request.ParseFromString(body)
                outer.requests.append(request)
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """Return the resource and the span of each exported span, in the order of the requests."""
        return [
            ({one.key: one.value.string_value for one in group.resource.attributes}, span)
            for request in self.requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def line(part: str = "rollouter", **fields: Any) -> EventLine:
    return EventLine(part, {"timestamp": 1000.5, "event": "trajectory", "duration_s": 0.25, **fields})


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("asyncrl")]


def test_events_are_spans_with_their_fields(collector: Collector) -> None:
    sink = otlp_sender(collector.url, "small-1")
    sink.put([line(step=3, sample="sample_0_7", turns=2, tokens=np.int64(11), finish_reason="stop")])
    sink.put([line("replica-r0", step=4, sample="sample_0_7", error="OSError"), line(step=4), line(step=5)])
    sink.close(10)
    found = collector.spans()
    assert sink.lost == 0 and len(found) == 4
    by_part = {resource["asyncrl.part"]: resource for resource, _ in found}
    assert set(by_part) == {"rollouter", "replica-r0"}
    assert by_part["rollouter"]["service.name"] == "asyncrl"
    assert by_part["rollouter"]["asyncrl.run"] == "small-1"
    first = next(span for _, span in found if any(one.key == "asyncrl.tokens" for one in span.attributes))
    assert first.name == "trajectory"
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1000_500_000_000, 1000_750_000_000)
    values = {one.key: one.value for one in first.attributes}
    assert set(values) == {f"asyncrl.{name}" for name in ("step", "sample", "turns", "tokens", "finish_reason")}
    assert (values["asyncrl.tokens"].int_value, values["asyncrl.finish_reason"].string_value) == (11, "stop")
    failed = next(span for resource, span in found if resource["asyncrl.part"] == "replica-r0")
    assert (failed.status.code, failed.status.message) == (2, "OSError")
    # Events of a sample share a trace over parts and steps; other events have one trace per step.
    assert failed.trace_id == first.trace_id == trace_id("small-1", "sample_0_7", 3).to_bytes(16, "big")
    assert len({span.trace_id for _, span in found}) == 3
    assert len({span.span_id for _, span in found}) == 4


def test_traces_differ_between_runs() -> None:
    assert trace_id("a", "sample_0_1", 1) == trace_id("a", "sample_0_1", 2)
    ids = {trace_id(run, sample, 1) for run in "ab" for sample in ("sample_0_1", None)} | {trace_id("a", None, 2)}
    assert len(ids) == 5 and all(0 < one < 1 << 128 for one in ids)


def test_a_profiler_sends_its_events(collector: Collector, tmp_path: Path) -> None:
    profiler = Profiler()
    config = ProfilerConfig(otlp_endpoint=collector.url)
    profiler.configure("rollouter", ProfilerSettings.of(config, tmp_path / "small-1"))
    with profiler.span("tool.execute", sample="sample_0_1", turn=1, tool="search"):
        pass
    profiler.close()
    ((_, span),) = collector.spans()
    assert span.name == "tool.execute"


def test_many_events_are_sent_in_batches(collector: Collector) -> None:
    sink = otlp_sender(collector.url, "small-1")
    sink.put([line(sample=str(number)) for number in range(2 * MAX_BATCH + 1)])
    sink.close(30.0)
    sizes = [
        sum(len(scope.spans) for group in request.resource_spans for scope in group.scope_spans)
        for request in collector.requests
    ]
    assert sum(sizes) == 2 * MAX_BATCH + 1 and max(sizes) <= MAX_BATCH


def test_a_collector_that_refuses_spans_loses_them_with_one_warning(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400  # not retried
    sink = otlp_sender(collector.url, "small-1")
    with caplog.at_level(logging.INFO):
        sink.put([line(), line()])
        sink.close(10)
    assert sink.lost == 2
    assert messages(caplog) == [
        f"profiler.otlp_endpoint: {collector.url} does not accept events (ConnectionError: it answered with an error, "
        "or not at all); the run continues",
        f"{collector.url} lacks 2 events of this run",
    ]


def test_a_dead_collector_blocks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exporting, go = threading.Event(), threading.Event()

    class DeadExporter:
        def export(self, spans: Any) -> Any:
            exporting.set()
            go.wait(30)
            raise ConnectionError("no answer")

        def shutdown(self) -> None:
            go.set()

    exporter: Any = DeadExporter()
    sink = otlp_sender("http://127.0.0.1:9/v1/traces", "r", max_events=5, make_exporter=lambda: exporter)
    sink.put([line()])
    assert exporting.wait(10)
    for _ in range(4):  # five events are queued, and the others are lost
        sink.put([line(), line()])
    assert sink.lost == 3
    started = time.monotonic()
    sink.close(0.2)
    assert time.monotonic() - started < 5
    assert "is too slow (5 events wait for it already, and more are lost)" in messages(caplog)[0]
    sink.put([line()])  # an event after the end is counted and not queued
    assert sink.lost >= 4


def test_a_lone_surrogate_does_not_lose_its_batch(collector: Collector) -> None:
    sink = otlp_sender(collector.url, "small-1")
    sink.put([line(tool="\ud800add"), line(tool="größer 😀")])
    sink.close(10)
    values = sorted(attribute.value.string_value for _, span in collector.spans() for attribute in span.attributes)
    assert sink.lost == 0 and values == ["?add", "größer 😀"]


def test_the_status_counts_unsent_events(collector: Collector, tmp_path: Path) -> None:
    collector.status = 400
    profiler = Profiler()
    profiler.configure(
        "rollouter", ProfilerSettings.of(ProfilerConfig(otlp_endpoint=collector.url), tmp_path / "small-1")
    )
    profiler.note("sample.ready")
    profiler.flush()
    assert (profiler.status()["unsent"], profiler.status()["dropped"]) == (1, 0)
    profiler.close()


def test_only_the_writing_process_has_an_endpoint(tmp_path: Path) -> None:
    assert ProfilerSettings.of(ProfilerConfig(), tmp_path).otlp_endpoint is None
    away = ProfilerSettings.of(ProfilerConfig(otlp_endpoint="http://127.0.0.1:9"), None)
    assert away.otlp_endpoint is None
