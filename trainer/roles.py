"""What the loop asks of a role's ranks, as awaitables. Calls come from several tasks and run one at a time.

`trainer.group` answers with Ray actors: every call has its deadline inside, and a dead rank is an `InfraError`.
`trainer.inline` answers in this process: no deadline but those of collective operations and of the weight store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from asyncrl.ports import Publication
from asyncrl.records import Metrics
from trainer.engine.base import Loss
from trainer.placement import Role

__all__ = ["Published", "Role", "RoleCalls", "RoleGroup"]


class Published(NamedTuple):
    """A version that can be fetched, and what that took."""

    publication: Publication
    gather_s: float
    """Collecting the weights on rank 0."""
    put_s: float
    """From there to the weight store."""


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
        """One optimizer step for each list of row numbers, in order; one deadline for all of them.

        Which rows make a step is the caller's matter: mini-batches hold whole samples, over all passes, in an order
        that a resume finds again (`batching.mini_batches` makes them). A rank sees its own rows only.
        """

    async def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        """Forward only: see `BaseEngine.infer`. `adapters=False`: without LoRA."""

    async def forward_backward(self, batch: TensorDict) -> Metrics: ...

    async def optim_step(self) -> Metrics: ...

    async def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None: ...

    async def reset(self) -> None: ...

    async def publish(self, version: int, step: int, *, validate: bool) -> Published:
        """Offer the weights as `version`, straight from rank 0 to the weight store."""

    async def republish(self) -> None:
        """See `WeightPublisher.republish`; beside other calls."""

    async def save_checkpoint(self, directory: Path, *, hf: Path | None = None) -> None:
        """Begin: returns once training may go on. See `BaseEngine.save`."""

    async def finish_checkpoint(self) -> None:
        """Wait until it is written."""

    async def load_checkpoint(self, directory: Path) -> None: ...

    async def step(self) -> int:
        """Optimizer steps taken, over resumes."""


class RoleCalls(ABC):
    """`RoleGroup` in terms of one `call`: a method of `trainer.worker.TrainingWorker` by name, with its arguments."""

    @abstractmethod
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    async def publish(self, version: int, step: int, *, validate: bool) -> Published: ...

    @abstractmethod
    async def republish(self) -> None: ...

    @abstractmethod
    async def written(self) -> None:
        """Until every rank has written its files of the checkpoint begun, well or not; beside other calls."""

    async def set_loss_fn(self, loss: Loss) -> None:
        await self.call("set_loss_fn", loss)

    async def plan(self, total_steps: int) -> None:
        await self.call("plan", total_steps)

    async def train_batch(self, batch: TensorDict) -> Metrics:
        return await self.call("train_batch", batch)

    async def train_mini_batch(self, batch: TensorDict, mini_batches: Sequence[Sequence[int]]) -> list[Metrics]:
        return await self.call("train_mini_batch", batch, mini_batches)

    async def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        return await self.call("infer_batch", batch, adapters=adapters)

    async def forward_backward(self, batch: TensorDict) -> Metrics:
        return await self.call("forward_backward", batch)

    async def optim_step(self) -> Metrics:
        return await self.call("optim_step")

    async def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        await self.call("to", device, model=model, optimizer=optimizer, grad=grad)

    async def reset(self) -> None:
        await self.call("reset")

    async def save_checkpoint(self, directory: Path, *, hf: Path | None = None) -> None:
        await self.call("save_checkpoint", directory, hf=hf)

    async def finish_checkpoint(self) -> None:
        # Other calls go on until the files are there; only then do the ranks meet, for a moment.
        await self.written()
        await self.call("finish_checkpoint")

    async def load_checkpoint(self, directory: Path) -> None:
        await self.call("load_checkpoint", directory)

    async def step(self) -> int:
        return await self.call("step")
