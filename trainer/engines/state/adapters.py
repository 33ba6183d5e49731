"""The LoRA adapters of a live model, for engines that add them to the weights in the model's files
(`weight_sync.lora=adapter`).

The names are peft's, and rank 0 gets whole tensors. Engines multiply B by `alpha / rank` when they load an adapter.
Here B has this factor already, and engines get `alpha = rank`, so their tensors are equal to the published ones bit by
bit, and checksums can compare them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import ConfigError
from trainer.engines.compute.lora import Adapter, adapter_of, is_adapted
from trainer.engines.dist import rank
from trainer.engines.foreign import ForeignModel
from trainer.engines.state.weights import DTYPES, plain_name, unwrapped


def adapter_weights(model: nn.Module, dtype: Dtype = "float32") -> Iterator[tuple[str, Tensor]]:
    """Yield peft's names with copies of the adapters on rank 0's CPU and empty tensors on other ranks. Collective:
    iterate to the end on every rank.

    Raises:
        ConfigError: the layers are not those of transformers, so engines would not find them.
    """
    inner = unwrapped(model)
    if isinstance(inner, ForeignModel):
        raise ConfigError(
            f"weight_sync.lora=adapter: the adapters of {type(inner).__name__} belong to layers that engines do not "
            "have; set weight_sync.lora=merged, or trainer.strategy=fsdp2"
        )
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    if not units:
        yield from _tensors(inner, "", dtype)
    for name, unit in units.items():
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            tensors = list(_tensors(unit, name, dtype))
        yield from tensors


def _tensors(module: nn.Module, prefix: str, dtype: Dtype) -> Iterator[tuple[str, Tensor]]:
    for name, adapter in _adapters(module, prefix):
        for part, tensor, factor in (("lora_A", adapter.a, 1.0), ("lora_B", adapter.b, adapter.scale)):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole = whole.detach() if rank() == 0 else whole.new_empty([0] * whole.ndim)
            yield f"base_model.model.{name}.{part}.weight", (factor * whole).to("cpu", DTYPES[dtype])


def _adapters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapters below `module` by the names of their layers, except in modules that FSDP gathers
    separately."""
    if is_adapted(module):
        yield plain_name(prefix), adapter_of(module)
        return
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _adapters(child, f"{prefix}.{name}")
