"""Where a check runs, how checks are found, and what they compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimConfig
from asyncrl.failures import AsyncRLError
from trainer.algorithms.objective import PolicyLoss, ValueLoss
from trainer.engine import dist
from trainer.engine.base import BaseEngine, EngineSpec, Loss, ModelType
from trainer.engine.contract.reference import close, make_batch, model_paths
from trainer.engine.registry import EngineRegistry

OPTIM = OptimConfig(lr=1e-2, clip_grad=0.7)
"""A learning rate at which three steps move weights by percents, and a norm that most gradients here exceed."""
EXACT = 5e-7
"""Of float64 arithmetic in another order, through the float32 norms that some models have and others have not."""
SINGLE = 2e-5
"""Of float32 arithmetic against float64."""
SAME = 1e-6
"""Of two ways through float32 arithmetic."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a check runs."""

    backend: str
    device: str
    directory: Path
    """Seen by all ranks: models (`reference.write_models`), and room for checkpoints."""

    def spec(self, model_type: ModelType = "language_model", **changes: Any) -> EngineSpec:
        """`changes`: fields of EngineSpec, EngineConfig or ModelConfig."""
        fields: dict[str, Any] = {"optim": OPTIM} if model_type != "reward_model" else {}
        model: dict[str, Any] = {"path": str(model_paths(self.directory)[model_type])}
        engine: dict[str, Any] = {"strategy": self.backend, "device": self.device, "num_workers": dist.world_size()}
        for key, value in changes.items():
            owner = engine if key in EngineConfig.model_fields else model if key in ModelConfig.model_fields else fields
            owner[key] = value
        return EngineSpec(model_type, ModelConfig(**model), EngineConfig(**engine), **fields)

    def engine(self, model_type: ModelType = "language_model", **changes: Any) -> BaseEngine:
        return EngineRegistry.new(self.spec(model_type, **changes))


class Check(NamedTuple):
    name: str
    run: Callable[[Setting], None]
    model_type: ModelType
    num_ranks: int | None
    """Only with so many ranks; None: with any number."""


CHECKS: list[Check] = []


def check(
    model_type: ModelType = "language_model", *, num_ranks: int | None = None
) -> Callable[[Callable[[Setting], None]], Callable[[Setting], None]]:
    def add(run: Callable[[Setting], None]) -> Callable[[Setting], None]:
        CHECKS.append(Check(run.__name__, run, model_type, num_ranks))
        return run

    return add


class Step(NamedTuple):
    figures: list[float]
    weights: dict[str, Tensor]


def one_step(
    setting: Setting, batch: TensorDict | None = None, *, loss: Loss | None = None, first: int = 0, **changes: Any
) -> Step:
    engine = setting.engine(**({"float64": True} | changes))
    return two_steps(engine, make_batch(6, 1) if batch is None else batch, loss or make_loss(), first)


def two_steps(engine: BaseEngine, batch: TensorDict, loss: Loss, first: int = 0) -> Step:
    """Two steps: the second one starts from an optimizer with a state."""
    share = share_of(engine, batch, first)
    figures = engine.forward_backward(share, loss)
    norms = [engine.optim_step(figures["loss"]).grad_norm]
    engine.forward_backward(share, loss)
    norms.append(engine.optim_step(0.0).grad_norm)
    return Step([figures["loss"], *norms], copies(weights_of(engine)))


def same_step(got: Step, expected: Step, tolerance: float = EXACT) -> None:
    for name, left, right in zip(("loss", "first norm", "second norm"), got.figures, expected.figures, strict=True):
        close(left, right, tolerance, name)
    same_weights(got.weights, expected.weights, max(tolerance, SAME / 10) * 10, "after two steps")


def make_loss(model_type: ModelType = "language_model", algorithm: AlgorithmConfig | None = None) -> Loss:
    return ValueLoss(0.5) if model_type == "value_model" else PolicyLoss(algorithm or AlgorithmConfig(), 20)


def share_of(engine: BaseEngine, batch: TensorDict, first: int = 0) -> TensorDict:
    """This rank's rows; `first`: how many the first data rank gets of them, 0: half."""
    layout = engine.layout
    if layout.data_size == 1:
        return batch
    cut = first or len(batch) // 2
    bounds = [0, *(cut + (len(batch) - cut) * rank // (layout.data_size - 1) for rank in range(layout.data_size))]
    return batch[bounds[layout.data_rank] : bounds[layout.data_rank + 1]]


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """Whole on rank 0, empty elsewhere."""
    return dict(engine.weights("float32"))


def copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def same_weights(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, when: str) -> None:
    if dist.rank() != 0:
        return
    true(got.keys() == expected.keys(), f"{when}: weights are called {sorted(got)}, not {sorted(expected)}")
    for name, tensor in expected.items():
        close(got[name], tensor, tolerance, f"{name} {when}")


def true(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def raises(kind: type[AsyncRLError], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        true(words in str(error), f"{kind.__name__} says {words!r}: {error}")
        return
    raise AssertionError(f"{kind.__name__} about {words!r} was expected")
