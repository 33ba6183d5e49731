"""The trained weights and optimizer moments of a live engine under names that don't depend on how it is sharded.

`model.{parameter}` and `optimizer.{parameter}.{moment}`; the parameter's name is that of the unwrapped model. Sharded
tensors are DTensors.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from trainer.engine.export import plain_name, unwrapped
from trainer.engine.lora import is_adapter
from trainer.engine.optim import local_part

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
Shapes = Mapping[str, tuple[int, ...]]


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> LiveState:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return _FlatState(model, optimizer)
    return _PlainState(model, optimizer)


class LiveState(ABC):
    """Of one model and optimizer. The tensors are for reading."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        names = {plain_name(name): value.requires_grad for name, value in unwrapped(model).named_parameters()}
        adapted = any(is_adapter(name) for name in names)
        self._names = {
            name
            for name, trained in names.items()
            # Without an optimizer nothing is trained, but what was trained can be loaded.
            if (trained if optimizer is not None else is_adapter(name) or not adapted)
        }
        """Of the parameters that are, or were, trained."""

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What there is to save; no moments before the first step."""

    @abstractmethod
    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        """What has to be among `saved` to go on from it. Tensors of the right shape, dtype and sharding, whatever they
        hold. Changes nothing."""

    @abstractmethod
    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Take over what was read: `staged` has this rank's part of everything in `wanted`, save for empty parts."""


class _PlainState(LiveState):
    """Parameters are whole tensors (one process, DDP) or DTensors (FSDP2), and moments look like them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(model, optimizer)
        parameters = {plain_name(name): value for name, value in unwrapped(model).named_parameters()}
        self._trained = {name: parameters[name] for name in parameters if name in self._names}

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self._trained.items()}
        if self._optimizer is not None:
            for name, parameter in self._trained.items():
                for moment, tensor in self._optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{name}.{moment}"] = tensor
        return tensors

    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in self._trained.items()}
        moments = {name.rpartition(".")[2]: shape for name, shape in saved.items() if name.startswith("optimizer.")}
        for name, parameter in self._trained.items() if self._optimizer is not None else ():
            for moment, shape in moments.items():
                stored = f"optimizer.{name}.{moment}"
                # A count of steps is a scalar; everything else has one number for each of the parameter's.
                tensors[stored] = torch.zeros((), dtype=torch.float32) if shape == () else parameter
        return tensors

    @torch.no_grad()
    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained.items():
            if (weight := staged.get(f"model.{name}")) is not None:
                local_part(parameter).copy_(weight)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, parameter in self._trained.items():
            prefix = f"optimizer.{name}."
            for stored in (stored for stored in wanted if stored.startswith(prefix)):
                scalar = wanted[stored] is not parameter
                self._optimizer.state[parameter][stored.removeprefix(prefix)] = (
                    staged[stored].to(self._count_device(parameter)) if scalar else _like(parameter, staged.get(stored))
                )

    def _count_device(self, parameter: Tensor) -> torch.device:
        """Where the optimizer keeps a parameter's count of steps."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                on_device = group.get("fused") or group.get("capturable")
                return local_part(parameter).device if on_device else torch.device("cpu")
        return torch.device("cpu")


class _FlatState(LiveState):
    """FSDP keeps flat parameters; torch's own functions know what is where; given a mesh, they make DTensors."""

    def tensors(self) -> dict[str, Tensor]:
        return self._weights() | (self._moments() if self._stepped else {})

    def wanted(self, saved: Shapes) -> dict[str, Tensor]:
        if self._optimizer is None or not any(name.startswith("optimizer.") for name in saved):
            return self._weights()
        fresh = not self._stepped
        try:
            return self._weights() | self._moments()
        finally:
            if fresh:  # torch takes a step of size 0 to see the moments
                self._optimizer.state.clear()

    def restore(self, staged: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        for name, tensor in wanted.items():
            if name in staged:
                local_part(tensor).copy_(staged[name])
        weights: dict[str, Any] = {
            name.removeprefix("model."): wanted[name] for name in wanted if name.startswith("model.")
        }
        with _quiet():
            set_model_state_dict(self._model, weights, options=TRAINED)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        if len(weights) == len(wanted):
            return
        state: Any = get_optimizer_state_dict(self._model, self._optimizer, options=TRAINED)
        for name, moments in state["state"].items():
            state["state"][name] = {moment: wanted[f"optimizer.{name}.{moment}"] for moment in moments}
        set_optimizer_state_dict(self._model, self._optimizer, state, options=TRAINED)

    @property
    def _stepped(self) -> bool:
        return self._optimizer is not None and bool(self._optimizer.state)

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Any] = get_model_state_dict(self._model)
        return {f"model.{name}": tensor for name, tensor in weights.items() if name in self._names}

    def _moments(self) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: Any = get_optimizer_state_dict(self._model, self._optimizer, options=TRAINED)["state"]
        return {
            f"optimizer.{name}.{moment}": tensor
            for name, moments in state.items()
            for moment, tensor in moments.items()
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning for each weight left alone on purpose: frozen ones, and the second name of tied ones."""
    noisy = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


def _like(parameter: Tensor, part: Tensor | None) -> Tensor:
    """Sharded and placed as `parameter`, holding `part` where this rank has one."""
    tensor = torch.zeros_like(parameter, requires_grad=False)
    if part is not None:
        local_part(tensor).copy_(part)
    return tensor
