"""Where weights, gradients, optimizer state and activations are kept. On a CPU engine all of it is there already."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MIN_ACTIVATION_BYTES = 1 << 20
"""Smaller ones stay: the copy's start costs more than the memory is worth."""


def move_gradients(model: nn.Module, device: torch.device) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient._local_tensor = gradient._local_tensor.to(device)
        elif gradient is not None:  # in place: a new one would have to be where the parameter is
            gradient.data = gradient.data.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(device)


@contextmanager
def activations_on_cpu(shapes: Set[torch.Size] = frozenset(), min_bytes: int = MIN_ACTIVATION_BYTES) -> Iterator[None]:
    """What the forward pass within keeps for the backward pass is copied to (pinned) CPU memory, weights excepted.

    Together with gradient checkpointing only the layers' inputs are kept at all, and so copied.

    Args:
        shapes: of the weights, where autocast makes copies of them: those are no parameters, and known by their shape
            alone. An activation has one more dimension; one that has not and is taken for a weight just stays.
    """

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter) or whole.shape in shapes or tensor.nbytes < min_bytes:
            return tensor.device, tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
