"""Storage of torch.distributed.checkpoint: one safetensors file for each rank, and an index in JSON.

index.json                dtype and shape of each tensor, and the file of each of its parts
rank_NNNNN.safetensors    `name[offsets]`: a part; CRC-32 of each part in the file's metadata

DCP's own `.metadata` is a pickle and is neither written nor read. Its Hugging Face storage has no index, so that a lost
shard would pass for a smaller tensor or leave part of it unread.
"""

from __future__ import annotations

import errno
import json
import math
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from asyncrl.core.failures import BugError, ConfigError

INDEX = "index.json"
CHECKSUMS = "crc32"


class Part(NamedTuple):
    """A box of a tensor, in a file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Entry(NamedTuple):
    """A whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Index = Mapping[str, Entry]


def damaged(path: Path, detail: object) -> ConfigError:
    """Return an error that names the damaged file, the consequence and the fix."""
    return ConfigError(
        f"{path}: the checkpoint is damaged ({detail}), so the run cannot go on from it; nothing was loaded. If the "
        "run has an earlier one, delete this one to go on from that; else start anew with resume=none"
    )


class ShardWriter(StorageWriter):
    """Copies this rank's parts to CPU when DCP hands them over; `flush` writes them, and may do so in another thread.

    `flush` raises OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = ""
        self._staged: dict[str, Tensor] = {}
        self._index: dict[str, Any] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._staged, self._index = {}, None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            if item.tensor_data is None:
                raise BugError(f"{item.index.fqn} is not a tensor; only tensors are stored")
            chunk = item.tensor_data.chunk
            part = Part(plan.storage_data, tuple(chunk.offsets), tuple(chunk.sizes))
            if math.prod(part.sizes) == 0:
                continue  # a rank may hold nothing of a small tensor
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, Tensor):
                raise BugError(f"{item.index.fqn} is not a tensor; only tensors are stored")
            # A copy even of CPU tensors: training goes on while they are written.
            staged = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._staged[_key(item.index.fqn, part.offsets)] = staged
            results.append(WriteResult(index=item.index, size_in_bytes=staged.nbytes, storage_data=part))
        self._file = plan.storage_data
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[Part]] = {}
        for result in (result for of_rank in results for result in of_rank):
            parts.setdefault(result.index.fqn, []).append(result.storage_data)
        self._index = {
            name: {
                "dtype": str(kind.properties.dtype).removeprefix("torch."),
                "shape": list(kind.size),
                "parts": [part._asdict() for part in parts.get(name, [])],
            }
            for name, kind in metadata.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata)
        }

    def flush(self) -> None:
        """Write this rank's file, and on the coordinating rank the index."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._staged:
            checksums = {key: _checksum(tensor) for key, tensor in self._staged.items()}
            write_tensors(self._staged, self._directory / self._file, {CHECKSUMS: json.dumps(checksums)})
        if self._index is not None:
            write_json({"tensors": self._index}, self._directory / INDEX)
        self._staged = {}


class ShardReader(StorageReader):
    """Reads what `ShardWriter` wrote, checking every part it touches.

    Raises (from `read_data`):
        ConfigError: a file is missing or damaged.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory = directory
        self._index = index

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
                    size=torch.Size(entry.shape),
                    chunks=[ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.parts],
                )
                for name, entry in self._index.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._file_of(item.storage_index), []).append(item)
        for file, items in by_file.items():
            with _ShardFile.open(self._directory / file) as shard:
                for item in items:
                    part = shard.part(_key(item.storage_index.fqn, item.storage_index.offset or ()))
                    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        part = part.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item)
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _file_of(self, where: MetadataIndex) -> str:
        return next(p.file for p in self._index[where.fqn].parts if p.offsets == tuple(where.offset or ()))


class _ShardFile:
    """A safetensors file whose parts are checked as they are read, each of them once."""

    def __init__(self, path: Path, file: Any, checksums: Mapping[str, int]) -> None:
        self._path, self._file, self._checksums = path, file, checksums
        self._read: tuple[str, Tensor] | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        try:
            file = safe_open(path, framework="pt")
            return cls(path, file, json.loads((file.metadata() or {})[CHECKSUMS]))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise damaged(path, error) from None

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def part(self, key: str) -> Tensor:
        if self._read is None or self._read[0] != key:
            try:
                tensor = self._file.get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise damaged(self._path, error) from None
            if self._checksums.get(key) != _checksum(tensor):
                raise damaged(self._path, f"the checksum of {key} does not fit")
            self._read = (key, tensor)
        return self._read[1]


def read_index(directory: Path) -> Index:
    """The index, with every tensor's parts adding up to the whole.

    Raises:
        ConfigError: it is missing or damaged.
    """
    path = directory / INDEX
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        index = {
            name: Entry(
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(Part(p["file"], tuple(p["offsets"]), tuple(p["sizes"])) for p in entry["parts"]),
            )
            for name, entry in content["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error) from None
    for name, entry in index.items():
        if sum(math.prod(part.sizes) for part in entry.parts) != math.prod(entry.shape):
            raise damaged(path, f"the parts of {name} do not add up to its shape {entry.shape}")
        if not isinstance(getattr(torch, entry.dtype, None), torch.dtype):
            raise damaged(path, f"{name} has dtype {entry.dtype}")
        if any(Path(part.file).name != part.file for part in entry.parts):
            raise damaged(path, f"{name} lies outside of the checkpoint")
    return index


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, with the permissions of the umask. Raises OSError, as writing any other file does."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}))
        path.chmod(mode)  # safetensors replaces it by a file that only its owner may read
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Raises OSError, with the file's name."""
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        error.filename = str(path)  # a failing write, unlike a failing open, does not know it
        raise


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}[{','.join(map(str, offsets))}]"


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
