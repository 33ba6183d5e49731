"""The comparison of measured ratios with their baselines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.check import BASELINE, GUARDS, Guard, _measure, check, main
from benchmarks.compare.measure import PeerFailedError


def measures(*results: float | Exception) -> Callable[[Guard], float]:
    """Return a measurement that gives one result after another."""
    left = iter(results)

    def measure(guard: Guard) -> float:
        result = next(left)
        if isinstance(result, Exception):
            raise result
        return result

    return measure


@pytest.mark.parametrize(
    ("lower_is_better", "results", "measured", "verdict"),
    [
        (False, [0.9], 0.9, "ok"),
        (False, [1.3], 1.3, "better"),
        (False, [0.7, 0.95], 0.95, "ok"),
        (False, [0.7, 0.6], 0.7, "WORSE"),
        (True, [1.1], 1.1, "ok"),
        (True, [0.7], 0.7, "better"),
        (True, [1.5, 1.3], 1.3, "WORSE"),
        (False, [PeerFailedError("no engine")], None, "FAILED"),
        (False, [0.7, PeerFailedError("no engine")], 0.7, "WORSE"),
    ],
)
def test_a_worse_ratio_is_measured_again_and_the_better_one_counts(
    lower_is_better: bool, results: list[float | Exception], measured: float | None, verdict: str
) -> None:
    guard = Guard("speed", ("benchmarks.speed",), lambda result: result["ratio"], lower_is_better)
    row = check("speed", guard, 1.0, measures(*results))
    assert (row["measured"], row["verdict"]) == (measured, verdict)


def test_a_ratio_without_baseline_is_new() -> None:
    assert check("speed", GUARDS["rollout"], None, measures(1.0))["verdict"] == "new"


def test_every_ratio_that_needs_no_other_system_has_a_baseline() -> None:
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    assert baseline.keys() | {"peers"} == GUARDS.keys() and all(value > 0 for value in baseline.values())


def test_the_exit_code_is_one_if_a_ratio_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))["rollout"]
    monkeypatch.setattr("benchmarks.check._measure", lambda guard: baseline * 0.5)
    with pytest.raises(SystemExit) as ended:
        main(["--only", "rollout"])
    assert ended.value.code == 1
    monkeypatch.setattr("benchmarks.check._measure", lambda guard: baseline)
    main(["--only", "rollout"])


def test_a_selection_that_leaves_nothing_to_measure_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.check.ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["--only", "peers"])
    assert ended.value.code == 2 and "make bench-setup" in capsys.readouterr().err


def test_an_update_keeps_what_was_measured_before_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    file.write_text('{"rollout": 1.0, "queue": 2.0}')
    monkeypatch.setattr("benchmarks.check.BASELINE", file)
    results = iter([1.5])

    def measure(guard: Guard) -> float:
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("benchmarks.check._measure", measure)
    with pytest.raises(KeyboardInterrupt):
        main(["--only", "rollout,queue", "--update"])
    assert json.loads(file.read_text()) == {"rollout": 1.5, "queue": 2.0}


@pytest.mark.parametrize(
    ("guard", "result", "message"),
    [
        ("weight_sync", "", "has no ratio"),
        ("weight_sync", '{"rows": []}', "has no ratio"),
        ("glue", '{"glue": [{"Rollouter ms": 1.0, "queue ms": 1.0, "replicas ms": 0.0}]}', "has no ratio"),
        ("peers", '{"failures": [{"system": "asyncrl", "error": "exited with 1"}]}', "asyncrl: exited with 1"),
    ],
)
def test_a_result_without_the_ratio_is_a_failure_that_names_the_failed_system(
    monkeypatch: pytest.MonkeyPatch, guard: str, result: str, message: str
) -> None:
    def run(command: list[str], *_: object) -> None:
        Path(command[-1]).write_text(result, encoding="utf-8")

    monkeypatch.setattr("benchmarks.check.run_measured", run)
    with pytest.raises(PeerFailedError, match=message):
        _measure(GUARDS[guard])
