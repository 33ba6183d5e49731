"""Learning-rate schedule, AdamW, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncrl.config.schema import OptimConfig
from asyncrl.failures import BugError, ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


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
    """AdamW (https://arxiv.org/abs/1711.05101) over all parameters, weight decay included, one fused kernel a step."""
    return torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `{parameter}.{moment}`; empty before the first step."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
        if moment in optimizer.state[parameter]
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, bit for bit.

    Raises:
        ConfigError: the tensors belong to another model.
    """
    expected = {f"{name}.{moment}" for name, _ in model.named_parameters() for moment in MOMENTS}
    if tensors and set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)[:3]
        raise ConfigError(
            f"the optimizer state is of another model: {', '.join(odd)} on one side only; use resume=none"
        )
    optimizer.state.clear()
    if not tensors:
        return
    for name, parameter in model.named_parameters():
        state = {moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS}
        if state["exp_avg"].shape != parameter.shape:
            raise ConfigError(
                f"the optimizer state of {name} has shape {tuple(state['exp_avg'].shape)}, the parameter "
                f"{tuple(parameter.shape)}: it is of another model; use resume=none"
            )
        optimizer.state[parameter] = state
