"""A supervised run in real ranks, a launch that starts from its model, and a student that learns from it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.e2e.launches import SHORT, LaunchedRun, balanced, start, start_command

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
@pytest.mark.timeout(520)
def test_two_ranks_learn_and_a_launch_starts_from_their_model(tmp_path: Path) -> None:
    ranks = "trainer.strategy=fsdp2", "trainer.num_workers=2", "data.max_val_samples=32"
    run = supervised(tmp_path, *ranks, "trainer.total_training_steps=40", "trainer.save_freq=5")
    run.wait_for("step 6/")
    run.interrupt()
    assert run.wait(60.0) == 130, run.output()
    step = run.summary()["step"]
    assert run.summary()["status"] == "interrupted" and 6 <= step < 40
    assert run.survivors() == []
    assert (run.run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()

    # One rank continues what two began.
    again = supervised(tmp_path, "trainer.total_training_steps=16", "data.max_val_samples=32", "resume=auto")
    completed(again)
    assert (again.summary()["step"], again.summary()["resumed"]["step"]) == (16, step)
    losses = [line["sft/loss"] for line in again.steps()]
    assert len(losses) == 16 and losses[-1] < 0.7 * losses[0]
    validation = again.summary()["validation"]
    assert validation["after"] < validation["before"]

    model = again.run_dir / "checkpoints" / "step_000016" / "hf"
    launched = start(tmp_path, *SHORT, f"model.path={model}", run_dir=tmp_path / "launched")
    completed(launched)
    assert balanced(launched.summary()["samples"])
    config = json.loads((model / "config.json").read_text())
    assert config["model_type"] == "llama"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trained_model_teaches_an_untrained_one(tmp_path: Path) -> None:
    teacher = supervised(tmp_path)
    completed(teacher, 400.0)
    path = teacher.run_dir / "checkpoints" / "step_000125" / "hf"
    config = str(EXAMPLES / "distill" / "config.yaml")
    run_dir = tmp_path / "run"
    student = start_command(
        tmp_path, "launch", "fully_async", config, f"run_dir={run_dir}", f"teacher.path={path}",
        "logging.console=plain", run_dir=run_dir,
    )  # fmt: skip
    completed(student, 480.0)
    before, after = (student.summary()["validation"][when]["reward"] for when in ("before", "after"))
    assert before < 0.2
    assert after > 0.7
    divergences = [line["teacher/reverse_kl"] for line in student.steps()]
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5])
