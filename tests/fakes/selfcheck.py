"""Run the engine contract in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SELFCHECK_S = 240
"""Deadline of one run of the contract on at most two ranks. More ranks have as much time for each two."""


def torchrun(*command: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` on this many ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}") if ranks > 1 else ()
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *launcher, *command],
        capture_output=True,
        text=True,
        timeout=SELFCHECK_S * max(1, ranks // 2),
        check=False,
        cwd=ROOT,
        env=environment,
    )


def selfcheck(*options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `trainer.selfcheck` on CPU."""
    return torchrun("-m", "trainer.selfcheck", "--device", "cpu", *options, ranks=ranks)


def selfcheck_document(*options: str, ranks: int = 1) -> dict[str, Any]:
    """Return the JSON document of `selfcheck`, and check that its exit code fits the results."""
    run = selfcheck(*options, "--json", ranks=ranks)
    assert "{" in run.stdout, f"selfcheck ended with {run.returncode}: {run.stdout}\n{run.stderr[-4000:]}"
    document: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])
    assert run.returncode == (0 if all(result["passed"] for result in document["results"]) else 1)
    return document
