"""torchtitan's Llama 3 and Qwen 3 (https://github.com/pytorch/torchtitan), sharded by torchtitan's own FSDP2 recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines import dist
from trainer.engines.base import EngineSpec, ModelType
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
    has_meshes: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        check_ready(spec, BACKEND, "torchtitan", "torchtitan.models.common.decoder")
        super().__init__(spec)

    def _load(self) -> PreTrainedModel:
        return TitanModel(TorchEngine._load(self))  # the conversion needs the whole model

    def _wrap(self, model: nn.Module) -> nn.Module:
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        dtype = self._compute_dtype() or self._master_dtype
        mesh = dist.make_mesh(self.device, {"fsdp": self.layout.world_size}, timeout_s=self.spec.collective_s)
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
        return self.inner(input_ids, positions=position_ids)

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._adapter.to_hf(dict(weights))


class _InnerAttention(Attention):
    """A replacement of torchtitan's attention, whose causal mask needs a GPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Compute attention. Arguments and result are `[B, T, heads, head_dim]`."""
        return self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))


class _ModelClasses(NamedTuple):
    """The classes of one of torchtitan's architectures."""

    model: Any
    block: Any
    rope: Any
    adapter: Any


def _parts(config: PretrainedConfig) -> _ModelClasses:
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    check_settings(config, BACKEND, MODELS)
    if config.model_type == "llama":
        from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

        return _ModelClasses(Llama3Model, Llama3TransformerBlock, ComplexRoPE, Llama3StateDictAdapter)
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    return _ModelClasses(Qwen3Model, Qwen3TransformerBlock, CosSinRoPE, Qwen3StateDictAdapter)


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
    return parts.model.Config(
        dim=size,
        vocab_size=vocab,
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=size),
        norm=norm(size),
        lm_head=Linear.Config(in_features=size, out_features=vocab),
        layers=[block] * config.num_hidden_layers,
    )


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
