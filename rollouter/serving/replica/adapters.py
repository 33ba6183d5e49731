"""LoRA adapters as weights versions of a replica (`weight_sync.lora=adapter`).

    write the files (while decoding) ▸ add_lora, update_weight_version (in the pause) ▸ checksums ▸ delete the files

vLLM loads an adapter from a directory in peft's format, through its public `add_lora`, and adds it to the weights of
the model's files in every layer. Every version replaces the adapter of the previous one, under the same number. So
requests that stay in the engine during the pause (`keep`) continue with the new adapter, just as they continue with new
full weights, while a new number for each version would leave them with the old adapter, although vLLM stamps their
tokens with the new version. The prefix cache does not mix versions: the keys of vLLM's blocks contain the name and the
path of the adapter, which are new for each version, besides the salt of the request.

vLLM reads the files only in `add_lora`, so they exist for the time of an update, in memory where the machine has
`/dev/shm`. Their directory has a random name, so no other user can have created it before. A replica that is killed
during an update leaves its files; the replicas that start an hour later or more delete them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from numpy.typing import NDArray
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from asyncrl.core.failures import BugError
from asyncrl.core.ports import WeightsVersion
from asyncrl.weights.disk import write_tensors
from asyncrl.weights.transport import StoredChunk

ADAPTER_ID = 1
"""vLLM's number of the only adapter that an engine has."""
_MEMORY = Path("/dev/shm")
_PREFIX = "asyncrl-adapter-"
LEFTOVER_S = 3600.0
"""Age of files, beyond the longest update, that belong to a killed replica."""


def new_adapter(weights_version: WeightsVersion) -> LoRARequest:
    """Return what requests name to use the adapter of this version. Its directory does not exist yet."""
    lineage, version = weights_version
    return LoRARequest(f"weights-{lineage}-{version}", ADAPTER_ID, str(_folder() / f"{_PREFIX}{uuid4().hex}"))


def replacing(adapter: LoRARequest) -> LoRARequest:
    """Return the adapter for `add_lora`, to be loaded in place of the one that the engine has."""
    return LoRARequest(adapter.lora_name, adapter.lora_int_id, adapter.lora_path, load_inplace=True)


def write_adapter(adapter: LoRARequest, handles: Sequence[Any], limit_s: float) -> None:
    """Write the files of an adapter whose tensors have these handles of the weight store. Blocking.

    Raises:
        BugError: the version is not an adapter.
        TimeoutError: the bytes were not read within `limit_s`; nothing is written.
        OSError, Exception: the bytes cannot be read, or the files cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {}
    until = time.monotonic() + limit_s
    for handle in handles:
        left_s = max(0.0, until - time.monotonic())
        tensors |= handle.get() if isinstance(handle, StoredChunk) else ray.get(handle, timeout=left_s)
    if time.monotonic() > until:  # the update has been given up, and its files may have been deleted
        raise TimeoutError(f"{adapter.lora_name} was not read within {limit_s:g} s")
    folder = Path(adapter.lora_path)
    folder.mkdir(mode=0o700)
    (folder / "adapter_config.json").write_text(json.dumps(_peft_config(tensors)), encoding="utf-8")
    write_tensors(folder / "adapter_model.safetensors", tensors)


def delete_files(adapter: LoRARequest) -> None:
    """Delete the files of an adapter, if there are any."""
    shutil.rmtree(adapter.lora_path, ignore_errors=True)


def delete_leftovers(older_than_s: float) -> None:
    """Delete the files that killed replicas have left on this machine. Blocking."""
    for directory in _folder().glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another replica deletes it, or it belongs to another user
            if time.time() - directory.stat().st_mtime > older_than_s:
                shutil.rmtree(directory)


def _folder() -> Path:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _peft_config(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json. B includes the scale (`trainer.engines.state.adapters`)."""
    ranks = {array.shape[0] for name, array in tensors.items() if name.endswith(".lora_A.weight")}
    if len(ranks) != 1 or not all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors):
        raise BugError(
            "the engines expect versions that consist of LoRA adapters of one rank (weight_sync.lora=adapter), and the "
            f"published one has {len(tensors)} tensors, such as {next(iter(tensors), 'none')}"
        )
    (rank,) = ranks
    layers = sorted({name.split(".")[-3] for name in tensors})
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}


def held_tensors(model: torch.nn.Module, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parts of the loaded adapter that this tensor-parallel rank counts, with the names of their layers.

    The parts of all ranks together are the published tensors and zeros: vLLM pads A and B to the largest rank. A layer
    that splits its outputs has all of A and a part of B on each rank; one that splits its inputs has a part of A and
    all of B. What several ranks have is counted by one of them, as for the weights of the layers.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        base, is_split = layer.base_layer, layer.tp_size > 1
        if rank == 0 or (is_split and isinstance(base, RowParallelLinear)):
            yield from ((name, part) for part in layer.lora_a_stacked)
        if rank == 0 or (is_split and isinstance(base, ColumnParallelLinear)):
            parts: Sequence[torch.Tensor] = layer.lora_b_stacked
            if isinstance(base, QKVParallelLinear) and rank % base.num_kv_head_replicas:
                # Its keys and values are those of an earlier rank, which counts them.
                parts = [parts[0][..., : base.num_heads * base.head_size, :]]
            yield from ((name, part) for part in parts)
