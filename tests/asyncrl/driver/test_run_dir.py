"""Which directory a launch runs in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.staleness import Pacing
from asyncrl.driver import launch as launch_module
from asyncrl.driver.actors import SupervisedTrainer
from asyncrl.driver.run_directory import check_run_dir, open_run_dir
from asyncrl.observe.status.summary import ResumePoint
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.checkpoint_manifest import NO_REWINDS, Manifest, Progress, Resume, dump_manifest, load_manifest
from asyncrl.storage.run_dir import RunDir
from tests.fakes.queues import MemoryLog


def resume_of(run_dir: Path) -> Resume:
    snapshot = QueueSnapshot(1, (), SampleCounts(), 0)
    manifest = Manifest(Progress(), snapshot, {})
    return Resume(run_dir, run_dir / "checkpoints" / "step_000001", manifest)


def write_records(run_dir: RunDir) -> None:
    for path in (run_dir.metrics, run_dir.journal, run_dir.path / "journal.db-wal", run_dir.path / "trained.jsonl"):
        path.write_text("{}\n", encoding="utf-8")
    run_dir.samples.mkdir()


def test_a_run_without_checkpoint_and_journal_starts_anew_in_its_directory(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), resume="auto")
    first = open_run_dir(config, None)
    write_records(first)
    second = open_run_dir(config, None)
    assert second.path == first.path
    kept = {path.name for path in second.path.iterdir() if "-abandoned-" not in path.name}
    assert kept == {"config.yaml", "logs"}
    for name in ("metrics-*.jsonl", "trained-*.jsonl", "journal-*.db", "journal-*.db-wal", "samples-*"):
        assert len([*second.path.glob(name)]) == 1, name


def test_a_used_directory_is_not_overwritten(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    open_run_dir(config, None)
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run_dir(config, None)


def test_a_resumed_run_continues_in_its_own_directory(tmp_path: Path) -> None:
    old = open_run_dir(Config(run_dir=str(tmp_path / "old")), None)
    assert open_run_dir(Config(), resume_of(old.path)).path == old.path
    check_run_dir(Config(run_dir=str(tmp_path / "new" / ".." / "old")), resume_of(old.path))
    with pytest.raises(ConfigError, match="a run continues in its own directory"):
        check_run_dir(Config(run_dir=str(tmp_path / "new")), resume_of(old.path))
    assert not (tmp_path / "new").exists()


def test_resuming_without_a_journal_sets_the_old_one_aside(tmp_path: Path) -> None:
    """Its samples are of a time that the checkpoints to come know nothing of."""
    run_dir = open_run_dir(Config(run_dir=str(tmp_path / "run")), None)
    write_records(run_dir)
    open_run_dir(Config(), resume_of(run_dir.path))
    assert run_dir.journal.exists() and run_dir.samples.exists()
    open_run_dir(Config(journal="off"), resume_of(run_dir.path))
    kept = {path.name for path in run_dir.path.iterdir() if "-abandoned-" not in path.name}
    assert kept == {"config.yaml", "logs", "metrics.jsonl", "trained.jsonl"}
    assert len([*run_dir.path.glob("*-abandoned-*")]) == 3


def test_the_choice_of_the_run_to_resume_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def fails(config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
        raise InfraError("no Ray today")
        yield name

    told: list[str] = []
    monkeypatch.setattr(launch_module, "cluster", fails)
    monkeypatch.setattr(launch_module.View, "message", lambda view, level, text: told.append(text))
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "resume": "auto", "logging": {"console": "off"}})
    assert launch_module.launch(config) == 1
    assert told == []
    assert launch_module.launch(config) == 1
    assert told == [
        f"resume=auto starts the run in {tmp_path / 'run'} anew: it has no checkpoint, and no journal. Its records are "
        "set aside as *-abandoned-*"
    ]


async def test_a_trainer_goes_back_to_its_own_line_whatever_the_one_before_it_writes(tmp_path: Path) -> None:
    queue = LocalSampleQueue(QueueOptions(10, Pacing(4, 0)), journal=MemoryLog())
    part = SupervisedTrainer(Config(), RunDir(tmp_path), None, nothing_to_do, lambda: None)
    part.queue = cast(QueueClient, queue)
    part.total_steps, part.num_prompts = 9, 10
    await queue.mark(3)
    await queue.mark(5)
    write_checkpoint(tmp_path, 3)
    await part.claim(2)
    write_checkpoint(tmp_path, 5)  # by the first one, behind the back of the second
    assert (await part.claim(3)).startswith("back to step 3 ")
    assert queue.state.history == NO_REWINDS.after_rewind(3, 2)
    await queue.mark(4)
    write_checkpoint(tmp_path, 4, lineage=2)
    assert (await part.claim(4)).startswith("back to step 4 ")
    assert queue.state.history == NO_REWINDS.after_rewind(3, 2).after_rewind(4)


async def nothing_to_do(resumed: ResumePoint) -> None:
    pass


def write_checkpoint(run_dir: Path, step: int, *, lineage: int = 0) -> None:
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    manifest = Manifest(Progress(step=step), QueueSnapshot(1, (), SampleCounts(), 0), {}, lineage=lineage)
    (path / "manifest.json").write_text(dump_manifest(manifest))


def save(run_dir: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = run_dir / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{")


def test_a_torn_checkpoint_names_the_one_before_only_if_there_is_one(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(ConfigError) as caught:
        load_manifest(tmp_path / "checkpoints" / "step_000005")
    assert "no earlier one" in caught.value.message and "Delete" not in caught.value.message
    save(tmp_path, 3, 4, 6)
    with pytest.raises(ConfigError, match=r"Delete .*step_000005 to continue from step_000004"):
        load_manifest(tmp_path / "checkpoints" / "step_000005")


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("model.path=x: is none; give another"), 2), (InfraError("a rank died"), 1)]
)
def test_a_part_that_refuses_the_configuration_ends_the_launch_with_two(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def fails(config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
        raise error
        yield name

    monkeypatch.setattr(launch_module, "cluster", fails)
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "logging": {"console": "plain"}})
    assert launch_module.launch(config) == code
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
    assert told["message"] == str(error)
    captured = capsys.readouterr()
    assert ("Traceback" in captured.out + captured.err) is (code == 1)
