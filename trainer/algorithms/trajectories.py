"""Which rows of a batch are one trajectory. Pure torch.

Most trajectories are one row. Where the chat template rewrote history, a trajectory is several, neighbours and in
order: each of its sampled tokens is in one of them, and its reward is that of all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """`B` rows that are `T` trajectories. Where each row is one, sums over rows are exact copies."""

    number: Tensor
    """int64 `[B]`: each row's trajectory, from 0."""
    first: Tensor
    """int64 `[T]`: the first row of each."""
    last: Tensor
    """int64 `[T]`: the last row of each."""
    continuing: tuple[int, ...]
    """Rows that are not the first of their trajectory, ascending."""

    @classmethod
    def of(cls, labels: Tensor) -> Self:
        """From int64 `[B]`: neighbours with one label are rows of one trajectory (`trajectories` of
        `trainer.tensors`)."""
        _, number, counts = torch.unique_consecutive(labels, return_inverse=True, return_counts=True)
        last = counts.cumsum(0) - 1
        continuing = (number.diff() == 0).nonzero()[:, 0] + 1
        return cls(number, last - counts + 1, last, tuple(continuing.tolist()))

    def __len__(self) -> int:
        """`T`."""
        return len(self.first)

    @property
    def forked(self) -> bool:
        """Some are of several rows."""
        return bool(self.continuing)

    def sum(self, values: Tensor) -> Tensor:
        """`[B]` → `[T]`."""
        return values.new_zeros(len(self)).index_add(0, self.number, values)

    def spread(self, values: Tensor) -> Tensor:
        """`[T]` → `[B]`: each row gets its trajectory's."""
        return values[self.number]

    def so_far(self, values: Tensor) -> Tensor:
        """`[B]` → `[B]`: sum over the rows of the trajectory up to this one, which is included."""
        sums = values.clone()
        for row in self.continuing:
            sums[row] += sums[row - 1]
        return sums

    def later(self, values: Tensor) -> Tensor:
        """`[B]` → `[B]`: sum over the rows of the trajectory behind this one."""
        sums = torch.zeros_like(values)
        for row in reversed(self.continuing):
            sums[row - 1] = sums[row] + values[row]
        return sums
