"""Learning-rate schedule, AdamW, and the gradient's norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.sections.trainer import OptimConfig
from asyncrl.core.failures import BugError


def learning_rate(step: int, total_steps: int | None, optim: OptimConfig) -> float:
    """Return the learning rate of optimizer step `step`, from 1: it rises from `lr / warmup_steps` to `lr`, then
    falls to `lr · min_lr_ratio`.

    It depends only on the step, so there is no scheduler state to save. From `total_steps` on it is constant.

    Raises:
        BugError: the schedule decays, and `total_steps` is unknown.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.decay == "constant":
        return optim.lr
    if total_steps is None:
        raise BugError(f"trainer.optim.decay={optim.decay} needs the run's total steps before its first step")
    progress = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    remaining = 1.0 - progress if optim.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)


def adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Create AdamW (https://arxiv.org/abs/1711.05101) with weight decay for the trained parameters; a step is one
    fused kernel."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of each gradient; missing gradients are set to zeros.

    With a gradient of 0, AdamW still moves a parameter by its momentum; with None, it skips the parameter.
    """
    parts = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parts.append(local_part(parameter.grad))
    return parts


def squared_norm(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, a float64 scalar."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([norm.double() for norm in torch._foreach_norm(filled)]).square().sum()


def clip_(parts: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of the global norm `norm` in place to at most `max_norm`, as torch's `clip_grad_norm_` does."""
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and parts:
        torch._foreach_mul_(parts, factor)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a tensor with the layout of `tensor` from this rank's part, and keeps no memory of
    `tensor`."""
    if not isinstance(tensor, DTensor):
        return lambda part: part
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda part: DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def move_gradients(model: nn.Module, device: torch.device) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient._local_tensor = gradient._local_tensor.to(device)
        elif gradient is not None:  # in place, because torch accepts a new gradient only on the parameter's device
            gradient.data = gradient.data.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(device)
