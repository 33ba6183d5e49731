"""One short chaos round on a real run: the harness finds no broken promise and leaves no process behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.launches import MARK

SEED = 7
FAULTS = ("queue kill", "rollouter kill", "trainer kill")
"""Faults of an engine are tested in tests/e2e/test_vllm_serving.py."""


@pytest.mark.timeout(400)
def test_a_run_keeps_its_promises_through_faults(tmp_path: Path) -> None:
    result = tmp_path / "chaos.json"
    arguments = ["--seed", str(SEED), "--one-node", "--replicas", "1", "--faults", str(len(FAULTS))]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.chaos",
            *arguments,
            "--no-finish",
            "--calm",
            "1",
            "3",
            "--json",
            str(result),
            "--keep",
            str(tmp_path / "kept"),
            "--parts",
            *FAULTS,
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    summary = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert summary["verdict"] == "kept"
    injected = summary["injected_faults"]
    assert all(fault["recovered_s"] is not None and fault["launch_survived"] for fault in injected), injected
    assert {fault["fault"] for fault in injected} == set(FAULTS), "each fault was injected once"
    assert summary["samples"]["trained"] > 0
    assert summary["launches"] == 1
    assert not _left()


def _left() -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
