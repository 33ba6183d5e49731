"""Models whose weights vLLM splits, packs or rearranges after it has loaded them: the engines compute what the Trainer
publishes. The table of docs/models.md has all architectures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.architectures import check


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "tensor_parallel"), [("Qwen3Moe", 2), ("Mixtral", 1), ("GptOss", 2)])
def test_the_engine_computes_what_the_trainer_publishes(tmp_path: Path, name: str, tensor_parallel: int) -> None:
    """The samples may differ more than the texts: if the scores of two experts are equal but for rounding, engine and
    Trainer may send a token to different ones. Wrong weights differ in the texts as well."""
    row = check(name, tensor_parallel, tmp_path)
    assert (row["result"], row["updates"]) == ("right", 4)
    assert row["KL of texts"] < 1e-9 and row["KL of samples"] < 1e-4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["staleness"]["max"] == 0  # as `mode_a` promises
