"""FSDP and FSDP2: weights, gradients and optimizer state are split over all ranks.

`fully_shard` (FSDP2) shards layer by layer, as DTensors; `FullyShardedDataParallel` (FSDP1) shards flat tensors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines import dist
from trainer.engines.compute.optim import local_part
from trainer.engines.compute.tensor_parallel import share_layers
from trainer.engines.models import decoder_layers, empty_model, load_model
from trainer.engines.sharded_loading import expert_placements, fill
from trainer.engines.torch_engine import TorchEngine

# A head with a bias returns a view of its product, into which no code writes.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Fsdp2Engine(TorchEngine):
    """FSDP2. Between calls the weights are always sharded, so that the next pass gathers the stepped or loaded ones.

    On CPU, or with one rank, a call gathers each layer once and sums its gradient over the ranks once, regardless of
    the number of micro-batches. On several GPUs every micro-batch does both, which saves memory.

    Each rank reads only its own parts of the weights (`trainer.engines.sharded_loading`). With `trainer.fsdp_size`,
    groups of ranks have the same parts (HSDP). Weights are split along their first dimension, but experts along another
    one if a rank would get no expert.
    """

    has_meshes: ClassVar[bool] = True
    _partial: Sequence[str] = ()
    """Names of the modules of which each rank of `_tensor_group` has only a summand of the gradient."""
    _tensor_group: ProcessGroup | None = None

    def _load(self) -> PreTrainedModel:
        return empty_model(**self._source) or super()._load()

    def _fill(self, model: PreTrainedModel) -> None:
        failure: ConfigError | None = None
        try:
            loaded = load_model(**self._source, layout_of=model)
            fill(model, loaded, f"{self.spec.path_key}={self.spec.model.path}")
        except ConfigError as error:
            failure = error
        for first in filter(None, dist.gather(failure)):
            raise first

    def _enable_packing(self, model: PreTrainedModel) -> bool:
        """Gather no more than one layer at a time, and leave all of them sharded, as the optimizer has to get them."""
        units = _units(model)
        if not isinstance(model, FSDPModule):
            return super()._enable_packing(model)
        if not self._frugal:
            model.set_reshard_after_forward(True)
        try:
            return super()._enable_packing(model)
        finally:
            if not self._frugal:
                model.set_reshard_after_forward(False)
            for unit in units:
                unit.reshard()

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh, dtype = self._split(model), self._compute_dtype()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        size = mesh.size(mesh.ndim - 1)
        key = f"fsdp_size={size}" if self.spec.engine.fsdp_size else f"num_workers={self.layout.world_size}"
        placements = expert_placements(model, size, f"trainer.{key}")
        for layer in decoder_layers(model):
            fully_shard(
                layer,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=self._frugal,
                shard_placement_fn=placements.get,
            )
        if (head := self._float32_head(model)) is not None:
            whole = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            fully_shard(head, mesh=mesh, mp_policy=whole, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sum_gradients(model)
        return model

    def zero_grad(self) -> None:
        """Discard the gradient, including gathered weights and unsummed gradients of a pass that ended with an
        error."""
        super().zero_grad()
        assert isinstance(self._model, FSDPModule)
        if not self._model._get_fsdp_state()._is_root:  # before the first pass there is nothing to discard
            return
        self._model.reset_iter_state()
        for unit in _units(self._model):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # only after the first gathering
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

    def _split(self, model: nn.Module) -> DeviceMesh:
        """Share layers over the ranks of tensor parallelism. Return the mesh over which the rest is sharded."""
        shape, names = self._sizes(), ("dp_replicate", "fsdp", "tp")
        used = [number for number, name in enumerate(names) if shape[number] > 1 or name == "fsdp"]
        sizes = {names[number]: shape[number] for number in used}
        mesh = dist.make_mesh(self.device, sizes, timeout_s=self.spec.collective_s)
        if "tp" not in sizes:
            return mesh
        self._share_layers(model, mesh["tp"])
        return mesh[tuple(name for name in sizes if name != "tp")]

    def _sizes(self) -> tuple[int, int, int]:
        """Return the number of copies of the model, the number of ranks that split what a rank has, and the number that
        share layers."""
        engine, ranks = self.spec.engine, self.layout.world_size
        tensor, size = engine.tensor_parallel_size, engine.fsdp_size
        if tensor > 1 and engine.ulysses_sequence_parallel_size > 1:
            raise ConfigError(
                f"trainer.tensor_parallel_size={tensor}: ranks cannot share layers and sequences at once; set it or "
                "trainer.ulysses_sequence_parallel_size to 1"
            )
        if ranks % tensor:
            raise ConfigError(
                f"trainer.tensor_parallel_size={tensor} does not divide the {ranks} ranks; set it to a divisor of "
                f"{ranks}, or trainer.num_workers to a multiple of {tensor}"
            )
        size = size or ranks // tensor
        if ranks // tensor % size:
            raise ConfigError(
                f"trainer.fsdp_size={size} does not divide {ranks // tensor}: {ranks} ranks with "
                f"trainer.tensor_parallel_size={tensor} leave so many; set it to a divisor of {ranks // tensor}"
            )
        return ranks // tensor // size, size, tensor

    def _share_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._partial, self._tensor_group = share_layers(model, mesh), mesh.get_group()

    def _complete_gradients(self) -> None:
        for name in self._partial:
            for parameter in self._model.get_submodule(name).parameters():
                if parameter.grad is not None:
                    dist.all_sum(local_part(parameter.grad), self._tensor_group)

    def _num_copies(self, parameter: nn.Parameter) -> int:
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        parts = [mesh.size(number) for number, one in enumerate(parameter.placements) if not one.is_replicate()]
        return self.layout.world_size // math.prod(parts)

    @property
    def _frugal(self) -> bool:
        return self.device.type != "cpu" and self.layout.world_size > 1


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 sum gradients over the ranks instead of averaging them."""
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # otherwise FSDP uses a scaled sum, which gloo does not support


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# With LoRA, a layer has frozen and trained weights; FSDP1 then allocates gradient buffers as if all were trained.
warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")


