"""VeOmni's Llama, Qwen 2 and Qwen 3 (https://github.com/ByteDance-Seed/VeOmni), sharded by VeOmni's FSDP2 recipe."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines.base import EngineSpec, ModelType
from trainer.engines.foreign import check_ready
from trainer.engines.sharded import Fsdp2Engine, sum_gradients
from trainer.engines.torch_engine import TorchEngine

BACKEND = "veomni"
MODELS = ("llama", "qwen2", "qwen3")
INSTALL = "veomni==0.1.12 in an environment of its own (docs/training.md)"
KERNELS = (
    "moe",
    "cross_entropy_loss",
    "rms_norm",
    "swiglu_mlp",
    "rotary_pos_emb",
    "load_balancing_loss",
    "rms_norm_gated",
    "causal_conv1d",
    "chunk_gated_delta_rule",
)
"""VeOmni's operations with fused kernels, which are not used, because most need a GPU and further packages."""


class VeomniEngine(Fsdp2Engine):
    """The engine of `trainer.strategy=veomni`. VeOmni does not shard a model for a single rank; torch's FSDP2 does
    then.

    Raises:
        ConfigError: VeOmni is not installed, does not have the model, or takes this machine for another device.
    """

    model_types: ClassVar[tuple[ModelType, ...]] = ("language_model",)
    balances_experts: ClassVar[bool] = False
    has_meshes: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")  # it logs to stdout
        check_ready(spec, BACKEND, "veomni", "veomni.distributed.torch_parallelize", INSTALL)
        super().__init__(spec)

    def _load(self) -> PreTrainedModel:
        return veomni_model(TorchEngine._load(self))

    def _wrap(self, model: nn.Module) -> nn.Module:
        ranks = self.layout.world_size
        if ranks == 1:
            return super()._wrap(model)
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state
        from veomni.distributed.torch_parallelize import build_parallelize_model
        from veomni.utils.device import get_device_type

        if (found := get_device_type()) != self.device.type:
            raise ConfigError(
                f"trainer.device={self.device.type} with trainer.strategy={BACKEND}: VeOmni uses the {found} of this "
                "machine; use trainer.strategy=fsdp2"
            )
        clear_parallel_state()  # its groups may be those of an engine that is closed
        init_parallel_state(dp_size=ranks, dp_shard_size=ranks, dp_mode="fsdp2", device_type=self.device.type)
        whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
        mixed = self._compute_dtype() is not None and self.spec.optim is not None
        wrapped: nn.Module = build_parallelize_model(
            model,
            init_device="meta",
            should_skip_hf_weight_load=True,  # it would not read the adapters of LoRA
            enable_reshard_after_forward=self._frugal,
            enable_gradient_checkpointing=False,  # `speed_up` has enabled it
            mixed_precision=MixedPrecisionConfig(enable=mixed, param_dtype="bfloat16", reduce_dtype="float32"),
        )
        with torch.no_grad():  # VeOmni leaves the weights undefined
            for name, parameter in wrapped.named_parameters():
                assert isinstance(parameter, DTensor)
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(whole[name].to(mesh.device_type), mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
        sum_gradients(wrapped)
        return wrapped


def veomni_model(source: PreTrainedModel) -> PreTrainedModel:
    """Return VeOmni's version of a model, with the weights of `source`, whose memory it shares.

    Raises:
        ConfigError: VeOmni has no version of this type of model.
    """
    from veomni.arguments import OpsImplementationConfig
    from veomni.models import build_foundation_model
    from veomni.ops import apply_ops_config

    config = deepcopy(source.config)
    if config.model_type not in MODELS:
        raise ConfigError(
            f"trainer.strategy={BACKEND}: runs models of type {', '.join(MODELS)}, not {config.model_type}; use "
            "trainer.strategy=fsdp2"
        )
    attention = config._attn_implementation
    config.architectures = [type(source).__name__]
    apply_ops_config(
        OpsImplementationConfig(
            attn_implementation=attention, **{f"{name}_implementation": "eager" for name in KERNELS}
        )
    )
    model: PreTrainedModel = build_foundation_model(
        config,
        torch_dtype=str(source.dtype).removeprefix("torch."),
        attn_implementation=attention,
        init_device="meta",
    )
    del model.config.encoder_data_balance  # VeOmni's own setting, which exported files must not have
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model
