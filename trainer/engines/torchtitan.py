"""torchtitan's Llama 3 and Qwen 3 (https://github.com/pytorch/torchtitan), sharded by torchtitan's own FSDP2
recipe, and shared by its own plans of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines.base import EngineSpec, ModelType
from trainer.engines.compute.tensor_parallel import check_divides
from trainer.engines.foreign import Attention, ForeignModel, check_ready, check_settings, check_weights, head_dim
from trainer.engines.sharded import Fsdp2Engine, sum_gradients
from trainer.engines.torch_engine import TorchEngine

BACKEND = "torchtitan"
MODELS = ("llama", "qwen3")


class TorchtitanEngine(Fsdp2Engine):
    """The engine of `trainer.strategy=torchtitan`. torchtitan's state-dict adapters convert weights from and to Hugging
    Face names.

    Raises:
        ConfigError: torchtitan is not installed, or does not support the model.
    """

    model_types: ClassVar[tuple[ModelType, ...]] = ("language_model",)
    balances_experts: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        check_ready(spec, BACKEND, "torchtitan", "torchtitan.models.common.decoder")
        super().__init__(spec)

    def _load(self) -> PreTrainedModel:
        return TitanModel(TorchEngine._load(self))  # the conversion needs the whole model

    def _wrap(self, model: nn.Module) -> nn.Module:
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        mesh, dtype = self._split(model), self._compute_dtype() or self._master_dtype
        assert isinstance(model, TitanModel)
        apply_fsdp_to_decoder(
            model.inner,
            mesh,
            param_dtype=dtype,
            reduce_dtype=self._master_dtype,
            pp_enabled=False,
            reshard_after_forward_policy="default" if self._frugal else "never",
        )
        fully_shard(model, mesh=mesh)
        sum_gradients(model)
        return model

    def _share_layers(self, model: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(model, TitanModel)
        check_divides(model.config, mesh.size(), with_experts=False)
        if self.spec.model.lora_rank:
            raise ConfigError(
                f"trainer.tensor_parallel_size={mesh.size()}: torchtitan's layers cannot be shared with adapters in "
                "them (model.lora_rank); set it to 1"
            )
        model.share_layers(mesh)


class TitanModel(ForeignModel):
    """A torchtitan decoder with the weights of `source`, whose memory it may share."""

    def __init__(self, source: PreTrainedModel) -> None:
        parts = _parts(source.config)
        self.layer_class = parts.block.__name__
        super().__init__(source.config)
        settings = _decoder_settings(source.config, parts)
        self._adapter = parts.adapter(settings, None)
        with torch.device("meta"):
            self.inner = settings.build()
        self.inner._skip_lm_head = True  # the head is called separately, on the scored positions
        self.inner.load_state_dict(self._adapter.from_hf(source.state_dict()), assign=True)
        if settings.enable_weight_tying:
            self.inner.tok_embeddings.weight = self.inner.lm_head.weight
        for module in self.inner.modules():
            if isinstance(module, parts.rope):
                module._init_self_buffers(buffer_device=torch.device("cpu"))
        self.head = self.inner.lm_head
        # As in Hugging Face's embedding, the padding token has no gradient as an input.
        self.inner.tok_embeddings.padding_idx = source.get_input_embeddings().padding_idx
        for number, layer in enumerate(self.inner.layers.values()):
            layer.attention.inner_attention = _InnerAttention(source.config, number)
        check_weights(self, source, BACKEND)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.tok_embeddings

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.inner(input_ids, positions=position_ids)
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden

    def share_layers(self, mesh: DeviceMesh) -> None:
        """Share the layers over the ranks of `mesh`, by torchtitan's plan for the architecture. Hidden states and
        logits are the same on all of them."""
        from torchtitan.distributed import ParallelDims

        inner, size = self.inner, mesh.size()
        inner.parallelize(
            ParallelDims(
                dp_replicate=1,
                dp_shard=1,
                cp=1,
                tp=size,
                pp=1,
                ep=1,
                world_size=size,
                spmd_backend="partial_dtensor",  # weights are DTensors of this mesh, which FSDP2 splits further
                _single_axis_meshes={"tp": mesh},
            )
        )
        if inner.enable_weight_tying:
            inner.tok_embeddings.weight = self.head.weight
        embedding, whole = inner.tok_embeddings, self.head.forward
        if embedding.padding_idx is not None:  # it is looked up in this rank's rows
            row = embedding.padding_idx - mesh.get_local_rank() * math.ceil(embedding.num_embeddings / size)
            embedding.padding_idx = row if 0 <= row < len(embedding.weight.to_local()) else None
        self.head.forward = lambda hidden: whole(hidden).full_tensor()

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._adapter.to_hf(dict(weights))


class _InnerAttention(Attention):
    """A replacement of torchtitan's attention, whose causal mask needs a GPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Compute attention. Arguments and result are `[B, T, heads, head_dim]`, of which a rank of tensor parallelism
        has some heads."""
        if isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor):
            output = self(query.to_local(), key.to_local(), value.to_local())
            return DTensor.from_local(output, query.device_mesh, query.placements, run_check=False)
        return self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))


class _ModelClasses(NamedTuple):
    """The classes of one of torchtitan's architectures."""

    model: Any
    block: Any
    rope: Any
    adapter: Any
    set_sharding: Any
    """A function that adds torchtitan's plan of tensor parallelism to the settings of a decoder."""


