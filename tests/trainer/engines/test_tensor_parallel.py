"""Models whose layers ranks cannot share are refused. `trainer.selfcheck` checks what the others compute."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from asyncrl.core.failures import ConfigError
from tests.fakes.configurations import config_with
from trainer.engines.compute.tensor_parallel import check_model, share_layers

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Phi3Config(**SIZES), "the layers of Phi3ForCausalLM cannot be shared (its plan has rowwise_split_input)"),
        (GptOssConfig(**SIZES, num_local_experts=4), "the layers of GptOssForCausalLM cannot be shared (transformers"),
        (Qwen3MoeConfig(**SIZES, num_experts=4), ""),
    ],
)
def test_models_that_cannot_be_shared_are_refused_before_the_start(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    changes = {"model.path": str(tmp_path), "trainer.tensor_parallel_size": 2, "trainer.num_workers": 2}
    problems = list(check_model(config_with(changes)))
    assert [(one.key, one.fix) for one in problems] == [("trainer.tensor_parallel_size", "set it to 1")] * bool(reason)
    assert all(reason in one.consequence for one in problems)
    assert list(check_model(config_with(changes | {"trainer.tensor_parallel_size": 1}))) == []
    assert list(check_model(config_with(changes | {"trainer.strategy": "torchtitan"}))) == []
    assert list(check_model(config_with(changes | {"model.path": str(tmp_path / "none")}))) == []


def refusal(config: PretrainedConfig, size: int) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError) as raised:
        share_layers(model, cast(Any, SimpleNamespace(size=lambda: size)))
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (GptOssConfig(**SIZES, num_local_experts=4), 2, "transformers has no plan for it"),
        (Phi3Config(**SIZES), 2, "rowwise_split_input"),
        (OlmoeConfig(**SIZES, num_experts=4), 2, "rowwise_split_input"),
        (
            Qwen3MoeConfig(**SIZES, num_experts=4),
            3,
            "does not divide the model's 4 heads (num_attention_heads); set it to 1, or to another divisor of 2",
        ),
        (Qwen3MoeConfig(**SIZES, num_experts=5), 2, "does not divide the model's 5 experts (num_experts)"),
        (MixtralConfig(**SIZES, num_local_experts=5), 2, "does not divide the model's 5 experts (num_experts)"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(config: PretrainedConfig, size: int, reason: str) -> None:
    message = refusal(config, size)
    assert message.startswith(f"trainer.tensor_parallel_size={size}: ") and reason in message
