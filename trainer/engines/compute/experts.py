"""The load-balancing loss of mixtures of experts, with which their routers send tokens to all experts alike.

For a layer with `E` experts, of which each token chooses `K`, it is `E · Σ_e f_e · P_e` (Switch Transformer,
https://arxiv.org/abs/2101.03961, equations 4 to 6): `f_e` is how often a token chooses expert `e`, and `P_e` the mean
of the router's probability of it. It is `K` if the tokens are spread evenly, and at most `E`.

Both averages are over all real tokens of a batch, on all ranks and in all micro-batches: the positions of each row with
a trained token, of its prompt, too, but neither padding nor the filler of a packed row. The loss is the mean over the
layers. So it depends only on the batch, as every loss here, and it does not force each sequence to use all experts
(https://arxiv.org/abs/2501.11873). The `load_balancing_loss_func` of transformers has the averages of one forward call,
and adds up the layers before it multiplies, so that the imbalances of two layers may hide each other. With one layer,
and the whole batch in one call, the two are equal.

`f` has no gradient, but the gradient of each micro-batch depends on the `f` of the batch. If a rank has more than one
micro-batch, forward passes without logits count it first: at most a third more time for a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from asyncrl.core.failures import ConfigError
from trainer.engines import dist

KEY = "trainer.router_aux_loss_coef"


class ExpertLoad(NamedTuple):
    """How routers distribute tokens over the `E` experts of each of `L` layers, summed over the tokens of a pass."""

    chosen: Tensor
    """`[L, E]`: number of tokens that choose the expert."""
    probabilities: Tensor
    """`[L, E]`: sum of the probabilities that the router gives the expert."""
    tokens: Tensor
    """Scalar: number of tokens."""


class Routers:
    """Records what the routers of a model compute.

    Raises:
        ConfigError: the model has no experts, or transformers has no load-balancing loss for it.
    """

    def __init__(self, model: PreTrainedModel, coef: float) -> None:
        recorders = _recorders(model)
        self._name = type(model).__name__
        self._coef = coef
        self._top_k: int = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
        if not recorders:
            raise self._refused("has no experts, so there is nothing to balance")
        if not (self._top_k and _has_loss(model) and all(_is_usable(recorder) for recorder in recorders)):
            raise self._refused("has no load-balancing loss in transformers: its experts are balanced in another way")
        self._logits: list[Tensor] | None = None
        self._hooks = [
            module.register_forward_hook(self._recorder(recorder.index))
            for module in model.modules()
            for recorder in recorders
            if isinstance(module, recorder.target_class)
        ]

    def detach(self) -> None:
        """Remove the hooks. Nothing is recorded afterwards."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the logits of each router within the context, in a list. The layers of a backward pass that are
        computed again are not recorded."""
        logits: list[Tensor] = []
        self._logits = logits
        try:
            yield logits
        finally:
            self._logits = None

    def load(self, logits: Sequence[Tensor], real: Tensor) -> ExpertLoad:
        """Return the load of the recorded pass. `real`: bool, one for each position of the pass; others don't count.

        Raises:
            ConfigError: not every router was called once, with all positions.
        """
        positions = real.numel()
        if [one.numel() // one.shape[-1] for one in logits] != [positions] * len(self._hooks):
            raise self._refused(f"did not route {positions} positions once in each of its {len(self._hooks)} layers")
        chosen, probabilities = [], []
        for one in logits:
            shares = one.flatten(0, -2).softmax(-1, dtype=torch.promote_types(one.dtype, torch.float32))
            weight = real.flatten().to(shares)
            best = shares.detach().topk(self._top_k).indices
            chosen.append(
                shares.new_zeros(shares.shape[1]).scatter_add_(0, best.flatten(), weight.repeat_interleave(self._top_k))
            )
            probabilities.append(weight @ shares)
        return ExpertLoad(torch.stack(chosen), torch.stack(probabilities), real.sum())

    def _recorder(self, index: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._logits is not None:
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        return record

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{KEY}={self._coef:g}: {self._name} {why}; set {KEY}=0")


class BalancingLoss:
    """The load-balancing loss of one batch.

    Args:
        coef: its weight.
        num_copies: number of ranks that compute the same positions, each with the whole gradient (tensor parallelism).
    """

    def __init__(self, coef: float, num_copies: int = 1) -> None:
        self._coef, self._num_copies = coef, num_copies
        self._total: ExpertLoad | None = None

    def count(self, loads: Sequence[ExpertLoad]) -> None:
        """Add up the loads of all micro-batches of all ranks. Collective."""
        size = loads[0].chosen.shape
        parts = [torch.cat([load.chosen.flatten(), load.probabilities.flatten(), load.tokens[None]]) for load in loads]
        summed = torch.stack([part.detach().double() for part in parts]).sum(dim=0)
        total = dist.all_sum(summed) / self._num_copies
        chosen, probabilities = total[:-1].view(2, *size)
        self._total = ExpertLoad(chosen, probabilities, total[-1])

    def part(self, load: ExpertLoad) -> Tensor:
        """Return the summand of a micro-batch, a scalar. The summands of all micro-batches and ranks add up to the
        weighted loss. If nothing was counted, this is the only micro-batch of each rank: collective."""
        if self._total is None:
            self.count([load])
        return self._coef * _loss(self._counted, load.probabilities)

    @property
    def value(self) -> float:
        """The weighted loss of the batch."""
        return self._coef * float(_loss(self._counted, self._counted.probabilities))

    def metrics(self) -> dict[str, float]:
        chosen = self._counted.chosen
        return {
            "actor/router_aux_loss": self.value / self._coef,
            "actor/busiest_expert_share": float((chosen / chosen.sum(dim=1, keepdim=True)).max()),
        }

    @property
    def _counted(self) -> ExpertLoad:
        assert self._total is not None, "loads are counted before they are used"
        return self._total


def _loss(total: ExpertLoad, probabilities: Tensor) -> Tensor:
    num_layers, num_experts = total.chosen.shape
    factor = total.chosen * (num_experts / (num_layers * total.tokens**2))
    return (factor.to(probabilities) * probabilities).sum()


def _recorders(model: PreTrainedModel) -> list[Any]:
    """Return what transformers uses to find the outputs of the model's routers."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    found: list[Any] = []
    for part in parts:
        recorder = (part._can_record_outputs or {}).get("router_logits")
        if recorder is not None and recorder not in found:
            found.append(recorder)
    return found


def router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model's routers; empty if it has no experts, or no class shows what is a router."""
    return tuple(recorder.target_class for recorder in _recorders(model) if _is_usable(recorder))


def _is_usable(recorder: Any) -> bool:
    """Whether the logits are an output of a module whose class shows that it is a router."""
    return isinstance(recorder, OutputRecorder) and recorder.target_class is not nn.Linear


def _has_loss(model: PreTrainedModel) -> bool:
    modules = (sys.modules.get(base.__module__) for base in type(model).__mro__)
    return any(hasattr(module, "load_balancing_loss_func") for module in modules)
