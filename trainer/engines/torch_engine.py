"""The base of the torch backends: everything except how a model is distributed over the ranks.

    batch ─ micro-batches of this rank, as many as any rank has ─▶ scores ─▶ loss · weights ─▶ gradient over all ranks
          └ tokens and rows of all ranks ─▶ each token's weight ───────────────┘

Collective operations are the totals of a batch, the number of its micro-batches, those of the model itself, the sums
at the end of a batch, and the norm before a step. A rank raises an error only for reasons that all ranks see.
"""

from __future__ import annotations

import gc
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.sections.base import Dtype
from asyncrl.config.sections.trainer import OptimConfig
from asyncrl.core.failures import BugError, ConfigError, DataError, DivergenceError, InfraError
from trainer.engines import dist
from trainer.engines.base import BaseEngine, EngineSpec, Layout, Loss, StepOutcome
from trainer.engines.compute import lora
from trainer.engines.compute.attention import enable_packing, sequence_mesh
from trainer.engines.compute.experts import Routers
from trainer.engines.compute.flops import ModelShape, Utilization, peak_flops
from trainer.engines.compute.media import MediaEncoder
from trainer.engines.compute.micro_batches import MetricSums, MicroBatches
from trainer.engines.compute.optim import (
    adamw,
    clip_,
    gradients,
    learning_rate,
    move_gradients,
    move_optimizer,
    squared_norm,
)
from trainer.engines.compute.packing import input_lengths, token_weights
from trainer.engines.compute.scorer import Scorer
from trainer.engines.models import convert_weights, head_of, keep_float32, load_model, speed_up
from trainer.engines.sharded_loading import is_empty
from trainer.engines.state import checkpoint as state
from trainer.engines.state.adapters import adapter_weights
from trainer.engines.state.weights import full_weights


class LoadedModel(NamedTuple):
    """The model, its optimizer and everything else that a reset replaces."""

    model: nn.Module
    """The module that forward passes call."""
    scorer: Scorer
    passes: MicroBatches
    optimizer: torch.optim.Optimizer | None


