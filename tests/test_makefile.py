"""`make setup` builds `.venv` for CPUs or for GPUs, and never installs one kind over the other."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/bash
# Stands for Python, pip and asyncrl: writes down what it would do.
case "$*" in
  "-m venv "*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> log ;;
  *" install "*)
    all="$*"; case "$all" in *"$FAIL"*) exit 1 ;; esac
    echo "${all#*--quiet }" >> log; cp "$0" .venv/bin/asyncrl ;;
esac
"""
GPU = ["-e .[gpu,liger,dev]"]
CPU = ["--no-deps torch==2.13.0+cpu", "--no-deps -r requirements/cpu.txt", "--no-deps --no-build-isolation -e ."]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(project: Path, *arguments: str, fail: str = "nothing") -> list[str]:
    """Return the environments that `make` creates and the packages that it installs."""
    (log := project / "log").write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "GPU"}
    command = ["make", *arguments, f"PYTHON={project / 'python'}"]
    done = subprocess.run(command, cwd=project, env=env | {"FAIL": fail}, capture_output=True, text=True)
    assert (done.returncode != 0) == (fail != "nothing"), done
    return log.read_text().splitlines()


def test_another_kind_is_a_new_environment_and_other_commands_keep_the_kind(project: Path) -> None:
    assert make(project, "demo") == ["venv", *CPU]
    assert make(project, "demo") == make(project, "setup") == []
    assert make(project, "setup", "GPU=1") == ["venv", *GPU]
    assert make(project, "setup", "GPU=1") == make(project, "demo") == make(project, "test") == []
    assert make(project, "setup", "GPU=") == ["venv", *CPU]


def test_a_changed_requirement_updates_the_environment_of_its_kind(project: Path) -> None:
    make(project, "setup", "GPU=1")
    (project / "pyproject.toml").write_text("changed")
    assert make(project, "demo") == GPU
    assert make(project, "demo") == []


def test_an_installation_that_fails_continues_with_the_same_kind(project: Path) -> None:
    make(project, "demo")
    assert make(project, "setup", "GPU=1", fail="gpu,") == ["venv"]
    assert make(project, "demo") == GPU
