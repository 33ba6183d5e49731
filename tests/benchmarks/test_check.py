"""The comparison of measured ratios with their baselines."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from benchmarks.check import BASELINE, GUARDS, Guard, check, main


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
        (False, [RuntimeError("no engine")], None, "FAILED"),
        (False, [0.7, RuntimeError("no engine")], 0.7, "WORSE"),
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
