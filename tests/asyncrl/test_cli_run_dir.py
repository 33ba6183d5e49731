"""Which directory a launch runs in."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import launch as launch_module
from asyncrl.cli.launch import _refuse_running, _run_dir
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, InfraError
from asyncrl.manifest import Manifest, Progress, Resume, load_manifest
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import RunDir
from asyncrl.run_state import FILE_NAME
from asyncrl.telemetry.state_file import StateFile
from tests.fakes.run_states import running


def resume_of(run_dir: Path) -> Resume:
    snapshot = QueueSnapshot(1, (), Books(), 0)
    manifest = Manifest(Progress(), snapshot, {})
    return Resume(run_dir, run_dir / "checkpoints" / "step_000001", manifest)


def write_records(run_dir: RunDir) -> None:
    for path in (run_dir.metrics, run_dir.journal, run_dir.path / "journal.db-wal", run_dir.path / "trained.jsonl"):
        path.write_text("{}\n", encoding="utf-8")
    run_dir.samples.mkdir()


def test_a_run_that_left_nothing_to_go_on_from_starts_anew_in_its_place(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), resume="auto")
    first = _run_dir(config, None)
    write_records(first)
    second = _run_dir(config, None)
    assert second.path == first.path
    kept = {path.name for path in second.path.iterdir() if "-abandoned-" not in path.name}
    assert kept == {"config.yaml", "logs"}
    for name in ("metrics-*.jsonl", "trained-*.jsonl", "journal-*.db", "journal-*.db-wal", "samples-*"):
        assert len([*second.path.glob(name)]) == 1, name


def state_of(run_dir: Path, **given: Any) -> None:
    StateFile(run_dir / FILE_NAME).write_now(replace(running(), **given))


def test_a_second_driver_is_refused_as_long_as_the_first_one_lives(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), resume="auto")
    run_dir = _run_dir(config, None)
    alive = {"pid": os.getppid(), "host": socket.gethostname(), "written_at": time.time()}
    _refuse_running(run_dir.path)  # nothing is known of it
    state_of(run_dir.path, **alive)
    with pytest.raises(ConfigError, match=rf"still running \(pid {os.getppid()}\)"):
        launch_module.launch(config)
    for other in ({"phase": "completed"}, {"host": "elsewhere"}, {"written_at": 1000.0}, {"pid": 2**22 + 1}):
        state_of(run_dir.path, **alive | other)
        _refuse_running(run_dir.path)


def test_a_used_directory_is_not_written_over(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    _run_dir(config, None)
    with pytest.raises(ConfigError, match="already holds a run"):
        _run_dir(config, None)


def test_a_resumed_run_goes_on_where_its_checkpoint_is(tmp_path: Path) -> None:
    old = _run_dir(Config(run_dir=str(tmp_path / "old")), None)
    assert _run_dir(Config(), resume_of(old.path)).path == old.path
    with pytest.raises(ConfigError, match="a run goes on where it is"):
        _run_dir(Config(run_dir=str(tmp_path / "new")), resume_of(old.path))
    assert not (tmp_path / "new").exists()


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
    with pytest.raises(ConfigError, match=r"Delete .*step_000005 to go on from step_000004"):
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
