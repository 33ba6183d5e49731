"""Metrics for Prometheus, exported through Ray's metrics endpoint of the driver's node.

A gauge that is not set for half a minute disappears from Ray's endpoint. While no rows come, the current values are
therefore set again every `REFRESH_S` seconds.
`prometheus.json` in the run directory holds the endpoint's address, in the form of Prometheus' `file_sd_configs`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncrl.observe.metrics import registry
from asyncrl.observe.metrics.registry import PLACEHOLDER, Metric
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.sinks import TrackedRun, Tracker, tracked_values

logger = logging.getLogger(__name__)

TAGS = ("experiment", "run", "lineage")
TARGETS = "prometheus.json"
REFRESH_S = 5.0


class Series(NamedTuple):
    name: str
    """The name in Ray's metrics; the endpoint adds the prefix `ray_`."""
    labels: tuple[str, ...]
    """Labels besides `TAGS`."""


def exported(metric: str) -> Series:
    """Return the series of a registered metric: `health/cpu/<process>` is
    `asyncrl_health_cpu_by_process{process=…}`."""
    labels = tuple(PLACEHOLDER.findall(metric))
    name = re.sub(r"[/_]?<\w+>", "", metric)
    return Series("asyncrl_" + "_by_".join((re.sub(r"\W", "_", name, flags=re.ASCII), *labels)), labels)


def _find(name: str) -> tuple[Metric, Mapping[str, str]]:
    """Return the registered metric of `name`, or a new one for names without `/`, such as `step` and `version`."""
    return registry.find(name) if "/" in name else (Metric(name, "1", name), {})


class PrometheusTracker(Tracker):
    """Exports a gauge for each registered metric. Ray has started before the first row is written."""

    refresh_s = REFRESH_S

    def __init__(self, run: TrackedRun, make_gauge: Callable[..., Any] | None = None) -> None:
        """`make_gauge`: the class of gauges; `ray.util.metrics.Gauge` by default."""
        super().__init__(run)
        self._make_gauge = make_gauge
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._lineage = 0

    def write(self, row: MetricsRow) -> None:
        self._lineage = row.lineage
        if self._make_gauge is None:
            from ray.util.metrics import Gauge

            self._make_gauge = Gauge
            self._write_targets()
        if row.kind == "step":  # replicas and processes that have ended are no longer in `health/`
            self._values = {name: value for name, value in self._values.items() if not name.startswith("health/")}
        values = {"step": float(row.step), **tracked_values(row)}
        for name in values:
            metric, _ = _find(name)
            if metric.name not in self._gauges:
                series = exported(metric.name)
                self._gauges[metric.name] = self._make_gauge(series.name, metric.meaning, TAGS + series.labels)
        self._values |= values
        self.refresh()

    def rewind(self) -> None:
        """Stop exporting the values of the lineage that training abandons."""
        self._values.clear()

    def refresh(self) -> None:
        run = self._tracked
        tags = {"experiment": run.experiment, "run": run.name, "lineage": str(self._lineage)}
        for name, value in self._values.items():
            metric, labels = _find(name)
            self._gauges[metric.name].set(value, {**tags, **labels})

    def close(self, *, ok: bool) -> None:
        (self._tracked.directory / TARGETS).unlink(missing_ok=True)

    def _write_targets(self) -> None:
        from ray._private import worker

        node = worker._global_node  # known since Ray started; asking the cluster could take long
        if node is not None and node.metrics_export_port:
            target = f"{node.node_ip_address}:{node.metrics_export_port}"
            path = self._tracked.directory / TARGETS
            path.write_text(json.dumps([{"targets": [target]}]) + "\n", encoding="utf-8")
            logger.info("metrics for Prometheus: http://%s/metrics", target)
