"""The simulation of a run of weeks: what it measures, and the aims that it checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import weeks
from benchmarks.weeks import BATCH, POINTS, main, missed_aims

COLUMNS = {
    *("samples", "us", "cpu_us", "memory_mb", "blocks", "journal_mb", "turns_mb", "events_mb", "call_p50_ms"),
    *("call_p99_ms", "call_max_ms", "back_s", "back_call_max_ms", "reopen_s", "reopen_cpu_s"),
}
SAMPLES = 4 * POINTS * BATCH


def run_weeks(tmp_path: Path, samples: int, save_freq: int) -> None:
    options = {"--samples": samples, "--save-freq": save_freq, "--n": 1, "--dir": tmp_path}
    main([*(str(each) for option in options.items() for each in option), "--json", str(tmp_path / "weeks.json")])


def result_in(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "weeks.json").read_text())
    return result


def check_rows(rows: Sequence[Mapping[str, Any]], samples: int) -> None:
    assert len(rows) == POINTS and all(row.keys() == COLUMNS for row in rows)
    assert [row["samples"] for row in rows] == [samples // POINTS * point for point in range(1, POINTS + 1)]
    for row in rows:
        assert all(row[column] > 0 for column in COLUMNS - {"turns_mb"})
        assert row["call_p50_ms"] <= row["call_p99_ms"] <= row["call_max_ms"]
    assert rows[-1]["events_mb"] > rows[0]["events_mb"]


@pytest.mark.slow
def test_a_run_of_some_thousand_samples_meets_the_aims(tmp_path: Path) -> None:
    run_weeks(tmp_path, SAMPLES, save_freq=3)
    result = result_in(tmp_path)
    assert result["name"] == "weeks" and result["missed"] == "" and result["report_s"] > 0
    check_rows(result["rows"], SAMPLES)
    assert [path.name for path in tmp_path.iterdir()] == ["weeks.json"], "the simulated run directory is deleted"


@pytest.mark.timeout(120)  # it writes many transactions to the disk
def test_a_run_that_misses_an_aim_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints nothing bounds the journal."""
    monkeypatch.setattr(weeks, "run_asyncrl", lambda *arguments: None)
    monkeypatch.setattr(weeks, "MAX_JOURNAL_MB", 0.1)
    with pytest.raises(SystemExit, match="1"):
        run_weeks(tmp_path, POINTS * BATCH, save_freq=-1)
    result = result_in(tmp_path)
    assert result["missed"].startswith("the journal has ")
    check_rows(result["rows"], POINTS * BATCH)


def rows_of(**changes: float) -> list[dict[str, Any]]:
    """Return the rows of a run that keeps everything flat, with changed values at the last point."""
    flat = {"journal_mb": 9.0, "reopen_cpu_s": 0.3, "back_call_max_ms": 4.0, "events_mb": 2003.0, "blocks": 200_000}
    return [dict(flat) for _ in range(POINTS - 1)] + [flat | changes]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"journal_mb": 51.0}, "the journal has 51 MB"),
        ({"reopen_cpu_s": 3.1}, "rebuilding takes 3.1 s of CPU"),
        ({"back_call_max_ms": 1200.0}, "a commit during a scan took 1.2 s"),
        ({"events_mb": 2300.0}, "the events have 2300 MB"),
        ({"blocks": 230_000}, "memory grows: 15% more allocated blocks in the second half of the run"),
    ],
)
def test_every_aim_can_be_missed(changes: dict[str, float], expected: str) -> None:
    assert "; ".join(missed_aims(rows_of(**changes), keep_gb=2.0)) == expected
