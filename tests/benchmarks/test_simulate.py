"""The benchmark of predictions, on runs that are written instead of launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulate import AGAIN, QUICKSTART, Figures, compare, launch, main, measure
from benchmarks.synthetic_run import RunPlan, write_run
from tests.fakes.events import write_events

STEPS = 6


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Write a run for each command, and return the commands."""
    commands: list[tuple[str, ...]] = []

    def run(*arguments: str) -> None:
        commands.append(arguments)
        directory = Path(arguments[2].removeprefix("run_dir="))
        write_run(directory, RunPlan(steps=STEPS, seed=len(commands)))
        (directory / "summary.json").write_text(json.dumps({"status": "completed"}))

    monkeypatch.setattr(simulate, "run_asyncrl", run)
    return commands


def test_every_configuration_is_launched_once_and_compared_with_its_simulation(
    launched: list[tuple[str, ...]], tmp_path: Path
) -> None:
    runs, file = tmp_path / "runs", tmp_path / "result.json"
    options = ["--steps", str(STEPS), "--runs", str(runs), "--json", str(file), "mode=sync rollout.n=4"]
    main(options)
    assert [command[:2] for command in launched] == [("launch", "fully_async")] * 2 + [("launch", "sync")]
    assert "rollout.n=4" in launched[2] and "mode=sync" not in launched[2]
    assert all(f"trainer.total_training_steps={STEPS}" in command for command in launched)
    result = json.loads(file.read_text())
    assert (result["steps"], result["aim"]) == (STEPS, simulate.AIM)
    rows = {(row["run"], row["figure"]): row for row in result["rows"]}
    assert {run for run, _ in rows} == {QUICKSTART, AGAIN, "mode=sync rollout.n=4"}
    for (_, figure), row in rows.items():
        assert row["measured"] >= 0 and row["predicted"] >= 0
        assert row["difference"].endswith(" %" if figure == "wall_s" else " points")
    main(options)
    assert len(launched) == 3, "complete runs are reused"


def test_a_run_that_did_not_complete_is_launched_again(launched: list[tuple[str, ...]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"status": "failed"}))
    launch(tmp_path / "run", STEPS, [])
    launch(tmp_path / "run", STEPS, [])
    assert len(launched) == 1


def test_shares_of_the_time_come_from_the_events(tmp_path: Path) -> None:
    """Between the first admission and the last step, 20 s, two engines decode for 12 and 4 s."""
    request = {"prompt_tokens": 1, "output_tokens": 10, "request": "sample_0_1.0.0"}
    write_events(
        tmp_path,
        ("sample.admitted", 10.0, 0.0, {"sample": "sample_0_1"}),
        ("sample.generate", 10.0, 12.0, {"sample": "sample_0_1"}),
        ("validation", 20.0, 5.0, {"version": 1}),
        ("request", 10.0, 14.0, {"replica": "a", "decode_s": 14.0, **request}),
        ("sync.pause", 15.0, 2.0, {"replica": "a"}),
        ("request", 10.0, 6.0, {"replica": "b", "decode_s": 4.0, **request}),
        ("trainer.wait_samples", 10.0, 5.0, {"step": 1}),
        ("trainer.wait_samples", 0.0, 4.0, {"step": 0}),  # before the first admission
        ("step", 15.0, 5.0, {"step": 1}),
        ("step", 20.0, 10.0, {"step": 2}),
    )
    figures = measure(tmp_path)
    assert figures == pytest.approx(
        Figures(steps=2, wall_s=20.0, trainer_waits=0.25, rollouter_idle=0.25, engines_idle=1 - (12 + 4) / 2 / 20)
    )


def test_differences_are_relative_for_the_time_and_in_points_for_shares() -> None:
    measured, predicted = Figures(9, 100.0, 0.2, 0.1, 0.5), Figures(9, 93.0, 0.25, 0.1, 0.48)
    rows = compare("sync", measured, predicted)
    assert [(row["figure"], row["measured"], row["predicted"], row["difference"]) for row in rows] == [
        ("wall_s", 100.0, 93.0, "-7.0 %"),
        ("trainer_waits_percent", 20.0, 25.0, "+5.0 points"),
        ("rollouter_idle_percent", 10.0, 10.0, "+0.0 points"),
        ("engines_idle_percent", 50.0, 48.0, "-2.0 points"),
    ]
