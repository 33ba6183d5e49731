"""The examples of user-defined roles record a judge's answers and replay them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "skip" / "ask_twice.py"


@pytest.mark.parametrize("module", ["my_stage", "own_files"])
def test_the_judge_is_called_once(module: str) -> None:
    command = [sys.executable, str(SCRIPT), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("{'recorded': 8}")
    assert second.endswith("{'replayed': 8}")
