"""Language models of other libraries with the interface of a Hugging Face model, for the torch backends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.core.failures import ConfigError
from trainer.engines.base import EngineSpec

INNER = "inner."
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Values that these keys of a Hugging Face configuration must have if they are present, because the backends assume
these values."""


class ForeignModel(PreTrainedModel):
    """Another library's causal language model, `self.inner`, with its head, `self.head`. It is configured and called
    like a Hugging Face model. It computes attention with `Attention`, so packing and sequence parallelism work as in
    every other model.

    A subclass sets `layer_class` and implements the abstract methods.
    """

    layer_class = ""
    """Name of the class of the repeated layers."""
    inner: Any
    head: nn.Module
    base_model_prefix = "body"
    _supports_sdpa = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self._no_split_modules = [self.layer_class]

    @abstractmethod
    def to_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole tensors by parameter name of `inner` to tensors by Hugging Face checkpoint name. Callers may
        convert one layer at a time."""

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the input of the head, `[B, T, H]`, for `input_ids` and `position_ids`, int64 `[B, T]`."""

    def checkpoint_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call `to_hf` with tensors by this model's parameter names."""
        return self.to_hf({name.removeprefix(INNER): tensor for name, tensor in weights.items()})

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        """Compute logits. `kwargs` are arguments of the attention function."""
        return CausalLMOutput(logits=self.head(self._hidden(input_ids, position_ids, kwargs)))

    def body(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        """Compute the hidden states, without the head. `kwargs` as in `forward`."""
        return BaseModelOutput(last_hidden_state=self._hidden(input_ids, position_ids, kwargs))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _hidden(self, input_ids: Tensor, position_ids: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        for module in self.modules():
            if isinstance(module, Attention):
                # Not reset after the pass, because a checkpointed layer is computed again in the backward pass.
                module.arguments = arguments
        return self.hidden_states(input_ids, position_ids)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Let every layer recompute its activations in the backward pass."""
        layers = {id(layer) for layer in self.modules() if type(layer).__name__ == self.layer_class}
        for parent in [module for module in self.modules() if not isinstance(module, CheckpointWrapper)]:
            for name, child in list(parent.named_children()):
                if id(child) in layers:
                    setattr(parent, name, checkpoint_wrapper(child))


class Attention(nn.Module):
    """Causal attention with the function that the model's configuration names (`attn_implementation`).

    Args:
        config: the configuration of the Hugging Face model.
    """

    is_causal = True

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.layer_idx = layer_idx
        self.arguments: dict[str, Any] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention: `[B, heads, T, head_dim]`, perhaps with fewer heads of keys and values, →
        `[B, T, heads, head_dim]`."""
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        arguments = {"attention_mask": None, "scaling": query.shape[-1] ** -0.5, **self.arguments}
        output, _ = function(self, query, key, value, **arguments)
        return output


def head_dim(config: PretrainedConfig) -> int:
    """Return the size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_settings(config: PretrainedConfig, backend: str, model_types: Sequence[str]) -> None:
    """Check that a backend's version of a model computes everything that the model does.

    Raises:
        ConfigError: the model is of another type, or a key of its configuration differs from `FIXED`.
    """
    if config.model_type not in model_types:
        raise ConfigError(
            f"trainer.strategy={backend}: runs models of type {', '.join(model_types)}, not {config.model_type}; use "
            "trainer.strategy=fsdp2"
        )
    for key, value in FIXED.items():
        if (found := getattr(config, key, value)) != value:
            raise ConfigError(
                f"trainer.strategy={backend}: its {config.model_type} has no {key}={found!r}, only {value!r}, so its "
                "results would differ; use trainer.strategy=fsdp2"
            )


def check_weights(model: ForeignModel, source: PreTrainedModel, backend: str) -> None:
    """Check that `source` and `model` have the same weights.

    Raises:
        ConfigError: some weights have no counterpart; the message names them.
    """
    wanted = {name for name, _ in source.named_parameters()}
    odd = sorted(wanted ^ set(model.checkpoint_weights(dict(model.named_parameters()))))
    if odd:
        raise ConfigError(
            f"trainer.strategy={backend}: {len(odd)} weights of this {source.config.model_type} have no counterpart "
            f"({', '.join(odd[:3])}, …); use trainer.strategy=fsdp2"
        )


def check_ready(spec: EngineSpec, backend: str, package: str, module: str, install: str = "") -> None:
    """Check the library and the options before anything is loaded. Arguments are those of `check_library`.

    Raises:
        ConfigError: the library is missing or broken, or the configuration asks for kernels that only fit
            transformers' models.
    """
    check_library(backend, package, module, install)
    if spec.engine.use_liger:
        raise ConfigError(
            f"trainer.use_liger=true with trainer.strategy={backend}: Liger kernels replace parts of transformers' "
            "models, which this one is not; set trainer.use_liger=false"
        )


def check_library(backend: str, package: str, module: str, install: str = "") -> None:
    """Check that the library of a backend can be imported.

    Args:
        module: the module to import.
        install: what to install, for the message; empty: the extra of this project with the library's name.

    Raises:
        ConfigError: the library is missing or broken.
    """
    wanted = install or f"'asyncrl[{module.partition('.')[0]}]'"
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken library fails with an OSError, a RuntimeError, …
        raise ConfigError(
            f"trainer.strategy={backend}: it needs {package}, which cannot be imported here ({error}); "
            f"pip install {wanted}, or use trainer.strategy=fsdp2"
        ) from None
