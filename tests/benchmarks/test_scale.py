"""The benchmark of the system around the engines, at its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.scale import __main__ as benchmark
from benchmarks.scale.dispatch import measure_dispatch
from benchmarks.scale.throttle import throttled


def test_dispatch_keeps_every_simulated_replica_busy() -> None:
    (row,) = measure_dispatch([6], group=2)
    assert row["replicas"] == row["calls at once"] == 6
    assert row["decisions/s"] > 0
    assert row["CPU ms/decision"] == pytest.approx(2 * row["CPU ms/response"]) and row["CPU ms/response"] > 0


def test_a_throttled_process_gets_its_share_of_the_time_and_runs_on_afterwards() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            busy = psutil.Process(process.pid)
            with throttled([process.pid], 0.2):
                before, started = busy.cpu_times().user, time.perf_counter()
                time.sleep(1.5)
                share = (busy.cpu_times().user - before) / (time.perf_counter() - started)
            assert share < 0.4
            assert busy.status() != psutil.STATUS_STOPPED
        finally:
            process.kill()


@pytest.mark.slow
def test_the_cost_of_each_process_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    benchmark.main(
        ["--only", "glue,queue", "--samples", "128", "--concurrent", "8", "--rounds", "1", "--json", str(path)]
    )
    found = json.loads(path.read_text(encoding="utf-8"))
    (glue,) = found["glue"]
    assert glue["replicas"] == 1 and glue["responses/s"] > 0
    assert all(glue[f"{part} ms"] > 0 for part in ("Rollouter", "replicas", "queue"))
    assert {row["through"] for row in found["queue"]} == {"journal on", "journal off"}
    assert all(row["samples/s"] > 0 for row in found["queue"])
