"""Which directory a launch runs in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncrl.cli import launch as launch_module
from asyncrl.cli.launch import _run_dir
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, InfraError
from asyncrl.manifest import Manifest, Progress, Resume, load_manifest
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
    async def fails(config: Config, name: str) -> AsyncIterator[str]:
        raise error
        yield name

    monkeypatch.setattr(launch_module, "cluster", fails)
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "logging": {"console": "plain"}})
    assert launch_module.launch(config) == code
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
    assert told["message"] == str(error)
    captured = capsys.readouterr()
    assert ("Traceback" in captured.out + captured.err) is (code == 1)
