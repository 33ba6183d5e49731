"""The interface of engines, which train one model on all ranks of a process group, and of their losses.

Engines use neither Ray nor vLLM. Every rank of a group makes the same calls in the same order; docstrings mark
collective methods. A rank gets the rows of its data group (`Layout.data_rank`); ranks that share sequences or tensors
get the same rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.sections.base import Dtype
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from asyncrl.core.failures import ConfigError

ModelType = Literal["language_model", "value_model", "reward_model"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything needed to create an engine."""

    model_type: ModelType
    model: ModelConfig
    engine: EngineConfig
    optim: OptimConfig | None = None
    """Optimizer settings; None: forward passes only."""
    temperature: float = 1.0
    """Log-probs are those of softmax(logits / temperature)."""
    seed: int = 0
    float64: bool = False
    """Weights and arithmetic in float64, for comparisons."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of experts, which is added to every loss (`trainer.engines.compute.experts`);
    0: none."""
    adapters_only: bool = False
    """Whether versions for the engines of generation consist of the LoRA adapters."""
    bfloat16_on_gpu: bool = False
    """Whether passes on a GPU are in bfloat16, whatever `engine.dtype` is."""
    collective_s: float = 300.0
    """Deadline of one collective operation, if the engine has to create the process group."""
    path_key: str = "model.path"
    """The configuration key of the model's path, for messages."""


class Layout(NamedTuple):
    """The position of this process among the ranks."""

    rank: int
    world_size: int
    data_rank: int
    """Number of this rank's data group, which determines its share of a batch's rows."""
    data_size: int
    reports: bool
    """Whether this rank's results are collected, which is true of one rank of each data group."""


class TokenScores(NamedTuple):
    """Scores of the tokens of a micro-batch, in row order. float32 `[N]`."""

    log_probs: Tensor
    """Log-probs in nats; for a value or reward model, its values."""
    entropy: Tensor
    """Entropy in nats of the distribution that each token was drawn from, detached unless `Loss.entropy_gradient`;
    zeros for a value or reward model."""


class Tokens(NamedTuple):
    """Input of a loss besides the scores: the trained tokens of a micro-batch, one after another."""

    fields: Mapping[str, Tensor]
    """All float32 `[B, R]` keys of the batch (`trainer.workers.tensors`), as float32 `[N]`."""
    weight: Tensor
    """float32 `[N]`: weight of each token. It includes the denominators, so the loss is a sum over micro-batches and
    ranks."""
    row: Tensor
    """int64 `[N]`: number of the token's row within the micro-batch."""
    num_rows: int


class LossParts(NamedTuple):
    loss: Tensor
    """Scalar: weighted sum over these tokens."""
    sums: Mapping[str, Tensor]
    """Detached scalars with weights applied, which are summed over micro-batches and ranks."""
    means: Mapping[str, Tensor]
    """Detached `[N]`, which are averaged over all trained tokens of the step."""


class Loss(Protocol):
    """The interface of losses. Picklable. See `trainer.algorithms.objective`."""

    agg_mode: str
    """A value of `algorithm.loss_agg_mode`."""
    agg_scale: float
    """Divisor of `seq-mean-token-sum-norm`, in tokens."""
    entropy_gradient: bool
    """Whether gradients flow through the entropies, for which the backward pass needs another tensor `[N, V]`."""

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        """Return which rows need a backward pass, bool `[B]`: False where the gradient is exactly 0."""

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts: ...


class StepOutcome(NamedTuple):
    step: int
    grad_norm: float
    """Global norm before clipping."""
    lr: float


