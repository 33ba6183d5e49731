"""Fixtures for the tests of the commands: a command line and a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.command_line import CommandLine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in `runs/quickstart` of the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "quickstart" / "20260102-030405"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("")
    return path
