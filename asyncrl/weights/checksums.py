"""Checksums of weights that do not depend on the engine's memory layout. Pure.

An engine fuses matrices (q, k, v into one; gate and up into one), pads vocabularies with zeros and shards over ranks:
its tensors cannot be compared with the published ones name by name. The set of numbers stays the same: the checksum
of a layer group is the sum of the raw bits of all its elements, modulo 2**64. A sum does not depend on the order, so
fusing, zero padding and sharding do not change it. It detects stale, missing, truncated and doubled tensors, but not
a permutation inside a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

MODULUS = 1 << 64
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


def group_checksums(tensors: Mapping[str, NDArray[np.generic]]) -> dict[str, int]:
    """Return the checksum by layer group. A head tied to the embeddings (bitwise equal) counts once, as in the
    engine."""
    tied = tied_names(tensors)
    sums: dict[str, int] = {}
    for name, array in tensors.items():
        if name not in tied:
            add(sums, layer_group(name), bit_sum(array))
    return sums


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


def tied_names(tensors: Mapping[str, NDArray[np.generic]]) -> set[str]:
    """Return `lm_head.weight` if it is tied to the input embedding."""
    head = tensors.get("lm_head.weight")
    embeddings = [array for name, array in tensors.items() if name.endswith("embed_tokens.weight")]
    if head is None or len(embeddings) != 1 or head.shape != embeddings[0].shape:
        return set()
    same = np.shares_memory(head, embeddings[0]) or np.array_equal(
        head.view(_BITS[head.dtype.itemsize]), embeddings[0].view(_BITS[head.dtype.itemsize])
    )
    return {"lm_head.weight"} if same else set()
