"""`asyncrl launch` as a user runs it: real Ray, real vLLM, real files, whatever the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launches import SHORT, balanced, start

pytestmark = pytest.mark.timeout(400)


def test_a_run_completes_and_a_resumed_one_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = start(tmp_path, *SHORT)
    assert first.wait() == 0, first.output()
    summary = first.summary()
    assert (summary["status"], summary["step"], summary["version"]) == ("completed", 4, 4)
    assert summary["error"] is None
    assert summary["samples"]["trained"] == 64
    assert balanced(summary["samples"])
    assert summary["weight_sync"]["count"] == 4
    assert [point["version"] for point in summary["validation"]["points"]] == [0, 4]
    assert first.survivors() == []

    second = start(tmp_path, *SHORT, "trainer.total_training_steps=6", "resume=auto", run_dir=first.run_dir)
    assert second.wait() == 0, second.output()
    summary = second.summary()
    assert (summary["status"], summary["step"], summary["version"]) == ("completed", 6, 6)
    assert summary["samples"]["trained"] == 96
    assert summary["samples"]["fed"] == 96, "feed indices go on: nothing is fed twice"
    assert balanced(summary["samples"])
    assert [step["step"] for step in second.steps()] == [1, 2, 3, 4, 5, 6]
    assert second.survivors() == []


def test_ctrl_c_stops_in_order_with_a_checkpoint(tmp_path: Path) -> None:
    run = start(tmp_path, *SHORT, "trainer.total_training_steps=500")
    run.wait_for("step 1/")
    run.interrupt()
    assert run.wait(20.0) == 130, run.output()
    summary = run.summary()
    assert summary["status"] == "interrupted"
    assert summary["error"] is None
    assert [summary["samples"][state] for state in ("running", "ready", "leased")] == [0, 0, 0]
    assert balanced(summary["samples"])
    (checkpoint,) = (run.run_dir / "checkpoints").iterdir()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["progress"]["step"] == summary["step"] >= 1
    assert manifest["queue"]["books"]["trained"] == summary["samples"]["trained"]
    assert run.survivors() == []


def test_a_raising_reward_function_fails_the_run_with_its_traceback(tmp_path: Path) -> None:
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n", encoding="utf-8"
    )
    run = start(tmp_path, *SHORT, f"reward.function={reward}:score")
    assert run.wait() == 1, run.output()
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"]["type"] == "UserCodeError"
    assert "ZeroDivisionError" in summary["error"]["cause"]
    assert "1 / 0" in run.output()
    assert run.survivors() == []


@pytest.mark.slow
def test_two_ctrl_c_stop_at_once(tmp_path: Path) -> None:
    run = start(tmp_path, *SHORT, "trainer.total_training_steps=500")
    run.wait_for("step 1/")
    run.interrupt()
    run.wait_for("stopping")
    run.interrupt()
    assert run.wait(10.0) == 130, run.output()
    assert run.summary()["status"] == "interrupted"
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize("said", ["starting Ray", "starting engines"])
def test_ctrl_c_while_starting(tmp_path: Path, said: str) -> None:
    run = start(tmp_path, *SHORT)
    run.wait_for(said)
    run.interrupt()
    assert run.wait(20.0) == 130, run.output()
    assert run.summary()["status"] == "interrupted"
    assert run.survivors() == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_fails_the_run(tmp_path: Path) -> None:
    run = start(tmp_path, *SHORT, "rollout.engine_kwargs={block_size: 7}")
    assert run.wait() == 1, run.output()
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"]["type"] == "InfraError"
    assert "engine" in summary["error"]["message"]
    assert run.survivors() == []


@pytest.mark.slow
def test_a_full_disk_fails_the_run_and_is_told_in_its_summary(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        # The checkpoint does not fit.
        run = start(tmp_path, *SHORT, "logging.tensorboard=false", run_dir=disk / "run")
        assert run.wait() == 1, run.output()
        summary = run.summary()
        assert summary["status"] == "failed"
        assert "full" in summary["error"]["message"] or "No space" in summary["error"]["message"]
        assert run.survivors() == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    run = start(tmp_path, *SHORT, "trainer.total_training_steps=500")
    run.wait_for("step 1/")
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    for _ in range(100):
        if not (left := run.survivors()):
            break
        os.sched_yield()
        subprocess.run(["sleep", "0.2"], check=True)
    assert left == []


@pytest.mark.slow
def test_sync_is_the_same_run_with_a_barrier(tmp_path: Path) -> None:
    run = start(tmp_path, *SHORT, mode="sync")
    assert run.wait() == 0, run.output()
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["staleness"] == {"mean": 0.0, "max": 0}
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mode_a", "mode_b", "mode_c", "mode_d"])
def test_every_mode_runs_and_keeps_its_staleness(tmp_path: Path, mode: str) -> None:
    run = start(tmp_path, *SHORT, f"async_training={mode}", "trainer.total_training_steps=8")
    assert run.wait() == 0, run.output()
    summary = run.summary()
    assert summary["samples"]["trained"] == 128
    assert balanced(summary["samples"])
    if mode in ("mode_a", "mode_b"):
        assert summary["staleness"]["max"] == 0
    assert run.survivors() == []
