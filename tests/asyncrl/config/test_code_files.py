"""The user's files that a launch sends to the nodes of a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.code_files import code_files, stage
from asyncrl.config.schema import Config


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("VALUE = 7\n", encoding="utf-8")


@pytest.mark.parametrize("absolute", [False, True])
def test_the_files_that_a_configuration_names_travel(
    tmp_path: Path, absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, elsewhere = tmp_path / "work", tmp_path / "node"
    elsewhere.mkdir()
    write(root, "rewards/score.py", "agents/__init__.py", "agents/loop.py", "stages.py", "unused.py", "data.jsonl")
    named = str(root / "rewards/score.py") if absolute else "rewards/score.py"
    config = Config.model_validate(
        {
            "reward": {"function": f"{named}:VALUE"},
            "rollout": {"agent": {"program": "agents.loop:VALUE"}},
            "skip": {"modules": ["stages"]},
            "model": {"path": "unused.py"},
        }
    )
    files = ["agents/__init__.py", "agents/loop.py", "rewards/score.py", "stages.py"]
    assert [str(file) for file in code_files(config, root)] == files
    package = stage(config, root, tmp_path / "sent")
    assert package is not None
    # On another node, nothing of the working directory exists; Ray puts the package's parent on the path.
    root.rename(tmp_path / "gone")
    script = (
        "from asyncrl.config.import_path import import_module, load_object\n"
        f"assert load_object({named + ':VALUE'!r}, 'reward.function') == 7\n"
        "assert load_object('agents.loop:VALUE', 'rollout.agent.program') == 7\n"
        "assert import_module('stages', 'skip.modules').VALUE == 7\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{Path(__file__).parents[3]}")
    subprocess.run([sys.executable, "-c", script], cwd=elsewhere, check=True, timeout=60)


def test_nothing_travels_that_is_no_code_of_the_working_directory(tmp_path: Path) -> None:
    write(tmp_path / "other", "score.py")
    config = Config.model_validate({"reward": {"function": f"{tmp_path}/other/score.py:VALUE"}})
    root = tmp_path / "work"
    root.mkdir()
    assert code_files(config, root) == ()
    assert code_files(Config.model_validate({"reward": {"function": "../other/score.py:VALUE"}}), root) == ()
    assert stage(Config(), root, tmp_path / "sent") is None
