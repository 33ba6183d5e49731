"""Published arrays as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncrl.core.ports import WeightBucket


def as_tensors(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the arrays as tensors that share their read-only memory. Arrays of uint16 contain bfloat16 values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in bucket.items():
            tensor = torch.from_numpy(array)
            yield name, tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
