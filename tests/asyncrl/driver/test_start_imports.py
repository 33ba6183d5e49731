"""The libraries that the processes of a run import, of which each costs seconds of CPU time in each process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

import asyncrl.driver.run  # and with it the modules of all actors except the ranks

def check(names):
    assert not (found := names & set(sys.modules)), found

check({"datasets", "tensordict", "torch", "transformers", "vllm"})

from asyncrl.config.compose import check_config
from asyncrl.core.types import SampleId
from rollouter.loading import load_task

task = load_task(check_config(None, ()).require(), Path(sys.argv[1]))
assert "+" in task.decode(task.prompts.at(SampleId(0, 1)).prompt_ids)
check({"tensordict", "torch", "vllm"})
"""


def test_driver_and_actors_import_no_large_library_before_they_need_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