class TorchEngine(BaseEngine, abstract=True):
    """A Hugging Face model on one process group. A subclass defines `_wrap` and the class variables."""

    distributed: ClassVar[bool] = True
    """Whether the engine uses a process group, even on one rank."""
    sharded: ClassVar[bool] = True
    """Whether a rank holds a part of each gradient instead of the whole gradient."""
    has_meshes: ClassVar[bool] = False
    """Whether the engine has `trainer.fsdp_size` and `trainer.tensor_parallel_size`."""
    balances_experts: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    """Whether the wrapper divides gradients by the number of ranks, which `gradient_scale` undoes."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.device = dist.pick_device(spec.engine.device)
        _check(spec, self.device)
        for key, default in (("fsdp_size", None), ("tensor_parallel_size", 1)):
            if (value := getattr(spec.engine, key)) != default and not self.has_meshes:
                raise ConfigError(
                    f"trainer.{key}={value}: strategy {spec.engine.strategy} does not have it; leave this key out, or "
                    "use fsdp2"
                )
        if self.device.type == "cpu":
            torch.set_num_threads(spec.engine.cpu_threads)
        self._owns_group = self.distributed and dist.join(self.device, timeout_s=spec.collective_s)
        self._total_steps: int | None = None
        self._pending: state.PendingSave | None = None
        self._loaded: LoadedModel | None = None
        self._accumulated = False
        self._meter: Utilization | None = None
        try:
            size = spec.engine.ulysses_sequence_parallel_size
            self._mesh = sequence_mesh(self.layout.world_size, size, self.device, timeout_s=spec.collective_s)
            with dist.guarded("loading the model"):
                self._build()
        except BaseException:
            self._leave()
            raise

    @property
    def layout(self) -> Layout:
        rank, world = (dist.rank(), dist.world_size()) if self.distributed else (0, 1)
        size = self.spec.engine.ranks_per_row
        return Layout(rank, world, rank // size, world // size, reports=rank % size == 0)

    @property
    def step(self) -> int:
        return self._step

    @property
    def attention(self) -> str:
        rows = "packed" if self._current.scorer.packed else "padded"
        return f"{self.spec.engine.attn_implementation}, {rows} rows"

    @property
    def model(self) -> nn.Module:
        """The module that forward passes call."""
        return self._model

    @property
    def _model(self) -> nn.Module:
        return self._current.model

    @property
    def _current(self) -> LoadedModel:
        if self._loaded is None:
            raise InfraError(
                "this engine has no model, because a reset failed (the error was raised then); reset it again, or "
                "create a new engine"
            )
        return self._loaded

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if (optimizer := self._current.optimizer) is None:
            raise BugError("this engine was made forward only (EngineSpec.optim is None); it cannot train")
        return optimizer

    def plan(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if device not in ("cpu", self.device.type):
            raise ConfigError(f"an engine on {self.device.type} cannot move to {device}; only to cpu and back")
        target = self.device if device == self.device.type else torch.device(device)
        wanted = {"model": model, "grad": grad, "optimizer": optimizer}
        self._put({part: target for part, moves in wanted.items() if moves})

    def forward_backward(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        """See `BaseEngine`. Trained rows (`[B, R]`) run in micro-batches, forward only where no gradient is needed."""
        self.optimizer  # noqa: B018 - raises if the engine is forward only
        self.to(self.device.type, optimizer=False)
        passes, counts = self._current.passes, self.layout.reports
        if not self._accumulated and self._meter is not None:
            self._meter.reset()
        with dist.guarded("forward_backward"), self._settled(), passes.timed():
            totals = passes.totals(batch, counts=counts)
            if totals[0] == 0:
                raise DataError("a batch without a single trained token: loss_mask is False everywhere; no step taken")
            weights = token_weights(batch, totals, loss.agg_mode, loss.agg_scale)
            trained = batch["loss_mask"].any(dim=1)
            learns = trained if self.spec.router_aux_loss_coef else trained & loss.needs_gradient(batch)
            sums = MetricSums(self.device)
            with_gradient = passes.cut(batch, learns)
            balancing = passes.balancing(batch, with_gradient)
            for number, rows in enumerate(with_gradient, start=1):
                with self._sync(number == len(with_gradient)):
                    passes.train(batch, rows, weights, loss, sums, balancing)
            with torch.no_grad():
                for rows in passes.cut(batch, trained & ~learns):
                    passes.train(batch, rows, weights, loss, sums)
            self._count(batch, learns, backward=True)
            self._count(batch, trained & ~learns, backward=False)
            summed = sums.over_ranks(dist.all_sum, num_tokens=totals[0], counts=counts)
            if balancing is not None:
                summed |= {"loss": summed["loss"] + balancing.value, **balancing.metrics()}
        self._accumulated = True
        return summed | {"tokens": totals[0]}

    def optim_step(self, loss: float) -> StepOutcome:
        """See `BaseEngine`. All ranks agree on `loss` and the norm, a scalar over all parameters, before they step."""
        optimizer = self.optimizer
        if not self._accumulated:
            raise BugError(
                "optim_step without a forward_backward since the last step, reset or load: there is no gradient to "
                "apply, yet momentum and weight decay would move the weights; no step was taken"
            )
        self.to(self.device.type)
        try:
            with dist.guarded("optim_step"):
                parts = gradients(self._model.parameters())
                self._complete_gradients()
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
            self._offload()
        self._step += 1
        return StepOutcome(self._step, norm, rate)

    def utilization(self, since: float) -> float | None:
        if self._meter is None:
            return None
        torch.cuda.synchronize(self.device)  # the optimizer may still be running
        return self._meter.of(time.perf_counter() - since)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulated = False

    def infer(self, batch: TensorDict, *, temperature: float | None = None) -> TensorDict:
        passes = self._current.passes
        results = passes.empty_results(batch)
        self.to(self.device.type, optimizer=False, grad=False)
        try:
            with dist.guarded("infer"), self._settled(), torch.no_grad(), passes.timed():
                passes.totals(batch, counts=self.layout.reports)
                for rows in passes.cut(batch, torch.ones(len(batch), dtype=torch.bool)):
                    passes.infer(batch, rows, results, temperature=temperature)
        finally:
            self._offload()
        return results

    def adapters_off(self) -> AbstractContextManager[None]:
        return lora.adapters_off(self._model)

    def weights(self, dtype: Dtype) -> Iterator[tuple[str, Tensor]]:
        with dist.guarded("weights"), self._on_device(optimizer=False):
            yield from full_weights(self._model, dtype)

    def adapter_weights(self, dtype: Dtype) -> Iterator[tuple[str, Tensor]]:
        with dist.guarded("weights"), self._on_device(optimizer=False):
            yield from adapter_weights(self._model, dtype)

    def save(self, directory: Path, *, hf: Path | None = None, hf_dtype: Dtype = "float32") -> None:
        self.finish_save()
        with dist.guarded("save"), self._on_device(optimizer=True):
            model, optimizer = self._model, self._current.optimizer
            self._pending = state.begin_save(
                directory, model, optimizer, self._step, self.spec, hf=hf, hf_dtype=hf_dtype
            )

    def wait_for_files(self) -> None:
        if (pending := self._pending) is not None:
            pending.wait_for_files()

    def finish_save(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            with dist.guarded("finish_save"):
                pending.wait()

    def load(self, directory: Path) -> None:
        self.finish_save()
        if self._current.optimizer is not None:
            self.zero_grad()
        self.to(self.device.type)
        try:
            with dist.guarded("load"):
                self._step = state.load(directory, self._model, self._current.optimizer, self.spec)
        finally:
            self._offload()

    def reset(self) -> None:
        self.finish_save()
        self._discard()
        with dist.guarded("reset"):
            self._build()

    def close(self) -> None:
        try:
            self.finish_save()
        finally:
            if self._loaded is not None:
                state.release(self._loaded.model)
            self._leave()

    def _load(self) -> PreTrainedModel:
        """Load the full model on CPU, in the dtype of trained weights, or build it without weights (`_fill`)."""
        return load_model(**self._source)

    @property
    def _source(self) -> dict[str, Any]:
        """The model's files, as arguments of `load_model`."""
        spec = self.spec
        return {
            "path": spec.model.path,
            "model_type": spec.model_type,
            "key": spec.path_key,
            "dtype": self._master_dtype,
            "attn_implementation": spec.engine.attn_implementation,
            "trust_remote_code": spec.model.trust_remote_code,
        }

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """Distribute `model`, which is on CPU or has no weights, over the ranks, each part on `self.device`. Return the
        module to call."""

    def _fill(self, model: PreTrainedModel) -> None:
        """Load the weights of a wrapped model that was built without them. Collective."""

    def _enable_packing(self, model: PreTrainedModel) -> bool:
        return enable_packing(model)

    def _leave(self) -> None:
        if self._owns_group:
            dist.leave()
            self._owns_group = False

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; by the end of the last one, gradients must be summed over the
        ranks."""
        return nullcontext()

    def _settle(self) -> None:
        """Restore the parameters that the optimizer and checkpoints use, after the passes of a call."""

    def _move_model(self, device: torch.device) -> None:
        self._model.to(device)

    def _autocast(self) -> torch.dtype | None:
        """Return the dtype that the scorer has to cast to, if the wrapper does not cast."""
        return self._compute_dtype()

    def _complete_gradients(self) -> None:
        """Sum gradients of which each rank has only a summand, once, before a step."""

    def _num_copies(self, _parameter: nn.Parameter) -> int:
        """Return how many ranks have the same part of a parameter's gradient."""
        return 1 if self.sharded else self.layout.world_size

    @property
    def _optim(self) -> OptimConfig:
        assert self.spec.optim is not None, "an engine with an optimizer has its settings"
        return self.spec.optim

    def _build(self) -> None:
        spec = self.spec
        torch.manual_seed(spec.seed)
        self._step, self._accumulated = 0, False
        hf = self._load()
        if spec.float64:
            # Grouped products have no float64. The eager loop has no gradient in a rank whose experts get no token, and
            # the others wait for it.
            hf.set_experts_implementation("batched_mm")
        if spec.optim is None:
            hf.requires_grad_(False)
        else:
            lora.add_lora(hf, spec.model)
        routers = Routers(hf, spec.router_aux_loss_coef) if spec.router_aux_loss_coef else None
        self._meter = _meter(hf, spec, self.device)
        empty = is_empty(hf)
        packed = spec.engine.use_remove_padding and not empty and self._enable_packing(hf)
        speed_up(hf, spec.engine, self.device)
        if (head := self._float32_head(hf)) is not None:
            keep_float32(head, self.device)
        if spec.optim is None and (dtype := self._compute_dtype()) is not None:
            convert_weights(hf, dtype, head)
        vocab_size = int(hf.get_input_embeddings().weight.shape[0])
        shapes = frozenset(parameter.shape for parameter in hf.parameters())
        model = self._wrap(hf.train())  # checkpointing works in train mode only; dropout is 0 everywhere
        if empty:
            self._fill(hf)
            packed = spec.engine.use_remove_padding and self._enable_packing(hf)
        scorer = Scorer(
            hf,
            module=model,
            model_type=spec.model_type,
            device=self.device,
            autocast=self._autocast(),
            temperature=spec.temperature,
            packed=packed,
            sp_group=self._mesh.get_group("sequence") if self._mesh is not None else None,
            media_encoder=MediaEncoder(hf, spec.model, spec.path_key) if spec.model_type == "language_model" else None,
            routers=routers,
        )
        passes = MicroBatches(
            scorer,
            spec,
            self.device,
            dtype=self._master_dtype,
            vocab_size=vocab_size,
            gradient_scale=self.layout.world_size if self.averages else 1,
            copied_weights=shapes if self._autocast() is not None else frozenset(),
        )
        self._loaded = LoadedModel(model, scorer, passes, None if spec.optim is None else adamw(model, spec.optim))
        self._places = dict.fromkeys(("model", "grad", "optimizer"), self.device)
        self._offload()

    def _discard(self) -> None:
        """Free the old model before the next one is loaded: modules, hooks and wrappers refer to each other in
        cycles."""
        if self._loaded is not None:
            state.release(self._loaded.model)
            self._loaded.scorer.detach()
            self._loaded = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _master_dtype(self) -> torch.dtype:
        return torch.float64 if self.spec.float64 else torch.float32

    def _compute_dtype(self) -> torch.dtype | None:
        spec = self.spec
        half = spec.engine.dtype == "bfloat16" or (spec.bfloat16_on_gpu and self.device.type == "cuda")
        return torch.bfloat16 if half and not spec.float64 else None

    def _float32_head(self, model: nn.Module) -> nn.Module | None:
        """Return the head of a value or reward model if it computes in float32 and the rest of the model does not."""
        if self._compute_dtype() is None or self.spec.model_type == "language_model":
            return None
        return head_of(model)

    def _count(self, batch: TensorDict, chosen: Tensor, *, backward: bool) -> None:
        if self._meter is not None:
            lengths = input_lengths(batch)
            self._meter.add([lengths[row] for row in chosen.nonzero().flatten().tolist()], backward=backward)

    def _put(self, places: Mapping[str, torch.device]) -> None:
        for part, target in places.items():
            if self._places[part] == target:
                continue
            if part == "model":
                self._move_model(target)
            elif part == "grad":
                move_gradients(self._model, target)
            elif self._current.optimizer is not None:
                move_optimizer(self._current.optimizer, target)
            self._places[part] = target

    @contextmanager
    def _on_device(self, *, optimizer: bool) -> Iterator[None]:
        """Move weights and optimizer state to a device that collectives support, and back afterwards."""
        before = self._places.copy()
        try:
            if self.sharded:
                self.to(self.device.type, optimizer=optimizer, grad=False)
            yield
        finally:
            self._put(before)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._settle()

    def _offload(self) -> None:
        """Move offloaded parts to CPU between calls."""
        engine = self.spec.engine
        if engine.param_offload or engine.optimizer_offload:
            self.to("cpu", model=engine.param_offload, optimizer=engine.optimizer_offload, grad=False)

    def _agree(self, parts: list[Tensor], loss: float) -> tuple[float, bool]:
        """Return the gradient's global norm, and whether it and every rank's `loss` are finite. All ranks agree."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        copies = [self._num_copies(parameter) for parameter in trained]
        for number in sorted(set(copies)):
            alike = [part for part, count in zip(parts, copies, strict=True) if count == number]
            square += squared_norm(alike).to(self.device) / number  # the sum is over all ranks
        bad = torch.tensor(float(not math.isfinite(loss)), dtype=torch.float64, device=self.device)
        total, num_bad = dist.all_sum(torch.stack([square, bad])).tolist()
        norm = math.sqrt(total) if total >= 0 else math.nan
        return norm, num_bad == 0 and math.isfinite(norm)

    def _diverged(self, loss: float, norm: float) -> DivergenceError:
        return DivergenceError(
            f"step {self._step + 1}: loss {loss}, gradient norm {norm}. The step was not taken; the weights are those "
            f"of step {self._step}; start again, from a checkpoint if there is one, with a smaller trainer.optim.lr "
            f"(now {self._optim.lr:g}) or clip_grad (now {self._optim.clip_grad:g})"
        )


def _meter(model: PreTrainedModel, spec: EngineSpec, device: torch.device) -> Utilization | None:
    """Return the meter of utilization; None if the device's peak or the work is unknown, or nothing is trained."""
    if device.type != "cuda" or spec.engine.dtype != "bfloat16" or spec.float64 or spec.optim is None:
        return None
    peak = peak_flops(torch.cuda.get_device_name(device))
    if peak is None or getattr(model.config, "vision_config", None) is not None:
        return None
    shape = ModelShape.of_model(model)
    return None if shape is None else Utilization(shape, peak, sharing=spec.engine.ranks_per_row)


def _check(spec: EngineSpec, device: torch.device) -> None:
    if spec.engine.dtype == "float16":
        raise ConfigError(
            "trainer.dtype=float16: gradients would underflow, since loss scaling is not supported; use bfloat16"
        )
    if spec.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0: greedy responses of a group are all alike, and their policy has no "
            "probabilities to train on; use a temperature above 0 (validation has its own temperature)"
        )
