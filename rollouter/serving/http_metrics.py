"""Metrics of a server for Prometheus: the requests of its HTTP API, and vLLM's metrics of each replica."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CONTENT_TYPE", "HttpMetrics", "engine_metrics"]

ENGINE_PREFIX = "vllm:"
_UNTIMED = frozenset({"/health", "/metrics"})
"""Paths that probes request all the time."""
_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Families:
    """A registry with the metrics of an iterator, for `generate_latest`."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def engine_metrics(replica: str, version: int) -> str:
    """Return vLLM's metrics of this process with the label `replica`, and the weights version that it serves.

    vLLM counts them in any case (`PrometheusStatLogger`).
    """
    own = CollectorRegistry()
    gauge = Gauge("asyncrl_serve_weights_version", "Weights version that the replica serves; 0: the initial model.",
                  ["replica"], registry=own)  # fmt: skip
    gauge.labels(replica).set(version)
    engine = (family for family in REGISTRY.collect() if family.name.startswith(ENGINE_PREFIX))
    return generate_latest(_Families(_labelled(engine, replica))).decode() + generate_latest(own).decode()


def _labelled(families: Iterator[Metric], replica: str) -> Iterator[Metric]:
    for family in families:
        labelled = Metric(family.name, family.documentation, family.type)
        labelled.samples = [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
        yield labelled


class HttpMetrics:
    """Requests of an HTTP API, counted in this process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("asyncrl_serve_requests", "Answered requests, by path and HTTP status.",
                                 ["path", "status"], registry=self._registry)  # fmt: skip
        self._seconds = Histogram("asyncrl_serve_request_seconds", "Time from a request to the end of its answer.",
                                  ["path"], buckets=_BUCKETS, registry=self._registry)  # fmt: skip
        self._open = Gauge("asyncrl_serve_requests_in_flight", "Requests that are being answered.",
                           registry=self._registry)  # fmt: skip
        self._replicas = Gauge("asyncrl_serve_replicas", "Replicas that can be sent requests.",
                               registry=self._registry)  # fmt: skip

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return the app with each of its requests counted, under the path of the route that answers it."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, began = 499, time.monotonic()  # a client that leaves before the answer

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                with self._open.track_inprogress():
                    await app(scope, receive, watched)
            finally:
                path = getattr(scope.get("route"), "path", "other")  # a bounded number of paths
                self._requests.labels(path, status).inc()
                if path not in _UNTIMED:
                    self._seconds.labels(path).observe(time.monotonic() - began)

        return counted

    def text(self, replicas: int, engines: Sequence[str]) -> bytes:
        """Return all metrics in Prometheus' text format. `engines` are the answers of `engine_metrics`."""
        self._replicas.set(replicas)
        merged: dict[str, Metric] = {}
        for answer in engines:
            for family in text_string_to_metric_families(answer):
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(
                    family.samples
                )
        return generate_latest(self._registry) + generate_latest(_Families(iter(merged.values())))
