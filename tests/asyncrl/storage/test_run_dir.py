"""Run directories: unique names, contents, and errors with fixes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.storage import run_dir as run_dirs
from asyncrl.storage.run_dir import (
    RunDir,
    SavedConfig,
    check_file_types,
    create_run_dir,
    disk_error,
    read_file,
    read_lines,
    reopen_run_dir,
    runs_of,
)

NOW = datetime(2026, 3, 4, 5, 6, 7)


def test_two_runs_started_in_one_second_get_two_directories_and_latest_is_the_second(tmp_path: Path) -> None:
    first = create_run_dir(Config(), NOW, root=tmp_path)
    second = create_run_dir(Config(), NOW, root=tmp_path)
    assert first.path == tmp_path / "quickstart" / "20260304-050607"
    assert second.path == tmp_path / "quickstart" / "20260304-050607-2"
    assert (tmp_path / "quickstart" / "latest").resolve() == second.path
    assert first.logs.is_dir()


def test_the_written_config_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = Config(experiment_name="ü", seed=7)
    run_dir = create_run_dir(config, NOW, root=tmp_path)
    assert Config.model_validate(yaml.safe_load(run_dir.config.read_text(encoding="utf-8"))) == config


def test_a_given_directory_is_used_unchanged_but_never_for_a_second_run(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "mine"))
    assert create_run_dir(config, NOW).path == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"already holds a run.*resume="):
        create_run_dir(config, NOW)


def test_a_relative_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run_dir(Config(), NOW).path == tmp_path / "runs" / "quickstart" / "20260304-050607"


def test_the_error_for_an_unwritable_directory_has_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*run_dir=PATH"):
        create_run_dir(Config(run_dir=str(tmp_path / "file" / "run")), NOW)


def test_a_full_disk_is_an_infra_error_with_the_fix() -> None:
    error = disk_error(Path("/runs/x"), OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, InfraError)
    assert "/runs/x" in error.message
    assert "run_dir=PATH" in error.message


def test_runs_are_listed_newest_first_without_latest(tmp_path: Path) -> None:
    assert list(runs_of("quickstart", root=tmp_path)) == []
    runs = [create_run_dir(Config(), NOW.replace(second=second), root=tmp_path) for second in (1, 2, 3)]
    twins = [create_run_dir(Config(), NOW.replace(second=2), root=tmp_path) for _ in range(10)]
    (tmp_path / "quickstart" / "notes.txt").touch()
    assert list(runs_of("quickstart", root=tmp_path)) == [runs[2], *reversed(twins), runs[1], runs[0]]


@pytest.mark.parametrize(("number", "kept"), [(errno.EPERM, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_file_system_without_symbolic_links_lacks_only_the_link(
    tmp_path: Path, number: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(link: Path, target: str) -> None:
        raise OSError(number, "no", str(link))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with nullcontext() if kept else pytest.raises(InfraError, match=r"cannot write .*latest"):
        assert create_run_dir(Config(), NOW, root=tmp_path).config.exists()


def test_reopening_rewrites_the_config_of_an_existing_directory(tmp_path: Path) -> None:
    run_dir = create_run_dir(Config(), NOW, root=tmp_path)
    assert reopen_run_dir(run_dir.path, Config(seed=9)) == run_dir
    assert yaml.safe_load(run_dir.config.read_text())["seed"] == 9
    with pytest.raises(ConfigError, match="no run directory"):
        reopen_run_dir(tmp_path / "gone", Config())


def test_a_file_named_latest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "latest").write_text("mine")
    create_run_dir(Config(), NOW, root=tmp_path)
    assert (tmp_path / "quickstart" / "latest").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["run.lock", "metrics.jsonl", "journal.db-wal", "samples", "samples/1-1.safetensors", "checkpoints/step_000005",
     "events/step_000001", "logs", "logs/driver.log", "profiles", "tensorboard", "wandb"],
)  # fmt: skip
def test_a_link_that_leads_out_of_the_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    check_file_types(tmp_path / "run")
    for target in (tmp_path / "victim", Path("/nowhere/at/all"), Path("../" * name.count("/") + "../victim")):
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=rf"{link} is a link to .*, outside of the run.*Replace the link"):
            check_file_types(tmp_path / "run")
        link.unlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "trained.jsonl", "logs/driver.log", "samples/sample_0_1"])
def test_a_pipe_in_the_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "run" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=rf"{pipe} is a pipe, a socket or a device.*Remove it"):
        check_file_types(tmp_path / "run")


def test_links_within_the_run_directory_and_to_the_logs_of_ray_are_allowed(tmp_path: Path) -> None:
    run_dir, alias = tmp_path / "run", tmp_path / "latest"
    for directory in ("logs", "checkpoints/step_000005"):
        (run_dir / directory).mkdir(parents=True)
    (run_dir / "logs" / "ray").symlink_to(tmp_path / "session")
    (run_dir / "checkpoints" / "best").symlink_to("step_000005")
    alias.symlink_to(run_dir)
    check_file_types(run_dir)
    check_file_types(alias)


# ---------------------------------------------------------------------------------------------- access and environment


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize(("access", "mode"), [("private", "700"), ("group", "750"), ("umask", "755")])
def test_only_the_user_can_open_a_run_directory_unless_the_configuration_allows_others(
    access: Any, mode: str, tmp_path: Path
) -> None:
    named = create_run_dir(Config(run_dir=str(tmp_path / "a" / "mine"), directory_access=access), NOW)
    unnamed = create_run_dir(Config(directory_access=access), NOW, root=tmp_path / "runs")
    assert (mode_of(named.path), mode_of(unnamed.path)) == (mode, mode)
    assert mode_of(tmp_path / "a") == mode_of(unnamed.path.parent) == mode_of(named.logs) == "755"
    assert mode_of(named.config) == "644"


@pytest.mark.usefixtures("usual_umask")
def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o755)
    config = Config(run_dir=str(tmp_path / "mine"))
    assert mode_of(create_run_dir(config, NOW).path) == mode_of(reopen_run_dir(tmp_path / "mine", config).path) == "755"


def test_values_from_the_environment_are_read_from_a_written_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "c4n4ry-place")
    config = Config.model_validate(
        {
            "run_dir": str(tmp_path / "mine"),
            "rollout": {"dump_dir": "c4n4ry-place/quickstart"},
            "reward": {"kwargs": {"key": "${secret:PLACE}"}},
        }
    ).with_unresolved({("rollout", "dump_dir"): "${oc.env:PLACE}/${experiment_name}"})
    run_dir = create_run_dir(config, NOW)
    assert "c4n4ry" not in run_dir.config.read_text(encoding="utf-8")
    saved = SavedConfig(run_dir.path)
    assert saved.value("rollout", "dump_dir") == "c4n4ry-place/quickstart"
    assert saved.value("reward", "kwargs", "key") == "${secret:PLACE}"
    monkeypatch.delenv("PLACE")
    assert saved.value("rollout", "dump_dir") == "${oc.env:PLACE}/${experiment_name}", "a reader may lack the variable"


def test_the_mirror_of_a_url_is_named_without_its_credentials(tmp_path: Path) -> None:
    given, renewed, other = (
        RunDir.of(tmp_path, f"s3://{url}/run") for url in ("key:c4n4ry@bucket", "key:new@bucket", "key:new@other")
    )
    assert given.checkpoint_url == "s3://key:c4n4ry@bucket/run" and "c4n4ry" not in str(given.checkpoints)
    assert given.checkpoints == renewed.checkpoints != other.checkpoints


def test_files_and_lines_are_read_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").write_bytes(b"abcdef\nx\n")
    monkeypatch.setattr(run_dirs, "MAX_LINE_BYTES", 4)
    assert list(read_lines(file)) == [b"abcd", b"ef\n", b"x\n"]
    monkeypatch.setattr(run_dirs, "MAX_FILE_BYTES", 9)
    assert read_file(file) == file.read_bytes()
    monkeypatch.setattr(run_dirs, "MAX_FILE_BYTES", 8)
    with pytest.raises(
        OSError, match=r"it has 9 bytes, and no run writes more than 8: delete it, or copy it again.*file"
    ):
        read_file(file)


@pytest.mark.parametrize("read", [read_file, lambda path: list(read_lines(path))])
def test_a_pipe_is_not_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read(tmp_path / "pipe")
