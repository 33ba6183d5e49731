"""What the engine assumes of a model holds beyond Llama: head, right padding, no dropout, checkpoint names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from tests.fakes.trainer_model import VOCAB, make_config, make_rows
from trainer.worker import LocalTrainingWorker

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = {
    "qwen2": Qwen2Config(**SHAPE, attention_dropout=0.5, tie_word_embeddings=False),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_architecture(name: str, tmp_path: Path) -> None:
    config: PreTrainedConfig = MODELS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    worker, rows = LocalTrainingWorker(make_config(tmp_path)), make_rows(8)

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for row, log_probs in zip(rows, worker.infer_batch(rows), strict=True):
        tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logits = model(tokens).logits[0, len(row.prompt_ids) - 1 : -1].double()
        targets = tokens[0, len(row.prompt_ids) :, None]
        expected = torch.log_softmax(logits, dim=-1).gather(-1, targets)[:, 0]
        np.testing.assert_allclose(log_probs, expected.detach().numpy(), atol=5e-5)

    exported, saved = dict(worker.weights("float32")), load_file(tmp_path / "model.safetensors")
    assert exported.keys() == saved.keys()
    for key, array in saved.items():
        np.testing.assert_array_equal(exported[key], array, err_msg=key)

    before = worker.train_mini_batch(rows)["actor/ratio_mean"]
    assert worker.train_mini_batch(rows)["actor/ratio_mean"] != before
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    worker.save_checkpoint(checkpoint)
    again = LocalTrainingWorker(make_config(tmp_path))
    again.load_checkpoint(checkpoint)
    for left, right in zip(worker.infer_batch(rows), again.infer_batch(rows), strict=True):
        np.testing.assert_array_equal(left, right)
