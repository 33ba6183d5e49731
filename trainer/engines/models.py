"""Load models from files: causal language models, value models and reward models, checked and without dropout."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import logging as transformers_logging

from asyncrl.assets import resolve
from asyncrl.config.sections.trainer import EngineConfig
from asyncrl.core.failures import ConfigError
from trainer.engines.base import ModelType
from trainer.engines.sharded_loading import placed_like

logger = logging.getLogger(__name__)

CLASSES = {
    "language_model": (AutoModelForCausalLM, "causal language model"),
    "value_model": (AutoModelForTokenClassification, "value model (token classification, one label)"),
    "reward_model": (AutoModelForSequenceClassification, "reward model (sequence classification, one label)"),
}
ATTENTIONS: tuple[str, ...] = get_args(EngineConfig.model_fields["attn_implementation"].annotation)
HEADS = ("score", "classifier")
"""Hugging Face's names for the head of a classification model."""


def load_model(
    path: str,
    model_type: ModelType = "language_model",
    *,
    key: str = "model.path",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    layout_of: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Load a model without dropout: dropout would make the current policy differ from the served one.

    If the files are those of a language model, without a value head, the value head starts at 0.

    Args:
        key: the configuration key of `path`, with which messages begin.
        layout_of: an `empty_model` that is sharded; of each parameter, only this rank's part is read. Collective.
            None: load the whole model on CPU.

    Raises:
        ConfigError: there is no such model, its files lack weights, the weights have another shape, or the model or
            this machine lacks the attention.
    """
    _, name = CLASSES[model_type]
    try:
        source = resolve(path)
        with quiet():
            kind, settings = _kind_and_settings(source, model_type, trust_remote_code)
            placement = {} if layout_of is None else {"distributed_config": DistributedConfig(tp_size=1)}
            model, report = (kind if layout_of is None else placed_like(layout_of)).from_pretrained(
                source,
                config=settings,
                dtype=dtype,
                use_safetensors=True,  # never a pickle from disk
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the reason
                **placement,
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        if re.search(r"attention|Flash ?Attention|flash_attn", why, re.IGNORECASE):
            others = ", ".join(name for name in ATTENTIONS if name != attn_implementation)
            raise ConfigError.wrap(
                f"trainer.attn_implementation={attn_implementation}: the model of {key}={path} cannot compute "
                f"attention like this here ({why}); set it to one of {others}, of which eager works for every model",
                error,
            ) from None
        raise ConfigError.wrap(
            f"{key}={path}: no {name} could be loaded from there ({why}); give a directory in Hugging Face format with "
            "config.json and safetensors, or a hub name",
            error,
        ) from None
    where = f"{key}={path}"
    _check_shapes(where, report["mismatched_keys"], name, whole=layout_of is None)
    _check_complete(where, model, set(report["missing_keys"]), model_type)
    _disable_dropout(model)
    return model


def empty_model(
    path: str,
    model_type: ModelType = "language_model",
    *,
    key: str = "model.path",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel | None:
    """Return the model of `load_model` on the meta device, without weights. Return None if it cannot be built like
    that; `load_model` reports what is wrong with the files."""
    try:
        with quiet(), torch.device("meta"):
            kind, settings = _kind_and_settings(resolve(path), model_type, trust_remote_code)
            if getattr(settings, "quantization_config", None) is not None:
                raise ValueError("its weights are quantized")
            model: PreTrainedModel = kind.from_config(
                settings, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
    except OSError:
        return None
    except Exception as error:  # noqa: BLE001 - a model's own code may fail in any way
        why = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning("%s=%s: every rank reads the whole model, because of this: %s", key, path, why)
        return None
    _disable_dropout(model)
    return model


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def head_of(model: nn.Module) -> nn.Module:
    """Return the value or reward head of a classification model.

    Raises:
        ConfigError: the head has none of the known names.
    """
    for name in HEADS:
        if isinstance(head := getattr(model, name, None), nn.Module):
            return head
    raise ConfigError(f"{type(model).__name__}: has no head called {' or '.join(HEADS)}; use another architecture")


def keep_float32(head: nn.Module, device: torch.device) -> None:
    """Let a value or reward head compute in its weights' dtype under autocast too, whatever its input is.

    A value in bfloat16 has three digits, too few for an advantage, which is a difference of values.
    """
    plain = head.forward

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            output: Tensor = plain(hidden.to(next(head.parameters()).dtype))
            return output

    head.forward = forward


def convert_weights(model: nn.Module, dtype: torch.dtype, except_of: nn.Module | None = None) -> None:
    """Convert the parameters, but not the buffers, to `dtype` in place, except those of the module `except_of`."""
    kept = set() if except_of is None else {id(parameter) for parameter in except_of.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, which are sharded, compiled and checkpointed one by one.

    Raises:
        ConfigError: the model does not name them (`_no_split_modules`).
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"{type(model).__name__}: names no repeated layers; use trainer.strategy=ddp or local")
    return layers


def speed_up(model: PreTrainedModel, engine: EngineConfig, device: torch.device) -> None:
    """Apply gradient checkpointing, Liger kernels and compilation as configured, in place, before the model is wrapped.

    Raises:
        ConfigError: Liger kernels without a GPU or without the package.
    """
    if engine.use_liger:
        _apply_liger(model, device)
    if engine.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if engine.torch_compile:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True)


def _apply_liger(model: PreTrainedModel, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("trainer.use_liger=true: Liger kernels run on GPUs only; set trainer.use_liger=false")
    try:
        kernels = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ConfigError.wrap(
            "trainer.use_liger=true: the package liger-kernel is missing; pip install 'asyncrl[liger]', or set "
            "trainer.use_liger=false",
            error,
        ) from None
    # Liger's fused losses would replace the whole forward pass; here, the loss is computed outside of the model.
    kernels._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and reports of missing weights, which are checked here."""
    verbosity, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _is_vision_language(settings: PretrainedConfig) -> bool:
    """Whether these are the settings of a vision-language model, which transformers does not count among the language
    models."""
    kind = type(settings)
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _kind_and_settings(
    source: str, model_type: ModelType, trust_remote_code: bool
) -> tuple[type[_BaseAutoModelClass], PretrainedConfig]:
    """Return the auto class that creates the model, and the model's configuration without dropout."""
    settings = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    for part in (settings, settings.get_text_config(), *filter(None, [getattr(settings, "vision_config", None)])):
        for key, value in vars(part).items():
            if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
                setattr(part, key, 0.0)
    if model_type != "language_model":
        settings.num_labels = 1
    elif _is_vision_language(settings):
        return AutoModelForImageTextToText, settings
    return CLASSES[model_type][0], settings


def _check_shapes(
    where: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], kind: str, *, whole: bool
) -> None:
    """Refuse weights of another shape. `mismatched`: names with their shapes in the files and in the model, which are
    shapes of parts unless `whole`."""
    for name, stored, wanted in sorted(mismatched):
        if name.partition(".")[0] in HEADS:
            outputs = f"{stored[0]} outputs" if whole else "more than one output"
            raise ConfigError(
                f"{where}: its head has {outputs} ({name}) and must have one, so it is no {kind}; give one "
                "that was trained with num_labels=1"
            )
        raise ConfigError(
            f"{where}: {'' if whole else 'a part of '}{name} has shape {list(stored)} in the files and {list(wanted)} "
            "by config.json, so the weights are of another model; give a directory as save_pretrained writes it"
        )


def _check_complete(where: str, model: PreTrainedModel, missing: set[str], model_type: ModelType) -> None:
    if not missing:
        return
    if model_type != "language_model":
        head = head_of(model)
        own = {name for name, parameter in model.named_parameters() if any(parameter is p for p in head.parameters())}
        if own & missing and model_type == "reward_model":
            raise ConfigError(
                f"{where}: its files have no reward head ({_few(missing)}), so scores would be random; give a "
                f"{CLASSES[model_type][1]}"
            )
        if own & missing:
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.zero_()
        missing = missing - own
    if missing:
        raise ConfigError(
            f"{where}: {len(missing)} weights are missing ({_few(missing)}), so they would be random; give a directory "
            "with all of them, as save_pretrained writes it"
        )


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
