"""`fully_shard`: weights, gradients and optimizer state split over all ranks, layer by layer, as DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.engine.models import decoder_layers
from trainer.engine.registry import EngineRegistry
from trainer.engine.torch_engine import TorchEngine

# A head with a bias gives a view of its product; nothing writes into it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@EngineRegistry.register(("language_model", "value_model", "reward_model"), backend="fsdp2", device=("cpu", "cuda"))
class Fsdp2Engine(TorchEngine):
    """Between calls weights are sharded, always: what is stepped, loaded or exported is what the next pass gathers.

    On CPU, or with one rank, a call gathers each layer once and sums its gradient over the ranks once, however many
    micro-batches it has; on several GPUs memory goes first, and every micro-batch does both.
    """

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.layout.world_size,), mesh_dim_names=("shard",))
        dtype = self._compute_dtype()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self._frugal)
        if (head := self._float32_head(model)) is not None:
            whole = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            fully_shard(head, mesh=mesh, mp_policy=whole, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sum_gradients(model)
        return model

    def zero_grad(self) -> None:
        """Also of a pass that an error has ended: what it had gathered, and what it had not yet summed."""
        super().zero_grad()
        assert isinstance(self._model, FSDPModule)
        if not self._model._get_fsdp_state()._is_root:  # nor anything else, before the first pass
            return
        self._model.reset_iter_state()
        for unit in _units(self._model):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # not before it was gathered once
                        parameter._unsharded_param.grad = None

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        model = self._model
        assert isinstance(model, FSDPModule)
        if not self._frugal:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        yield

    def _settle(self) -> None:
        for unit in _units(self._model):
            unit.reshard()

    def _autocast(self) -> None:
        return None

    @property
    def _frugal(self) -> bool:
        return self.device.type != "cpu" and self.layout.world_size > 1


def sum_gradients(model: nn.Module) -> None:
    """Gradients become sums over the ranks instead of means."""
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # otherwise gloo is asked for a scaled sum, which it has not


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
