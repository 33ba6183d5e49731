"""One rank of a role: an engine behind calls that a group of any kind can make.

Every rank of the role makes the same calls in the same order, with its own rows (`trainer.dispatch` says which). All
calls block. `python`, `torchrun` and Ray ranks use it alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed
from numpy.typing import NDArray
from tensordict import TensorDict

from asyncrl.failures import BugError, DataError
from asyncrl.profiling import profile
from asyncrl.records import Metrics
from trainer.dispatch import dispatched
from trainer.engine.base import BaseEngine, EngineSpec, Layout, Loss
from trainer.engine.dist import guarded
from trainer.engine.registry import EngineRegistry
from trainer.placement import RolePlan

NEEDED = ("input_ids", "prompt_lens", "response_lens", "response_mask", "loss_mask")


class TrainingWorker:
    """See the head of this file.

    Raises (on construction):
        ConfigError: see `EngineRegistry.new`.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.engine: BaseEngine = EngineRegistry.new(spec)
        self._loss: Loss | None = None
        self._pending_loss: float | None = None
        """Of the `forward_backward` calls since the last step; None: there were none."""

    @property
    def layout(self) -> Layout:
        return self.engine.layout

    @dispatched("rank_zero")
    def step(self) -> int:
        """Optimizer steps taken, over resumes."""
        return self.engine.step

    @dispatched("all")
    def reset(self) -> None:
        """Back to the model files, with a fresh optimizer, step 0."""
        self._pending_loss = None
        self.engine.reset()

    @dispatched("all")
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move what is named to `device`, `cpu` or `cuda`; the next batch moves it back as needed."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    @dispatched("all")
    def set_loss_fn(self, loss: Loss) -> None:
        self._loss = loss

    @dispatched("all")
    def plan(self, total_steps: int) -> None:
        """Before the first step: how many there will be, which is where the learning rate's decay ends."""
        self.engine.plan(total_steps)

    @dispatched("mini_batches")
    def train_mini_batch(self, batch: TensorDict, mini_batches: Sequence[Sequence[int]]) -> list[Metrics]:
        """One optimizer step for each list of row numbers, in order.

        Which rows make a step is the caller's matter, and the same on every rank: mini-batches hold whole samples, have
        to leave out what is not trained, and are drawn by a seed that a resume knows (`batching.mini_batches`, for all
        passes). A worker sees its own share of the rows only.

        Raises (on every rank):
            DataError: a batch without the keys it takes, or a mini-batch without a trained token on any rank; no step
                was taken.
            DivergenceError: loss or gradient not finite; the steps before that one were taken.
        """
        parts = [batch[torch.tensor(list(rows), dtype=torch.int64)] for rows in mini_batches]
        self._check(batch, parts)
        return [self._train(part) for part in parts]

    @dispatched("rows")
    def train_batch(self, batch: TensorDict) -> Metrics:
        """One optimizer step on all rows: `loss`, the loss's own figures, `tokens`, `grad_norm`, `lr`, of all ranks;
        `mfu` of this one, where it is known (`BaseEngine.utilization`)."""
        self._check(batch, [batch])
        return self._train(batch)

    @dispatched("rows")
    def forward_backward(self, batch: TensorDict) -> Metrics:
        """Add this batch's gradient to what `optim_step` will apply. Denominators are this batch's own."""
        self._check(batch, [batch])
        return self._accumulate(batch)

    @dispatched("all")
    def optim_step(self) -> Metrics:
        """Apply what has accumulated: `grad_norm`, `lr`.

        Raises:
            DivergenceError: loss or gradient not finite; no step was taken, and the gradient is forgotten.
            BugError: nothing has accumulated; no step was taken.
        """
        loss, self._pending_loss = self._pending_loss, None
        if loss is None:
            raise BugError(
                "optim_step without a forward_backward since the last step, reset or load: there is no gradient to "
                "apply, yet momentum and weight decay would move the weights; no step was taken"
            )
        with profile.span("rank.optimizer", sync=True):
            outcome = self.engine.optim_step(loss)
        return {"grad_norm": outcome.grad_norm, "lr": outcome.lr}

    @dispatched("rows", collect="rows")
    def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        """Forward only: see `BaseEngine.infer`. `adapters=False`: the model without its LoRA adapters.

        Raises:
            ConfigError: there are no adapters to switch off.
        """
        self._check(batch, [])
        with nullcontext() if adapters else self.engine.adapters_off():
            return self.engine.infer(batch)

    @dispatched("all")
    def save_checkpoint(self, directory: Path, *, hf: Path | None = None) -> None:
        """Begin; training may go on when this returns. See `BaseEngine.save`."""
        self.engine.save(directory, hf=hf)

    @dispatched("all")
    def finish_checkpoint(self) -> None:
        """Wait until it is written. `engine.wait_for_files` first, beside other calls, and this holds up none of them.

        Raises:
            InfraError: it could not be.
        """
        self.engine.finish_save()

    @dispatched("all")
    def load_checkpoint(self, directory: Path) -> None:
        """See `BaseEngine.load`. A gradient that has accumulated is forgotten, also if loading fails."""
        if self._pending_loss is not None:
            self._forget_gradient()
        self.engine.load(directory)

    def weights(self, dtype: Literal["float32", "bfloat16", "float16"]) -> dict[str, NDArray[Any]]:
        """Collective. Of rank 0 the whole weights by Hugging Face names, bfloat16 as its bits in uint16; else empty.

        On CPU these may be the live weights: use them before the next call.
        """
        keep = self.layout.rank == 0
        whole = {name: tensor for name, tensor in self.engine.weights(dtype) if keep}
        bits = torch.uint16 if dtype == "bfloat16" else None
        return {name: (tensor.view(bits) if bits else tensor).numpy() for name, tensor in whole.items()}

    def close(self) -> None:
        self.engine.close()

    def _train(self, batch: TensorDict) -> Metrics:
        started = time.perf_counter()
        metrics = self._accumulate(batch) | self.optim_step()
        utilization = self.engine.utilization(started)
        return metrics if utilization is None else metrics | {"mfu": utilization}

    def _accumulate(self, batch: TensorDict) -> Metrics:
        if self._loss is None:
            raise BugError("a worker was asked to train before set_loss_fn")
        try:
            metrics = self.engine.forward_backward(batch, self._loss)
        except BaseException:
            # A part of this gradient must not find its way into a later step.
            self._forget_gradient()
            raise
        self._pending_loss = (self._pending_loss or 0.0) + metrics["loss"]
        return metrics

    def _forget_gradient(self) -> None:
        self._pending_loss = None
        self.engine.zero_grad()

    def _check(self, batch: TensorDict, steps: Sequence[TensorDict]) -> None:
        """Refuse on every rank what is bad on any, before one of them is left alone in a collective operation."""
        missing = [key for key in NEEDED if key not in batch]
        problem = f"a batch lacks {', '.join(missing)}" if missing else ""
        if not problem and len(batch) == 0:
            problem = "a batch without rows"
        counts = [] if problem else [int(part["loss_mask"].sum()) for part in steps]
        views = self._views_of_all((problem, counts))
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(views) if text]
        if not problems and len({len(counted) for _, counted in views}) > 1:
            problems = ["ranks were given different numbers of mini-batches"]
        if problems:
            raise DataError(f"{problems[0]}; nothing was computed. `trainer.tensors` says what a batch holds")
        for number in range(len(steps)):
            if not sum(counts[number] for _, counts in views):
                which = f"mini-batch {number}" if len(steps) > 1 else "a batch"
                raise DataError(
                    f"{which} without a single trained token: loss_mask is False everywhere; no step was taken"
                )

    def _views_of_all(self, view: tuple[str, list[int]]) -> list[tuple[str, list[int]]]:
        if self.layout.world_size == 1:
            return [view]
        views: list[Any] = [None] * self.layout.world_size
        with guarded("comparing batches"):
            torch.distributed.all_gather_object(views, view)
        return views


def engine_spec(plan: RolePlan, *, device: Literal["auto", "cpu", "cuda"], collective_s: float) -> EngineSpec:
    """What a role's engine is made from, on ranks of this device."""
    return EngineSpec(
        model_type=plan.model_type,
        model=plan.model,
        engine=plan.engine.model_copy(update={"device": device}),
        optim=plan.optim,
        temperature=plan.temperature,
        seed=plan.seed,
        collective_s=collective_s,
        path_key=plan.path_key,
    )
