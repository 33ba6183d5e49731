"""Models whose ranks read only their own parts: equal to whole models bit for bit, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from asyncrl.core.failures import ConfigError
from tests.fakes.selfcheck import SELFCHECK_S, torchrun
from tests.fakes.trainer_model import SHAPE, make_spec, write_model
from tests.trainer.engines.loading_ranks import compare, write_models
from trainer.engines.models import empty_model
from trainer.engines.sharded import Fsdp2Engine
from trainer.engines.sharded_loading import expert_placements


def change(directory: Path, name: str, tensor: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file, metadata={"format": "pt"})


@pytest.mark.timeout(SELFCHECK_S + 30)
def test_the_parts_of_two_ranks_are_those_of_the_whole_models(tmp_path: Path) -> None:
    write_models(tmp_path)
    stored = tmp_path / "tied_and_stored"
    change(stored, "lm_head.weight", load_file(stored / "model.safetensors")["model.embed_tokens.weight"].clone())
    run = torchrun("-m", "tests.trainer.engines.loading_ranks", str(tmp_path))
    assert run.returncode == 0, run.stderr[-4000:]


def test_one_rank_has_the_whole_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    compare(tmp_path, "model")
    compare(tmp_path, "model", "value_model")


def test_different_weights_that_config_json_ties_are_refused(tmp_path: Path) -> None:
    change(write_model(tmp_path), "lm_head.weight", torch.ones(24, 16))
    with pytest.raises(ConfigError, match=r"model\.path=.*: lm_head\.weight and model\.embed_tokens\.weight differ"):
        Fsdp2Engine(make_spec(tmp_path, strategy="fsdp2"))


def mixture(num_experts: int) -> nn.Module:
    """Return a mixture of experts of hidden size 64 without weights."""
    shape = SHAPE | {"hidden_size": 64, "num_attention_heads": 4}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**shape, moe_intermediate_size=16, num_experts=num_experts)
        )


@pytest.mark.parametrize(
    ("num_experts", "ranks", "dims"), [(3, 3, {0}), (10, 4, {0}), (2, 4, {2}), (6, 4, {2}), (8, 32, {1, 2})]
)
def test_experts_are_split_so_that_every_rank_loads_some(num_experts: int, ranks: int, dims: set[int]) -> None:
    placements = expert_placements(mixture(num_experts), ranks, "trainer.num_workers")
    assert {placement.dim for placement in placements.values()} == dims
    assert len(placements) == 4, "two in each layer"


def test_experts_that_cannot_be_split_over_the_ranks_are_refused() -> None:
    reason = r"trainer\.num_workers=24: .* 128 experts .* 24 does not divide the size 64 .*; set trainer\.fsdp_size=12"
    with pytest.raises(ConfigError, match=reason):
        expert_placements(mixture(128), 24, "trainer.num_workers=24")


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    change(write_model(tmp_path), "model.norm.weight", torch.ones(7))
    with pytest.raises(ConfigError, match=r"a part of model\.norm\.weight has shape \[7\] in the files and \[16\]"):
        Fsdp2Engine(make_spec(tmp_path, strategy="fsdp2"))


def test_a_model_that_needs_its_weights_to_be_built_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "model")

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", refuse)
    assert empty_model(str(tmp_path / "model")) is None
    assert "every rank reads the whole model, because of this: Tensor.item()" in caplog.text
    compare(tmp_path, "model", whole=True)


def test_adapters_of_a_model_without_weights_have_their_usual_start(tmp_path: Path) -> None:
    write_model(tmp_path)
    spec = make_spec(tmp_path, strategy="fsdp2")
    engine = Fsdp2Engine(replace(spec, model=spec.model.model_copy(update={"lora_rank": 2})))
    parameters = {name: value.detach().full_tensor() for name, value in engine.model.named_parameters()}  # type: ignore[operator]
    first = [value for name, value in parameters.items() if ".lora_A." in name]
    second = [value for name, value in parameters.items() if ".lora_B." in name]
    assert len(first) == len(second) == 14
    assert all(0.1 < float(value.abs().max()) < 1 for value in first)
    assert not any(value.any() for value in second)
    engine.close()
