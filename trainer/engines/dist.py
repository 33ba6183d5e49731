"""The process group, seen by an engine: who is in it, sums over it, and what to say when it breaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from asyncrl.failures import ConfigError, DeadlineError, InfraError

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
BROKEN = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")
"""What torch's plain RuntimeErrors of a failed collective say; it has no type of its own for most of them."""
_joins = count()
"""Every rank joins as often, so that each group they make has a number of its own."""
_stores: dict[tuple[str, ...], tuple[dist.Store, int, int]] = {}


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU when torch sees one; of several, the one of this process's LOCAL_RANK."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no GPU here; use trainer.device=auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def join(device: torch.device, *, timeout_s: float) -> bool:
    """Be in a process group: the one there is, the one torchrun's variables describe, or one of this process alone.

    Returns whether it was made here, and so is the caller's to leave.

    Raises:
        InfraError: the other ranks did not come within `timeout_s`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whoever made the group: NCCL uses the current one
    if dist.is_initialized():
        return False
    backend, timeout = BACKENDS[device.type], timedelta(seconds=timeout_s)
    try:
        if "WORLD_SIZE" in os.environ:
            store, number, size = _meeting_place(timeout)
            store.set_timeout(timeout)
            # A prefix of its own: addresses that the ranks left for an earlier group are not to be found again.
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


def _meeting_place(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store of torchrun's variables, this rank and the number of ranks.

    Kept for good: rank 0 may be its server, and a second one at the same port would find ranks still at the first.
    """
    where = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if where not in _stores:
        _stores[where] = next(iter(rendezvous("env://", timeout=timeout)))
    return _stores[where]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def all_sum(values: Tensor) -> Tensor:
    """Of all ranks, in place. Nothing to do for one."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_max(value: int, device: torch.device) -> int:
    """Of all ranks."""
    if world_size() == 1:
        return value
    reduced = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return int(reduced)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn torch's errors of a broken collective into InfraError, DeadlineError if it was for lack of an answer.

    After one, the process group is of no more use.
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
