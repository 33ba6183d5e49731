"""A model small enough to train in a test, its directory, and rows for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.schema import Config
from asyncrl.ports import TrainRow
from asyncrl.types import SampleId

VOCAB = 24


def write_model(directory: Path, *, seed: int = 0, hidden: int = 16, tied: bool = True) -> Path:
    """A two-layer Llama of a few thousand parameters, with a tokenizer file to be copied along."""
    torch.manual_seed(seed)
    settings = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attention_dropout=0.5,  # as some published models have it; training has to switch it off
    )
    LlamaForCausalLM(settings).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"model": "a tokenizer"}))
    return directory


def make_config(model: Path, **sections: Any) -> Config:
    trainer: dict[str, Any] = {"device": "cpu", "optim": {"lr": 1e-2}, "ppo_mini_batch_size": 2}
    trainer |= sections.pop("trainer", {})
    rollout: dict[str, Any] = {"n": 2} | sections.pop("rollout", {})
    return Config.model_validate({"model": {"path": str(model)}, "trainer": trainer, "rollout": rollout, **sections})


def make_rows(number: int, *, seed: int = 0, mask_share: float = 0.2, zero_share: float = 0.0) -> list[TrainRow]:
    """Rows of many lengths with random tokens, behaviour log-probs and advantages."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(1, number + 1):
        length = int(rng.integers(1, 20))
        mask = rng.random(length) >= mask_share
        mask[0] = True
        advantage = 0.0 if rng.random() < zero_share else rng.normal()
        rows.append(
            TrainRow(
                sample_id=SampleId(0, index),
                prompt_ids=rng.integers(0, VOCAB, int(rng.integers(1, 9))).astype(np.int32),
                response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                response_mask=mask,
                rollout_log_probs=rng.normal(-3.0, 0.3, length).astype(np.float32),
                advantages=np.full(length, advantage, dtype=np.float32),
            )
        )
    return rows
