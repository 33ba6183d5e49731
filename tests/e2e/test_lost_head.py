"""The machine of a run is lost with all processes and the run directory: the run continues on another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.storage.run_dir import RunDir
from tests.e2e.launches import SHORT, LaunchedRun, balanced, start

pytestmark = pytest.mark.timeout(600)
STEPS = 20


def trained_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps of a run that never went back, with their samples, from the Trainer's own record."""
    lines = (run_dir / "trained.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "samples" in record]


def lose(run: LaunchedRun, checkpoints: Path, after: int) -> tuple[int, list[dict[str, Any]]]:
    """Once there is a checkpoint later than step `after`, lose the machine of the run. Return the step of the newest
    checkpoint, and the steps whose training it contains."""

    def newest() -> int:
        return max((int(path.parent.name[-6:]) for path in checkpoints.glob("step_*/manifest.json")), default=0)

    run.wait_until(lambda: newest() > after, "checkpoint")
    run.kill_all()
    assert run.survivors() == []
    before = trained_in(run.run_dir)
    shutil.rmtree(run.run_dir)
    return newest(), [record for record in before if record["step"] <= newest()]


def assert_continues(output: str, lost: LaunchedRun, step: int) -> None:
    text = "".join(output.split())
    assert "".join(f"{lost.run_dir} on ".split()) in text and f"whichisstep{step}" in text, output


@pytest.mark.slow
def test_a_run_whose_machine_is_lost_continues_elsewhere_from_its_checkpoints(tmp_path: Path) -> None:
    """The checkpoints are on a network file system at first, and then in a remote store that has been moved there."""
    checkpoints = tmp_path / "network" / "run"
    remote = f"file://{checkpoints}"
    keys = (*SHORT, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=3")
    first = start(tmp_path, *keys, f"trainer.checkpoint_dir={checkpoints}")
    first_newest, surviving = lose(first, checkpoints, 0)

    keys = (*keys, f"trainer.checkpoint_dir={remote}", "resume=auto")
    second = start(tmp_path, *keys, run_dir=tmp_path / "elsewhere")
    second_newest, more = lose(second, checkpoints, first_newest)
    assert_continues(second.output(), first, first_newest)
    shutil.rmtree(RunDir.of(second.run_dir, remote).checkpoints)

    third = start(tmp_path, *keys, run_dir=tmp_path / "third")
    assert third.wait() == 0, third.output()
    assert_continues(third.output(), second, second_newest)
    summary = third.summary()
    assert (summary["status"], summary["step"], summary["lineage"]) == ("completed", STEPS, 2)
    assert summary["resumed"]["step"] == second_newest
    notice = summary["resumed"]["lost"]
    assert f"{second.run_dir} on " in notice and f"which is step {second_newest} " in notice
    samples = summary["samples"]
    assert (samples["trained"], balanced(samples)) == (16 * STEPS, True)
    assert samples["fed"] == samples["trained"] + sum(samples["dropped"].values()), "nothing is fed twice"
    surviving += more + trained_in(third.run_dir)
    assert [record["step"] for record in surviving] == list(range(1, STEPS + 1))
    trained = [sample for record in surviving for sample in record["samples"]]
    assert len(trained) == len(set(trained)) == 16 * STEPS
    assert [step["step"] for step in third.steps()] == list(range(second_newest + 1, STEPS + 1))
    assert (checkpoints / f"step_{STEPS:06d}").is_dir() and not (third.run_dir / "checkpoints").exists()
    assert third.survivors() == []
    shutil.rmtree(RunDir.of(third.run_dir, remote).checkpoints)
