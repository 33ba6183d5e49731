"""Megatron-Core's GPT (https://github.com/NVIDIA/Megatron-LM), with the whole model on each rank.

Megatron-Core's tensor, pipeline, context and expert parallelism are not used, because its buffers for them need CUDA.
Layers follow Megatron-Core's "local" specification, so Transformer Engine is not needed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from asyncrl.core.failures import ConfigError
from trainer.engines.base import EngineSpec, ModelType
from trainer.engines.foreign import Attention, ForeignModel, check_ready, check_settings, check_weights, head_dim
from trainer.engines.replicated import DdpEngine

BACKEND = "megatron_layers"
MODELS = ("llama", "qwen2", "qwen3")
NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "self_attention.linear_qkv.linear": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj.linear": ("self_attn.o_proj",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "mlp.linear_fc1.linear": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2.linear": ("mlp.down_proj",),
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
}
"""Modules of a Megatron-Core layer, each with the Hugging Face modules that it joins."""


class MegatronEngine(DdpEngine):
    """The engine of `trainer.strategy=megatron_layers`.

    Raises:
        ConfigError: megatron-core is not installed, or the model type is not supported.
    """

    model_types: ClassVar[tuple[ModelType, ...]] = ("language_model",)
    balances_experts: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Transformer Engine and Apex, which are missing
            check_ready(spec, BACKEND, "megatron-core", "megatron.core.models.gpt")
        super().__init__(spec)

    def _load(self) -> PreTrainedModel:
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        return MegatronModel(super()._load())

    def _leave(self) -> None:
        if self._owns_group:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        super()._leave()


class MegatronModel(ForeignModel):
    """A Megatron-Core GPT with the weights of `source`, whose memory it may share.

    `inner` returns hidden states; the head is a separate, plain linear layer.
    """

    layer_class = "TransformerLayer"

    def __init__(self, source: PreTrainedModel) -> None:
        config = source.config
        check_settings(config, BACKEND, MODELS)
        super().__init__(config)
        self._joined = _JoinedProjections(config)
        with torch.device("meta"):
            self.inner = _build_gpt(config, source.dtype)
        # In Hugging Face's embedding, the padding token has no gradient as an input. Megatron-Core's embedding is for
        # ranks that share a vocabulary.
        self.inner.embedding.word_embeddings = copy.deepcopy(source.get_input_embeddings())
        self.inner.output_layer = _HiddenStates()
        self._positions = _Positions()
        self.inner.rotary_pos_emb = _Rotary(source.get_decoder().rotary_emb, self._positions)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=source.dtype, device="meta")
        self._take_weights(source.state_dict())
        for number, layer in enumerate(self.inner.decoder.layers):
            layer.self_attention.core_attention = _CoreAttention(config, number)
        check_weights(self, source, BACKEND)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.embedding.word_embeddings

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self._positions.ids = position_ids
        return self.inner(input_ids, position_ids, None)

    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: part
            for name, tensor in weights.items()
            for key, part in zip(_hf_names(name), self._joined.split(name, tensor), strict=True)
        }

    def _take_weights(self, source: Mapping[str, Tensor]) -> None:
        names = [name for name, _ in self.inner.named_parameters()]
        joined = {name: self._joined.join(name, [source[key] for key in _hf_names(name)]) for name in names}
        self.inner.load_state_dict(joined, assign=True, strict=False)  # not strict: there is no extra state to load
        tied = self.config.tie_word_embeddings
        self.head.weight = self.get_input_embeddings().weight if tied else nn.Parameter(source["lm_head.weight"])


class _JoinedProjections:
    """Converts the projections that Megatron-Core joins: gate and up; queries, keys and values, by key group
    `[q…, k, v]`."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._groups = config.num_key_value_heads
        self._queries = config.num_attention_heads // self._groups
        self._head_dim = head_dim(config)

    def split(self, name: str, joined: Tensor) -> Sequence[Tensor]:
        """Return Hugging Face's tensors, in the order of `_hf_names`."""
        if ".linear_qkv." in name:
            grouped = joined.unflatten(0, (self._groups, self._queries + 2, self._head_dim))
            return [part.flatten(0, 2) for part in grouped.split([self._queries, 1, 1], dim=1)]
        return joined.chunk(2) if ".linear_fc1." in name else [joined]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if ".linear_qkv." in name:
            grouped = [part.unflatten(0, (self._groups, -1, self._head_dim)) for part in parts]
            return torch.cat(grouped, dim=1).flatten(0, 2)
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class _Projection(nn.Module):
    """A replacement of Megatron-Core's linear layers, which need GPUs for half precision and take no adapters."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, bias: bool, **_settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, output_size, bias=bias, dtype=config.params_dtype)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.linear(hidden), None


class _HiddenStates(nn.Module):
    """A replacement of Megatron-Core's head that returns its input."""

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden, None


class _Positions:
    """The positions of the current forward pass."""

    ids = torch.zeros(1, 1, dtype=torch.int64)
    """`[B, T]`."""


class _Rotary(nn.Module):
    """Rotary angles of the current positions. Megatron-Core's rotary embedding counts from 0 and needs a GPU."""

    inv_freq: Tensor

    def __init__(self, source: Any, positions: _Positions) -> None:
        super().__init__()
        if source.attention_scaling != 1.0:
            raise ConfigError(
                f"trainer.strategy={BACKEND}: does not support the attention scaling of this model's positions "
                f"({source.attention_scaling:g}); use trainer.strategy=fsdp2"
            )
        self.register_buffer("inv_freq", source.inv_freq.clone().float(), persistent=False)
        self._positions = positions

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self._positions.ids.shape[1]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles in radians, float32 `[T, B, 1, head_dim]`."""
        angles = self._positions.ids.T[..., None].to(self.inv_freq) * self.inv_freq
        return torch.cat([angles, angles], dim=-1)[:, :, None, :]


class _CoreAttention(Attention):
    """A replacement of Megatron-Core's attention, whose causal mask needs a GPU."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention: `[T, B, heads, head_dim]` → `[T, B, heads · head_dim]`."""
        output = self.attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value)))
        return output.flatten(2).transpose(0, 1).contiguous()


def _hf_names(name: str) -> list[str]:
    """Return Hugging Face's names of the tensors that make up Megatron-Core's `name`."""
    if name in NAMES:
        return [NAMES[name]]
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return [f"model.layers.{number}.{part}.{kind}" for part in LAYER_NAMES[module]]


def _build_gpt(config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    qwen3 = config.model_type == "qwen3"
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=qwen3,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qwen3)
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_qkv = attention.linear_proj = mlp.linear_fc1 = mlp.linear_fc2 = _Projection
    return GPTModel(
        settings,
        layer,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
    )
