"""The commands of docs/training.md: start from an export, and continue on another number of ranks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.storage.checkpoint_manifest import load_manifest
from tests.e2e.launches import SHORT, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
EXPORT = ("trainer.hf_export=last", "trainer.hf_export_dtype=bfloat16")


def commands() -> list[list[str]]:
    """Return the overrides of the two commands."""
    found = re.findall(r"```console\nasyncrl launch fully_async (.*?)\n```", PAGE.read_text(encoding="utf-8"))
    assert len(found) == 2
    return [shlex.split(line) for line in found]


def test_the_documented_commands_start_from_an_export_and_continue_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    second_keys, more_keys = ([key for key in one if not key.startswith("run_dir=")] for one in commands())
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_checkpoints_to_keep=2")
    first = start(tmp_path, *SHORT, *steps, *EXPORT, run_dir=tmp_path / "runs" / "first")
    assert first.wait() == 0, first.output()
    one, two = (first.run_dir / "checkpoints" / f"step_{step:06d}" for step in (1, 2))
    assert not (one / "hf").exists()
    assert load_manifest(two).progress.step == 2
    exported = load_file(two / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}

    second = start(tmp_path, *SHORT, *steps, *second_keys, run_dir=tmp_path / "runs" / "second")
    assert second.wait() == 0, second.output()
    weights = load_file(second.run_dir / "checkpoints" / "step_000002" / "hf" / "model.safetensors")
    moved = max((weights[name] - exported[name].float()).abs().max().item() for name in exported)
    assert 0 < moved < 0.1, "two steps from the exported weights"

    more = start(tmp_path, *SHORT, *steps, *EXPORT, *more_keys, run_dir=first.run_dir)
    assert more.wait() == 0, more.output()
    summary = more.summary()
    assert (summary["status"], summary["step"], summary["resumed"]["step"]) == ("completed", 4, 2)
    engine = json.loads((first.run_dir / "checkpoints" / "step_000004" / "actor" / "engine.json").read_text())
    assert (engine["world_size"], engine["strategy"]) == (2, "fsdp2")
