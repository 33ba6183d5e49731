"""Weights of a live model: full tensors under Hugging Face names, for publication and export; and sharded tensors with
the optimizer's moments, for checkpoints.

Tensors in checkpoints are called `model.{parameter}` and `optimizer.{parameter}.{moment}`, by the parameter's name in
the unwrapped model, which does not depend on the sharding. Sharded tensors are DTensors.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from asyncrl.assets import resolve
from asyncrl.config.sections.base import Dtype
from asyncrl.config.sections.data import ModelConfig
from trainer.engines.compute.lora import Adapter, adapter_of, base_of, is_adapted, is_adapter
from trainer.engines.compute.optim import local_part
from trainer.engines.dist import rank
from trainer.engines.foreign import ForeignModel
from trainer.engines.state.storage import write_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

WRAPPERS = {"", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}

LAYER = re.compile(r"^(.*?\.\d+)\.")
"""Matches `model.layers.3` in `model.layers.3.mlp.experts.0.up_proj.weight`."""

MAX_SHARD_BYTES = 5 * 10**9

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "*.model",
)


def full_weights(model: nn.Module, dtype: Dtype = "float32") -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint names with whole, contiguous CPU tensors on rank 0 and empty tensors on other ranks. Collective:
    iterate to the end on every rank.

    Adapters are merged into copies of the weights. A tied head appears once, under the embedding's name. No rank holds
    more than one whole tensor, besides those that were yielded; or more than one decoder layer if the files have other
    tensors than the model, or with FSDP1. Unsharded float32 tensors on CPU are the live weights.
    """
    inner = unwrapped(model)
    for weights in _parts(model, whole_layers=_is_converted(inner)):
        if rank() != 0:
            yield from weights.items()
            continue
        exported = _checkpoint_weights(inner, weights)
        del weights  # only the consumer holds a tensor while the next one is gathered
        for name in list(exported):
            yield name, _rounded(exported.pop(name), dtype)


def _rounded(tensor: Tensor, dtype: Dtype) -> Tensor:
    if tensor.is_floating_point():
        tensor = tensor.to(DTYPES[dtype])
    return tensor.to("cpu").contiguous()


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the model itself, without the wrapper for several ranks."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel | FullyShardedDataParallel) or "_orig_mod" in inner._modules:
        inner = inner._modules.get("_orig_mod") or inner.module
    return inner


def plain_name(name: str) -> str:
    """Return a parameter's name in the unwrapped model, given its name within `unwrapped(model)` or an FSDP model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class HfExport:
    """A copy of a model on rank 0's CPU, to be written into a directory that `from_pretrained` can load."""

    weights: Mapping[str, Tensor]
    config: PretrainedConfig
    generation: GenerationConfig | None
    remote_code: PreTrainedModel | None
    """The model, if its code comes from its directory; None otherwise."""

    @classmethod
    def stage(cls, model: nn.Module, dtype: Dtype = "float32") -> HfExport | None:
        """Copy the model, with floating-point weights in `dtype`. Collective. Returns None on all ranks but 0."""
        inner = unwrapped(model)
        owned = itertools.chain(model.parameters(), model.buffers())
        live = {local_part(tensor).untyped_storage().data_ptr() for tensor in owned}
        weights = {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor
            for name, tensor in full_weights(model, dtype)
        }
        if rank() != 0:
            return None
        config = copy.deepcopy(inner.config)
        if not isinstance(inner, ForeignModel):
            config.architectures = [type(inner).__name__.removeprefix("FSDP")]
        config.dtype = dtype
        generation = copy.deepcopy(inner.generation_config) if inner.can_generate() else None
        return cls(weights, config, generation, inner if inner.is_remote_code() else None)

    def write(self, directory: Path, model: ModelConfig) -> None:
        """Write weights, configuration and tokenizer.

        Raises:
            OSError: the disk is full or failing.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if self.remote_code is not None:
            custom_object_save(self.remote_code, directory, config=self.config)
        self.config.save_pretrained(directory)
        if self.generation is not None:
            self.generation.save_pretrained(directory)
        _write_weights(self.weights, directory)
        copy_tokenizer(model, directory)


def copy_tokenizer(model: ModelConfig, target: Path) -> None:
    """Copy the run's tokenizer and chat template into `target`, file by file if the tokenizer is a directory."""
    source = resolve(model.tokenizer_path or model.path)
    if Path(source).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in sorted(Path(source).glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)
    else:
        AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code).save_pretrained(target)
    if model.chat_template is not None:
        shutil.copyfile(resolve(model.chat_template), target / "chat_template.jinja")


