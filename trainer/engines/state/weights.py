"""Whole weights out of a model on any number of ranks, under their Hugging Face names; and a directory made of them."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from asyncrl.assets import resolve
from asyncrl.config.schema import ModelConfig
from trainer.engine.dist import rank
from trainer.engine.foreign import ForeignModel
from trainer.engine.lora import Adapter, adapter_of, base_of, is_adapted
from trainer.engine.optim import local_part
from trainer.engine.storage import write_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WRAPPERS = {"", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
LAYER = re.compile(r"^(.*?\.\d+)\.")
"""`model.layers.3` of `model.layers.3.mlp.experts.0.up_proj.weight`."""
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


def full_weights(
    model: nn.Module, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and whole, contiguous CPU tensors on rank 0; empty tensors elsewhere. Collective: run it to its
    end on every rank.

    Adapters are merged in, into copies. A tied head appears once, under the embedding's name. No rank holds more than
    one decoder layer of whole tensors on its device. Unsharded float32 tensors on CPU are the live weights.
    """
    inner = unwrapped(model)
    for weights in _layers(model):
        if rank() != 0:
            yield from weights.items()
            continue
        for name, tensor in _checkpoint_weights(inner, weights).items():
            if tensor.is_floating_point():
                tensor = tensor.to(DTYPES[dtype])
            yield name, tensor.to("cpu").contiguous()


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model itself, whatever makes it run on several ranks."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel | FullyShardedDataParallel) or "_orig_mod" in inner._modules:
        inner = inner._modules.get("_orig_mod") or inner.module
    return inner


def plain_name(name: str) -> str:
    """A parameter's name in the unwrapped model, of its name within `unwrapped(model)` or an FSDP model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class HfExport:
    """A model on its way into a directory that `from_pretrained` loads. On rank 0: CPU copies that nobody changes."""

    weights: Mapping[str, Tensor]
    config: PretrainedConfig
    generation: GenerationConfig | None
    remote_code: PreTrainedModel | None
    """The model, if its directory brought its code along."""

    @classmethod
    def stage(cls, model: nn.Module) -> HfExport | None:
        """Collective. None on all ranks but 0."""
        inner = unwrapped(model)
        owned = itertools.chain(model.parameters(), model.buffers())
        live = {local_part(tensor).untyped_storage().data_ptr() for tensor in owned}
        weights = {
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor
            for name, tensor in full_weights(model)
        }
        if rank() != 0:
            return None
        config = copy.deepcopy(inner.config)
        if not isinstance(inner, ForeignModel):
            config.architectures = [type(inner).__name__.removeprefix("FSDP")]
        config.dtype = "float32"
        generation = copy.deepcopy(inner.generation_config) if inner.can_generate() else None
        return cls(weights, config, generation, inner if inner.is_remote_code() else None)

    def write(self, directory: Path, model: ModelConfig) -> None:
        """Weights, configuration and tokenizer.

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
    """The run's tokenizer and chat template into `target`, file by file when it is a directory."""
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


def _layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Whole tensors, adapters merged, on rank 0 and empty ones elsewhere: one decoder layer after another, and what is
    outside of layers one by one."""
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    if not units:
        yield from _grouped(_own(unwrapped(model), "", set()))
    seen: set[int] = set()
    for name, unit in units.items():
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            # Copies: the whole tensors lose their memory with the context.
            weights = [(key, tensor.to("cpu", copy=True)) for key, tensor in _own(unit, name, seen)]
        yield from _grouped(weights)


def _grouped(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for _, group in itertools.groupby(weights, key=lambda item: (LAYER.match(item[0]) or [None, item[0]])[1]):
        yield dict(group)


def _own(
    module: nn.Module, prefix: str, seen: set[int], adapter: Adapter | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers below `module`, down to modules that FSDP gathers by themselves."""
    if is_adapted(module):
        yield from _own(base_of(module), prefix, seen, adapter_of(module))
        return
    buffers = {key: buffer for key, buffer in module._buffers.items() if key not in module._non_persistent_buffers_set}
    for key, tensor in (module._parameters | buffers).items():
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            weight = _gathered(tensor)
            if adapter is not None and key == "weight":
                weight = adapter.merged(weight, _gathered(adapter.a), _gathered(adapter.b))
            yield plain_name(f"{prefix}.{key}"), weight
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own(child, f"{prefix}.{name}", seen)


def _gathered(tensor: Tensor) -> Tensor:
    """The whole of it on rank 0, nothing elsewhere. Collective if it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach() if rank() == 0 else tensor.new_empty([0] * tensor.ndim)
