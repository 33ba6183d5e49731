"""A launch chooses its run directory, locks it, and recognizes a run that has already finished."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.core.staleness import Pacing
from asyncrl.driver import launch as launch_module
from asyncrl.driver.actors import SupervisedTrainer
from asyncrl.driver.run_directory import (
    LOCK,
    RunLocks,
    already_finished,
    check_run_dir,
    open_run_dir,
    planned_steps,
)
from asyncrl.observe.status.summary import ResumePoint
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.operations import MarkCheckpoint
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.checkpoint_manifest import NO_REWINDS, load_manifest
from asyncrl.storage.run_dir import RunDir
from tests.fakes.queues import MemoryLog
from tests.fakes.run_on_disk import RunOnDisk, write_checkpoint

SHORT = {"trainer": {"total_training_steps": 9}}

# ---------------------------------------------------------------------------------------------- choice of the directory


def write_records(run_dir: RunDir) -> None:
    for path in (run_dir.metrics, run_dir.journal, run_dir.path / "journal.db-wal", run_dir.path / "trained.jsonl"):
        path.write_text("{}\n", encoding="utf-8")
    run_dir.samples.mkdir()


def current_files(run_dir: RunDir) -> set[str]:
    return {path.name for path in run_dir.path.iterdir() if "-abandoned-" not in path.name}


def test_a_run_without_checkpoint_and_journal_starts_again_in_its_directory(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), resume="auto")
    write_records(first := open_run_dir(config, None))
    second = open_run_dir(config, None)
    assert second.path == first.path
    assert current_files(second) == {"config.yaml", "logs"}
    for name in ("metrics-*.jsonl", "trained-*.jsonl", "journal-*.db", "journal-*.db-wal", "samples-*"):
        assert len([*second.path.glob(name)]) == 1, name


def test_a_completed_run_does_not_hide_an_older_unfinished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dead, completed = (RunOnDisk(tmp_path / "runs" / "quickstart" / name, **SHORT) for name in ("1", "2"))
    config = Config.model_validate({"resume": "auto", **SHORT})
    dead.checkpoint(5)
    lines = launch_module.preview_resume(config)
    assert len(lines) == 2 and lines[1].endswith(f"continues from {dead.files.checkpoints / 'step_000005'}, at step 5")
    completed.checkpoint(9)
    completed.summary("completed", 9)
    found, hint = launch_module.preview_resume(config)
    assert found.startswith(f"nothing is left to train: the run in {completed.path} is completed")
    command = f"`asyncrl launch fully_async {dead.path / 'config.yaml'} resume={dead.path}` continues it"
    assert hint.startswith(f"The run in {dead.path} is not finished") and hint.endswith(command)
    dead.summary("completed", 5)
    assert len(launch_module.preview_resume(config)) == 1


def test_a_used_directory_is_not_overwritten(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    open_run_dir(config, None)
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run_dir(config, None)


def test_a_link_is_refused_before_the_run_directory_is_written_to(tmp_path: Path) -> None:
    """The driver truncates its lock, so a lock that is a link would empty another file."""
    victim, run = tmp_path / "victim", RunOnDisk(tmp_path / "run")
    run.checkpoint(1)
    victim.write_text("theirs")
    (run.path / LOCK).symlink_to(victim)
    files = {path for path in run.path.rglob("*")}
    with RunLocks() as locks, pytest.raises(ConfigError, match=f"{LOCK} is a link to {victim}, outside of the run"):
        locks.take(run.path)
    assert victim.read_text() == "theirs"
    assert {path for path in run.path.rglob("*")} == files


def test_a_run_directory_that_cannot_exist_is_refused() -> None:
    with RunLocks() as locks, pytest.raises(ConfigError, match=r"run_dir=/proc/run: there can be no such directory"):
        locks.take(Path("/proc/run"))


def test_a_resumed_run_continues_in_its_own_directory(tmp_path: Path) -> None:
    old = RunOnDisk(tmp_path / "old")
    old.checkpoint(1)
    assert open_run_dir(Config(), old.found()).path == old.path
    check_run_dir(Config(run_dir=str(tmp_path / "new" / ".." / "old")), old.found())
    with pytest.raises(ConfigError, match="a run continues in its own directory"):
        check_run_dir(Config(run_dir=str(tmp_path / "new")), old.found())
    assert not (tmp_path / "new").exists()


def test_resuming_without_a_journal_sets_the_old_one_aside(tmp_path: Path) -> None:
    """The next checkpoints have sample counts that the old journal would contradict."""
    run = RunOnDisk(tmp_path / "run")
    run.checkpoint(1)
    resume = run.found()
    write_records(run.files)
    open_run_dir(Config(), resume)
    assert run.files.journal.exists() and run.files.samples.exists()
    open_run_dir(Config(journal="off"), resume)
    assert current_files(run.files) == {"config.yaml", "logs", "checkpoints", "metrics.jsonl", "trained.jsonl"}
    assert len([*run.path.glob("*-abandoned-*")]) == 3


async def test_a_new_trainer_process_rewinds_within_its_lineage_whatever_its_predecessor_writes(tmp_path: Path) -> None:
    async def ignore(resumed: ResumePoint) -> None:
        pass

    queue = LocalSampleQueue(QueueOptions(10, Pacing(4, 0)), journal=MemoryLog())
    part = SupervisedTrainer(Config(), RunDir(tmp_path), None, ignore, lambda: None)
    part.queue = cast(QueueClient, queue)
    part.total_steps, part.num_prompts = 9, 10
    await queue.mark(3)
    await queue.mark(5)
    write_checkpoint(tmp_path, 3)
    await part.release_samples(2)
    write_checkpoint(tmp_path, 5)  # written by the first process although it was replaced
    assert (await part.release_samples(3)).startswith("back to step 3 ")
    assert queue.state.history == NO_REWINDS.after_rewind(3, 2)
    await queue.mark(4)
    write_checkpoint(tmp_path, 4, lineage=2)
    assert (await part.release_samples(4)).startswith("back to step 4 ")
    assert queue.state.history == NO_REWINDS.after_rewind(3, 2).after_rewind(4)


def test_the_error_of_a_torn_checkpoint_names_an_earlier_one_only_if_there_is_one(tmp_path: Path) -> None:
    five = write_checkpoint(tmp_path, 5)
    (five / "manifest.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        load_manifest(five)
    assert "no earlier one" in caught.value.message and "Delete" not in caught.value.message
    for step in (3, 4, 6):
        write_checkpoint(tmp_path, step)
    with pytest.raises(ConfigError, match=r"Delete .*step_000005 to continue from step_000004"):
        load_manifest(five)


# ---------------------------------------------------------------------------------------------- locks

HOLD = """
import sys
from pathlib import Path
from asyncrl.driver.run_directory import RunLocks
with RunLocks() as locks:
    locks.take(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_driver(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it ends."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_driver_is_refused_before_it_changes_a_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("of the first driver")
    with other_driver(run_dir) as process:
        before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
        for config in (Config(run_dir=str(run_dir), resume="auto"), Config(resume=str(run_dir))):
            with pytest.raises(ConfigError, match=rf"in {run_dir} is still running: .*\(pid {process.pid} on .*{LOCK}"):
                launch_module.launch(config)
        assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before
        process.kill()
        process.wait()
        with RunLocks() as locks:
            assert locks.take(run_dir), "the lock ends with a driver that was killed"


def test_a_lock_is_held_until_the_block_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    with RunLocks() as locks:
        assert locks.take(run_dir)
        assert not locks.take(tmp_path / "new" / ".." / "new" / "run")
        with pytest.raises(ConfigError, match="still running"), RunLocks() as others:
            others.take(run_dir)
        assert "pid" in (run_dir / LOCK).read_text(), "the refused attempt leaves the owner's name"
    assert (run_dir / LOCK).read_bytes() == b""
    with RunLocks() as locks:
        assert locks.take(run_dir)


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with RunLocks() as locks, pytest.raises(ConfigError, match="run_dir=PATH"):
        locks.take(tmp_path / "file" / "run")


# ---------------------------------------------------------------------------------------------- finished runs


def sections(*, train_files: str = "data.parquet", **trainer: Any) -> dict[str, Any]:
    """Settings of a run; the number of prompts in a Parquet file is unknown before the data is read."""
    return {"trainer": {"ppo_mini_batch_size": 2, **trainer}, "data": {"train_files": [train_files]}}


def test_a_checkpoint_at_the_last_step_or_beyond_is_already_finished(tmp_path: Path) -> None:
    run = RunOnDisk(tmp_path / "run")
    for step in (7, 8, 9):
        run.checkpoint(step)
        text = already_finished(run.found(), 8)
        assert (text is not None) is (step >= 8)
        assert already_finished(run.found(), None) is None
    assert text is not None
    assert "at step 9 of 8" in text and "total_training_steps" in text and "resume=none model.path=" in text
    assert already_finished(None, 8) is None


def test_steps_are_known_from_the_configuration_or_from_the_lines_of_the_data(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n" * 9, encoding="utf-8")
    epochs = {"total_training_steps": None, "total_epochs": 2}
    for given, steps in (
        (sections(total_training_steps=5), 5),
        (sections(train_files=str(data), **epochs), 9),  # 18 prompts, in leases of 2
        (sections(**epochs), None),
    ):
        assert planned_steps(Config.model_validate(given)) == steps


def ended_run(run_dir: Path, *, status: str = "completed", step: int = 4, **trainer: Any) -> RunOnDisk:
    """A run that ended at `step`, with a checkpoint of step 4."""
    run = RunOnDisk(run_dir, **sections(**{"total_training_steps": 4} | trainer))
    run.checkpoint(4, seq=3)
    run.journal(MarkCheckpoint(4), seq=3)
    run.summary(status, step)
    (run_dir / "state.json").write_text("{}")
    for path in (run.files.metrics, run_dir / "trained.jsonl", run.files.logs / "driver.log", run_dir / LOCK):
        path.touch()
    return run


def contents(run_dir: Path) -> dict[str, bytes]:
    """Return all files except the shared memory and the empty log that every reader of SQLite leaves."""
    files = {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    return {
        name: data
        for name, data in files.items()
        if not (name.endswith("-shm") or (name.endswith("-wal") and not data))
    }


class Started(Exception):
    """Raised when a launch starts to train instead of reporting that the run is finished."""


class Launches:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages: list[str] = []
        monkeypatch.setattr(launch_module.View, "message", lambda view, level, text: self._messages.append(text))
        monkeypatch.setattr(launch_module, "open_run_dir", self._start)

    def _start(self, config: Config, resume: object) -> None:
        raise Started

    def message(self, config: Config) -> str:
        """Return what the launch reports instead of starting."""
        self._messages.clear()
        assert launch_module.launch(config) == 0
        [message] = self._messages
        return message

    def starts(self, config: Config) -> None:
        with pytest.raises(Started):
            launch_module.launch(config)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


@pytest.mark.parametrize("named", ["auto", "", "checkpoints/step_000004"])
def test_launching_a_completed_run_changes_no_file(tmp_path: Path, launches: Launches, named: str) -> None:
    run = ended_run(tmp_path / "run")
    before = contents(run.path)
    message = launches.message(run.again(resume="auto" if named == "auto" else str(run.path / named)))
    assert f"nothing is left to train: the run in {run.path} is completed, at step 4" in message
    assert "total_training_steps" in message and "resume=none model.path=" in message
    assert contents(run.path) == before


def test_a_completed_run_continues_to_a_later_end_or_from_an_earlier_checkpoint(
    tmp_path: Path, launches: Launches
) -> None:
    run = ended_run(tmp_path / "run", step=5, total_training_steps=5)  # with trainer.save_last=false
    message = launches.message(run.again())
    assert "at step 5" in message
    launches.starts(run.again(trainer={"total_training_steps": 6}))
    launches.starts(run.again(resume=str(run.path / "checkpoints" / "step_000004")))
    assert launches.message(run.again(trainer={"total_training_steps": 4})) == message


def test_a_completed_run_of_unknown_length_continues_only_if_its_length_keys_change(
    tmp_path: Path, launches: Launches
) -> None:
    run = ended_run(tmp_path / "run", total_training_steps=None, total_epochs=2)
    assert planned_steps(run.config) is None
    assert "nothing is left to train" in launches.message(run.again())
    launches.starts(run.again(trainer={"total_epochs": 3}))


@pytest.mark.parametrize("status", ["interrupted", "failed", None])
def test_a_run_that_ended_incomplete_after_its_last_step_continues(
    tmp_path: Path, launches: Launches, status: str | None
) -> None:
    """The run's last version may lack its validation, and the run's records are incomplete."""
    run = ended_run(tmp_path / "run", status=status or "")
    if status is None:
        (run.path / "summary.json").unlink()
    launches.starts(run.again())


def test_a_completed_run_in_another_directory_is_refused(tmp_path: Path) -> None:
    run = ended_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="a run continues in its own directory"):
        launch_module.launch(run.again(run_dir=str(tmp_path / "new"), resume=str(run.path)))
