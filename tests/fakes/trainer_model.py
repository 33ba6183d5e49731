"""A model that is small enough to train in a test, its directory, and configurations of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from trainer.engines.base import EngineSpec, ModelType

VOCAB = 24
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
"""Sizes for any transformers configuration: two layers with a few thousand parameters."""


def write_model(directory: Path, *, seed: int = 0, hidden: int = 16, tied: bool = True) -> Path:
    """Write a two-layer Llama of a few thousand parameters, with a tokenizer file that exports have to copy."""
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
        attention_dropout=0.5,  # some published models have dropout, which training has to disable
    )
    LlamaForCausalLM(settings).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"model": "a tokenizer"}))
    return directory


def random_model(config: PreTrainedConfig, model_type: ModelType) -> PreTrainedModel:
    """Return a model with random weights and sdpa attention. A head for values or rewards has one output."""
    torch.manual_seed(0)
    config = type(config)(**{**config.to_dict(), "num_labels": 1, "classifier_dropout": 0.0})
    model_class: Any = {
        "language_model": AutoModelForCausalLM,
        "value_model": AutoModelForTokenClassification,
        "reward_model": AutoModelForSequenceClassification,
    }[model_type]
    return model_class.from_config(config, attn_implementation="sdpa")


def make_config(model: Path, **sections: Any) -> Config:
    trainer: dict[str, Any] = {"device": "cpu", "optim": {"lr": 1e-2}, "ppo_mini_batch_size": 2}
    trainer |= sections.pop("trainer", {})
    rollout: dict[str, Any] = {"n": 2} | sections.pop("rollout", {})
    return Config.model_validate({"model": {"path": str(model)}, "trainer": trainer, "rollout": rollout, **sections})


def make_spec(
    path: Path | str, *, model_type: ModelType = "language_model", lr: float | None = 1e-2, **engine: Any
) -> EngineSpec:
    """Return the specification of an engine on CPU, which is forward-only if `lr` is None."""
    settings = EngineConfig(**({"strategy": "local", "device": "cpu"} | engine))
    return EngineSpec(model_type, ModelConfig(path=str(path)), settings, None if lr is None else OptimConfig(lr=lr))
