"""What the loop asks of a role's ranks, as awaitables. `trainer.group` answers with Ray actors, `trainer.inline` in this
process. Every call has its deadline inside; a dead rank is an `InfraError`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from tensordict import TensorDict

from asyncrl.ports import Metrics, Publication
from trainer.engine.base import Loss

Role = Literal["actor", "ref", "critic", "reward_model"]


class RoleGroup(Protocol):
    """One role: a model on its ranks. Rows are shared out over the ranks and results come back in the rows' order."""

    async def set_loss_fn(self, loss: Loss) -> None: ...

    async def plan(self, total_steps: int) -> None: ...

    async def train_batch(self, batch: TensorDict) -> Metrics:
        """One optimizer step: `loss`, the loss's own figures, `grad_norm`, `lr`, `tokens`.

        Raises:
            DataError: no trained token in the whole batch.
            DivergenceError: loss or gradient not finite; no step was taken.
            InfraError: a rank died. DeadlineError: it did not answer in time.
        """

    async def train_mini_batch(self, batch: TensorDict, mini_batches: Sequence[Sequence[int]]) -> list[Metrics]:
        """One optimizer step for each list of row numbers, in order (`batching.mini_batches` makes them)."""

    async def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        """Forward only: see `BaseEngine.infer`. `adapters=False`: without LoRA."""

    async def forward_backward(self, batch: TensorDict) -> Metrics: ...

    async def optim_step(self) -> Metrics: ...

    async def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None: ...

    async def reset(self) -> None: ...

    async def publish(self, version: int, step: int, *, validate: bool) -> Publication:
        """Offer the weights as `version`, straight from rank 0 to the weight store."""

    async def save_checkpoint(self, directory: Path) -> None:
        """Begin: returns once training may go on."""

    async def finish_checkpoint(self) -> None:
        """Wait until it is written."""

    async def load_checkpoint(self, directory: Path) -> None: ...
