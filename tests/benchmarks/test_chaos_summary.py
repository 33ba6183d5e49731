"""Tests of the result of a chaos round: its figures, its verdict and its exit code."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import __main__ as program
from benchmarks.chaos import summary
from benchmarks.chaos.faults import KINDS, InjectedFault
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import BrokenCall, Violation

NAMED = {kind.name: kind for kind in KINDS}


def injected(number: int, name: str, recovered_s: float | None, **fields: Any) -> InjectedFault:
    return InjectedFault(number, NAMED[name], 100.0 * number, recovered_s=recovered_s, **fields)


def round_of_five() -> list[InjectedFault]:
    return [
        injected(1, "queue kill", 1.0),
        injected(2, "trainer kill", 9.0, steps_lost=3, restart_details=("trainer: back to step 10",)),
        injected(3, "queue stop", None, launch_survived=False),
        injected(4, "engine kill", 50.0),
        injected(5, "driver kill", 70.0, launch_survived=False),
    ]


def test_faults_without_recovery_are_listed_beside_the_medians() -> None:
    groups = summary.by_group(round_of_five())
    assert groups["actors"] == {"injected": 3, "not_recovered": 1, "median_s": 5.0, "max_s": 9.0}
    assert groups["engines"]["not_recovered"] == 0 and groups["rewards"]["median_s"] is None
    (stop,) = [row for row in summary.rows(round_of_five()) if row["fault"] == "queue stop"]
    assert (stop["not recovered"], stop["launch survived"], stop["median s"]) == (1, 0, "-")
    assert [line.split() for line in summary.histogram(round_of_five())[:4]] == [
        ["recovery,", "actors"], ["<", "5", "s", "█", "1"], ["<", "10", "s", "█", "1"], ["never", "█", "1"],
    ]  # fmt: skip


def test_every_fault_is_listed_with_its_cost() -> None:
    calls = [
        BrokenCall("a/0", (7, 8), (7, 8), (7, 8, 9), at=401.0),
        BrokenCall("b/0", (7,), None, None, at=402.0),
        BrokenCall("c/0", (7,), None, None, at=99.0),
    ]
    found = {one["fault"]: one for one in summary.injected_faults(round_of_five(), calls)}
    assert found["trainer kill"]["lost"]["steps"] == 3 and found["trainer kill"]["lost"]["restart_details"]
    assert found["trainer kill"]["recovered_s"] == 9.0 and found["trainer kill"]["at_s"] == 100.0
    engine = found["engine kill"]["lost"]
    assert (engine["responses"], engine["tokens_received"], engine["tokens_kept"]) == (2, 3, 2)
    assert found["queue stop"]["recovered_s"] is None


def result(faults: list[InjectedFault], path: Path, **settings: Any) -> dict[str, Any]:
    """Return the JSON of a round with these options."""
    options = ChaosOptions(1, 1800.0, settings.pop("num_faults", None), None, path, aim=settings.pop("aim", False))
    kept = summary.report_outcome(ChaosOutcome(faults=faults, **settings), options, path / "result.json")
    found: dict[str, Any] = json.loads((path / "result.json").read_text())
    assert kept == (found["verdict"] == "kept") == (not found["failed"])
    return found


def test_every_kind_is_in_a_group() -> None:
    assert {summary.group_of(kind) for kind in KINDS} == set(summary.GROUPS)
    assert [kind.name for kind in KINDS if summary.group_of(kind) == "drivers"] == ["driver stop"]


def test_a_round_passes_when_every_requested_fault_was_injected(tmp_path: Path) -> None:
    for num_faults in (None, 5):
        found = result(round_of_five(), tmp_path, num_faults=num_faults)
        assert found["verdict"] == "kept" and len(found["injected_faults"]) == 5


def test_a_broken_promise_outranks_every_other_verdict(tmp_path: Path) -> None:
    found = result(round_of_five(), tmp_path, num_faults=6, violations=[Violation("trained once", "sample_0_2")])
    assert found["verdict"] == "broken" and found["violations"] == found["failed"][:1] == ["trained once: sample_0_2"]
    assert len(found["failed"]) == 2


@pytest.mark.parametrize(
    ("num_injected", "num_faults", "gave_up", "why"),
    [
        (5, 6, False, "5 of 6 faults (--faults) were injected: the limit of 30 minutes (--minutes) was reached"),
        (5, 6, True, "5 of 6 faults (--faults) were injected: the run could not be restarted"),
        (0, None, False, "no fault was injected, so nothing was tested: the limit of 30 minutes"),
    ],
)
def test_a_round_with_fewer_faults_than_asked_for_fails_and_says_why(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_injected: int,
    num_faults: int | None,
    gave_up: bool,
    why: str,
) -> None:
    found = result(round_of_five()[:num_injected], tmp_path, num_faults=num_faults, gave_up=gave_up)
    assert found["verdict"] == "short" and found["failed"][0].startswith(why)
    assert f"FAILED: {why}" in " ".join(capsys.readouterr().out.split())


def test_a_median_is_judged_only_with_at_least_five_faults(tmp_path: Path) -> None:
    slow = [injected(number, "engine kill", 61.0) for number in range(1, 6)]
    fast = [injected(number, "queue kill", 1.0) for number in range(6, 11)]
    assert summary.aim_met([*slow, *fast]) == {"engines": False, "actors": True}
    assert summary.aim_met([*slow[:4], *fast]) == {"engines": None, "actors": True}
    assert result([*slow, *fast], tmp_path)["verdict"] == "kept", "no aim applies without --aim"
    found = result([*slow, *fast], tmp_path, aim=True)
    assert found["verdict"] == "slow" and found["aim_met"] == {"engines": False, "actors": True}
    assert found["failed"][0].startswith("median recovery of engines was not under 60 s (--aim)")
    assert result([*slow[:4], *fast], tmp_path, aim=True)["verdict"] == "kept"
    assert "cannot be judged" in result(slow[:4], tmp_path, aim=True)["failed"][0]


def test_a_fault_without_recovery_misses_every_aim() -> None:
    faults = [injected(number, "queue kill", 1.0 if number < 3 else None) for number in range(1, 6)]
    assert summary.aim_met(faults)["actors"] is False


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 0), (["--faults", "5"], 0), (["--faults", "6"], 1), (["--aim"], 1)]
)
def test_the_exit_code_reports_the_verdict(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int) -> None:
    class FakeHarness:
        def __init__(self, *_: Any) -> None: ...

        def run(self) -> ChaosOutcome:
            return ChaosOutcome(faults=round_of_five())

    monkeypatch.setattr(program, "ChaosHarness", FakeHarness)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["chaos", *arguments])
    assert program.main() == code
