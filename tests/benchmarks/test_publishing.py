"""Two ranks publish a version within the memory of two buckets and the largest tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import TransformerShape, make_llama
from benchmarks.publishing import WHOLE, measure

SHAPE = TransformerShape(hidden_size=512, layers=8, heads=8, kv_heads=8, intermediate_size=2048, vocab_size=8000)
BUCKET_BYTES = 8 << 20
SLACK_MB = 12.0
"""For buffers of threads, and because gloo gathers a tensor into a second copy."""


@pytest.mark.timeout(120)
def test_ranks_hold_two_buckets_and_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # so that the C library returns freed tensors at once
    rows = measure(make_llama(tmp_path / "model", SHAPE), {"whole": WHOLE, "small": BUCKET_BYTES})
    found = {(row["dtype"], row["buckets"]): row for row in rows}
    for dtype, size_mb in (("float32", 150.6), ("bfloat16", 75.3)):
        whole, small = found[dtype, "whole"], found[dtype, "small"]
        assert whole["model_mb"] == small["model_mb"] == pytest.approx(size_mb, abs=0.1)
        assert whole["chunks"] == 1
        assert small["chunks"] >= size_mb / (BUCKET_BYTES / 1e6)
        assert whole["rank0_mb"] > 0.9 * size_mb
        assert max(small["rank0_mb"], small["rank1_mb"]) < small["aim_mb"] + SLACK_MB < 0.8 * size_mb
