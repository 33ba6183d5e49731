"""A launch whose engines round their weights to FP8: the Trainer's samples are corrected, and every version arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launches import QUIET, balanced, start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engines_round_each_version_anew_and_samples_are_corrected(tmp_path: Path) -> None:
    run = start(
        tmp_path, *QUIET, "trainer.total_training_steps=8", "trainer.optim.lr=2e-3", "trainer.optim.warmup_steps=0",
        "rollout.quantization=fp8_per_channel", "rollout.dtype=bfloat16", "async_training=mode_a",
    )  # fmt: skip
    assert run.wait() == 0, run.output()
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    applied = [line for line in lines if line["kind"] == "apply"]
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    # Texts of a model that makes large steps differ by up to 0.02 nats per token, and samples by 0.0004 to 0.003.
    assert max(line["weight_sync/mismatch_kl"] for line in applied) < 0.06
    steps = run.steps()
    assert 2e-4 < max(step["rollout/mismatch_kl_age_0"] for step in steps) < 0.02
    assert all(0.9 < step["correction/is_weight_mean"] < 1.1 for step in steps), "importance weights are applied"
    assert run.summary()["samples"]["trained"] == 16 * 8 and balanced(run.summary()["samples"])
    assert run.survivors() == []
