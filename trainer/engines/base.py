"""What an engine is: one model on all ranks of a process group, and the loss it is trained with.

Engines know neither Ray nor vLLM. Every rank of a group makes the same calls in the same order; what is collective says
so. A rank gets the rows of its data group (`Layout.data_rank`): ranks that share a sequence or a tensor get the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.schema import EngineConfig, ModelConfig, OptimConfig

ModelType = Literal["language_model", "value_model", "reward_model"]
AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is made from."""

    model_type: ModelType
    model: ModelConfig
    engine: EngineConfig
    optim: OptimConfig | None = None
    """None: forward only, no optimizer."""
    temperature: float = 1.0
    """Log-probs are of softmax(logits / temperature)."""
    seed: int = 0
    float64: bool = False
    """Weights and arithmetic in float64, for comparisons."""
    collective_s: float = 300.0
    """Deadline of one collective operation, if the engine has to make the process group."""
    path_key: str = "model.path"
    """The key that `model.path` was given under, which messages name."""


class Layout(NamedTuple):
    """Where this process is."""

    rank: int
    world_size: int
    data_rank: int
    """Which share of a batch's rows this rank gets."""
    data_size: int
    reports: bool
    """Whether this rank's results are the ones to collect: one rank of each data group."""


class TokenScores(NamedTuple):
    """Of the scored tokens of a micro-batch, in row order. float32 `[N]`."""

    log_probs: Tensor
    """Nats; of a value or reward model: the values."""
    entropy: Tensor
    """Nats, of the distribution each token was drawn from; detached unless `Loss.entropy_gradient`; of a value or
    reward model: zeros."""


class Tokens(NamedTuple):
    """What a loss sees besides the scores: the trained tokens of a micro-batch, one after another."""

    fields: Mapping[str, Tensor]
    """Every float32 `[B, R]` key of the batch (`trainer.tensors`), as float32 `[N]`."""
    weight: Tensor
    """float32 `[N]`: what the token counts in the loss. The loss is a plain sum over all micro-batches and ranks."""
    row: Tensor
    """int64 `[N]`: number of the token's row within the micro-batch."""
    num_rows: int


class LossParts(NamedTuple):
    loss: Tensor
    """Scalar: sum over these tokens, weights applied."""
    sums: Mapping[str, Tensor]
    """Detached scalars, weights applied: added up over micro-batches and ranks."""
    means: Mapping[str, Tensor]
    """Detached `[N]`: averaged over all trained tokens of the step."""


class Loss(Protocol):
    """Picklable. `trainer.algorithms.objective` has the ones of this project."""

    agg_mode: AggMode
    agg_scale: float
    """Divisor of `seq-mean-token-sum-norm`, in tokens."""
    entropy_gradient: bool
    """Whether the loss is differentiated through the entropies, which costs the backward pass another `[N, V]`."""

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        """bool `[B]`: False where the gradient is exactly 0, so that no backward pass is needed."""

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts: ...


class StepOutcome(NamedTuple):
    step: int
    grad_norm: float
    """Global norm before clipping."""
    lr: float


class BaseEngine(ABC):
    """One model, its optimizer and its schedule. One call at a time.

    Defining a subclass that leaves something abstract fails with a TypeError, unless it says `abstract=True` and is
    meant to be subclassed again: `class TorchEngine(BaseEngine, abstract=True)`. Subclasses of the torch backends
    (`trainer.engine.torch_engine`) only have to wrap the model.

    Raises (on construction):
        ConfigError: the model cannot be loaded, or the configuration asks for what this backend cannot do.
    """

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = missing_methods(cls)  # __abstractmethods__ is set after this hook runs, so it is worked out here
        if missing and not abstract:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}: an engine implements all of BaseEngine")

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @property
    @abstractmethod
    def layout(self) -> Layout: ...

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps taken, over resumes."""

    @abstractmethod
    def plan(self, total_steps: int) -> None:
        """Before the first step: how many there will be, which is where the learning rate's decay ends."""

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move what is named to `device` ("cpu", or "cuda" for this rank's GPU); a batch moves it back as needed."""

    @abstractmethod
    def forward_backward(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        """Add this batch's gradient to what has accumulated. Collective.

        Denominators span the rows of all ranks, and count a trajectory of several rows once
        (`trainer.engine.packing.token_weights`). Returns the loss's sums and means over all ranks, and `tokens`.
        """

    @abstractmethod
    def optim_step(self, loss: float) -> StepOutcome:
        """Clip, apply and clear the accumulated gradient. Collective.

        Raises (on every rank):
            BugError: nothing has accumulated since the last step.
            DivergenceError: `loss` or the gradient is not finite; weights and optimizer are as they were.
        """

    def utilization(self, since: float) -> float | None:
        """Right after a step: what its `forward_backward` calls were of this rank's device at its peak, if they and the
        step took from `since` (`time.perf_counter`) until now. None: not known."""
        return None

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""

    @abstractmethod
    def infer(self, batch: TensorDict) -> TensorDict:
        """Forward only. Collective. float32, for this rank's rows:

        language model: `log_probs [B, R]`, `entropy [B, R]` of every response token, masked ones too; value model:
        `values [B, R]`, before each response token; reward model: `scores [B]`, at the last response token.
        """

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Within: the model without its LoRA adapters. Without LoRA: ConfigError."""

    @abstractmethod
    def weights(self, dtype: Literal["float32", "bfloat16", "float16"]) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face checkpoint names and whole contiguous CPU tensors on rank 0; other ranks: empty tensors. LoRA is
        merged in. A tied head appears once, under the embedding's name. Collective: run it to its end on every rank.

        On CPU these may be the live weights: use them before the next optimizer step.
        """

    @abstractmethod
    def save(self, directory: Path, *, hf: Path | None = None) -> None:
        """Begin a checkpoint: copy the state, so that training may go on, and write it in the background. Collective.

        Waits for the one before. `directory` exists and all ranks see it. `hf`: where rank 0 writes the whole model in
        Hugging Face format too.
        """

    def wait_for_files(self) -> None:
        """Wait until this rank has written, well or not, what it has to of the checkpoint begun.

        Not collective. Alone of all methods it may be called beside another, from any thread: after it, `finish_save`
        holds up nobody.
        """
        return  # an engine that writes in `save` has nothing left to do

    @abstractmethod
    def finish_save(self) -> None:
        """Wait until the checkpoint begun is written. Collective.

        Raises:
            InfraError: it could not be written (disk full, …), or a rank died; DeadlineError if not in time.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Put back what `save` wrote, on this or another number of ranks; forget the accumulated gradient. Collective.

        Raises:
            ConfigError: files are missing or damaged, or belong to another model; nothing else was changed.
        """

    @abstractmethod
    def reset(self) -> None:
        """Back to the model files, with a fresh optimizer, step 0. If it fails, only `reset` and `close` are left."""

    @abstractmethod
    def close(self) -> None:
        """Wait for a checkpoint begun, as `finish_save` does, and give up the process group, if it is this engine's."""


def missing_methods(engine: type[BaseEngine]) -> list[str]:
    """Names that `engine` leaves abstract."""
    return sorted(name for name in dir(engine) if getattr(getattr(engine, name, None), "__isabstractmethod__", False))
