"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): y = W x + alpha / rank * B A x, with W frozen."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from trainer.engines.models import HEADS

ADAPTER = "default"
ALL_LINEAR = "all-linear"


class Adapter(NamedTuple):
    """The low-rank update of one layer's weight. The tensors are the live parameters, which may be sharded."""

    a: Tensor
    """`[rank, in]`."""
    b: Tensor
    """`[out, rank]`."""
    scale: float
    transposed: bool
    """Whether the layer's weight is `[in, out]`, as in GPT-2."""

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return `weight` plus the adapter, in the wider of float32 and the weight's dtype. Tensors must be whole."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        delta = self.scale * (b.to(wide) @ a.to(wide))
        return weight.to(wide) + (delta.T if self.transposed else delta)


def add_lora(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Freeze `model` and add adapters to its linear layers, in place. Call it before the model is wrapped for ranks.

    The head of a value or reward model gets no adapter, because all of its weights are trained. Adapters are float32,
    or float64 if the weights are. B starts at 0, so the outputs are unchanged at first. A is drawn from torch's
    generator, so all ranks need the same seed. With `lora_rank=0` the model is returned unchanged.

    Raises:
        ConfigError: a name in `model.target_modules` matches no linear layer.
    """
    if config.lora_rank == 0:
        return model
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and most runs train without adapters

    targets = _targets(model, config.target_modules)
    heads = [getattr(model, name) for name in HEADS if hasattr(model, name)]
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a float works too
        target_modules=targets,
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    inject_adapter_in_model(lora, model, adapter_name=ADAPTER)
    for layer in [module for module in model.modules() if is_adapted(module)]:
        if base_of(layer).weight.is_meta:  # peft puts the adapter there, too, where it has no values
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    for name, parameter in model.named_parameters():
        adapter = is_adapter(name)
        parameter.requires_grad_(adapter)
        if adapter:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for head in heads:
        head.requires_grad_(True)
    return model


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of the model off within the context, whatever wraps the model.

    Raises:
        ConfigError: the model has no adapters.
    """
    layers = [module for module in model.modules() if is_adapted(module)]
    if not layers:
        raise ConfigError(
            "model.lora_rank=0: there are no adapters to switch off, so the policy cannot be its own reference; "
            "set model.lora_rank, or configure a separate model for the reference"
        )
    # enable_adapters() would also set requires_grad, which fails for parameters that FSDP has flattened.
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]


def is_adapter(name: str) -> bool:
    """Whether the parameter called `name` belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def is_adapted(module: nn.Module) -> bool:
    """Whether `module` is a layer with an adapter."""
    return "lora_A" in module._modules


def base_of(layer: nn.Module) -> nn.Module:
    """Return the base layer of a layer that `is_adapted`."""
    return layer.get_submodule("base_layer")


def adapter_of(layer: Any) -> Adapter:
    """Return the adapter of a layer that `is_adapted`."""
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return Adapter(a, b, layer.scaling[ADAPTER], transposed=isinstance(base_of(layer), Conv1D))


def _targets(model: PreTrainedModel, wanted: str | Sequence[str]) -> list[str]:
    """Return the full names of the layers to adapt. Output heads are excluded, because they are used in ways that would
    bypass an adapter."""
    heads = {id(model.get_output_embeddings()), *(id(getattr(model, name, None)) for name in HEADS)}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in heads
    ]
    if wanted == ALL_LINEAR:
        return linear
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    found = []
    for target in names:
        fitting = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not fitting:
            known = sorted({name.rpartition(".")[2] for name in linear})
            nearest = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"model.target_modules={target}: no linear layer of that name in {type(model).__name__}, so it would "
                f"get no adapter; did you mean {', '.join(nearest)}? There are {', '.join(known)}; or {ALL_LINEAR}"
            )
        found += fitting
    return sorted(set(found))
