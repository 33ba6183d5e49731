"""The interface of one rank of a role, as blocking calls on an engine, and of all its ranks, as awaitable calls.

The worker is the same under `python`, `torchrun` and Ray. `trainer.workers.dispatch` decides which rows a rank gets.
"""

from __future__ import annotations

import gc
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import BugError, ConfigError, DataError
from asyncrl.core.ports import Publication, WeightsProbe
from asyncrl.core.records import Metrics
from asyncrl.profiling import profile
from trainer.engines.base import BaseEngine, EngineSpec, Layout, Loss
from trainer.engines.dist import gather, guarded
from trainer.engines.registry import new_engine
from trainer.workers.dispatch import dispatched

PROBE_ROWS = 2
PROBE_TOKENS = 64
"""Tokens of each row of a probe. A pass over them costs little, and a wrong layer changes the log-probs of most."""
REQUIRED_KEYS = ("input_ids", "prompt_lens", "response_lens", "response_mask", "loss_mask")


class TrainingWorker:
    """Blocking calls on an engine. Every rank of the role makes the same calls in the same order, with its own rows.

    Raises (on construction):
        ConfigError: see `new_engine`.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.engine: BaseEngine = new_engine(spec)
        self._loss: Loss | None = None
        self._pending_loss = 0.0
        """Loss summed over the `forward_backward` calls since the last step."""
        self._probe_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def layout(self) -> Layout:
        return self.engine.layout

    @dispatched("rank_zero")
    def step(self) -> int:
        """Number of optimizer steps taken, including those before a resume."""
        return self.engine.step

    @dispatched("rank_zero")
    def attention(self) -> str:
        """See `BaseEngine.attention`."""
        return self.engine.attention

    @dispatched("all")
    def reset(self) -> None:
        """Reload the model files, with a fresh optimizer and step 0."""
        self._pending_loss = 0.0
        self.engine.reset()

    @dispatched("all")
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the named parts to `device`, `cpu` or `cuda`; the next batch moves them back as needed."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    @dispatched("all")
    def offload(self) -> None:
        """Move everything to the CPU, and free the GPU memory for other processes."""
        self.engine.to("cpu")
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    @dispatched("all")
    def set_threads(self, threads: int) -> None:
        """Compute on CPU with this many threads from now on."""
        torch.set_num_threads(threads)

    @dispatched("all")
    def set_loss_fn(self, loss: Loss) -> None:
        self._loss = loss

    @dispatched("all")
    def plan(self, total_steps: int) -> None:
        """Set the total number of steps, at which the learning rate's decay ends. Call it before the first step."""
        self.engine.plan(total_steps)

    @dispatched("rows")
    def train_batch(self, batch: TensorDict) -> Metrics:
        """Take one optimizer step on all rows. Return `loss`, the metrics of the loss, `tokens`, `grad_norm` and
        `lr` over all ranks, and `mfu` of this rank, if known (`BaseEngine.utilization`).

        Raises (on every rank):
            DataError: the batch lacks required keys, or has no trained token on any rank; no step was taken.
            DivergenceError: loss or gradient is not finite; no step was taken, and the gradient is discarded.
        """
        started = time.perf_counter()
        metrics = self.forward_backward(batch) | self.optim_step()
        utilization = self.engine.utilization(started)
        return metrics if utilization is None else metrics | {"mfu": utilization}

    @dispatched("rows")
    def forward_backward(self, batch: TensorDict) -> Metrics:
        """Add this batch's gradient to the one that `optim_step` applies. Denominators count only this batch.

        Raises (on every rank):
            BugError: the role has no loss yet (`set_loss_fn`).
            DataError: the batch lacks required keys or has no rows, or no rank has a trained token.
        """
        self._check(batch, trains=True)
        if self._loss is None:
            raise BugError("a worker was asked to train before set_loss_fn")
        try:
            metrics = self.engine.forward_backward(batch, self._loss)
        except BaseException:
            # A partial gradient must not be part of a later step.
            self._pending_loss = 0.0
            self.engine.zero_grad()
            raise
        self._pending_loss += metrics["loss"]
        self._probe_ids = _first_tokens(batch)
        return metrics

    @dispatched("all")
    def optim_step(self) -> Metrics:
        """Apply the accumulated gradient (`BaseEngine.optim_step`). Return `grad_norm` and `lr`."""
        loss, self._pending_loss = self._pending_loss, 0.0
        with profile.span("rank.optimizer", sync=True):
            outcome = self.engine.optim_step(loss)
        return {"grad_norm": outcome.grad_norm, "lr": outcome.lr}

    @dispatched("rows", collect="rows")
    def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        """Run the forward pass only (`BaseEngine.infer`). `adapters=False` switches the LoRA adapters off.

        Raises:
            ConfigError: there are no adapters to switch off.
        """
        self._check(batch, trains=False)
        with nullcontext() if adapters else self.engine.adapters_off():
            return self.engine.infer(batch)

    @dispatched("all")
    def find_file(self, path: Path) -> None:
        """Check that this rank sees a file in the directory of the checkpoints.

        Raises:
            ConfigError: it does not.
        """
        if not path.exists():
            rank = f"rank {self.layout.rank} on {socket.gethostname()}"
            raise ConfigError(
                f"trainer.checkpoint_dir: {rank} does not see the directory {path.parent} of the Trainer's node, where "
                "it has to write its part of each checkpoint. Set it to one that all nodes with ranks have mounted"
            )

    @dispatched("all")
    def save_checkpoint(self, directory: Path, *, hf: Path | None = None, hf_dtype: Dtype = "float32") -> None:
        """Begin a checkpoint; training may continue when this returns. See `BaseEngine.save`."""
        self.engine.save(directory, hf=hf, hf_dtype=hf_dtype)

    @dispatched("all")
    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is written. After `engine.wait_for_files`, which may run concurrently with other
        calls, this returns at once.

        Raises:
            InfraError: it could not be written.
        """
        self.engine.finish_save()

    @dispatched("all")
    def load_checkpoint(self, directory: Path) -> None:
        """See `BaseEngine.load`. An accumulated gradient is discarded, even if loading fails."""
        self._pending_loss = 0.0
        self.engine.load(directory)

    def weights(self, dtype: Dtype) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield what a version consists of on rank 0, bfloat16 as its bits in uint16; nothing elsewhere: the full
        weights by Hugging Face names, or the adapters by peft's (`EngineSpec.adapters_only`). Collective: iterate to
        the end on every rank.

        On CPU these may be the live weights: use them before the next call.
        """
        engine = self.engine
        tensors = engine.adapter_weights(dtype) if engine.spec.adapters_only else engine.weights(dtype)
        if self.layout.rank == 0:
            # A loop would hold a tensor while the next one is gathered.
            yield from map(_as_array, tensors)
        else:
            for _ in tensors:
                pass

    def probe(self) -> WeightsProbe | None:
        """Compute a probe of the current weights from the batch that rank 0 trained last; None if nothing was trained
        since the start, or rows with images or videos. Collective."""
        token_ids = gather(self._probe_ids)[0]
        if not token_ids:
            return None
        lengths = torch.tensor([len(ids) for ids in token_ids])
        rows = pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True)
        responses = torch.arange(rows.shape[1] - 1) < lengths[:, None] - 1
        batch = TensorDict(
            {
                "input_ids": rows,
                "prompt_lens": torch.ones_like(lengths),
                "response_lens": lengths - 1,
                "response_mask": responses,
                "loss_mask": responses,
            },
            batch_size=[len(token_ids)],
        )
        log_probs = self.engine.infer(batch, temperature=1.0)["log_probs"]
        return WeightsProbe(
            token_ids, tuple(tuple(row[mask].tolist()) for row, mask in zip(log_probs, responses, strict=True))
        )

    def close(self) -> None:
        self.engine.close()

    def _check(self, batch: TensorDict, *, trains: bool) -> None:
        """Refuse a batch on every rank if it is invalid on any rank, before ranks wait in a collective operation."""
        missing = [key for key in REQUIRED_KEYS if key not in batch]
        problem = f"a batch lacks {', '.join(missing)}" if missing else "" if len(batch) else "a batch without rows"
        num_trained = int(batch["loss_mask"].sum()) if trains and not problem else 0
        with guarded("comparing batches"):
            views = gather((problem, num_trained))
        for rank, (text, _) in enumerate(views):
            if text:
                raise DataError(
                    f"rank {rank}: {text}; nothing was computed. `trainer.workers.tensors` lists the keys of a batch"
                )
        if trains and not sum(count for _, count in views):
            raise DataError("a batch without a single trained token: loss_mask is False everywhere; no step was taken")