class BaseEngine(ABC):
    """One model with its optimizer and learning rate schedule. Calls must not overlap.

    Defining a subclass with abstract methods raises a TypeError, unless it is declared with `abstract=True` to be
    subclassed again: `class TorchEngine(BaseEngine, abstract=True)`. Subclasses of the torch backends
    (`trainer.engines.torch_engine`) only have to wrap the model.

    Raises (on construction):
        ConfigError: the model cannot be loaded, or the backend does not support the configuration.
    """

    model_types: ClassVar[tuple[ModelType, ...]] = get_args(ModelType)
    """Types of models that it runs."""
    balances_experts: ClassVar[bool] = False
    """Whether it has the load-balancing loss (`EngineSpec.router_aux_loss_coef`)."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = missing_methods(cls)  # __abstractmethods__ is set after this hook runs, so it is computed here
        if missing and not abstract:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}: an engine must implement all of BaseEngine")

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @property
    @abstractmethod
    def layout(self) -> Layout: ...

    @property
    def attention(self) -> str:
        """How the model computes attention, in words."""
        return f"that of {self.spec.engine.strategy}"

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of optimizer steps taken, including those before a resume."""

    @abstractmethod
    def plan(self, total_steps: int) -> None:
        """Set the total number of steps, at which the learning rate's decay ends. Call it before the first step."""

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the named parts to `device` ("cpu", or "cuda" for this rank's GPU); a batch moves them back as
        needed."""

    @abstractmethod
    def forward_backward(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        """Add the gradient of this batch to the accumulated one. Collective.

        Denominators cover the rows of all ranks and count a trajectory of several rows once
        (`trainer.engines.compute.packing.token_weights`). `batch` has this rank's rows (`trainer.workers.tensors`).
        Returns the sums and means of the loss over all ranks, and `tokens`.

        Raises (on every rank):
            BugError: the engine was built without an optimizer.
            DataError: no rank has a trained token.
        """

    @abstractmethod
    def optim_step(self, loss: float) -> StepOutcome:
        """Take one optimizer step: clip the accumulated gradient, apply it and clear it. Collective.

        Raises (on every rank):
            BugError: no gradient has accumulated since the last step.
            DivergenceError: `loss` or the gradient is not finite; weights and optimizer are unchanged.
        """

    def utilization(self, since: float) -> float | None:
        """Return the share of this rank's peak FLOPs that its `forward_backward` calls used, or None if it is
        unknown. Call it right after a step; the calls and the step lasted from `since` (`time.perf_counter`) until
        now."""
        return None

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""

    @abstractmethod
    def infer(self, batch: TensorDict, *, temperature: float | None = None) -> TensorDict:
        """Run the forward pass only. Collective. Returns float32 tensors for this rank's rows. `temperature` replaces
        that of the engine.

        A language model returns `log_probs [B, R]` and `entropy [B, R]` of every response token, including masked
        ones; a value model `values [B, R]`, before each response token; a reward model `scores [B]`, at the last
        response token.
        """

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Switch the LoRA adapters off within the context. Raises ConfigError without LoRA."""

    @abstractmethod
    def weights(self, dtype: Dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face checkpoint names and full contiguous CPU tensors on rank 0, empty tensors on other
        ranks. LoRA is merged. A tied head appears once, under the embedding's name. Collective: iterate to the end
        on every rank.

        On CPU these may be the live weights, so use them before the next optimizer step.
        """

    def adapter_weights(self, dtype: Dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA adapters by peft's names, as `weights` does. B is multiplied by `alpha / rank`, so the scale
        of the adapters is 1. Collective: iterate to the end on every rank.

        Raises:
            ConfigError: the backend cannot yield them.
        """
        raise ConfigError(
            f"weight_sync.lora=adapter: {type(self).__name__} publishes merged weights only; set "
            "weight_sync.lora=merged"
        )

    @abstractmethod
    def save(self, directory: Path, *, hf: Path | None = None, hf_dtype: Dtype = "float32") -> None:
        """Begin a checkpoint: copy the state, so that training may continue, and write the copy in the background.
        Collective.

        Waits for the previous one. `directory` exists and is visible to all ranks. In `hf`, rank 0 also writes the full
        model in Hugging Face format, with floating-point weights rounded to `hf_dtype`.
        """

    def wait_for_files(self) -> None:
        """Wait until this rank has written its part of the current checkpoint, or failed to.

        Not collective. This is the only method that may run concurrently with another one, in any thread. After it,
        `finish_save` returns at once.
        """
        return  # an engine that writes within `save` has nothing to wait for

    @abstractmethod
    def finish_save(self) -> None:
        """Wait until the current checkpoint is written. Collective.

        Raises:
            InfraError: it could not be written (disk full, …), or a rank died.
            DeadlineError: it was not written in time.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Load the state that `save` wrote, on this or another number of ranks; discard the gradient. Collective.

        Raises:
            ConfigError: files are missing or damaged, or belong to another model; nothing else was changed.
        """

    @abstractmethod
    def reset(self) -> None:
        """Reload the model files, with a fresh optimizer and step 0. If it fails, only `reset` and `close` may be
        called."""

    @abstractmethod
    def close(self) -> None:
        """Wait for a current checkpoint as `finish_save` does, and leave the process group if this engine created
        it."""


def missing_methods(engine: type[BaseEngine]) -> list[str]:
    """Return the names of the methods that `engine` leaves abstract."""
    return sorted(name for name in dir(engine) if getattr(getattr(engine, name, None), "__isabstractmethod__", False))
