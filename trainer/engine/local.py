"""One process, no process group."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from asyncrl.failures import ConfigError
from trainer.engine import dist
from trainer.engine.base import EngineSpec
from trainer.engine.registry import EngineRegistry
from trainer.engine.torch_engine import TorchEngine


@EngineRegistry.register(("language_model", "value_model", "reward_model"), backend="local", device=("cpu", "cuda"))
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
