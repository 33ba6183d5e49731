"""Launches with LoRA whose versions are adapters: engines, one of them with tensor parallelism, verify each version and
compute what the Trainer does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launches import QUIET, start


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "num_replicas", "tensor_parallel", "steps"), [("keep", 2, 1, 30), ("abort", 1, 2, 6)])
def test_engines_load_adapters_while_requests_are_in_flight(
    tmp_path: Path, mode: str, num_replicas: int, tensor_parallel: int, steps: int
) -> None:
    """Of two engines one is killed, and its successor loads the newest adapter."""
    run = start(
        tmp_path, *QUIET, "model=quickstart_lora", f"trainer.total_training_steps={steps}", "trainer.optim.lr=2e-3",
        "weight_sync.lora=adapter", "weight_sync.verify=every", f"rollout.num_replicas={num_replicas}",
        f"async_training.partial_mode={mode}", f"rollout.tensor_parallel_size={tensor_parallel}",
    )  # fmt: skip
    if num_replicas == 2:
        run.wait_for("step 4/")
        run.kill("replica")
    assert run.wait(300.0) == 0, run.output()
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    applied = [line for line in lines if line["kind"] == "apply"]
    # Version 0 is an adapter, too. It is recorded unless every replica has loaded it at its start.
    assert [line["version"] for line in applied][-steps:] == list(range(1, steps + 1))
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    assert max(line["weight_sync/mismatch_kl"] for line in applied[-steps:]) < 1e-9
    summary = run.summary()
    assert (summary["status"], summary["version"]) == ("completed", steps)
    assert summary["restarts"].get("replica", 0) == num_replicas - 1
