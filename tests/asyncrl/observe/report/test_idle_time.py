"""Idle time and outages of runs that are live, were killed, or were resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.report.plots import figures
from benchmarks.synthetic_run import START
from tests.fakes.events import EventTuple, report_of


def sample(index: int) -> dict[str, Any]:
    return {"step": 1, "sample": f"sample_0_{index}"}


ADMITTED: list[EventTuple] = [("sample.admitted", 0.0, 0.0, sample(index)) for index in range(1, 9)]
STALL: EventTuple = ("loop.stall", 600.0, 0.5, {"part": "rollouter"})


def idle_of(run_dir: Path, *lines: EventTuple, status: str = "running", **about: Any) -> dict[str, Any]:
    report = report_of(run_dir, *lines, status=status, **about)
    assert any("was down" in note for note in report["notes"]) == (report["idle"]["down_s"] > 0)
    return report["idle"]


def test_a_sample_without_an_end_counts_as_in_generation(tmp_path: Path) -> None:
    idle = idle_of(
        tmp_path,
        ("sample.admitted", 0.0, 0.0, sample(1)),
        ("sample.generate", 0.0, 2.0, sample(1)),
        ("sample.admitted", 3.0, 0.0, sample(2)),  # lost when its Rollouter died at 5 s, and admitted again at 8 s
        ("part.restarted", 5.0, 2.0, {"part": "rollouter", "cause": "killed"}),
        ("sample.admitted", 8.0, 0.0, sample(2)),
        ("trainer.wait_samples", 1.0, 5.0, {"step": 1}),
        ("loop.stall", 10.0, 2.0, {"part": "rollouter"}),
    )
    assert (idle["wall_s"], idle["in_flight"]) == (12, 1)
    assert (idle["rollouter"]["idle_s"], idle["rollouter"]["known_s"]) == (1 + 3, 12)
    assert (idle["trainer"]["idle_s"], idle["trainer"]["known_s"]) == (5, 6)
    assert idle["trainer"]["strip"][-1] is None


def test_an_outage_is_not_idle_time(tmp_path: Path) -> None:
    lines: list[EventTuple] = []
    for at in (0.0, 10_000.0):
        lines += [("trainer.wait_samples", at, 9.0, {}), ("sample.generate", at + 0.5, 7.0, sample(1))]
        lines += [("step", at, 11.0, {"step": 1}), ("sample.admitted", at, 0.0, sample(1))]
    idle = idle_of(tmp_path, *lines, status="completed")
    assert (idle["down_s"], idle["wall_s"]) == (pytest.approx(10_000 - 11), pytest.approx(22))
    assert (idle["trainer"]["idle_s"], idle["rollouter"]["idle_s"]) == (pytest.approx(18), pytest.approx(8))


def test_the_time_for_which_gpus_were_lent_is_added_up(tmp_path: Path) -> None:
    lines: list[EventTuple] = [("sample.admitted", 0.0, 0.0, sample(1)), ("trainer.wait_samples", 0.0, 9.0, {})]
    lines += [("gpus.lent", 2.0, 3.0, {}), ("gpus.lent", 7.0, 1.5, {}), ("step", 0.0, 12.0, {"step": 1})]
    report = report_of(tmp_path, *lines, status="completed")
    assert report["idle"]["lent_s"] == pytest.approx(4.5)
    (text,) = [one["text"] for one in figures(report) if one["id"] == "idle"]
    assert "Its GPUs were lent to generation for 38 % of the run (4.5 s)" in text


def test_a_live_run_is_not_down_while_its_samples_are_generated(tmp_path: Path) -> None:
    idle = idle_of(tmp_path, *ADMITTED, STALL, started_at=START - 100)
    assert (idle["down_s"], idle["wall_s"], idle["in_flight"], idle["rollouter"]["idle_s"]) == (0, 600.5, 8, 0)


def test_a_live_run_is_not_down_during_a_long_step(tmp_path: Path) -> None:
    """The last complete event of the run is the wait for the step's samples."""
    generated = [("sample.generate", 0.0, 2.0, fields) for _, _, _, fields in ADMITTED]
    idle = idle_of(tmp_path, *ADMITTED, *generated, ("trainer.wait_samples", 0.0, 2.0, {"step": 1}), STALL)
    assert (idle["down_s"], idle["wall_s"], idle["in_flight"]) == (0, 600.5, 0)


def test_samples_of_a_rollouter_count_as_in_generation_until_it_was_replaced(tmp_path: Path) -> None:
    again = [(name, 610.0, took, fields) for name, _, took, fields in ADMITTED]
    replaced = ("part.restarted", 600.0, 10.0, {"part": "rollouter", "cause": "hung"})
    idle = idle_of(tmp_path, *ADMITTED, replaced, *again)
    assert (idle["down_s"], idle["in_flight"], idle["rollouter"]["idle_s"]) == (0, 8, 10)


@pytest.mark.parametrize("sign", ["admitted again", "trained", "launched"])
def test_the_time_between_a_kill_and_the_resume_is_down_time(tmp_path: Path, sign: str) -> None:
    later: dict[str, EventTuple] = {
        "admitted again": ("sample.admitted", 600.0, 0.0, sample(4)),
        "trained": ("trainer.wait_samples", 600.0, 1.0, {"step": 2}),
        "launched": STALL,
    }
    about = {"started_at": START + 590} if sign == "launched" else {}
    idle = idle_of(tmp_path, *ADMITTED, ("trainer.wait_samples", 0.0, 2.0, {"step": 1}), later[sign], **about)
    assert idle["down_s"] == pytest.approx(598, abs=1e-3)
    # Samples that were not admitted again were lost when the run was killed.
    assert idle["in_flight"] == (1 if sign == "admitted again" else 0)
