"""Sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): `P` ranks share each packed row.

Every rank computes `T / P` neighbouring positions through all layers. Attention alone needs whole sequences: an
all-to-all trades positions for heads, so that each rank attends over all `T` positions with `H / P` heads, and another
trades back. Scores are gathered, so that every rank of the group computes the same, whole loss.

Gradients: each rank's backward pass gives the part that went through its own positions (and, in attention, its own
heads). Summed over the group, and over all data ranks, that is the gradient of one process; no rank divides by `P`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from asyncrl.failures import ConfigError

KEY = "ulysses_sequence_parallel_size"


def make_mesh(num_ranks: int, size: int, device: torch.device) -> DeviceMesh | None:
    """data × sequence; None where every rank has sequences of its own. Collective.

    Raises:
        ConfigError: `size` ranks for each sequence are not a divisor of all.
    """
    if num_ranks % size:
        raise ConfigError(f"trainer.{KEY}={size} does not divide the {num_ranks} ranks; choose a divisor")
    if size == 1:
        return None
    return init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("data", "sequence"))


def check_heads(model: PreTrainedModel, size: int) -> None:
    """Raises ConfigError unless `size` ranks can share the model's attention heads evenly."""
    heads = int(model.config.get_text_config().num_attention_heads)
    if heads % size:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"trainer.{KEY}={size}: does not divide the model's {heads} attention heads, which the ranks share; "
            f"use one of {fitting}"
        )


class Shard:
    """This rank's positions of a packed row of `num_positions`, a multiple of the group's size."""

    def __init__(self, num_positions: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self._size = num_positions // dist.get_world_size(group)
        self._edges = list(range(0, num_positions + 1, self._size))
        self.start = dist.get_rank(group) * self._size
        """This rank's first position."""

    def cut(self, row: Tensor) -> Tensor:
        """`[1, T]` → `[1, T / P]`."""
        return row[:, self.start : self.start + self._size]

    def scored(self, positions: Tensor) -> tuple[slice, list[int]]:
        """Which of ascending `positions` `[N]`, on CPU, are this rank's; how many each rank has."""
        bounds: list[int] = torch.searchsorted(positions, torch.tensor(self._edges)).tolist()
        rank = dist.get_rank(self.group)
        return slice(bounds[rank], bounds[rank + 1]), [end - start for start, end in pairwise(bounds)]


def gather_scores(scores: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`[K, n]` of each rank's scored positions, `n = counts[rank]` → `[K, N]` of all, in order, on every rank.

    Backward: a rank takes the gradient of its own scores and leaves the others' to them. That is the right share when
    every rank computes the same loss of the whole and gradients are then summed.
    """
    gathered: Tensor = _Gather.apply(scores, list(counts), group)
    return gathered


def spread_kv(states: Tensor, num_heads: int, group: dist.ProcessGroup) -> Tensor:
    """Repeat heads of keys or values `[1, H_kv, t, D]` as far as needed for every rank to get those of its queries."""
    ranks, num_kv = dist.get_world_size(group), states.shape[1]
    if num_kv % ranks == 0:
        return states
    return repeat_kv(states, (ranks if ranks % num_kv == 0 else num_heads) // num_kv)


def heads_to_sequence(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's positions `[1, H, T / P, D]` → this rank's heads of all positions `[1, H / P, T, D]`."""
    ranks = dist.get_world_size(group)
    _, heads, length, size = states.shape
    received = _all_to_all(states.reshape(ranks, heads // ranks, length, size), group)
    return received.transpose(0, 1).reshape(1, heads // ranks, ranks * length, size)


def sequence_to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: `[1, H / P, T, D]` → `[1, H, T / P, D]`."""
    ranks = dist.get_world_size(group)
    _, heads, length, size = states.shape
    received = _all_to_all(states.reshape(heads, ranks, length // ranks, size).transpose(0, 1), group)
    return received.reshape(1, ranks * heads, length // ranks, size)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[P, ...]`: part `i` goes to rank `i`; part `i` of the result came from rank `i`."""
    received: Tensor = _AllToAll.apply(parts, group)
    return received


class _AllToAll(torch.autograd.Function):
    """Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = scores.new_zeros(scores.shape[0], max(counts))
        padded[:, : counts[rank]] = scores
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(received, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[:, ctx.start : ctx.start + ctx.count].contiguous(), None, None
