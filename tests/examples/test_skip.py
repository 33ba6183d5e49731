"""The example of a user-defined role records a judge's answers and replays them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "skip" / "ask_twice.py"


def test_the_judge_is_called_once() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("{'recorded': 8}")
    assert second.endswith("{'replayed': 8}")
