"""Backends that keep the full model on every rank: one process (`local`), or `DistributedDataParallel` (`ddp`),
which sums gradients while the backward pass runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncrl.config.sections.data import NUM_EXPERTS
from asyncrl.core.failures import ConfigError
from trainer.engines import dist
from trainer.engines.base import EngineSpec
from trainer.engines.torch_engine import TorchEngine


class LocalEngine(TorchEngine):
    distributed: ClassVar[bool] = False
    sharded: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        ranks = max(dist.world_size(), spec.engine.num_workers)
        if ranks > 1:
            raise ConfigError(
                f"trainer.strategy=local with {ranks} ranks: it runs in one process; use trainer.strategy=fsdp2, or "
                "trainer.num_workers=1"
            )
        super().__init__(spec)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)


class DdpEngine(TorchEngine):
    sharded: ClassVar[bool] = False
    averages: ClassVar[bool] = True

    def _wrap(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # there is no gradient to sum, and DDP refuses such a model
        devices = [self.device] if self.device.type == "cuda" else None
        # Experts without a token have no gradient in a pass, nor have vision layers in a batch without images.
        config: Any = model.config
        unused = config.get_text_config() is not config or any(getattr(config, name, None) for name in NUM_EXPERTS)
        return DistributedDataParallel(
            model,
            device_ids=devices,
            find_unused_parameters=unused,
            forward_sync_buffers=False,  # buffers such as rotary tables are equal on all ranks and never trained
        )

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _move_model(self, device: torch.device) -> None:
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            tensor.data = tensor.data.to(device)
