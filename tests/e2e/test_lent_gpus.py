"""A launch whose Trainer lends its GPUs to generation, with vLLM's real calls. On a CPU they free nothing, and the
turns are the same. The engine on these GPUs and the Trainer are killed meanwhile, and Ctrl-C still gets its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launches import LaunchedRun, balanced, start, surviving_samples

Span = tuple[float, float]


def events(run: LaunchedRun) -> list[dict[str, Any]]:
    files = (run.run_dir / "events").rglob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def spans(found: list[dict[str, Any]], name: str, replica: str | None = None) -> list[Span]:
    """Return when each event of this name began and ended."""
    own = [one for one in found if one["event"] == name and replica in (None, one.get("replica"))]
    return sorted((one["timestamp"], one["timestamp"] + one["duration_s"]) for one in own)


def overlap(one: Span, others: list[Span]) -> bool:
    return any(begin + 0.02 < one[1] and one[0] + 0.02 < end for begin, end in others)


def asleep(run: LaunchedRun) -> list[dict[str, Any]]:
    """Return the replicas that sleep: only that on the Trainer's GPUs ever does."""
    return [one for one in run.state().get("replicas", ()) if one["phase"] == "sleeping"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_trainer_that_waits_lends_its_gpus(tmp_path: Path) -> None:
    run = start(
        tmp_path, "trainer.lend_after_s=0.1", "trainer.total_training_steps=60", "trainer.ppo_mini_batch_size=8",
        "rollout.max_concurrent_samples=2", "trainer.save_freq=2", "data.max_val_samples=8", "weight_sync.verify=every",
        "profiler.level=summary", "logging.console=plain", "timeouts.stop_s=90",
    )  # fmt: skip
    run.wait_until(lambda: run.state().get("step", 0) >= 3, "a third step", 600.0)
    lent: dict[str, Any] = {}
    run.wait_until(lambda: bool(lent.update(*asleep(run)) or lent), "a replica that sleeps")
    os.kill(lent["pid"], signal.SIGKILL)
    run.wait_until(lambda: run.recovered("replica") == 1 and bool(asleep(run)), "a loan of the next replica", 600.0)
    run.kill("trainer", signal.SIGKILL)
    run.wait_until(lambda: run.recovered("trainer") == 1, "the next Trainer", 600.0)
    reached = run.state()["step"]
    run.wait_until(lambda: run.state()["step"] >= reached + 3, "steps of the next Trainer", 600.0)
    run.interrupt()
    assert run.wait(240.0) == 130, run.output()
    summary = run.summary()
    assert balanced(summary["samples"]) and len(surviving_samples(run)) == summary["samples"]["trained"]
    last = max((run.run_dir / "checkpoints").glob("step_*"))
    assert json.loads((last / "manifest.json").read_text())["progress"]["step"] == summary["step"]
    found = events(run)
    loans = spans(found, "gpus.lent")
    assert len(loans) >= 3
    updates = spans(found, "trainer.update")
    assert len(updates) >= 6 and not any(overlap(one, loans) for one in updates)
    requests = 0
    for replica in {one["replica"] for one in found if one["event"] == "engine.asleep"}:
        sleeps, answered = spans(found, "engine.asleep", replica), spans(found, "request", replica)
        assert not any(overlap(one, sleeps) for one in answered)
        requests += len(answered)
    assert requests
    assert run.survivors() == []
