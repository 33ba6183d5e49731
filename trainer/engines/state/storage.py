"""The sharded tensors of a checkpoint: one safetensors file for each rank, and an index in JSON.

index.json                dtype and shape of each tensor, and the file of each of its parts
rank_NNNNN.safetensors    `name[offsets]`: a part; CRC-32 of each part in the file's metadata

The storages of torch.distributed.checkpoint are not used: one keeps its metadata in a pickle, and the Hugging Face one
has no index, so the loss of a shard would not be noticed: a tensor would seem smaller, or be read only in part.
"""

from __future__ import annotations

import errno
import json
import math
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.core.failures import ConfigError
from asyncrl.core.text import checked_name
from trainer.engines.compute.optim import local_part

INDEX = "index.json"
CHECKSUMS = "crc32"


class TensorBox(NamedTuple):
    """The part of a tensor that one rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredPart(NamedTuple):
    """A box of a tensor, stored in a file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


Index = Mapping[str, TensorEntry]


def damaged(path: Path, detail: object) -> ConfigError:
    """Return an error that names the damaged file, the consequence and the fix."""
    return ConfigError(
        f"{path}: the checkpoint is damaged ({detail}), so the run cannot continue from it; nothing was loaded. If "
        "the run has an earlier checkpoint, delete this one to continue from that; otherwise use resume=none"
    )


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def box_of(tensor: Tensor) -> TensorBox:
    """Return the part of `tensor` that this rank holds, which is all of it unless it is a DTensor."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return TensorBox(tuple(chunk.offsets), tuple(chunk.sizes))
    return TensorBox((0,) * tensor.ndim, tuple(tensor.shape))


class ShardWriter:
    """Copies this rank's parts to CPU, and then writes the copies, perhaps in another thread.

    If several ranks hold a part, one of them writes it; the ranks take turns.

    Args:
        boxes: for each rank, the result of `box_of` for each tensor.
    """

    def __init__(self, directory: Path, boxes: Sequence[Mapping[str, TensorBox]], rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._parts = {name: _shared_out(name, number, boxes) for number, name in enumerate(boxes[0])}
        self._staged: dict[str, Tensor] = {}
        self._index: dict[str, Any] = {}

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of `tensors`, even those that are on CPU, because training continues meanwhile."""
        mine = _file(self._rank)
        for name, tensor in tensors.items():
            for part in self._parts[name]:
                if part.file == mine:
                    copy = local_part(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                    self._staged[_key(name, part.offsets)] = copy
            self._index[name] = {
                "dtype": dtype_name(tensor),
                "shape": list(tensor.shape),
                "parts": [part._asdict() for part in self._parts[name]],
            }

    def flush(self) -> None:
        """Write this rank's file, and on rank 0 the index.

        Raises:
            OSError: the disk is full or failing.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._staged:
            checksums = {key: _checksum(tensor) for key, tensor in self._staged.items()}
            write_tensors(self._staged, self._directory / _file(self._rank), {CHECKSUMS: json.dumps(checksums)})
        if self._rank == 0:
            write_json({"tensors": self._index}, self._directory / INDEX)
        self._staged = {}


def read_shards(directory: Path, index: Index, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read this rank's part of each tensor in `wanted` into a new tensor on CPU, and check each part that is read.
    Parts without elements are left out.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    boxes = {name: box for name, tensor in wanted.items() if math.prod((box := box_of(tensor)).sizes)}
    staged = {name: torch.empty(box.sizes, dtype=wanted[name].dtype) for name, box in boxes.items()}
    needed: dict[str, list[tuple[str, StoredPart]]] = {}
    for name, box in boxes.items():
        for part in index[name].parts:
            if all(begin < end for begin, end in _overlap(box, part)):
                needed.setdefault(part.file, []).append((name, part))
    for file, parts in needed.items():
        path = directory / file
        try:
            with safe_open(path, framework="pt") as shard:
                checksums = json.loads((shard.metadata() or {})[CHECKSUMS])
                for name, part in parts:
                    key = _key(name, part.offsets)
                    tensor = shard.get_tensor(key)
                    if checksums.get(key) != _checksum(tensor):
                        raise ValueError(f"the checksum of {key} does not match")
                    shared = _overlap(boxes[name], part)
                    staged[name][_slices(shared, boxes[name].offsets)] = tensor[_slices(shared, part.offsets)]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise damaged(path, error) from None
    return staged


def read_index(directory: Path) -> Index:
    """Read the index, and check that the parts of every tensor add up to the whole.

    Raises:
        ConfigError: it is missing or damaged.
    """
    path = directory / INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        index = {
            name: TensorEntry(
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(
                    StoredPart(checked_name(p["file"]), tuple(p["offsets"]), tuple(p["sizes"])) for p in entry["parts"]
                ),
            )
            for name, entry in content["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from None
    for name, entry in index.items():
        if sum(math.prod(part.sizes) for part in entry.parts) != math.prod(entry.shape):
            raise damaged(path, f"the parts of {name} do not add up to its shape {entry.shape}")
        if not isinstance(getattr(torch, entry.dtype, None), torch.dtype):
            raise damaged(path, f"{name} has dtype {entry.dtype}")
    return index


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with permissions by the umask. Raises OSError, as writing any other file does."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}))
        path.chmod(mode)  # safetensors replaces the file by one that only its owner may read
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file. Raises OSError, which names the file."""
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # the error of a write, unlike that of an open, does not name the file
        raise


def _shared_out(name: str, number: int, boxes: Sequence[Mapping[str, TensorBox]]) -> list[StoredPart]:
    """Return the distinct parts of a tensor, each in the file of one of the ranks that hold it."""
    holders: dict[TensorBox, list[int]] = {}
    for rank, held in enumerate(boxes):
        if math.prod(held[name].sizes):  # a rank may hold no part of a small tensor
            holders.setdefault(held[name], []).append(rank)
    return [StoredPart(_file(ranks[number % len(ranks)]), *box) for box, ranks in holders.items()]


def _overlap(box: TensorBox, part: StoredPart) -> list[tuple[int, int]]:
    """Return where the intersection begins and ends in each dimension of the whole tensor."""
    return [
        (max(first, second), min(first + size, second + other))
        for first, size, second, other in zip(*box, part.offsets, part.sizes, strict=True)
    ]


def _slices(edges: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(edges, offsets, strict=True))


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}[{','.join(map(str, offsets))}]"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
