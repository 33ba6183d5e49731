"""What a training pass tells about itself, of all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.engine.base import LossParts


class Figures:
    """Sums and means of a loss, added up over micro-batches and then ranks. float64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[str, Tensor] = {}
        self._means: set[str] = set()

    def add(self, parts: LossParts, *, real: bool) -> None:
        """Not real: only the names count, so that every rank knows all of them."""
        self._means.update(parts.means)
        for name, value in [("loss", parts.loss), *parts.sums.items(), *parts.means.items()]:
            part = value.detach().double().sum() if real else torch.zeros((), dtype=torch.float64, device=self._device)
            self._values[name] = self._values[name] + part if name in self._values else part

    def over_ranks(self, add: Callable[[Tensor], Tensor], *, num_tokens: float, counts: bool) -> dict[str, float]:
        """`counts`: whether this rank's figures are not another's as well."""
        names = sorted(self._values)
        totals = add(torch.stack([self._values[name] for name in names]) * counts).tolist()
        figures = dict(zip(names, totals, strict=True))
        return {name: value / num_tokens if name in self._means else value for name, value in figures.items()}
