"""A run that is resumed where it ended."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.driver import launch as launch_module
from asyncrl.driver.resume import journal_identity
from asyncrl.driver.run_directory import LOCK, already_finished, planned_steps
from asyncrl.queue.journal import Journal
from asyncrl.queue.operations import MarkCheckpoint
from asyncrl.storage.checkpoint_manifest import Manifest, Progress, Resume, checkpoint_name, dump_manifest, run_identity
from asyncrl.storage.run_dir import create_run_dir
from tests.fakes.queues import end


def config_of(**trainer: Any) -> Config:
    """Nobody knows how many prompts there are before the data is read."""
    given = {"trainer": {"ppo_mini_batch_size": 2, **trainer}, "data": {"train_files": ["data.parquet"]}}
    return Config.model_validate(given | {"logging": {"console": "off"}})


def resume_at(step: int, run_dir: Path = Path("run")) -> Resume:
    progress = Progress(step=step)
    checkpoint = run_dir / "checkpoints" / f"step_{step:06d}" if step else None
    return Resume(run_dir, checkpoint, Manifest(progress, QueueSnapshot(1, (), SampleCounts(), 0), {}))


@pytest.mark.parametrize(("step", "told"), [(0, False), (7, False), (8, True), (9, True)])
def test_a_checkpoint_at_the_last_step_or_beyond_is_already_finished(step: int, told: bool) -> None:
    text = already_finished(resume_at(step), 8)
    assert (text is not None) is told
    if text is not None:
        assert f"at step {step} of 8" in text and "total_training_steps" in text and "resume=none model.path=" in text
    assert already_finished(None, 8) is None
    assert already_finished(resume_at(step), None) is None


def test_steps_are_known_from_the_configuration_or_from_lines_of_the_data(tmp_path: Path) -> None:
    assert planned_steps(config_of(total_training_steps=5)) == 5
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n" * 9, encoding="utf-8")
    epochs = config_of(total_training_steps=None, total_epochs=2).model_dump()
    epochs["data"]["train_files"] = [str(data)]
    assert planned_steps(Config.model_validate(epochs)) == 9  # 18 prompts, in leases of 2
    assert planned_steps(config_of(total_training_steps=None, total_epochs=2)) is None


def a_run(run_dir: Path, *, status: str = "completed", step: int = 4, kept: int = 4, **trainer: Any) -> Config:
    """What a run leaves behind that ended so, at `step` with a checkpoint of step `kept`. Returns how to launch it
    again."""
    config = config_of(**{"total_training_steps": 4} | trainer).model_copy(update={"run_dir": str(run_dir)})
    files = create_run_dir(config, datetime(2026, 1, 1))
    checkpoint = files.checkpoints / checkpoint_name(kept)
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "hf" / "config.json").write_text("{}")
    manifest = Manifest(Progress(step=kept), QueueSnapshot(1, (), SampleCounts(), 0, seq=3), run_identity(config))
    (checkpoint / "manifest.json").write_text(dump_manifest(manifest))
    (run_dir / "summary.json").write_text(json.dumps({"status": status, "step": step, "samples": {"fed": 64}}))
    (run_dir / "state.json").write_text("{}")
    for path in (files.metrics, run_dir / "trained.jsonl", files.logs / "driver.log", run_dir / LOCK):
        path.touch()

    async def write_journal() -> None:
        identity = journal_identity(config)
        restore = QueueSnapshot(1, (), SampleCounts(), 0, seq=3)
        journal = Journal.open(files.journal, num_prompts=8, identity=identity, restore=restore)
        await journal.flushed(journal.append(MarkCheckpoint(kept)))
        await end(journal)

    anyio.run(write_journal)
    return config.model_copy(update={"resume": "auto"})


def contents(run_dir: Path) -> dict[str, bytes]:
    """Of all its files but SQLite's scratch memory, and the empty log that comes with it: any reader leaves these."""
    files = {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    return {
        name: data
        for name, data in files.items()
        if not (name.endswith("-shm") or (name.endswith("-wal") and not data))
    }


def told_by(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a launch says that must not start anything."""
    told: list[str] = []
    monkeypatch.setattr(launch_module.View, "message", lambda view, level, text: told.append(text))
    assert launch_module.launch(config) == 0
    return told


class Started(Exception):
    """The launch goes on to bring the run up."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: Config, resume: Resume | None) -> None:
        raise Started

    monkeypatch.setattr(launch_module, "open_run_dir", start)


@pytest.mark.parametrize("named", ["auto", "", "checkpoints/step_000004"])
def test_a_completed_run_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    run_dir = tmp_path / "run"
    config = a_run(run_dir)
    before = contents(run_dir)
    again = config if named == "auto" else config.model_copy(update={"resume": str(run_dir / named)})
    [told] = told_by(again, monkeypatch)
    assert f"nothing is left to train: the run in {run_dir} is completed, at step 4" in told
    assert "total_training_steps" in told and "resume=none model.path=" in told
    assert contents(run_dir) == before


def test_a_completed_run_goes_on_if_it_is_to_be_longer_or_from_an_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_run(tmp_path / "run", step=5, kept=4, total_training_steps=5)  # with trainer.save_last=false
    [told] = told_by(config, monkeypatch)
    assert "at step 5" in told
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 6})})
    shorter = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": 4})})
    back = config.model_copy(update={"resume": str(tmp_path / "run" / "checkpoints" / "step_000004")})
    for onward in (longer, back):
        with pytest.raises(Started):
            launch_module.launch(onward)
    assert told_by(shorter, monkeypatch) == [told]


def test_a_run_of_unknown_length_is_as_long_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_run(tmp_path / "run", total_training_steps=None, total_epochs=2)
    assert planned_steps(config) is None
    [told] = told_by(config, monkeypatch)
    assert "nothing is left to train" in told
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_epochs": 3})})
    with pytest.raises(Started):
        launch_module.launch(longer)


@pytest.mark.parametrize("status", ["interrupted", "failed", None])
def test_a_run_that_ended_after_its_last_step_but_incomplete_continues(tmp_path: Path, status: str | None) -> None:
    """Its last version may not be validated, and its records are not whole: they would never be."""
    config = a_run(tmp_path / "run", status=status or "")
    if status is None:
        (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(Started):
        launch_module.launch(config)


def test_a_completed_run_in_another_directory_is_refused(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run")
    elsewhere = {"run_dir": str(tmp_path / "new"), "resume": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="a run continues in its own directory"):
        launch_module.launch(config.model_copy(update=elsewhere))
