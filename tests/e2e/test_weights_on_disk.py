"""A launch whose versions travel as files, some of them as changes: engines verify each of them, and old files are
deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.weights.changes import GAPS
from asyncrl.weights.object_store import NUM_KEPT_VERSIONS
from tests.e2e.launches import QUIET, balanced, start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engines_load_and_verify_the_versions_that_the_trainer_writes(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "mine.safetensors").write_bytes(b"of another program")
    run = start(
        tmp_path, *QUIET, "trainer.total_training_steps=6", "weight_sync.verify=every", "async_training=mode_c",
        "weight_sync.backend=disk", f"weight_sync.dir={weights}", "weight_sync.max_deltas=2", "rollout.dtype=bfloat16",
        "trainer.optim.lr=1e-6", "trainer.optim.warmup_steps=0",
    )  # fmt: skip
    assert run.wait(240.0) == 0, run.output()
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    applied = [line for line in lines if line["kind"] == "apply"]
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    assert max(line["weight_sync/mismatch_kl"] for line in applied) < 1e-3, "the Trainer computes in float32"
    shares = {line["version"]: line["weight_sync/sent_share"] for line in applied}
    assert all(share == 1.0 if version in (1, 4) else 0.0 < share < 0.3 for version, share in shares.items()), shares
    summary = run.summary()
    assert (summary["version"], summary["samples"]["trained"]) == (6, 96) and balanced(summary["samples"])
    assert run.survivors() == []
    files = [path for path in weights.iterdir() if path.name != "mine.safetensors"]
    assert len(files) == NUM_KEPT_VERSIONS + 4, "those of versions 3 to 6, and 1 and 2, to which 3 has the changes"
    whole = [path for path in files if not any(name.endswith(GAPS) for name in load_file(path))]
    assert len(whole) == 2 and all("model.embed_tokens.weight" in load_file(path) for path in whole)
    assert (weights / "mine.safetensors").exists()
