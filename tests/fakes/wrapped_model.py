"""A model under the wrappers of the training backends, on CPU."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

Wrapper = Literal["local", "ddp", "fsdp", "fsdp2"]


def wrap(wrapper: Wrapper, model: PreTrainedModel) -> nn.Module:
    """Wrap `model` for all ranks of the process group, with one FSDP unit for each decoder layer."""
    if wrapper == "local":
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    layers = model.model.layers
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapper == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with LoRA, a unit has frozen and trained weights
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            use_orig_params=True,
        )
