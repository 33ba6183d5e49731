from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from asyncrl.config.sections.data import ModelConfig
from tests.fakes.trainer_model import SHAPE, VOCAB, write_model
from trainer.engines.compute.lora import add_lora
from trainer.engines.models import load_model
from trainer.engines.state import weights as export
from trainer.engines.state.weights import HfExport, copy_tokenizer, full_weights, plain_name, unwrapped

MODELS: dict[str, PreTrainedConfig] = {
    "untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "tied": Gemma2Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "experts": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "renamed experts": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
}


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_exported_names_and_values_equal_those_of_the_checkpoint(tmp_path: Path, name: str, adapters: int) -> None:
    """The export splits the experts that transformers fuses, layer by layer, as in the file."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    model = add_lora(load_model(str(tmp_path)), ModelConfig(path=str(tmp_path), lora_rank=adapters))
    saved = load_file(tmp_path / "model.safetensors")
    names = [key for key, _ in full_weights(model)]
    assert len(names) == len(set(names))
    exported = dict(full_weights(model))
    assert exported.keys() == saved.keys()
    for key, value in saved.items():
        assert torch.equal(exported[key], value), key
        assert exported[key].is_contiguous()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversion_to_another_dtype_rounds_once(tmp_path: Path, dtype: str) -> None:
    model = load_model(str(write_model(tmp_path)))
    for name, value in full_weights(model, dtype):  # type: ignore[arg-type]
        expected = model.get_parameter(name).detach().to(getattr(torch, dtype))
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name


def test_persistent_buffers_are_exported(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path)))
    model.model.layers[0].register_buffer("bias_correction", torch.arange(3))
    model.model.layers[0].register_buffer("scratch", torch.arange(3), persistent=False)
    exported = dict(full_weights(model, "bfloat16"))
    assert torch.equal(exported["model.layers.0.bias_correction"], torch.arange(3)), "integers are not rounded"
    assert "model.layers.0.scratch" not in exported


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_of_another_type_loads_in_that_type(tmp_path: Path, dtype: Any) -> None:
    source, target = write_model(tmp_path / "source"), tmp_path / "target"
    model = load_model(str(source))
    staged = HfExport.stage(model, dtype)
    assert staged is not None
    staged.write(target, ModelConfig(path=str(source)))
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    expected = getattr(torch, dtype)
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == expected
        assert torch.equal(parameter, model.get_parameter(name).to(expected)), name


@pytest.mark.parametrize("model_type", ["language_model", "value_model", "reward_model"])
def test_a_written_directory_loads_as_the_same_model(tmp_path: Path, model_type: str) -> None:
    source, target = write_model(tmp_path / "source"), tmp_path / "target"
    if model_type == "reward_model":
        load_model(str(source), "value_model").save_pretrained(source)
    model = load_model(str(source), model_type)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    staged = HfExport.stage(model)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # training continues
    assert staged is not None
    staged.write(target, ModelConfig(path=str(source)))
    again = dict(load_model(str(target), model_type).named_parameters())  # type: ignore[arg-type]
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    settings = json.loads((target / "config.json").read_text())
    assert settings["architectures"] == [type(model).__name__]
    assert settings["dtype"] == "float32"
    assert (target / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 10_000)
    source, target = write_model(tmp_path / "source"), tmp_path / "target"
    model = load_model(str(source))
    staged = HfExport.stage(model)
    assert staged is not None
    staged.write(target, ModelConfig(path=str(source)))
    assert len(list(target.glob("model-*.safetensors"))) > 1
    again = dict(load_model(str(target)).named_parameters())
    assert all(torch.equal(again[name], value) for name, value in model.named_parameters())


def test_the_chat_template_of_the_configuration_is_exported(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "source"), tmp_path / "target"
    (source / "chat_template.jinja").write_text("its own")
    (source / "model.safetensors.index.json").write_text("not a tokenizer's")
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    target.mkdir()
    copy_tokenizer(ModelConfig(path=str(source), chat_template=str(template)), target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "tokenizer.json": (source / "tokenizer.json").read_text(),
        "chat_template.jinja": "mine",
    }


def test_names_of_weights_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path)))
    assert unwrapped(model) is model
    assert unwrapped(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]
    wrapped = "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp._orig_mod.up_proj.weight"
    assert plain_name(wrapped) == "model.layers.0.mlp.up_proj.weight"
    assert plain_name("_fsdp_wrapped_module.norm.weight") == "norm.weight"
    assert isinstance(unwrapped(model).get_input_embeddings(), nn.Embedding)
