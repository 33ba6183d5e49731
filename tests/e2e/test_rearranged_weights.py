"""Models whose weights vLLM rearranges after it has loaded them: the engines compute what the Trainer publishes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.assets import resolve
from tests.e2e.launches import start

SIZES = {
    "vocab_size": 103,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    # Larger than usual, so that an expert in a wrong place changes the log-probs.
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 1}


def save_model(path: Path, name: str) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    match name:
        case "Qwen3Moe":
            # 48 is not a multiple of 32, so vLLM pads the experts.
            sizes: dict[str, Any] = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32}
        case "Mixtral":
            sizes = EXPERTS | {"num_local_experts": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(resolve("asyncrl://quickstart")) / file, path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_the_engine_computes_what_the_trainer_publishes(tmp_path: Path, name: str) -> None:
    run = start(
        tmp_path,
        f"model.path={save_model(tmp_path / 'model', name)}",
        "trainer.total_training_steps=4",
        "trainer.optim.lr=1e-2",
        "trainer.optim.warmup_steps=0",
        "data.val_files=[]",
        recipe="mode_a_on_policy",
    )
    assert run.wait(300) == 0, run.output()
    assert [step["rollout/mismatch_kl"] < 1e-9 for step in run.steps()] == [True] * 4, run.steps()
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    probes = [line["weight_sync/mismatch_kl"] for line in lines if line["kind"] == "apply"]
    assert len(probes) == 4
    assert max(probes) < 1e-9
