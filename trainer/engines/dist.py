"""The process group of an engine: joining it, sums over it, and typed errors when it breaks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from asyncrl.core.failures import ConfigError, DeadlineError, InfraError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
BROKEN = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")
"""Words in torch's RuntimeErrors of failed collectives, most of which have no specific type."""
T = TypeVar("T")
_joins = count()
"""Counts the process groups; every rank joins equally often."""
_stores: dict[tuple[str, ...], tuple[dist.Store, int, int]] = {}


def pick_device(name: str) -> torch.device:
    """Return the device; `auto` is the GPU of this process's LOCAL_RANK if torch sees a GPU, else the CPU.

    Raises:
        ConfigError: `name` is `cuda`, and torch sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no GPU here; use trainer.device=auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def gpu_memory() -> tuple[int, int] | None:
    """Return the free and the total bytes of this process's GPU; None: it has not used one."""
    return torch.cuda.mem_get_info(pick_device("cuda")) if torch.cuda.is_initialized() else None


def join(device: torch.device, *, timeout_s: float) -> bool:
    """Join the existing process group, the one that torchrun's variables describe, or one of this process alone.

    Returns whether it was created here, in which case the caller has to leave it.

    Raises:
        InfraError: the other ranks did not join within `timeout_s`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device
    if dist.is_initialized():
        return False
    backend, timeout = BACKENDS[device.type], timedelta(seconds=timeout_s)
    try:
        if "WORLD_SIZE" in os.environ:
            store, number, size = _rendezvous_store(timeout)
            store.set_timeout(timeout)
            # A new prefix for each group, so that the ranks do not find the addresses of an earlier one.
            store = dist.PrefixStore(f"engines/{next(_joins)}", store)
        else:
            store, number, size = dist.HashStore(), 0, 1
        dist.init_process_group(backend, timeout=timeout, store=store, rank=number, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise InfraError.wrap(
            f"no process group of {os.environ.get('WORLD_SIZE', '1')} ranks within {timeout_s:g} s; look for a rank "
            "that did not start, or raise timeouts.collective_s",
            error,
        ) from None
    return True


def _rendezvous_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store that torchrun's variables describe, this rank, and the number of ranks.

    It is never closed, because rank 0 may be its server: ranks that are still connected to the first store would
    conflict with a second one at the same port.
    """
    where = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if where not in _stores:
        _stores[where] = next(iter(rendezvous("env://", timeout=timeout)))
    return _stores[where]


def make_mesh(device: torch.device, sizes: Mapping[str, int], *, timeout_s: float) -> DeviceMesh:
    """Return a mesh of all ranks with dimensions of these `sizes`. Consecutive ranks are neighbors in the last one.
    Collective.

    `init_device_mesh` would create its process groups with the default timeout of torch, half an hour.
    """
    ranks = torch.arange(world_size()).reshape(*sizes.values())
    groups: list[dist.ProcessGroup] = []
    for number, size in enumerate(ranks.shape):
        rows = ranks.movedim(number, -1).reshape(-1, size).tolist()
        group = dist.group.WORLD
        if len(rows) > 1:
            group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timedelta(seconds=timeout_s))
        assert group is not None, "every rank is in a row of each dimension"
        groups.append(group)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(sizes))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_sum(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over all ranks, or those of `group`, in place. Collective."""
    if world_size() > 1:
        dist.all_reduce(values, group=group)
    return values


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank, by rank. Collective."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def all_max(value: int, device: torch.device) -> int:
    """Return the maximum over all ranks. Collective."""
    if world_size() == 1:
        return value
    reduced = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return int(reduced)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn torch's errors of a broken collective into InfraError, or DeadlineError after a timeout.

    After such an error the process group cannot be used.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size() == 1 or not (
            isinstance(error, dist.DistError) or any(word in str(error).lower() for word in BROKEN)
        ):
            raise
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        raise (DeadlineError if late else InfraError).wrap(
            f"{what}: a collective operation of rank {rank()} of {world_size()} failed: another rank died, or did not "
            "answer within timeouts.collective_s; start again, from the last checkpoint if there is one",
            error,
        ) from None
