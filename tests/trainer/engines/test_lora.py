from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from tests.fakes.trainer_model import VOCAB, write_model
from trainer.engines.compute.lora import adapters_off, add_lora, is_adapter
from trainer.engines.models import load_model
from trainer.engines.state.adapters import adapter_weights
from trainer.engines.state.weights import full_weights

TOKENS = torch.arange(2, 14).view(2, 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def adapted(path: Path, **keys: object) -> tuple[PreTrainedModel, ModelConfig]:
    config = ModelConfig(path=str(path), **({"lora_rank": 3, "lora_alpha": 6.0} | keys))  # type: ignore[arg-type]
    return add_lora(load_model(str(path)).train(), config), config


def learn(model: nn.Module, *, seed: int = 1) -> None:
    """Give the adapters random values other than 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_fresh_adapters_change_nothing_and_only_they_are_trained(path: Path) -> None:
    model, _ = adapted(path)
    torch.testing.assert_close(logits(model), logits(load_model(str(path))), rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * 2 * 7, "A and B of seven matrices in two layers, and none of the head"


@pytest.mark.parametrize(("base", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_adapters_have_at_least_float32_precision(path: Path, base: torch.dtype, expected: torch.dtype) -> None:
    model = add_lora(load_model(str(path), dtype=base), ModelConfig(path=str(path), lora_rank=2))
    assert {value.dtype for name, value in model.named_parameters() if is_adapter(name)} == {expected}
    assert {value.dtype for name, value in model.named_parameters() if not is_adapter(name)} == {base}


def test_rank_0_does_not_change_the_model(path: Path) -> None:
    model = load_model(str(path))
    names = [name for name, _ in model.named_parameters()]
    assert add_lora(model, ModelConfig(path=str(path))) is model
    assert [name for name, value in model.named_parameters() if value.requires_grad] == names


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_adapters_follow_the_formula(path: Path, checkpointing: bool) -> None:
    """The reference has W + alpha / rank · B A as a plain weight, in float64. Checkpointing has a frozen embedding as
    input."""
    config = ModelConfig(path=str(path), lora_rank=3, lora_alpha=6.0)
    model = add_lora(load_model(str(path), dtype=torch.float64), config).train()
    learn(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()

    plain = load_model(str(path), dtype=torch.float64)
    name = "model.layers.0.self_attn.q_proj"
    layer, target = model.get_submodule(name), plain.get_submodule(name)
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            if (prefix := key.removesuffix(".weight")) and f"{prefix}.lora_A.default.weight" in dict(
                model.named_parameters()
            ):
                a = model.get_parameter(f"{prefix}.lora_A.default.weight")
                b = model.get_parameter(f"{prefix}.lora_B.default.weight")
                parameter += 2.0 * b @ a
    plain(input_ids=TOKENS, labels=TOKENS).loss.backward()
    # dL/dB = alpha / rank · dL/dW · Aᵀ and dL/dA = alpha / rank · Bᵀ · dL/dW
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(b.grad, 2.0 * target.weight.grad @ a.detach().T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a.grad, 2.0 * b.detach().T @ target.weight.grad, rtol=1e-10, atol=1e-12)


def test_disabling_the_adapters_restores_the_base_model(path: Path) -> None:
    model, _ = adapted(path)
    learn(model)
    plain, moved = logits(load_model(str(path))), logits(model)
    assert (moved - plain).abs().max() > 0.01
    with adapters_off(model):
        torch.testing.assert_close(logits(model), plain, rtol=0, atol=0)
    torch.testing.assert_close(logits(model), moved, rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        _ = 1 / 0
    torch.testing.assert_close(logits(model), moved, rtol=0, atol=0)
    assert all(value.requires_grad for name, value in model.named_parameters() if is_adapter(name))


def test_adapters_are_added_to_the_target_modules(path: Path) -> None:
    model, _ = adapted(path, target_modules=("q_proj", "layers.1.mlp.down_proj"))
    layers = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert layers == {f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)} | {"model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize(
    ("targets", "nearest"),
    [
        ("q_prj", "q_proj"),
        (("v_proj", "q_prj"), "q_proj"),
        (("q_proj", "gateproj"), "gate_proj"),
        ("lm_head", ""),
        ("embed_tokens", ""),
    ],
)
def test_the_error_for_an_unknown_layer_names_the_nearest(
    path: Path, targets: str | tuple[str, ...], nearest: str
) -> None:
    wrong = targets if isinstance(targets, str) else targets[-1]
    with pytest.raises(ConfigError, match=f"model.target_modules={wrong}: .*did you mean {nearest}") as caught:
        adapted(path, target_modules=targets)
    assert "all-linear" in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_merged_export_follows_the_formula_and_does_not_change_the_weights(path: Path, architecture: str) -> None:
    if architecture == "gpt2":  # this model stores matrices transposed
        settings = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
        torch.manual_seed(0)
        path = path.with_name("gpt2")
        AutoModelForCausalLM.from_config(settings).save_pretrained(path)
    model, _ = adapted(path)
    learn(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    plain = load_model(str(path))
    expected = {}
    for name, weight in plain.named_parameters():
        prefix = name.removesuffix(".weight")
        if f"{prefix}.lora_A.default.weight" in before:
            b, a = (before[f"{prefix}.lora_{side}.default.weight"].double() for side in "BA")
            delta = 2.0 * b @ a
            expected[name] = weight.double() + (delta.T if architecture == "gpt2" else delta)
        else:
            expected[name] = weight.double()
    exported = dict(full_weights(model))
    names = {name.removeprefix("transformer.") for name in expected}
    assert {name.removeprefix("transformer.") for name in exported} == names
    by_name = {name.removeprefix("transformer."): value for name, value in exported.items()}
    for name, value in expected.items():
        torch.testing.assert_close(by_name[name.removeprefix("transformer.")].double(), value, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(expected[name])
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["value_model", "reward_model"])
def test_the_head_of_a_value_model_is_trained_without_adapters(path: Path, model_type: str) -> None:
    config = ModelConfig(path=str(path), lora_rank=2)
    if model_type == "reward_model":
        load_model(str(path), "value_model").save_pretrained(path)
    model = add_lora(load_model(str(path), model_type), config)  # type: ignore[arg-type]
    trained = {name for name, value in model.named_parameters() if value.requires_grad and not is_adapter(name)}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("score")}
    assert trained
    assert not any(name.startswith("score") for name, _ in model.named_parameters() if is_adapter(name))


@pytest.mark.parametrize(("rank", "alpha"), [(3, 6.0), (3, 1.0), (8, 16.0)])
def test_published_adapters_and_the_files_are_the_merged_weights(path: Path, rank: int, alpha: float) -> None:
    """Engines add B A without a scale (`rollouter.serving.replica.adapters`)."""
    model, _ = adapted(path, lora_rank=rank, lora_alpha=alpha)
    learn(model)
    published = dict(adapter_weights(model))
    assert len(published) == 2 * 2 * 7, "nothing but A and B of seven matrices in two layers"
    weights = {name: weight.detach().clone() for name, weight in load_model(str(path)).named_parameters()}
    for name in {name.removesuffix(".lora_A.weight") for name in published if ".lora_A." in name}:
        a, b = published[f"{name}.lora_A.weight"], published[f"{name}.lora_B.weight"]
        assert len(a) == rank
        weights[f"{name.removeprefix('base_model.model.')}.weight"] += b @ a
    for name, merged in full_weights(model):
        torch.testing.assert_close(weights[name], merged, rtol=0, atol=1e-6)


def test_published_adapters_are_rounded_copies(path: Path) -> None:
    """The scale is multiplied before rounding, and later steps do not change what was published."""
    model, _ = adapted(path, lora_alpha=5.0)
    learn(model)
    layer = "model.layers.1.mlp.down_proj"
    b = model.get_parameter(f"{layer}.lora_B.default.weight").detach().clone()
    published = dict(adapter_weights(model, "bfloat16"))
    live = dict(adapter_weights(model))
    learn(model, seed=2)
    name = f"base_model.model.{layer}.lora_B.weight"
    assert torch.equal(published[name], (5.0 / 3.0 * b).to(torch.bfloat16))
    assert torch.equal(live[name], 5.0 / 3.0 * b)
