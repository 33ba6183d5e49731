"""A launch with LoRA whose versions are adapters: engines verify each of them, and compute what the Trainer does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launches import SHORT, start


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_engines_load_adapters_while_requests_are_in_flight(tmp_path: Path, mode: str) -> None:
    run = start(
        tmp_path, *SHORT, "model=quickstart_lora", "trainer.total_training_steps=6", "trainer.optim.lr=2e-3",
        "weight_sync.lora=adapter", "weight_sync.verify=every",
        "async_training=mode_d", f"async_training.partial_mode={mode}",
    )  # fmt: skip
    assert run.wait(300.0) == 0, run.output()
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    applied = [line for line in lines if line["kind"] == "apply"]
    # Version 0 is an adapter, too. It is recorded unless every replica has loaded it at its start.
    assert [line["version"] for line in applied][-6:] == list(range(1, 7))
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    assert max(line["weight_sync/mismatch_kl"] for line in applied[-6:]) < 1e-9
    assert run.summary()["version"] == 6 and run.summary()["status"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_replaced_engine_loads_the_newest_adapter(tmp_path: Path) -> None:
    run = start(
        tmp_path, *SHORT, "model=quickstart_lora", "trainer.total_training_steps=30",
        "weight_sync.lora=adapter", "weight_sync.verify=every", "rollout.num_replicas=2",
    )  # fmt: skip
    run.wait_for("step 4/")
    run.kill("replica")
    assert run.wait(300.0) == 0, run.output()
    summary = run.summary()
    assert (summary["status"], summary["version"], summary["restarts"]["replica"]) == ("completed", 30, 1)
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["weight_sync/verified"] for line in lines if line["kind"] == "apply"} == {1.0}