def _parts(config: PretrainedConfig) -> _ModelClasses:
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    check_settings(config, BACKEND, MODELS)
    if config.model_type == "llama":
        from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
        from torchtitan.models.llama3.sharding import set_llama3_sharding_config as share
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

        return _ModelClasses(Llama3Model, Llama3TransformerBlock, ComplexRoPE, Llama3StateDictAdapter, share)
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    share = partial(set_qwen3_sharding_config, enable_ep=False)
    return _ModelClasses(Qwen3Model, Qwen3TransformerBlock, CosSinRoPE, Qwen3StateDictAdapter, share)


def _decoder_settings(config: PretrainedConfig, parts: _ModelClasses) -> Any:
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps)

    size, heads, vocab = config.hidden_size, config.num_attention_heads, config.vocab_size
    block = parts.block.Config(
        attention_norm=norm(size),
        ffn_norm=norm(size),
        attention=make_gqa_config(
            dim=size,
            n_heads=heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            rope=_rope_settings(config, parts.rope),
            qk_norm=norm(head_dim(config)) if config.model_type == "qwen3" else None,
        ),
        feed_forward=make_ffn_config(
            dim=size, hidden_dim=config.intermediate_size, w1_param_init={}, w2w3_param_init={}
        ),
    )
    settings = parts.model.Config(
        dim=size,
        vocab_size=vocab,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=size),
        norm=norm(size),
        lm_head=Linear.Config(in_features=size, out_features=vocab),
        layers=[block] * config.num_hidden_layers,
    )
    parts.set_sharding(settings, enable_sp=False)  # rows of any length are shared, so no rank has a part of a row
    return settings


def _rope_settings(config: PretrainedConfig, kind: Any) -> Any:
    rope = config.rope_parameters
    settings = kind.Config(dim=head_dim(config), max_seq_len=config.max_position_embeddings, theta=rope["rope_theta"])
    scaling = rope.get("rope_type", "default")
    if scaling == "llama3" and config.model_type == "llama":
        settings.scaling = "llama"
        settings.scaling_factor = rope["factor"]
        settings.low_freq_factor = rope["low_freq_factor"]
        settings.high_freq_factor = rope["high_freq_factor"]
        settings.original_max_position_embeddings = rope["original_max_position_embeddings"]
    elif scaling != "default":
        raise ConfigError(
            f"trainer.strategy={BACKEND}: does not support {scaling!r} scaling of the positions of a "
            f"{config.model_type}; use trainer.strategy=fsdp2"
        )
    return settings
