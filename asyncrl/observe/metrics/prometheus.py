"""Prometheus, through Ray's metrics: every node of a Ray cluster has an endpoint, and this one is of the driver's node.

A gauge that is not set for half a minute leaves Ray's endpoint, so what was told last is told again until it changes.
`prometheus.json` in the run directory tells where it is, in the form of Prometheus' `file_sd_configs`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncrl.telemetry import registry
from asyncrl.telemetry.registry import PLACEHOLDER, Metric
from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.sinks.remote import TrackedRun, Tracker, values

logger = logging.getLogger(__name__)

TAGS = ("experiment", "run", "lineage")
TARGETS = "prometheus.json"
REFRESH_S = 5.0


class Series(NamedTuple):
    name: str
    """In Ray's metrics; its endpoint puts `ray_` before that."""
    labels: tuple[str, ...]
    """Besides `TAGS`."""


def exported(metric: str) -> Series:
    """As what a registered metric is exported: `health/cpu/<process>` is `asyncrl_health_cpu_by_process{process=…}`."""
    labels = tuple(PLACEHOLDER.findall(metric))
    name = re.sub(r"[/_]?<\w+>", "", metric)
    return Series("asyncrl_" + "_by_".join((re.sub(r"\W", "_", name, flags=re.ASCII), *labels)), labels)


def _find(name: str) -> tuple[Metric, Mapping[str, str]]:
    """The head of a row, its step and version, is of no section of the registry."""
    return registry.find(name) if "/" in name else (Metric(name, "1", name), {})


class PrometheusTracker(Tracker):
    """A gauge for each registered metric. The first row comes when Ray is up."""

    refresh_s = REFRESH_S

    def __init__(self, run: TrackedRun, make_gauge: Callable[..., Any] | None = None) -> None:
        """`make_gauge`: as `ray.util.metrics.Gauge`, which it is by default."""
        self._of = run
        self._make_gauge = make_gauge
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._lineage = 0

    def write(self, row: Row) -> None:
        self._lineage = row.lineage
        if self._make_gauge is None:
            from ray.util.metrics import Gauge

            self._make_gauge = Gauge
            self._tell_where()
        for name in ("step", *values(row)):
            about, _ = _find(name)
            if about.name not in self._gauges:
                series = exported(about.name)
                self._gauges[about.name] = self._make_gauge(series.name, about.meaning, TAGS + series.labels)
        if row.kind == "step":  # what has gone since, replicas and processes, is in `health/` no more
            self._values = {name: value for name, value in self._values.items() if not name.startswith("health/")}
        self._values |= {"step": float(row.step), **values(row)}
        self.refresh()

    def rewind(self) -> None:
        """The series of the lineage that is left end."""
        self._values.clear()

    def refresh(self) -> None:
        tags = {"experiment": self._of.experiment, "run": self._of.name, "lineage": str(self._lineage)}
        for name, value in self._values.items():
            about, labels = _find(name)
            self._gauges[about.name].set(value, {**tags, **labels})

    def close(self, *, ok: bool) -> None:
        (self._of.directory / TARGETS).unlink(missing_ok=True)

    def _tell_where(self) -> None:
        from ray._private import worker

        node = worker._global_node  # what it was told when it started: asking the cluster could take its time
        if node is not None and node.metrics_export_port:
            target = f"{node.node_ip_address}:{node.metrics_export_port}"
            (self._of.directory / TARGETS).write_text(json.dumps([{"targets": [target]}]) + "\n", encoding="utf-8")
            logger.info("metrics for Prometheus: http://%s/metrics", target)
