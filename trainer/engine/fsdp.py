"""`FullyShardedDataParallel` (FSDP1): weights, gradients and optimizer state split over all ranks, as flat tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from trainer.engine.models import decoder_layers
from trainer.engine.registry import EngineRegistry
from trainer.engine.torch_engine import TorchEngine


@EngineRegistry.register(("language_model", "value_model", "reward_model"), backend="fsdp", device=("cpu", "cuda"))
class FsdpEngine(TorchEngine):
    averages: ClassVar[bool] = True

    def _wrap(self, model: nn.Module) -> nn.Module:
        dtype = self._compute_dtype()
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in decoder_layers(model)}),
            mixed_precision=precision,
            device_id=self.device,
            use_orig_params=True,
        )

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        if last or self.device.type != "cpu":
            return nullcontext()
        return self._model.no_sync()

    def _autocast(self) -> None:
        return None
