"""Metrics in Prometheus: exported names, the Grafana dashboard and Ray's endpoint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.metrics import grafana, registry
from asyncrl.observe.metrics.prometheus import TAGS, exported

ROOT = Path(__file__).parents[3]
WHERE = 'experiment=~"$experiment",run=~"$run"'


def series_of(expression: str) -> str:
    """Return the series that an expression reads."""
    found = re.fullmatch(rf"(ray_asyncrl_\w+)\{{{re.escape(WHERE)}\}}", expression)
    assert found, f"{expression} names no metric"
    return found[1]


def panels(page: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in page["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_the_dashboard_is_current() -> None:
    page = ROOT / "docs" / "grafana-dashboard.json"
    assert page.read_text(encoding="utf-8") == grafana.text(), "docs/grafana-dashboard.json is stale: make docs"


def test_the_dashboard_shows_exactly_the_registered_metrics() -> None:
    known = {f"ray_{exported(metric.name).name}" for metric in registry.METRICS}
    shown = {series_of(target["expr"]) for panel in panels(grafana.dashboard()) for target in panel.get("targets", ())}
    assert shown == known


def test_legends_distinguish_series_of_one_name() -> None:
    for panel in panels(grafana.dashboard()):
        for target in panel.get("targets", ()):
            (metric,) = [one for one in registry.METRICS if f"ray_{exported(one.name).name}{{" in target["expr"]]
            assert all(f"{{{{{label}}}}}" in target["legendFormat"] for label in exported(metric.name).labels)


def test_exported_names_are_unique_and_valid_for_prometheus() -> None:
    series = [exported(metric.name) for metric in registry.METRICS]
    assert len({one.name for one in series}) == len(series)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", one.name) and not set(one.labels) & set(TAGS) for one in series)
    assert exported("health/rss_bytes/<process>") == ("asyncrl_health_rss_bytes_by_process", ("process",))
    assert exported("skip/<role>/replayed") == ("asyncrl_skip_replayed_by_role", ("role",))
    metric, labels = registry.find("validation/reward/mean/openai/gsm8k-µ")
    assert (metric.name, labels) == ("validation/reward/mean/<data_source>", {"data_source": "openai/gsm8k-µ"})


def test_panels_have_units_positions_and_unique_ids() -> None:
    page = json.loads(grafana.text())
    found = list(panels(page))
    numbers = [panel["id"] for panel in found]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    rows = [panel["title"] for panel in found if panel["type"] == "row"]
    assert rows == ["Overview", *registry.SECTIONS]
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in found if panel["type"] != "row"}
    assert (units["timing"], units["idle"], units["queue/payload_bytes"]) == ("s", "percentunit", "bytes")
    for panel in page["panels"]:
        places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panel.get("panels", ())]
        assert len(set(places)) == len(places)
        for one in panel.get("panels", ()):
            assert len({target["refId"] for target in one["targets"]}) == len(one["targets"])
    variables = {one["name"]: one for one in page["templating"]["list"]}
    assert set(variables) == {"source", "experiment", "run"}
    assert variables["run"]["query"]["query"] == 'label_values(ray_asyncrl_reward_mean{experiment=~"$experiment"}, run)'


_RUN = """
import json, sys, time, urllib.request
from pathlib import Path
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.prometheus import PrometheusTracker
from asyncrl.observe.metrics.sinks import RemoteSink, TrackedRun
directory = Path(sys.argv[1])
sink = RemoteSink("prometheus", PrometheusTracker(TrackedRun("p", "small", "one", directory, {}, False)))
sink.write(MetricsRow("step", 3, 3, 1.0, time.time(), {"reward/mean": 0.25, "health/cpu/rank 0": 1.5}))
until, found = time.monotonic() + 60, []
while not found and time.monotonic() < until:
    time.sleep(0.5)
    if (directory / "prometheus.json").exists():
        [[target]] = [one["targets"] for one in json.loads((directory / "prometheus.json").read_text())]
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("ray_asyncrl_reward_mean{")]
        by = [line for line in lines if line.startswith("ray_asyncrl_health_cpu_by_process{")]
sink.close()
assert not (directory / "prometheus.json").exists()
[line] = found
assert line.endswith(" 0.25"), line
assert 'experiment="small"' in line and 'run="one"' in line and 'lineage="0"' in line, line
[line] = by
assert line.endswith(" 1.5") and 'process="rank 0"' in line, line
ray.shutdown()
"""


@pytest.mark.slow
def test_the_endpoint_of_ray_shows_the_value(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