def _as_array(weight: tuple[str, Tensor]) -> tuple[str, NDArray[Any]]:
    """Return a named array with the tensor's memory. That of bfloat16 has its bits as uint16."""
    name, tensor = weight
    return name, (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _first_tokens(batch: TensorDict) -> tuple[tuple[int, ...], ...]:
    """Return the first tokens of the first rows of a batch; none if it has images or videos.

    The last token of a row is left out: an engine accepts only texts that it could continue within `max_model_len`.
    """
    if "media" in batch:
        return ()
    lengths = (batch["prompt_lens"] + batch["response_lens"] - 1).clamp(max=PROBE_TOKENS).tolist()
    rows = batch["input_ids"][:PROBE_ROWS].tolist()
    return tuple(tuple(ids[:length]) for ids, length in zip(rows, lengths, strict=False) if length > 1)


class PublishedVersion(NamedTuple):
    """A version that replicas can fetch, and how long its publication took."""

    publication: Publication
    gather_s: float
    """Time to collect the weights on rank 0."""
    put_s: float
    """Time for which rank 0 waited for the weight store, which takes each bucket while the next one is collected."""


class RoleGroup(ABC):
    """One role, a model on its ranks, as awaitable calls of `TrainingWorker`. Several tasks may call it; calls run
    one at a time.

    Rows are split over the ranks, and results are in the order of the rows. `trainer.workers.group` runs ranks as
    Ray actors: every call has a deadline, and a dead rank raises InfraError.
    """

    @abstractmethod
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `TrainingWorker` by its name."""

    @abstractmethod
    async def publish(self, version: int, step: int, *, validate: bool, probe: bool = False) -> PublishedVersion:
        """Publish the weights as `version`, directly from rank 0 to the weight store. `probe`: with log-probs of a few
        texts (`TrainingWorker.probe`)."""

    @abstractmethod
    async def republish(self) -> None:
        """See `WeightPublisher.republish`; other calls may run meanwhile."""

    @abstractmethod
    async def wait_for_files(self) -> None:
        """Wait until every rank has written its checkpoint files or failed; other calls may run meanwhile."""

    async def attention(self) -> str:
        answer: str = await self.call("attention")
        return answer

    async def set_loss_fn(self, loss: Loss) -> None:
        await self.call("set_loss_fn", loss)

    async def set_threads(self, threads: int) -> None:
        await self.call("set_threads", threads)

    async def plan(self, total_steps: int) -> None:
        await self.call("plan", total_steps)

    async def train_batch(self, batch: TensorDict) -> Metrics:
        return await self.call("train_batch", batch)

    async def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        return await self.call("infer_batch", batch, adapters=adapters)

    async def forward_backward(self, batch: TensorDict) -> Metrics:
        return await self.call("forward_backward", batch)

    async def optim_step(self) -> Metrics:
        return await self.call("optim_step")

    async def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        await self.call("to", device, model=model, optimizer=optimizer, grad=grad)

    async def offload(self) -> None:
        await self.call("offload")

    async def reset(self) -> None:
        await self.call("reset")

    async def find_file(self, path: Path) -> None:
        await self.call("find_file", path)

    async def save_checkpoint(self, directory: Path, *, hf: Path | None = None, hf_dtype: Dtype = "float32") -> None:
        await self.call("save_checkpoint", directory, hf=hf, hf_dtype=hf_dtype)

    async def finish_checkpoint(self) -> None:
        # Other calls may run until the files are written; only then do the ranks synchronize briefly.
        await self.wait_for_files()
        await self.call("finish_checkpoint")

    async def load_checkpoint(self, directory: Path) -> None:
        await self.call("load_checkpoint", directory)

    async def step(self) -> int:
        return await self.call("step")
