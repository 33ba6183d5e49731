"""Models whose ranks read only their own parts: equal to whole models bit for bit, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.core.failures import ConfigError
from tests.fakes.selfcheck import SELFCHECK_S, torchrun
from tests.fakes.trainer_model import make_spec, write_model
from tests.trainer.engines.loading_ranks import compare, write_models
from trainer.engines.models import empty_model
from trainer.engines.sharded import Fsdp2Engine


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
