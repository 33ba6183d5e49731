"""A real run whose conversations are held in worker processes, one of which is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.profiling.files import event_files
from tests.e2e.launches import balanced, start, trained_once

KEYS = (
    "rollout.num_workers=2",
    "trainer.total_training_steps=1000",
    "data.max_val_samples=16",
    "logging.console=plain",
    "profiler.level=full",
)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_worker_costs_no_sample_and_ctrl_c_stops_a_run_whose_rollouter_restarts(tmp_path: Path) -> None:
    """The samples call tools. Nothing but the worker is restarted, and every sample is trained once.

    The run goes on until the new worker has loaded everything, which takes minutes on a busy machine.
    """
    run = start(tmp_path, *KEYS, recipe="calculator")
    run.wait_for("step 1/")
    run.wait_until(lambda: len(run.pids("worker")) == 2, "report of both workers")
    run.kill("worker")
    run.wait_until(lambda: run.recovered("worker") == 1, "recovery of the worker")
    run.wait_until(lambda: len(run.pids("worker")) == 2, "report of the new worker")
    assert [restart["part"] for restart in run.state()["restarts"]] == ["worker"]
    run.kill("rollouter")
    run.wait_until(lambda: "rollouter" in run.state()["restarting"], "restart of the rollouter")
    run.interrupt()
    assert run.wait(60.0) == 130, run.output()
    summary = run.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert balanced(summary["samples"]) and trained_once(run)
    assert summary["samples"]["dropped"].get("failed", 0) == 0
    events = [json.loads(line) for file in event_files(run.run_dir) for line in file.read_text().splitlines()]
    parts = {file.stem for file in event_files(run.run_dir)}
    assert {"worker-0", "worker-1"} <= parts
    assert any(one["event"] == "tool.execute" for one in events)
    assert any(one["event"] == "request" for one in events), "workers forward the events of replicas"
    assert run.survivors() == []