class FsdpEngine(TorchEngine):
    averages: ClassVar[bool] = True

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._alone:
            return model.to(self.device)
        dtype = self._compute_dtype()
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
        head, layers = self._float32_head(model), {type(layer) for layer in decoder_layers(model)}

        def unit(module: nn.Module) -> bool | dict[str, Any]:
            if module is head:
                return {"mixed_precision": MixedPrecision(torch.float32, torch.float32)}
            return type(module) in layers

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(unit),
            mixed_precision=precision,
            device_id=self.device,
            # With a mesh, its state dicts contain DTensors, which checkpoints can reshard.
            device_mesh=dist.make_mesh(
                self.device, {"shard": self.layout.world_size}, timeout_s=self.spec.collective_s
            ),
            use_orig_params=True,
        )

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        # Gradients that are not yet summed over the ranks have the dtype of the pass; only summed ones are float32.
        sums_late = self.device.type == "cpu" and self._compute_dtype() is None
        if last or not sums_late or not isinstance(self._model, FullyShardedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    @torch.no_grad()
    def _move_model(self, device: torch.device) -> None:
        model = self._model
        if not isinstance(model, FullyShardedDataParallel):
            model.to(device)
            return
        _lazy_init(model, model)
        for handle in model._all_handles:
            handle.flat_param_to(device)
            handle.flat_param._local_shard = handle.flat_param.data
            handle._use_sharded_views()  # the parameters that the optimizer steps
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)

    def _settle(self) -> None:
        handle = getattr(self._model, "_handle", None)
        if handle is not None:  # FSDP1 reshards the root only after a backward pass
            handle.reshard(True)

    def _autocast(self) -> torch.dtype | None:
        return self._compute_dtype() if self._alone else None

    @property
    def _alone(self) -> bool:
        """Whether there is only one rank. FSDP1 would not shard then and would behave differently, so the plain model
        is used."""
        return self.layout.world_size == 1
