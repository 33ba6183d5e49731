"""Check on every rank that parts of models are those that transformers loads whole:
`torchrun -m tests.trainer.engines.loading_ranks DIRECTORY`, with a folder for each of `MODELS` in DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.fakes.trainer_model import SHAPE, make_spec
from trainer.engines import dist
from trainer.engines.base import ModelType
from trainer.engines.models import empty_model, load_model
from trainer.engines.sharded import Fsdp2Engine
from trainer.engines.state.weights import full_weights
from trainer.selfcheck.setting import weights_of

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LLAMA: dict[str, Any] = {**SHAPE, "tie_word_embeddings": True}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "tied": LlamaConfig(**LLAMA),
    "tied_and_stored": LlamaConfig(**LLAMA),
    "uneven": LlamaConfig(**LLAMA | {"vocab_size": 23}),
    "bfloat16": Qwen2Config(**SHAPE, dtype=torch.bfloat16),
    "many_files": LlamaConfig(**SHAPE),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0),
    "olmo2": Olmo2Config(**SHAPE),
    "gpt2": GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=4, decoder_sparse_step=1),
    "one_expert": Qwen3MoeConfig(**SHAPE, **EXPERTS | {"num_experts_per_tok": 1}, head_dim=8, num_experts=1),
    "one_expert_of_mixtral": MixtralConfig(**SHAPE, num_local_experts=1, num_experts_per_tok=1),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 2},
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "reward": LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0),
}


def write_models(directory: Path) -> None:
    torch.manual_seed(0)
    for name, config in MODELS.items():
        kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
        model = kind.from_config(config)
        for buffer in model.buffers():  # a persistent buffer of the files has other values than a new one
            if buffer.dtype == torch.float32 and buffer.ndim == 1 and not buffer.any():
                buffer.uniform_()
        options = {"max_shard_size": "10KB"} if name == "many_files" else {}
        model.save_pretrained(directory / name, **options)


def compare(directory: Path, name: str, model_type: ModelType = "language_model", *, whole: bool = False) -> None:
    """Compare all weights and buffers of an engine, and its exported weights, with those of the whole model. `whole`:
    the engine has to load the whole model."""
    spec = make_spec(directory / name, model_type=model_type, strategy="fsdp2", num_workers=dist.world_size())
    assert (empty_model(spec.model.path, model_type) is None) == whole, name
    engine = Fsdp2Engine(spec)
    model = load_model(spec.model.path, model_type)
    parts, expected = (dict(one.named_parameters(remove_duplicate=False)) for one in (engine.model, model))
    assert parts.keys() == expected.keys(), (name, parts.keys() ^ expected.keys())
    assert len({id(one) for one in parts.values()}) == len({id(one) for one in expected.values()}), "ties differ"
    for key, part in parts.items():
        assert isinstance(part, DTensor), (name, key)
        assert part.dtype == expected[key].dtype, (name, key, part.dtype)
        _same(f"{name}: {key}", part.full_tensor(), expected[key])
    buffers, expected_buffers = dict(engine.model.named_buffers()), dict(model.named_buffers())
    assert buffers.keys() == expected_buffers.keys(), (name, buffers.keys() ^ expected_buffers.keys())
    for key, buffer in buffers.items():
        _same(f"{name}: {key}", buffer, expected_buffers[key])
    exported, whole_exported = weights_of(engine), dict(full_weights(model))
    if dist.rank() == 0:
        assert exported.keys() == whole_exported.keys(), (name, exported.keys() ^ whole_exported.keys())
        for key, weight in exported.items():
            _same(f"{name}: exported {key}", weight, whole_exported[key])
    engine.close()


def _same(what: str, got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected), f"{what}: off by {(got - expected).abs().max()}"


def main() -> None:
    directory = Path(sys.argv[1])
    dist.join(torch.device("cpu"), timeout_s=60)
    for name in MODELS:
        compare(directory, name, "reward_model" if name == "reward" else "language_model")
    compare(directory, "llama", "value_model")
    dist.leave()


if __name__ == "__main__":
    main()
