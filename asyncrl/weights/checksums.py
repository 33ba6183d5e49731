"""Checksums of weights that do not depend on the engine's memory layout. Pure.

An engine fuses matrices (q, k, v into one; gate and up into one), pads vocabularies with zeros and shards over ranks:
its tensors cannot be compared with the published ones name by name. The set of numbers stays the same: the checksum
of a layer group is the sum of the raw bits of all its elements, modulo 2**64. A sum does not depend on the order, so
fusing, zero padding and sharding do not change it. It detects stale, missing, truncated and doubled tensors, but not
a permutation inside a group.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

MODULUS = 1 << 64
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
"""The name of a model's head, and the end of that of its embeddings."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def layer_group(name: str) -> str:
    """Return the group of a parameter: `layers.N`, or `other` (embeddings, final norm, head)."""
    match = _LAYER.search(name)
    return f"layers.{match[1]}" if match else "other"


def bit_sum(array: NDArray[np.generic]) -> int:
    """Return the sum of the elements' raw bits, read as signed integers of their width, modulo 2**64."""
    bits = np.ascontiguousarray(array).reshape(-1).view(_BITS[array.dtype.itemsize])
    return int(bits.sum(dtype=np.int64)) % MODULUS


class WeightChecksums:
    """The checksums of a model whose tensors are added part by part, in any order.

    A head tied to the embeddings (bitwise equal) counts once, as in the engine.
    """

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._embeddings: list[_Content] = []
        self._head: _Content | None = None

    def add(self, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Add whole tensors, each of them once."""
        for name, array in tensors.items():
            value = bit_sum(array)
            if name == HEAD:
                self._head = _Content.of(array, value)
                continue
            if name.endswith(EMBEDDINGS):
                self._embeddings.append(_Content.of(array, value))
            add(self._sums, layer_group(name), value)

    def by_group(self) -> dict[str, int]:
        """Return the checksum of each layer group of the tensors so far."""
        sums = dict(self._sums)
        if self._head is not None and self._embeddings != [self._head]:
            add(sums, layer_group(HEAD), self._head.bit_sum)
        return sums


class _Content(NamedTuple):
    """Values that are equal for two tensors with the same bits, and practically never for other ones."""

    shape: tuple[int, ...]
    bit_sum: int
    crc: int

    @classmethod
    def of(cls, array: NDArray[np.generic], bit_sum: int) -> Self:
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(array.shape, bit_sum, zlib.crc32(bits.data))


def add(sums: dict[str, int], group: str, value: int) -> None:
    """Add `value` to the group's checksum, in place."""
    sums[group] = (sums.get(group, 0) + value) % MODULUS


def merge(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the checksums of a model from those of its parts (the ranks of an engine)."""
    sums: dict[str, int] = {}
    for part in parts:
        for group, value in part.items():
            add(sums, group, value)
    return sums


def differing_groups(published: Mapping[str, int], served: Mapping[str, int]) -> list[str]:
    """Return the groups whose checksums differ or that only one side has."""
    return sorted(
        group for group in published.keys() | served.keys() if published.get(group, 0) != served.get(group, 0)
    )
