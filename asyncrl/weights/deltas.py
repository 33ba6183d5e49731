"""Versions as changes to the version before (`weight_sync.max_deltas`), for links that are slow.

Every chunk names all files that it consists of: a whole chunk, and the changes to it, oldest first. So a replica can
read any version, and needs only the files that follow the newest version of the chunk on its
node. The result is a file on the node, which its engines map; they keep it until they have loaded the next version.

The Trainer has a copy of the last version in memory, to find the changes. A new Trainer has none, so it begins with
whole chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from asyncrl.core.ports import WeightBucket
from asyncrl.weights.changes import apply_changes, find_changes
from asyncrl.weights.checksums import MODULUS, bit_sum
from asyncrl.weights.disk import DiskChunk, node_copy, read_tensors, write_tensors


class DeltaChunk(NamedTuple):
    """Some tensors of a version: a whole chunk, and the changes to it that later versions have made."""

    whole: DiskChunk
    deltas: tuple[DiskChunk, ...]
    bit_sum: int
    """Sum of the bits of all tensors, modulo 2**64."""
    sent_bytes: int
    """Bytes that were written for this version."""

    @property
    def files(self) -> tuple[DiskChunk, ...]:
        return (self.whole, *self.deltas)

    def get(self) -> Mapping[str, NDArray[Any]]:
        """Map the tensors. Blocking. The arrays are read-only.

        Raises:
            OSError: a file is missing or cannot be read, or the node has no room for the tensors.
            ValueError: a file is damaged.
        """
        return node_copy(self.deltas[-1].name, self._write) if self.deltas else self.whole.get()

    def _write(self, path: Path) -> None:
        """Write the tensors, from the newest copy on this node, unless it is damaged; otherwise from all files."""
        tensors: WeightBucket | None = None
        copies = [path.with_name(file.name) for file in self.files[:-1]]
        newest = max((index for index, copy in enumerate(copies) if copy.exists()), default=None)
        if newest is not None:
            with suppress(FileNotFoundError, ValueError, LookupError, TypeError):  # it is deleted or damaged
                tensors = self._patched(read_tensors(copies[newest]), self.deltas[newest:])
        write_tensors(path, tensors or self._patched(self.whole.get(in_memory=True), self.deltas))

    def _patched(self, base: WeightBucket, deltas: Sequence[DiskChunk]) -> WeightBucket:
        tensors = {name: array.copy() for name, array in base.items()}
        for delta in deltas:
            apply_changes(tensors, delta.get(in_memory=True))
        if _sum(tensors) != self.bit_sum:
            raise ValueError(f"{self.deltas[-1].url}: the changes do not result in the weights that were published")
        return tensors


_Layout: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, type and shape of each tensor of a bucket."""


class _Written(NamedTuple):
    chunk: DeltaChunk
    tensors: WeightBucket
    delta_bytes: int
    """Bytes of all its changes."""


class DeltaWriter:
    """Writes the buckets of a Trainer's versions, one after another."""

    def __init__(self, directory: str, max_deltas: int) -> None:
        self._directory, self._max_deltas = directory, max_deltas
        self._last: dict[_Layout, _Written] = {}
        """The last version of each bucket."""

    def put(self, bucket: WeightBucket) -> DeltaChunk:
        """Write what has changed in a bucket, or the whole bucket if there is no earlier version of it, if `max_deltas`
        changes follow its whole chunk, or if they would be larger together than the bucket. Blocking.

        Raises:
            OSError: the filesystem is full or failing.
        """
        tensors = {name: array.copy() for name, array in bucket.items()}  # the arrays may be the live weights
        layout = tuple((name, array.dtype.str, array.shape) for name, array in tensors.items())
        last = self._last.pop(layout, None)
        self._last[layout] = written = self._write(tensors, last)
        return written.chunk

    def _write(self, tensors: WeightBucket, last: _Written | None) -> _Written:
        total, size = _sum(tensors), _num_bytes(tensors)
        if last is not None and len(last.chunk.deltas) < self._max_deltas:
            changes = find_changes(last.tensors, tensors)
            sent = _num_bytes(changes)
            if last.delta_bytes + sent <= size:
                deltas = (DiskChunk.put(self._directory, changes),) if changes else ()
                chunk = DeltaChunk(last.chunk.whole, last.chunk.deltas + deltas, total, sent)
                return _Written(chunk, tensors, last.delta_bytes + sent)
        return _Written(DeltaChunk(DiskChunk.put(self._directory, tensors), (), total, size), tensors, 0)


def _sum(tensors: WeightBucket) -> int:
    return sum(map(bit_sum, tensors.values())) % MODULUS


def _num_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())
