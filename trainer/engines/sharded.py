"""`FullyShardedDataParallel` (FSDP1): weights, gradients and optimizer state split over all ranks, as flat tensors."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import CustomPolicy

from trainer.engine.models import decoder_layers
from trainer.engine.registry import EngineRegistry
from trainer.engine.torch_engine import TorchEngine

# With LoRA, layers have frozen and trained weights; FSDP1 then needs gradient buffers as if all were trained.
warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")


@EngineRegistry.register(("language_model", "value_model", "reward_model"), backend="fsdp", device=("cpu", "cuda"))
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
            # With a mesh, its state dicts are of DTensors, which checkpoints can reshard.
            device_mesh=init_device_mesh(self.device.type, (self.layout.world_size,)),
            use_orig_params=True,
        )

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        # Unsharded gradients are kept, and added up, in the dtype of the pass: only summed ones are float32.
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
        if handle is not None:  # FSDP1 reshards the root after a backward pass only, and there may have been none
            handle.reshard(True)

    def _autocast(self) -> torch.dtype | None:
        return self._compute_dtype() if self._alone else None

    @property
    def _alone(self) -> bool:
        """FSDP1 does not shard over one rank, and then lacks what it does otherwise; the plain model is used."""
        return self.layout.world_size == 1