def _write_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    plan = split_torch_state_dict_into_shards(
        dict(weights), filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_SHARD_BYTES
    )
    for file, names in plan.filename_to_tensors.items():
        write_tensors({name: weights[name] for name in names}, directory / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _checkpoint_weights(inner: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(inner, ForeignModel):
        return inner.checkpoint_weights(weights)
    return revert_weight_conversion(inner, weights)


def _is_converted(inner: PreTrainedModel) -> bool:
    """Whether tensors of a layer are joined or split for the model's files."""
    if isinstance(inner, ForeignModel):
        return True
    conversions = getattr(inner, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(inner, add_legacy=False)
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def _parts(model: nn.Module, *, whole_layers: bool) -> Iterator[dict[str, Tensor]]:
    """Yield whole tensors with merged adapters on rank 0, and empty tensors elsewhere. Each tensor is one item; with
    `whole_layers`, those of a decoder layer are one item together."""
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    if not units:
        yield from _grouped(_own(unwrapped(model), "", set()), whole_layers)
    seen: set[int] = set()
    for name, unit in units.items():
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            # Copies, because the memory of the whole tensors is freed at the end of the context.
            copies = ((key, tensor.to("cpu", copy=True)) for key, tensor in _own(unit, name, seen))
            yield from _grouped(copies, whole_layers)


def _grouped(weights: Iterable[tuple[str, Tensor]], whole_layers: bool) -> Iterator[dict[str, Tensor]]:
    if not whole_layers:
        yield from map(lambda item: dict([item]), weights)  # a loop would hold the tensor while the next is gathered
        return
    for _, group in itertools.groupby(weights, key=lambda item: (LAYER.match(item[0]) or [None, item[0]])[1]):
        yield dict(group)


def _own(
    module: nn.Module, prefix: str, seen: set[int], adapter: Adapter | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers below `module`, except in modules that FSDP gathers separately."""
    if is_adapted(module):
        yield from _own(base_of(module), prefix, seen, adapter_of(module))
        return
    buffers = {key: buffer for key, buffer in module._buffers.items() if key not in module._non_persistent_buffers_set}
    for key, tensor in (module._parameters | buffers).items():
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            update = adapter if key == "weight" else None
            yield plain_name(f"{prefix}.{key}"), _gathered(tensor) if update is None else _merged(tensor, update)
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own(child, f"{prefix}.{name}", seen)


def _merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Return the whole weight with its adapter on rank 0, as `_gathered`."""
    return adapter.merged(_gathered(weight), _gathered(adapter.a), _gathered(adapter.b))


def _gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor on rank 0 and an empty one elsewhere. Collective if it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach() if rank() == 0 else tensor.new_empty([0] * tensor.ndim)


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)

Shapes = Mapping[str, tuple[int, ...]]


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> LiveState:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return _FlatState(model, optimizer)
    return _PlainState(model, optimizer)


class LiveState(ABC):
    """The state of one model and its optimizer. Callers must not modify the tensors."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        names = {plain_name(name): value.requires_grad for name, value in unwrapped(model).named_parameters()}
        adapted = any(is_adapter(name) for name in names)
        self._names = {
            name
            for name, trained in names.items()
            # Without an optimizer no parameter is trained, but those that were trained can be loaded.
            if (trained if optimizer is not None else is_adapter(name) or not adapted)
        }
        """Names of the parameters that are or were trained."""

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, without moments before the first step."""

    @abstractmethod
    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        """Return the tensors that `saved` must contain, with the right shape, dtype and sharding; their values are
        arbitrary. Changes nothing."""

    @abstractmethod
    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Copy the loaded tensors. `staged` has this rank's part of each tensor in `wanted`, except empty parts."""


class _PlainState(LiveState):
    """Parameters are whole tensors (one process, DDP) or DTensors (FSDP2), and so are their moments."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(model, optimizer)
        parameters = {plain_name(name): value for name, value in unwrapped(model).named_parameters()}
        self._trained = {name: parameters[name] for name in parameters if name in self._names}

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self._trained.items()}
        if self._optimizer is not None:
            for name, parameter in self._trained.items():
                for moment, tensor in self._optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{name}.{moment}"] = tensor
        return tensors

    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self._trained.items()}
        moments = {name.rpartition(".")[2]: shape for name, shape in saved.items() if name.startswith("optimizer.")}
        for name, parameter in self._trained.items() if self._optimizer is not None else ():
            for moment, shape in moments.items():
                stored = f"optimizer.{name}.{moment}"
                # The step count is a scalar; every other moment has the shape of the parameter.
                tensors[stored] = torch.zeros((), dtype=torch.float32) if shape == () else parameter
        return tensors

    @torch.no_grad()
    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained.items():
            if (weight := staged.get(f"model.{name}")) is not None:
                local_part(parameter).copy_(weight)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, parameter in self._trained.items():
            prefix = f"optimizer.{name}."
            for stored in (stored for stored in wanted if stored.startswith(prefix)):
                scalar = wanted[stored] is not parameter
                self._optimizer.state[parameter][stored.removeprefix(prefix)] = (
                    staged[stored].to(self._count_device(parameter)) if scalar else _like(parameter, staged.get(stored))
                )

    def _count_device(self, parameter: Tensor) -> torch.device:
        """Return the device on which the optimizer stores a parameter's step count."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                on_device = group.get("fused") or group.get("capturable")
                return local_part(parameter).device if on_device else torch.device("cpu")
        return torch.device("cpu")


class _FlatState(LiveState):
    """Parameters are FSDP1's flat parameters, which torch's functions convert to DTensors if FSDP has a mesh."""

    def tensors(self) -> dict[str, Tensor]:
        return self._weights() | (self._moments() if self._stepped else {})

    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        if self._optimizer is None or not any(name.startswith("optimizer.") for name in saved):
            return self._weights()
        fresh = not self._stepped
        try:
            return self._weights() | self._moments()
        finally:
            if fresh:  # torch takes a step of size 0 to create the moments
                self._optimizer.state.clear()

    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        for name, tensor in wanted.items():
            if name in staged:
                local_part(tensor).copy_(staged[name])
        weights: dict[str, Any] = {
            name.removeprefix("model."): wanted[name] for name in wanted if name.startswith("model.")
        }
        with _quiet():
            set_model_state_dict(self._model, weights, options=TRAINED)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        if len(weights) == len(wanted):
            return
        state: Any = get_optimizer_state_dict(self._model, self._optimizer, options=TRAINED)
        for name, moments in state["state"].items():
            state["state"][name] = {moment: wanted[f"optimizer.{name}.{moment}"] for moment in moments}
        set_optimizer_state_dict(self._model, self._optimizer, state, options=TRAINED)

    @property
    def _stepped(self) -> bool:
        return self._optimizer is not None and bool(self._optimizer.state)

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Any] = get_model_state_dict(self._model)
        return {f"model.{name}": tensor for name, tensor in weights.items() if name in self._names}

    def _moments(self) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: Any = get_optimizer_state_dict(self._model, self._optimizer, options=TRAINED)["state"]
        return {
            f"optimizer.{name}.{moment}": tensor
            for name, moments in state.items()
            for moment, tensor in moments.items()
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about weights that are left out on purpose: frozen ones, and second names of tied weights."""
    noisy = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


def _like(parameter: Tensor, part: Tensor | None) -> Tensor:
    """Return a tensor sharded and placed like `parameter`, with the values of `part` if this rank has a part."""
    tensor = torch.zeros_like(parameter, requires_grad=False)
    if part is not None:
        local_part(tensor).copy_(part)
    return tensor
