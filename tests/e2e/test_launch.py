"""`asyncrl launch` as a user runs it: real Ray, real vLLM and real files, and every way in which a run ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.assets import resolve
from rollouter.rewards.check import DUMMY
from tests.e2e.launches import (
    QUIET,
    SHORT,
    LaunchedRun,
    balanced,
    completed_in_order,
    interrupted_in_order,
    start,
    surviving_samples,
    trained_once,
)

pytestmark = pytest.mark.timeout(400)
ENDLESS = (*SHORT, "trainer.total_training_steps=500")


def restarts(run: LaunchedRun) -> dict[str, int]:
    """Return how often each part has recovered that was restarted."""
    return dict(Counter(one["part"] for one in run.state()["restarts"] if one["recovered_at"] is not None))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_continues_whatever_has_ended_its_driver(tmp_path: Path) -> None:
    """Without a checkpoint, the driver is killed; after the first one, a second Ctrl-C stops it at once; then a single
    Ctrl-C writes a checkpoint. Each time no process is left, and the next launch trains every sample once.

    tests/e2e/test_skip_launch.py has the single Ctrl-C without engines.
    """
    first = start(tmp_path, *ENDLESS, "trainer.save_freq=-1")
    first.wait_for("step 4/")
    first.process.kill()
    first.process.wait(10)
    vanished = time.monotonic() + 20
    while first.survivors():
        assert time.monotonic() < vanished, first.survivors()
        time.sleep(0.2)
    assert not any(first.run_dir.glob("checkpoints/*/manifest.json"))

    second = start(tmp_path, *ENDLESS, "trainer.save_freq=3", "resume=auto", run_dir=first.run_dir)
    second.wait_until(lambda: any(first.run_dir.glob("checkpoints/*/manifest.json")), "checkpoint")
    second.interrupt()
    second.wait_for("stopping")
    second.interrupt()
    assert second.wait(10.0) == 130, second.output()
    assert (second.summary()["status"], second.survivors()) == ("interrupted", [])

    third = start(tmp_path, *ENDLESS, "resume=auto", run_dir=first.run_dir)
    total = interrupted_in_order(third)["step"] + 3
    last = start(tmp_path, *SHORT, f"trainer.total_training_steps={total}", "resume=auto", run_dir=first.run_dir)
    summary = completed_in_order(last, total)
    assert [point["version"] for point in summary["validation"]["points"]] == [0, summary["version"]]


@pytest.mark.slow
def test_a_reward_function_that_raises_later_fails_the_run_with_its_line(tmp_path: Path) -> None:
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return 1.0 if solution_str == {DUMMY!r} else 1 / 0\n",  # the call before the run is no mistake
        encoding="utf-8",
    )
    run = start(tmp_path, *SHORT, f"reward.function={reward}:score")
    assert run.wait() == 1, run.output()
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["error"]["type"] == "UserCodeError"
    assert "ZeroDivisionError" in summary["error"]["cause"]
    output = "".join(run.output().split())  # lines break where the path is too long
    assert f"{reward}line2,inscore:return1.0" in output and "Traceback" not in output
    assert "Traceback" in (run.run_dir / "logs" / "driver.log").read_text(encoding="utf-8")
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_learn_although_rollouter_rank_queue_and_trainer_are_killed(tmp_path: Path) -> None:
    steps = 40
    keys = (f"trainer.total_training_steps={steps}", "trainer.save_freq=3", "logging.console=plain")
    run = start(tmp_path, *keys, recipe="fsdp2_two_ranks")
    run.wait_for("step 6/")
    for killed, part in (("rollouter", "rollouter"), ("rank", "trainer"), ("queue", "queue"), ("trainer", "trainer")):
        recovered = run.recovered(part)
        run.kill(killed)
        run.wait_until(lambda part=part, more=recovered + 1: run.recovered(part) == more, f"recovery of the {part}")
    assert run.wait(400.0) == 0, run.output()
    summary = run.summary()
    assert (summary["status"], summary["step"], summary["lineage"]) == ("completed", steps, 2)
    assert summary["samples"]["trained"] == 16 * steps
    assert balanced(summary["samples"]) and trained_once(run)
    assert restarts(run) == {"rollouter": 1, "trainer": 2, "queue": 1}
    assert all(restart["recovered_s"] is not None for restart in summary["recovery"])
    assert [step["step"] for step in run.steps()] == list(range(1, steps + 1))
    before, after = (summary["validation"][when]["reward"] for when in ("before", "after"))
    assert before < 0.2 and after > before + 0.3
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize("said", ["starting Ray", "starting engines"])
def test_ctrl_c_during_the_start_leaves_nothing_behind(tmp_path: Path, said: str) -> None:
    run = start(tmp_path, *SHORT)
    run.wait_for(said)
    run.interrupt()
    assert run.wait(20.0) == 130, run.output()
    assert run.summary()["status"] == "interrupted"
    assert run.survivors() == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_fails_the_run(tmp_path: Path) -> None:
    run = start(tmp_path, *QUIET, "rollout.engine_kwargs={block_size: 7}")
    assert run.wait() == 1, run.output()
    summary = run.summary()
    assert summary["status"] == "failed"
    error = summary["error"]
    assert (error["type"], error["part"]) == ("InfraError", "replica")
    assert error["message"].startswith("the rollout engines did not start: RuntimeError: Engine core")
    assert f"the engine for {resolve('asyncrl://quickstart')} did not start" in error["cause"]
    assert run.survivors() == []


@pytest.mark.slow
def test_a_full_disk_fails_the_run_and_is_named_in_its_summary(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        run = start(tmp_path, *SHORT, "logging.sinks=[jsonl]", run_dir=disk / "run")
        run.wait_for("step 1/")
        # The checkpoint does not fit on the disk any more.
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - (2 << 20)))
        assert run.wait() == 1, run.output()
        summary = run.summary()
        assert (summary["status"], summary["error"]["type"]) == ("failed", "DiskFullError")
        assert run.survivors() == []
        (disk / "other").unlink()
        again = start(tmp_path, *SHORT, "logging.sinks=[jsonl]", "resume=auto", run_dir=disk / "run")
        assert again.wait() == 0, again.output()
        assert (again.summary()["step"], again.summary()["samples"]["trained"]) == (4, 64)
        assert balanced(again.summary()["samples"]) and trained_once(again)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_hung_parts_are_replaced_until_one_fails_more_often_than_the_run_allows(tmp_path: Path) -> None:
    run = start(tmp_path, *ENDLESS, "trainer.save_freq=3", "timeouts.probe_s=20", "recovery.max_restarts=1")
    run.wait_for("step 4/")
    for part in ("queue", "store", "rollouter", "trainer"):
        run.kill(part, signal.SIGSTOP)
        run.wait_until(lambda part=part: run.recovered(part) == 1, f"recovery of the {part}")
    step = run.state()["step"]
    run.wait_until(lambda: run.state()["step"] >= step + 2, "steps with the new parts")
    assert restarts(run) == {"queue": 1, "store": 1, "rollouter": 1, "trainer": 1}
    run.kill("rollouter")
    assert run.wait() == 1, run.output()
    summary = run.summary()
    assert balanced(summary["samples"]) and surviving_samples(run)
    error = summary["error"]
    assert (error["type"], error["part"]) == ("InfraError", "rollouter")
    assert "failed 2 times within 3600 s (recovery.max_restarts=1); the last time: the rollouter's" in error["message"]
    assert run.survivors() == []


@pytest.mark.slow
def test_ctrl_c_stops_a_run_whose_trainer_restarts(tmp_path: Path) -> None:
    """tests/e2e/test_workers.py has the same for the Rollouter."""
    run = start(tmp_path, *ENDLESS, "trainer.save_freq=4")
    run.wait_for("step 8/")
    run.kill("trainer")
    run.wait_until(lambda: "trainer" in run.state()["restarting"], "restart of the trainer")
    run.interrupt()
    assert run.wait(30.0) == 130, run.output()
    summary = run.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert balanced(summary["samples"])
    assert run.survivors() == []
