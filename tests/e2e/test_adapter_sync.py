"""Launches with LoRA whose versions are adapters: engines, one of them with tensor parallelism, verify each version and
compute what the Trainer does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launches import QUIET, start


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "num_replicas", "tensor_parallel"), [("keep", 2, 1), ("abort", 1, 2)])
def test_engines_load_adapters_while_requests_are_in_flight(
    tmp_path: Path, mode: str, num_replicas: int, tensor_parallel: int
) -> None:
    """Of two engines one is killed, and its successor loads the newest adapter."""
    run = start(
        tmp_path, *QUIET, "model=quickstart_lora", "trainer.total_training_steps=1000", "trainer.optim.lr=2e-3",
        "weight_sync.lora=adapter", "weight_sync.verify=every", f"rollout.num_replicas={num_replicas}",
        f"async_training.partial_mode={mode}", f"rollout.tensor_parallel_size={tensor_parallel}",
    )  # fmt: skip
    run.wait_until(lambda: run.state().get("step", 0) >= 4, "fourth step", 240.0)
    if num_replicas == 2:
        run.kill("replica")
        run.wait_until(lambda: run.recovered("replica") == 1, "recovery of the replica", 300.0)
        step = run.state()["step"]
        run.wait_until(lambda: run.state()["step"] >= step + 2, "steps with the new replica")
    run.interrupt()
    assert run.wait(60.0) == 130, run.output()
    summary = run.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert summary["restarts"].get("replica", 0) == num_replicas - 1
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    # Version 0 is an adapter, too. It is recorded unless every replica has loaded it at its start.
    applied = [line for line in lines if line["kind"] == "apply" and line["version"] > 0]
    assert [line["version"] for line in applied] == list(range(1, len(applied) + 1)) and len(applied) >= 3
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    assert max(line["weight_sync/mismatch_kl"] for line in applied) < 1e-9
