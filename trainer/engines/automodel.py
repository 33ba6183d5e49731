"""transformers' models, sharded by NeMo Automodel's FSDP2 recipe and its plans for tensor parallelism
(https://github.com/NVIDIA-NeMo/Automodel)."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines import dist
from trainer.engines.base import EngineSpec, ModelType
from trainer.engines.foreign import check_library
from trainer.engines.sharded import Fsdp2Engine, sum_gradients
from trainer.engines.sharded_loading import expert_placements

BACKEND = "nemo_automodel"
INSTALL = "nemo-automodel==0.7.0 in an environment of its own (docs/training.md)"
SHARED = ("llama", "qwen2", "qwen3")
"""Types of models with a plan for tensor parallelism that is held to the reference."""
VOCABULARY = ("model.embed_tokens", "lm_head")
"""Modules that ranks do not share, because the head is called on the scored positions only."""


class AutomodelEngine(Fsdp2Engine):
    """The engine of `trainer.strategy=nemo_automodel`. Each rank reads only its own parts of the weights, as with
    `fsdp2`. Automodel does not shard a model for a single rank; torch's FSDP2 does then.

    Raises:
        ConfigError: NeMo Automodel is not installed, or cannot divide the model over these ranks.
    """

    model_types: ClassVar[tuple[ModelType, ...]] = ("language_model",)

    def __init__(self, spec: EngineSpec) -> None:
        check_library(BACKEND, "nemo-automodel", "nemo_automodel.components.distributed.model_parallelizer", INSTALL)
        super().__init__(spec)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.layout.world_size == 1:
            return super()._wrap(model)
        from nemo_automodel.components.distributed.config import FSDP2Config
        from nemo_automodel.components.distributed.mesh import MeshContext
        from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

        assert isinstance(model, PreTrainedModel)
        copies, size, tensor = self._sizes()
        if any(part.dim for part in expert_placements(model, size, f"trainer.fsdp_size={size}").values()):
            raise ConfigError(
                f"trainer.strategy={BACKEND}: one of {size} ranks would get no expert; use trainer.strategy=fsdp2"
            )
        dtype = self._compute_dtype()
        config = FSDP2Config(
            # Without a policy, Automodel computes in bfloat16.
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
            reshard_after_forward=self._frugal,
            tp_plan=self._tensor_plan(model, tensor) if tensor > 1 else None,
        )
        # Automodel would create the process groups with the default timeout of torch.
        sizes = {"dp_replicate": copies, "dp_shard": size, "cp": 1, "tp": tensor}
        mesh = dist.make_mesh(self.device, sizes, timeout_s=self.spec.collective_s)
        self._tensor_group = mesh["tp"].get_group()
        try:
            wrapped: nn.Module = parallelize_model(model, MeshContext.from_meshes(mesh, strategy_config=config))
        except ValueError as error:  # the ranks cannot share the heads
            raise ConfigError.wrap(
                f"trainer.tensor_parallel_size={tensor}: {BACKEND} cannot share the layers ({error}); set it to 1",
                error,
            ) from error
        sum_gradients(wrapped)
        return wrapped

    def _tensor_plan(self, model: PreTrainedModel, size: int) -> dict[str, Any]:
        """Return Automodel's style of each module that ranks share. Note those of which each rank has a summand of the
        gradient."""
        from nemo_automodel.components.distributed.optimized_tp_plans import PARALLELIZE_FUNCTIONS
        from nemo_automodel.components.distributed.parallel_styles import ReplicatedWithGradAllReduce

        found = model.config.model_type
        if found not in SHARED or self.spec.model.lora_rank:
            raise ConfigError(
                f"trainer.tensor_parallel_size={size} with trainer.strategy={BACKEND}: for models of type "
                f"{', '.join(SHARED)} without adapters, not {found}{' with LoRA' * bool(self.spec.model.lora_rank)}; "
                "set it to 1"
            )
        every = PARALLELIZE_FUNCTIONS[f"{type(model).__module__}.{type(model).__qualname__}"](model, False)
        plan = {name: style for name, style in every.items() if name not in VOCABULARY}
        partial = [name for name, style in plan.items() if isinstance(style, ReplicatedWithGradAllReduce)]
        patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in partial]
        self._partial = [name for name, _ in model.named_modules() if any(one.fullmatch(name) for one in patterns)]
        return plan
