"""What the torch backends share: all but how a model is spread over the ranks.

    batch ─ micro-batches of this rank, as many as any rank has ─▶ scores ─▶ loss · weights ─▶ gradient over all ranks
          └ tokens and rows of all ranks ─▶ each token's weight ───────────────┘

Ranks meet in fixed places: the totals of a batch, the number of its micro-batches, the model's own collectives, the
figures at its end, and the norm before a step. Whatever makes one rank stop is decided on numbers all ranks have.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from asyncrl.config.schema import OptimConfig
from asyncrl.failures import BugError, ConfigError, DataError, DivergenceError
from trainer.batching import split
from trainer.engine import dist, export, lora, offload, state
from trainer.engine.attention import enable_packing
from trainer.engine.base import BaseEngine, EngineSpec, Layout, Loss, ModelType, StepOutcome
from trainer.engine.figures import Figures
from trainer.engine.models import load_model, speed_up
from trainer.engine.optim import adamw, clip_, gradients, learning_rate, squared_norm
from trainer.engine.packing import select_tokens, token_weights, unpack
from trainer.engine.scorer import Scorer
from trainer.tensors import input_lengths

CPU_MICRO_BATCH_TOKENS = 2048
"""Larger ones fall out of a CPU's caches: of a 1M-parameter model 9,700 tokens/s at 1,024, 10,400 at 2,048, 9,200 at
4,096."""
OVERHEAD_TOKENS = {"cpu": 96, "cuda": 1024}
"""What one pass costs beyond its tokens, in tokens. It only decides how finely rows are cut."""
RESULTS: dict[ModelType, tuple[str, ...]] = {
    "language_model": ("log_probs", "entropy"),
    "value_model": ("values",),
    "reward_model": ("scores",),
}


class TorchEngine(BaseEngine, abstract=True):
    """A Hugging Face model on one process group. A subclass says how: `_wrap`, and the class variables."""

    distributed: ClassVar[bool] = True
    """Uses a process group, of one rank too."""
    sharded: ClassVar[bool] = True
    """A rank holds a part of each gradient; otherwise all of it."""
    averages: ClassVar[bool] = False
    """The wrapper divides gradients by the number of ranks; ours are sums."""

    _model: nn.Module
    _scorer: Scorer
    _optimizer: torch.optim.Optimizer | None

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.device = dist.pick_device(spec.engine.device)
        _check(spec, self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(spec.engine.cpu_threads)
        self._owns_group = self.distributed and dist.join(self.device, timeout_s=spec.collective_s)
        self._mesh = self._make_mesh()
        self._total_steps: int | None = None
        self._pending: state.PendingSave | None = None
        with dist.guarded("loading the model"):
            self._build()

    @property
    def layout(self) -> Layout:
        rank, world = (dist.rank(), dist.world_size()) if self.distributed else (0, 1)
        size = self.spec.engine.ulysses_sequence_parallel_size
        return Layout(rank, world, rank // size, world // size, reports=rank % size == 0)

    @property
    def step(self) -> int:
        return self._step

    @property
    def model(self) -> nn.Module:
        """As it is called in a forward pass."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise BugError("this engine was made forward only (EngineSpec.optim is None); it cannot train")
        return self._optimizer

    def plan(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if device not in ("cpu", self.device.type):
            raise ConfigError(f"an engine on {self.device.type} cannot move to {device}; only to cpu and back")
        target = self.device if device == self.device.type else torch.device(device)
        wanted = {"model": model, "grad": grad, "optimizer": optimizer and self._optimizer is not None}
        for part in (part for part, moves in wanted.items() if moves and self._places[part] != target):
            if part == "model":
                self._move_model(target)
            elif part == "grad":
                offload.move_gradients(self._model, target)
            else:
                offload.move_optimizer(self.optimizer, target)
            self._places[part] = target

    def forward_backward(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        self.optimizer  # noqa: B018 - a forward-only engine refuses
        self.to(self.device.type, optimizer=False)
        with dist.guarded("forward_backward"), self._settled():
            totals = self._totals(batch)
            if totals[0] == 0:
                raise DataError("a batch without a single trained token: loss_mask is False everywhere; no step taken")
            weights = token_weights(batch, totals, loss.agg_mode, loss.agg_scale)
            trained = batch["loss_mask"].any(dim=1)
            learns = trained & loss.needs_gradient(batch)
            figures = Figures(self.device)
            with_gradient = self._cut(batch, learns)
            for number, rows in enumerate(with_gradient, start=1):
                with self._sync(number == len(with_gradient)):
                    self._micro_batch(batch, rows, weights, loss, figures)
            with torch.no_grad():
                for rows in self._cut(batch, trained & ~learns):
                    self._micro_batch(batch, rows, weights, loss, figures)
            summed = figures.over_ranks(self._sum, num_tokens=totals[0], counts=self.layout.reports)
        return summed | {"tokens": totals[0]}

    def optim_step(self, loss: float) -> StepOutcome:
        self.to(self.device.type)
        optimizer = self.optimizer
        try:
            with dist.guarded("optim_step"):
                parts = gradients(self._model.parameters())
                norm, all_finite = self._agree(parts, loss)
                if not all_finite:
                    raise self._diverged(loss, norm)
                rate = learning_rate(self._step + 1, self._total_steps, self._optim)
                clip_(parts, norm, self._optim.clip_grad)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
        finally:
            self.zero_grad()
            self._rest()
        self._step += 1
        return StepOutcome(self._step, norm, rate)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def infer(self, batch: TensorDict) -> TensorDict:
        self.to(self.device.type, optimizer=False, grad=False)
        size, width = batch["loss_mask"].shape
        mask = torch.arange(width) < batch["response_lens"][:, None]
        shape = (size,) if self.spec.model_type == "reward_model" else (size, width)
        result = TensorDict({key: torch.zeros(shape) for key in RESULTS[self.spec.model_type]}, batch_size=[size])
        with dist.guarded("infer"), self._settled(), torch.no_grad():
            self._totals(batch)
            for rows in self._cut(batch, torch.ones(size, dtype=torch.bool)):
                self._infer_micro_batch(batch, rows, mask, result)
        self._rest()
        return result

    def adapters_off(self) -> AbstractContextManager[None]:
        return lora.adapters_off(self._model)

    def weights(self, dtype: Literal["float32", "bfloat16", "float16"]) -> Iterator[tuple[str, Tensor]]:
        with dist.guarded("weights"):
            yield from export.full_weights(self._model, dtype)

    def save(self, directory: Path, *, hf: Path | None = None) -> None:
        self.finish_save()
        self._pending = state.begin_save(directory, self._model, self._optimizer, self._step, self.spec, hf=hf)

    def wait_for_files(self) -> None:
        if (pending := self._pending) is not None:
            pending.wait_for_files()

    def finish_save(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def load(self, directory: Path) -> None:
        self.finish_save()
        self.to(self.device.type)
        self._step = state.load(directory, self._model, self._optimizer, self.spec)
        self._rest()

    def reset(self) -> None:
        self.finish_save()
        del self._model, self._scorer, self._optimizer  # or there would be two models for a while
        with dist.guarded("reset"):
            self._build()

    def close(self) -> None:
        self.finish_save()
        if self._owns_group:
            dist.leave()
            self._owns_group = False

    # ------------------------------------------------------------------------------------------ of a backend

    def _load(self) -> PreTrainedModel:
        """On CPU, whole, in the master weights' dtype."""
        model = self.spec.model
        return load_model(
            model.path, self.spec.model_type, dtype=self._master_dtype, trust_remote_code=model.trust_remote_code
        )

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """Spread `model`, which is on CPU, over the ranks, each part on `self.device`. Returns what is to be called."""

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients have to be summed over the ranks by the end of the last one."""
        return nullcontext()

    def _settle(self) -> None:
        """After the passes of a call: the model's parameters are what the optimizer steps and checkpoints hold."""

    def _move_model(self, device: torch.device) -> None:
        self._model.to(device)

    def _autocast(self) -> torch.dtype | None:
        """What the scorer has to cast to, if the wrapper does not."""
        return self._compute_dtype()

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _optim(self) -> OptimConfig:
        assert self.spec.optim is not None, "an engine with an optimizer has its settings"
        return self.spec.optim

    def _build(self) -> None:
        spec = self.spec
        torch.manual_seed(spec.seed)
        self._step = 0
        hf = self._load()
        self._vocab_size = int(hf.get_input_embeddings().weight.shape[0])
        if spec.optim is None:
            hf.requires_grad_(False)
        else:
            lora.add_lora(hf, spec.model)
        packed = spec.engine.use_remove_padding and enable_packing(hf)
        speed_up(hf, spec.engine, self.device)
        self._model = self._wrap(hf.train())  # train mode is what turns checkpointing on; dropout is 0 everywhere
        self._scorer = Scorer(
            hf,
            module=self._model,
            model_type=spec.model_type,
            device=self.device,
            autocast=self._autocast(),
            temperature=spec.temperature,
            packed=packed,
            sp_group=self._mesh.get_group("sequence") if self._mesh is not None else None,
        )
        self._optimizer = None if spec.optim is None else adamw(self._model, spec.optim)
        self._places = dict.fromkeys(("model", "grad", "optimizer"), self.device)
        self._rest()

    def _make_mesh(self) -> DeviceMesh | None:
        """data × sequence; None where every rank has sequences of its own."""
        size = self.spec.engine.ulysses_sequence_parallel_size
        world = self.layout.world_size
        if world % size:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={size} does not divide the {world} ranks; choose a divisor"
            )
        if size == 1:
            return None
        return init_device_mesh(self.device.type, (world // size, size), mesh_dim_names=("data", "sequence"))

    @property
    def _master_dtype(self) -> torch.dtype:
        return torch.float64 if self.spec.float64 else torch.float32

    def _compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.spec.engine.dtype == "bfloat16" and not self.spec.float64 else None

    @contextmanager
    def _settled(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._settle()

    def _rest(self) -> None:
        """Between steps: what is configured to is kept on CPU."""
        engine = self.spec.engine
        if engine.param_offload or engine.optimizer_offload:
            self.to("cpu", model=engine.param_offload, optimizer=engine.optimizer_offload, grad=False)

    def _totals(self, batch: TensorDict) -> tuple[float, float]:
        """Trained tokens, and rows with a trained token, of all ranks. Refuses what no rank should begin with."""
        mask, ids, limit = batch["loss_mask"], batch["input_ids"], self._vocab_size
        odd = int(ids.min() < 0 or ids.max() >= limit)
        counts = torch.tensor([int(mask.sum()), int(mask.any(dim=1).sum()), odd], dtype=torch.float64)
        counts *= self.layout.reports
        tokens, rows, num_odd = self._sum(counts.to(self.device)).tolist()
        if num_odd:
            raise DataError(f"token ids outside the model's vocabulary of {limit}; check the tokenizer")
        return tokens, rows

    def _cut(self, batch: TensorDict, chosen: Tensor) -> list[list[int]]:
        """Rows of each micro-batch, as many on every rank: a rank that has too few rows ends with empty ones."""
        numbers = chosen.nonzero().flatten().tolist()
        all_lengths = input_lengths(batch)
        lengths = [all_lengths[number] for number in numbers]
        limit = self.spec.engine.ppo_max_token_len
        cut = partial(
            split,
            lengths,
            max_tokens=min(limit, CPU_MICRO_BATCH_TOKENS) if self.device.type == "cpu" else limit,
            overhead_tokens=OVERHEAD_TOKENS[self.device.type],
            packed=self._scorer.packed,
        )
        parts = cut() if lengths else []
        most = self._max(len(parts))
        if lengths and len(parts) < most:
            parts = cut(num_parts=most)
        return [[numbers[index] for index in part] for part in parts] + [[]] * (most - len(parts))

    def _micro_batch(self, batch: TensorDict, rows: list[int], weights: Tensor, loss: Loss, figures: Figures) -> None:
        """Forward, and backward where gradients are on. No rows: this rank only keeps the others company."""
        mask = batch["loss_mask"]
        real = bool(rows)
        if not real:
            rows, mask = [0], torch.zeros_like(mask).index_fill_(1, torch.tensor([0]), True)
        micro = self._scorer.lay_out(batch, rows, mask)
        tokens = select_tokens(batch, micro, weights * real, device=self.device, dtype=self._master_dtype)
        if not real:  # what stands in untrained tokens may be anything; 0 · inf would be NaN
            tokens = tokens._replace(fields={key: torch.zeros_like(field) for key, field in tokens.fields.items()})
        with self._activations():
            parts = loss(self._scorer(micro, entropy_gradient=loss.entropy_gradient), tokens)
        if torch.is_grad_enabled():
            (parts.loss * (self.layout.world_size if self.averages else 1)).backward()
        figures.add(parts, real=real)

    def _activations(self) -> AbstractContextManager[None]:
        offloads = self.spec.engine.activation_offload and self.device.type != "cpu"
        return offload.activations_on_cpu() if offloads else nullcontext()

    def _infer_micro_batch(self, batch: TensorDict, rows: list[int], mask: Tensor, result: TensorDict) -> None:
        micro = self._scorer.lay_out(batch, rows or [0], mask)
        scores = self._scorer(micro)
        if not rows:
            return
        if self.spec.model_type == "reward_model":
            result["scores"][micro.rows] = scores.log_probs.float().cpu()
            return
        width = mask.shape[1]
        if self.spec.model_type == "value_model":
            result["values"][micro.rows] = unpack(scores.log_probs.float().cpu(), micro, width)
            return
        result["log_probs"][micro.rows] = unpack(scores.log_probs.float().cpu(), micro, width)
        result["entropy"][micro.rows] = unpack(scores.entropy.float().cpu(), micro, width)

    def _agree(self, parts: list[Tensor], loss: float) -> tuple[float, bool]:
        """The gradient's global norm, and whether it and every rank's `loss` are finite. The same on all ranks."""
        square = squared_norm(parts).to(self.device)
        if not self.sharded:
            square = square / self.layout.world_size  # all ranks have the whole; they are added up below
        bad = torch.tensor(float(not math.isfinite(loss)), dtype=torch.float64, device=self.device)
        total, num_bad = self._sum(torch.stack([square, bad])).tolist()
        norm = math.sqrt(total) if total >= 0 else math.nan
        return norm, num_bad == 0 and math.isfinite(norm)

    def _diverged(self, loss: float, norm: float) -> DivergenceError:
        return DivergenceError(
            f"step {self._step + 1}: loss {loss}, gradient norm {norm}. The step was not taken; the weights are those "
            f"of step {self._step}; resume from a checkpoint with a smaller trainer.optim.lr (now {self._optim.lr:g}) "
            f"or clip_grad (now {self._optim.clip_grad:g})"
        )

    def _sum(self, values: Tensor) -> Tensor:
        return dist.all_sum(values) if self.distributed else values

    def _max(self, value: int) -> int:
        return dist.all_max(value, self.device) if self.distributed else value


def _check(spec: EngineSpec, device: torch.device) -> None:
    if spec.engine.dtype == "float16":
        raise ConfigError(
            "trainer.dtype=float16: gradients would underflow without loss scaling, which is not done; use bfloat16"
        )
    if spec.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0: greedy responses of a group are all alike and their policy has no "
            "probabilities to train on; use a temperature above 0 (validation has its own)"
        )
