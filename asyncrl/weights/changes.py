"""The difference between two versions of the same tensors, exact to the last bit. Pure.

After a step with a small learning rate, few bfloat16 weights differ, but they are spread over all tensors: at a share
of 1 %, half of all blocks of 64 weights contain one. So each changed weight is listed, by the distance to the previous
one. A tensor in which too many weights have changed is listed whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.ports import WeightBucket

Changes: TypeAlias = Mapping[str, NDArray[Any]]
"""By the name of each tensor that has changed: the new tensor; or its new weights, and under the name with `GAPS` the
distances of their positions in the flat tensor, the first one from 0, as the bits of uint16."""
GAPS = "@gaps"
MAX_GAP = 2**16 - 1
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def find_changes(base: WeightBucket, new: WeightBucket) -> dict[str, NDArray[Any]]:
    """Return the changes that turn `base` into `new`, which has the same names, types and shapes."""
    changes: dict[str, NDArray[Any]] = {}
    for name, tensor in new.items():
        changed = _bits(tensor) != _bits(base[name])
        if not changed.any():
            continue
        changed[::MAX_GAP] = True  # so that all distances fit
        if np.count_nonzero(changed) * (2 + tensor.itemsize) >= tensor.nbytes:
            changes[name] = tensor
            continue
        positions = np.flatnonzero(changed)
        changes[name] = tensor.reshape(-1)[positions]
        changes[name + GAPS] = np.diff(positions, prepend=0).astype(np.uint16).view(np.int16)
    return changes


def apply_changes(tensors: dict[str, NDArray[Any]], changes: Changes) -> None:
    """Change the tensors, which are contiguous and writable, in place."""
    for name, values in changes.items():
        if name.endswith(GAPS):
            continue
        if (gaps := changes.get(name + GAPS)) is None:
            tensors[name][...] = values  # not the array itself, which is read-only: later changes follow
        else:
            tensors[name].reshape(-1)[np.cumsum(gaps.view(np.uint16), dtype=np.int64)] = values


def _bits(tensor: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(tensor).reshape(-1).view(_BITS[tensor.itemsize])
