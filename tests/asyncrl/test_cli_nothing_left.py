"""A run that is resumed where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import launch as launch_module
from asyncrl.cli.nothing_left import nothing_left, planned_steps
from asyncrl.config.schema import Config
from asyncrl.manifest import Manifest, Progress
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.resume import Resume


def config_of(**trainer: Any) -> Config:
    return Config.model_validate({"trainer": {"ppo_mini_batch_size": 2, **trainer}, "logging": {"console": "off"}})


def resume_at(step: int, run_dir: Path = Path("run")) -> Resume:
    progress = Progress(step=step)
    checkpoint = run_dir / "checkpoints" / f"step_{step:06d}" if step else None
    return Resume(run_dir, checkpoint, Manifest(progress, QueueSnapshot(1, (), Books(), 0), {}))


@pytest.mark.parametrize(("step", "told"), [(0, False), (7, False), (8, True), (9, True)])
def test_it_is_told_at_the_last_step_and_beyond(step: int, told: bool) -> None:
    text = nothing_left(resume_at(step), 8)
    assert (text is not None) is told
    if text is not None:
        assert f"at step {step} of 8" in text and "total_training_steps" in text and "resume=none model.path=" in text
    assert nothing_left(None, 8) is None
    assert nothing_left(resume_at(step), None) is None


def test_steps_are_known_from_the_configuration_or_from_lines_of_the_data(tmp_path: Path) -> None:
    assert planned_steps(config_of(total_training_steps=5)) == 5
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n" * 9, encoding="utf-8")
    epochs = config_of(total_training_steps=None, total_epochs=2).model_dump()
    epochs["data"]["train_files"] = [str(data)]
    assert planned_steps(Config.model_validate(epochs)) == 9  # 18 prompts, in leases of 2
    epochs["data"]["train_files"] = ["data.parquet"]
    assert planned_steps(Config.model_validate(epochs)) is None


def test_a_launch_of_it_is_completed_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cluster(*args: Any) -> None:
        raise AssertionError("Ray was started")

    config = config_of(total_training_steps=4).model_copy(update={"run_dir": str(tmp_path / "run")})
    run_dir = launch_module._run_dir(config, None)
    resume = resume_at(4, run_dir.path)
    monkeypatch.setattr(launch_module, "cluster", no_cluster)
    monkeypatch.setattr(launch_module, "find_resume", lambda config, tell: resume)
    told: list[str] = []
    monkeypatch.setattr(launch_module.View, "message", lambda view, level, text: told.append(text))
    assert launch_module.launch(config) == 0
    assert json.loads((run_dir.path / "summary.json").read_text())["status"] == "completed"
    assert any("nothing is left to train" in text for text in told)
