"""A supervised run in real ranks, and a student that learns from its model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.e2e.launches import LaunchedRun, start_command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def supervised(where: Path, *overrides: str, name: str = "warm") -> LaunchedRun:
    """Start the example of `asyncrl sft` on its data, which is made below `where`."""
    data = where / "data"
    if not data.exists():
        runpy.run_path(str(EXAMPLES / "sft" / "prepare.py"))["prepare"](data)
    files = f"data.train_files=[{data}/train.jsonl]", f"data.val_files=[{data}/val.jsonl]"
    return start_command(
        where,
        "sft",
        str(EXAMPLES / "sft" / "config.yaml"),
        f"run_dir={where / name}",
        *files,
        *overrides,
        run_dir=where / name,
    )


def completed(run: LaunchedRun, timeout_s: float = 240.0) -> None:
    assert run.wait(timeout_s) == 0, run.output()
    assert (run.summary()["status"], run.summary()["error"]) == ("completed", None)
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_and_one_train_a_model_that_an_untrained_model_learns_from(tmp_path: Path) -> None:
    ranks = "trainer.strategy=fsdp2", "trainer.num_workers=2", "data.max_val_samples=32"
    run = supervised(tmp_path, *ranks, "trainer.total_training_steps=125", "trainer.save_freq=5")
    run.wait_for("step 6/")
    run.interrupt()
    assert run.wait(60.0) == 130, run.output()
    step = run.summary()["step"]
    assert run.summary()["status"] == "interrupted" and 6 <= step < 125
    assert run.survivors() == []
    assert (run.run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()

    # One rank continues what two began.
    again = supervised(tmp_path, "data.max_val_samples=32", "resume=auto")
    completed(again, 400.0)
    assert (again.summary()["step"], again.summary()["resumed"]["step"]) == (125, step)
    losses = [line["sft/loss"] for line in again.steps()]
    assert len(losses) == 125 and losses[-1] < 0.7 * losses[0]
    validation = again.summary()["validation"]
    assert validation["after"] < validation["before"]
    model = again.run_dir / "checkpoints" / "step_000125" / "hf"
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"

    config = str(EXAMPLES / "distill" / "config.yaml")
    run_dir = tmp_path / "run"
    student = start_command(
        tmp_path, "launch", "fully_async", config, f"run_dir={run_dir}", f"teacher.path={model}",
        "logging.console=plain", run_dir=run_dir,
    )  # fmt: skip
    completed(student, 480.0)
    before, after = (student.summary()["validation"][when]["reward"] for when in ("before", "after"))
    assert before < 0.2
    assert after > 0.7
    divergences = [line["teacher/reverse_kl"] for line in student.steps()]
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5])
