"""Models from files: any architecture, without dropout; incomplete files; heads that start at 0; Liger kernels."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.trainer import EngineConfig
from asyncrl.core.failures import ConfigError
from tests.fakes.trainer_model import SHAPE, make_spec, write_model
from trainer.algorithms.objective import PolicyLoss
from trainer.engines.models import decoder_layers, head_of, load_model, speed_up
from trainer.engines.registry import new_engine
from trainer.engines.replicated import LocalEngine
from trainer.selfcheck.setting import make_batch, plain_scores

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE, attention_dropout=0.5, tie_word_embeddings=False),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
}


def write(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_engine_computes_the_results_of_transformers(name: str, tmp_path: Path) -> None:
    path, batch = write(name, tmp_path), make_batch(8, 1)
    engine = LocalEngine(make_spec(path, lr=None, ppo_max_token_len=64))
    results = engine.infer(batch)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for number in range(len(batch)):
            expected, entropy = plain_scores(model, "language_model", batch[number])
            length = len(expected)
            torch.testing.assert_close(results["log_probs"][number, :length], expected, rtol=0, atol=5e-5)
            torch.testing.assert_close(results["entropy"][number, :length], entropy, rtol=0, atol=5e-5)


def test_eager_attention_computes_the_same_as_sdpa(tmp_path: Path) -> None:
    path, batch = write("qwen2", tmp_path), make_batch(8, 1)
    usual = LocalEngine(make_spec(path, lr=None, ppo_max_token_len=64))
    other = LocalEngine(make_spec(path, lr=None, ppo_max_token_len=64, attn_implementation="eager"))
    assert (usual.attention, other.attention) == ("sdpa, packed rows", "eager, padded rows")
    expected, found = usual.infer(batch), other.infer(batch)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=5e-5)


def test_the_gradient_of_eager_attention_is_that_of_sdpa(tmp_path: Path) -> None:
    path, batch, gradients = write("qwen2", tmp_path), make_batch(8, 1), []
    for attention in ("sdpa", "eager"):
        engine = LocalEngine(make_spec(path, ppo_max_token_len=64, attn_implementation=attention))
        engine.forward_backward(batch, PolicyLoss(AlgorithmConfig(), 8))
        gradients.append(torch.cat([one.grad.flatten() for one in engine.model.parameters() if one.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "name", "reason"),
    [
        ("flash_attention_2", "qwen2", "trainer.attn_implementation=flash_attention_2: the model of model.path="),
        (
            "flex_attention",
            "unsupported",
            "does not support an attention implementation through torch's flex_attention",
        ),
    ],
)
def test_an_attention_that_is_impossible_is_an_error_with_its_key(
    attention: str, name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "unsupported":
        name = "qwen2"
        monkeypatch.setattr("transformers.Qwen2PreTrainedModel._supports_flex_attn", False)
    with pytest.raises(ConfigError, match=re.escape(reason)) as raised:
        load_model(str(write(name, tmp_path)), attn_implementation=attention)
    assert "eager works for every model" in raised.value.message


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dropout_is_disabled(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    model, ids = load_model(str(path)).train(), torch.arange(1, 9)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    if name in ("qwen2", "gpt2"):  # the classification heads of these models have a separate dropout
        value = load_model(str(path), "value_model").train()
        nn.init.normal_(head_of(value).weight)  # type: ignore[arg-type]
        assert torch.equal(value(ids).logits, value(ids).logits)


def test_the_repeated_layers_of_a_model_are_found(tmp_path: Path) -> None:
    assert [type(layer).__name__ for layer in decoder_layers(load_model(str(write("qwen2", tmp_path))))] == [
        "Qwen2DecoderLayer"
    ] * 2
    with pytest.raises(ConfigError, match=r"Linear: names no repeated layers; use trainer\.strategy=ddp"):
        decoder_layers(nn.Linear(1, 1))


# ------------------------------------------------------------------------------------------------ heads


def test_a_value_head_in_the_files_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(LlamaConfig(**SHAPE, num_labels=1))
    nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "value_model")
    assert torch.equal(head_of(loaded).weight, model.score.weight)  # type: ignore[arg-type]


def test_a_reward_model_needs_its_head(tmp_path: Path) -> None:
    fix = r"no reward head \(score\.weight\), so scores would be random; give a reward model .*one label"
    with pytest.raises(ConfigError, match=rf"reward_model\.path={tmp_path}: its files have {fix}"):
        load_model(str(write_model(tmp_path)), "reward_model", key="reward_model.path")


@pytest.mark.parametrize(
    ("kind", "model_type", "key"),
    [
        (AutoModelForSequenceClassification, "reward_model", "reward_model.path"),
        (AutoModelForTokenClassification, "value_model", "critic.path"),
    ],
)
def test_the_error_for_a_head_with_two_labels_names_the_key_of_the_path(
    kind: Any, model_type: Any, key: str, tmp_path: Path
) -> None:
    kind.from_config(LlamaConfig(**SHAPE, num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        LocalEngine(replace(make_spec(tmp_path, model_type=model_type, lr=None), path_key=key))
    assert caught.value.message.startswith(f"{key}={tmp_path}: its head has 2 outputs (score.")
    assert "must have one" in caught.value.message
    assert "num_labels=1" in caught.value.message
    assert not caught.value.cause


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"model\.path={tmp_path}: model\.norm\.weight has shape \[7\] in the files"):
        load_model(str(tmp_path))


def test_a_head_with_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear: has no head called score or classifier"):
        head_of(nn.Linear(1, 1))


# ------------------------------------------------------------------------------------------------ bad files


def test_missing_weights_are_named(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    for model_type in ("language_model", "value_model"):
        with pytest.raises(ConfigError, match=r"model\.path=.*: 1 weights are missing \(model\.norm\.weight\)"):
            load_model(str(tmp_path), model_type)  # type: ignore[arg-type]


def test_missing_and_torn_model_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.path=/nowhere: no causal language model .*\(.*/nowhere.*\); give"):
        load_model("/nowhere", key="critic.path")
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"no value model"):
        load_model(str(tmp_path), "value_model")
    torch.save({"weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ConfigError, match=r"safetensors"):
        load_model(str(tmp_path))


# ------------------------------------------------------------------------------------------------ speed


def test_errors_about_liger_name_its_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = load_model(str(write_model(tmp_path))), EngineConfig(use_liger=True)
    with pytest.raises(ConfigError, match=r"use_liger=true: Liger kernels run on GPUs only"):
        speed_up(model, engine, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[liger\]'"):
        speed_up(model, engine, torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["local", "fsdp2"])
def test_compiled_layers_give_the_same_step(backend: str, tmp_path: Path) -> None:
    path, batch, loss = write_model(tmp_path), make_batch(6, 1), PolicyLoss(AlgorithmConfig(), 20)
    found = []
    for flag in (True, False):
        spec = make_spec(path, strategy=backend, torch_compile=flag, gradient_checkpointing=True)
        engine = new_engine(spec)
        log_probs = engine.infer(batch)["log_probs"]
        figures = engine.forward_backward(batch, loss)
        found.append((log_probs, figures["loss"], engine.optim_step(figures["loss"]).grad_norm))
        engine.close()
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
