"""Which directory a launch runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.launch import _run_dir
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError
from asyncrl.manifest import Manifest, Progress, Resume
from asyncrl.ports import Books, QueueSnapshot


def resume_of(run_dir: Path) -> Resume:
    snapshot = QueueSnapshot(1, (), Books(), 0)
    return Resume(run_dir / "checkpoints" / "step_000001", Manifest(Progress(), snapshot, {}))


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_in_its_place(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"), resume="auto")
    first = _run_dir(config, None)
    first.metrics.write_text("{}\n", encoding="utf-8")
    second = _run_dir(config, None)
    assert second.path == first.path
    assert not second.metrics.exists()
    assert len([*second.path.glob("metrics-abandoned-*.jsonl")]) == 1


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
