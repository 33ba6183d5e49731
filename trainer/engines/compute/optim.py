"""Learning-rate schedule, AdamW, and the gradient's norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import OptimConfig
from asyncrl.failures import BugError


def learning_rate(step: int, total_steps: int | None, optim: OptimConfig) -> float:
    """Of optimizer step `step`, from 1: rises from `lr / warmup_steps` to `lr`, then falls to `lr · min_lr_ratio`.

    A function of the step alone, so there is no scheduler state to save. Reaches its end at `total_steps` and stays.

    Raises:
        BugError: a decay without a known end.
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
    """AdamW (https://arxiv.org/abs/1711.05101) over what is trained, weight decay included, one fused kernel a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of each gradient; where there is none, zeros are put.

    A gradient of 0 still moves AdamW by its momentum; None would not.
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
    """Sum of squares of all elements: scalar, float64."""
    norms = torch._foreach_norm([part for part in parts if part.numel()])
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def clip_(parts: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale in place, as torch's `clip_grad_norm_` does, to a norm of at most `max_norm`."""
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and parts:
        torch._foreach_mul_(parts, factor)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
