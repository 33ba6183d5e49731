"""Build a model without weights, and give each rank only its own parts of them.

    empty_model ─▶ adapters, kernels, sharding ─▶ load_model(layout_of=…): this rank's parts, from the files ─▶ fill

transformers reads the files: it renames, joins and converts tensors, ties weights and computes buffers. It builds the
model on the meta device, too, and calls `maybe_distribute_model` before it loads the weights; there, each parameter
gets the layout of the sharded model, so that only this rank's part is read.

Files have one tensor for each matrix of an expert, and transformers stacks those that a rank has, of which there must
be one. Along the dimension in which it joins two matrices of an expert, parts of both are no part of the whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from asyncrl.core.failures import ConfigError

# A head that the files lack is drawn at random on each rank before it is set to 0.
warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")

BASE_LAYER = ".base_layer."
"""Part of the name of a weight whose layer has an adapter."""


def is_empty(model: nn.Module) -> bool:
    """Whether a parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def placed_like(sharded: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of `sharded`, whose `from_pretrained` creates parameters with the layout and dtype of those of
    `sharded`."""
    layout = _by_checkpoint_name(sharded)

    def place(_cls: type, model: nn.Module, *_settings: Any) -> nn.Module:
        for name, parameter in list(model.named_parameters()):
            like = layout.get(name)
            if isinstance(like, DTensor):
                module, _, leaf = name.rpartition(".")
                placed = nn.Parameter(_empty_like(like), requires_grad=parameter.requires_grad)
                setattr(model.get_submodule(module), leaf, placed)
        return model

    kind = next(base for base in type(sharded).__mro__ if not issubclass(base, FSDPModule))
    members = {"maybe_distribute_model": classmethod(place), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)  # transformers looks conversions up by the name of the class


def expert_placements(model: nn.Module, size: int, where: str) -> dict[nn.Parameter, Shard]:
    """Return how to split the stacked experts of a model without weights over `size` ranks.

    Args:
        where: the configuration key that sets `size`, and its value, with which a message begins.

    Raises:
        ConfigError: a rank would get no expert, and no other dimension can be split evenly, as FSDP2 requires.
    """
    experts = [(parameter, _local_shape(parameter), dims) for parameter, dims in _stacked_experts(model)]
    placements: dict[nn.Parameter, Shard] = {}
    for parameter, shape, dims in experts:
        dim = _split_dim(shape, dims, size)
        if dim is None:
            fitting = max(
                number
                for number in range(1, size)
                if size % number == 0 and all(_split_dim(one, rest, number) is not None for _, one, rest in experts)
            )
            raise ConfigError(
                f"{where}: one of {size} ranks would get none of the {shape[0]} experts of a layer, and {size} does "
                f"not divide the size {shape[dims[0]]} of an expert's weights, which could be split instead; set "
                f"trainer.fsdp_size={fitting}"
            )
        placements[parameter] = Shard(dim)
    return placements


def _stacked_experts(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[int]]]:
    """Yield the parameters without memory that transformers stacks from tensors of single experts, each with the
    dimensions besides 0 along which it can be loaded in parts."""
    assert isinstance(model, PreTrainedModel)
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        operations = conversion.operations if isinstance(conversion, WeightConverter) else []
        if not any(isinstance(operation, MergeModulelist) for operation in operations):
            continue
        joined = {operation.dim for operation in operations if isinstance(operation, Concatenate)}
        to_files = conversion.reverse_transform()
        for name, parameter in model.named_parameters():
            if parameter.is_meta and to_files.rename_source_key(name)[1] is not None:
                yield parameter, [dim for dim in (2, 1) if dim not in joined]


def _split_dim(shape: torch.Size, dims: Sequence[int], size: int) -> int | None:
    """Return the dimension to split: 0 if each of `size` ranks gets an expert, else the first of `dims` that divides
    evenly. Return None if there is none."""
    if math.ceil(shape[0] / size) * (size - 1) < shape[0]:
        return 0
    return next((dim for dim in dims if shape[dim] % size == 0), None)


def _local_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of what tensor parallelism leaves to this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape


@torch.no_grad()
def fill(model: PreTrainedModel, loaded: PreTrainedModel, where: str) -> None:
    """Let the parameters without memory and the buffers of `model` be those of `loaded`, a model that was loaded with
    the layout of `model`.

    Args:
        where: the configuration key of the model and its value, with which a message begins.

    Raises:
        ConfigError: the files have different weights where config.json ties them.
    """
    weights = dict(loaded.named_parameters(remove_duplicate=False))
    for target, origin in model.all_tied_weights_keys.items():
        if weights[target] is not weights[origin]:
            raise ConfigError(
                f"{where}: {target} and {origin} differ in the files, and config.json ties them, so that one of them "
                "would be lost; set tie_word_embeddings to false in config.json"
            )
    state = {
        name: weights[name.replace(BASE_LAYER, ".")]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_meta
    }
    model.load_state_dict(state, strict=False, assign=True)
    device = next(model.parameters()).device
    for name, buffer in loaded.named_buffers(remove_duplicate=False):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, buffer.to(device))
    if loaded.can_generate():
        model.generation_config = loaded.generation_config
    # Export reverts the conversions that the files needed (`trainer.engines.state.weights`).
    model._weight_conversions = loaded._weight_conversions


def _by_checkpoint_name(model: nn.Module) -> Mapping[str, Tensor]:
    return {name.replace(BASE_LAYER, "."): value for name, value in model.named_parameters(remove_duplicate=False)}


def _empty_like(like: DTensor) -> DTensor:
    """Return a tensor on the meta device with the layout and the dtype of `like`."""
    local = torch.empty_like(like.to_local(), device="meta")
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
