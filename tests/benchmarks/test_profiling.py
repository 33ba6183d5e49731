"""Tests of the profiling benchmark at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import profiling


def test_spans_are_recorded_by_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "BURST", 300)
    rows = {row["level"]: row for row in profiling.measure_spans(tmp_path, 2)}
    assert list(rows) == ["off", "summary", "full"]
    assert all(0 < row["caller_us"] <= row["worst_round_us"] for row in rows.values())
    assert len((tmp_path / "full-1" / "step_000001" / "benchmark.jsonl").read_text().splitlines()) == 300
    assert not (tmp_path / "off-0").exists()


def test_a_report_is_measured_in_its_own_process(tmp_path: Path) -> None:
    result = tmp_path / "deep" / "result.json"
    profiling.main(["--only", "report", "--events", "2000", "--json", str(result)])
    found = json.loads(result.read_text())
    (row,) = found["report"]
    assert row["events"] >= 2000 and row["wall_s"] > 0 and row["peak_mb"] > 50 and found["aims"]["report"]
