"""The benchmark of the system around the engines, at its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale import __main__ as benchmark
from benchmarks.scale.dispatch import measure_dispatch


def test_dispatch_keeps_every_simulated_replica_busy() -> None:
    (row,) = measure_dispatch([6], group=2)
    assert row["replicas"] == row["calls at once"] == 6
    assert row["decisions/s"] > 0
    assert row["CPU ms/decision"] == pytest.approx(2 * row["CPU ms/response"]) and row["CPU ms/response"] > 0


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
