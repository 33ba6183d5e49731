"""Split a batch into micro-batches, the same number on all ranks, run their passes, and sum their metrics.

Activations may be offloaded to CPU memory until the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from asyncrl.core.failures import DataError
from asyncrl.profiling import profile
from trainer.engines import dist
from trainer.engines.base import EngineSpec, Loss, LossParts, ModelType
from trainer.engines.compute.experts import BalancingLoss
from trainer.engines.compute.optim import layout_of, local_part
from trainer.engines.compute.packing import (
    MicroBatch,
    cut_rows,
    input_lengths,
    select_tokens,
    trajectory_share,
    unpack,
)
from trainer.engines.compute.scorer import Scorer

CPU_MICRO_BATCH_TOKENS = 2048
"""Larger micro-batches exceed a CPU's caches: a model of 1M parameters processes 9,700 tokens/s in micro-batches of
1,024 tokens, 10,400 in those of 2,048, and 9,200 in those of 4,096."""

OVERHEAD_TOKENS = {"cpu": 96, "cuda": 1024}
"""Fixed cost of one pass, in tokens. It only influences how many micro-batches there are."""

RESULTS: dict[ModelType, tuple[str, ...]] = {
    "language_model": ("log_probs", "entropy"),
    "value_model": ("values",),
    "reward_model": ("scores",),
}


class MicroBatches:
    """Cuts batches into micro-batches and runs them.

    Args:
        dtype: dtype of the weights.
        vocab_size: upper bound of the token ids, exclusive.
        gradient_scale: factor of the loss that undoes a division of the gradient by the model's wrapper.
        copied_weights: shapes of the weights, if the forward pass casts them (see `activations_on_cpu`).
    """

    def __init__(
        self,
        scorer: Scorer,
        spec: EngineSpec,
        device: torch.device,
        *,
        dtype: torch.dtype,
        vocab_size: int,
        gradient_scale: int,
        copied_weights: frozenset[torch.Size],
    ) -> None:
        self._scorer, self._spec, self._device = scorer, spec, device
        self._dtype, self._vocab_size, self._gradient_scale = dtype, vocab_size, gradient_scale
        self._copied_weights = copied_weights
        self._forward_s = self._backward_s = 0.0
        """Seconds that the passes within `timed` have taken."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the total time of the passes within the context: one event for forward, one for backward passes."""
        began, self._forward_s, self._backward_s = time.time(), 0.0, 0.0
        yield
        profile.record("rank.forward", began, self._forward_s)
        if self._backward_s > 0:
            profile.record("rank.backward", began + self._forward_s, self._backward_s)

    def totals(self, batch: TensorDict, *, counts: bool) -> tuple[float, float]:
        """Count the trained tokens, and the trajectories with a trained token, on all ranks; check the token ids.

        Args:
            counts: False if another rank reports the same rows.

        Raises (on every rank):
            DataError: a token id is outside the vocabulary.
        """
        mask, ids, limit = batch["loss_mask"], batch["input_ids"], self._vocab_size
        odd = int(ids.min() < 0 or ids.max() >= limit)
        shares = float(trajectory_share(batch).sum())
        mine = torch.tensor([int(mask.sum()), shares, odd], dtype=torch.float64) * counts
        tokens, trajectories, num_odd = dist.all_sum(mine.to(self._device)).tolist()
        if num_odd:
            raise DataError(f"token ids outside the model's vocabulary of {limit}; check the tokenizer")
        return tokens, float(round(trajectories))  # sums of fractions are not exact

    def cut(self, batch: TensorDict, chosen: Tensor) -> list[list[int]]:
        """Return the row numbers of each micro-batch. All ranks get the same number of micro-batches; on a rank with
        too few rows the last ones are empty."""
        numbers = chosen.nonzero().flatten().tolist()
        all_lengths = input_lengths(batch)
        lengths = [all_lengths[number] for number in numbers]
        limit = self._spec.engine.ppo_max_token_len
        cut = partial(
            cut_rows,
            lengths,
            max_tokens=min(limit, CPU_MICRO_BATCH_TOKENS) if self._device.type == "cpu" else limit,
            overhead_tokens=OVERHEAD_TOKENS[self._device.type],
            packed=self._scorer.packed and "media" not in batch,
        )
        parts = cut() if lengths else []
        most = dist.all_max(len(parts), self._device)
        if lengths and len(parts) < most:
            parts = cut(num_parts=most)
        return [[numbers[index] for index in part] for part in parts] + [[]] * (most - len(parts))

    def balancing(self, batch: TensorDict, parts: list[list[int]]) -> BalancingLoss | None:
        """Return the load-balancing loss of a batch, of which each micro-batch has the rows of one of `parts`; None if
        it is off. Collective."""
        coef, began = self._spec.router_aux_loss_coef, _now()
        if not coef:
            return None
        balancing = BalancingLoss(coef, self._spec.engine.tensor_parallel_size)
        if len(parts) > 1:
            nothing = torch.zeros_like(batch["loss_mask"])
            with torch.no_grad():
                micros = (self._lay_out(batch, rows, nothing) for rows in parts)
                balancing.count([self._scorer.with_experts(micro)[1] for micro in micros])
        self._forward_s += _now() - began
        return balancing

    def _lay_out(self, batch: TensorDict, rows: list[int], mask: Tensor) -> MicroBatch:
        """Lay out rows. Without rows, lay out the first one, none of whose positions is real."""
        micro = self._scorer.lay_out(batch, rows or [0], mask)
        return micro if rows else replace(micro, real=torch.zeros_like(micro.real))

    def train(
        self,
        batch: TensorDict,
        rows: list[int],
        weights: Tensor,
        loss: Loss,
        sums: MetricSums,
        balancing: BalancingLoss | None = None,
    ) -> None:
        """Run the forward pass and, if gradients are on, the backward pass. Without rows, this rank only joins the
        collective operations of the others."""
        mask = batch["loss_mask"]
        real = bool(rows)
        if not real:
            mask = torch.zeros_like(mask).index_fill_(1, torch.tensor([0]), True)
        micro = self._lay_out(batch, rows, mask)
        tokens = select_tokens(batch, micro, weights * real, device=self._device, dtype=self._dtype)
        if not real:  # untrained tokens may have any values, and 0 · inf would be NaN
            tokens = tokens._replace(fields={key: torch.zeros_like(field) for key, field in tokens.fields.items()})
        began = _now()
        with self._activations():
            if balancing is None:
                parts = loss(self._scorer(micro, entropy_gradient=loss.entropy_gradient), tokens)
                total = parts.loss
            else:
                scores, load = self._scorer.with_experts(micro, entropy_gradient=loss.entropy_gradient)
                parts = loss(scores, tokens)
                total = parts.loss + balancing.part(load)
        passed = _now()
        self._forward_s += passed - began
        if torch.is_grad_enabled():
            (total * self._gradient_scale).backward()
            self._backward_s += _now() - passed
        sums.add(parts, real=real)

    def empty_results(self, batch: TensorDict) -> TensorDict:
        """Create the tensors that `infer` fills."""
        size, width = batch["loss_mask"].shape
        shape = (size,) if self._spec.model_type == "reward_model" else (size, width)
        return TensorDict({key: torch.zeros(shape) for key in RESULTS[self._spec.model_type]}, batch_size=[size])

    def infer(
        self, batch: TensorDict, rows: list[int], results: TensorDict, *, temperature: float | None = None
    ) -> None:
        """Run the forward pass for every response token of the rows. Without rows, it behaves as `train` does."""
        width = batch["loss_mask"].shape[1]
        mask = torch.arange(width) < batch["response_lens"][:, None]
        micro = self._scorer.lay_out(batch, rows or [0], mask)
        began = _now()
        scores = self._scorer(micro, temperature=temperature)
        self._forward_s += _now() - began
        if not rows:
            return
        if self._spec.model_type == "reward_model":
            results["scores"][micro.rows] = scores.log_probs.float().cpu()
            return
        # A value model has one result; the second score is not used.
        for key, values in zip(RESULTS[self._spec.model_type], scores, strict=False):
            results[key][micro.rows] = unpack(values.float().cpu(), micro, width)

    def _activations(self) -> AbstractContextManager[None]:
        offloads = self._spec.engine.activation_offload and self._device.type != "cpu"
        return activations_on_cpu(self._copied_weights) if offloads else nullcontext()


def _now() -> float:
    """Return the time in seconds. With `profiler.synchronize`, first wait for the GPU, so that durations are exact."""
    if profile.records("rank.forward"):
        profile.synchronize()
    return time.perf_counter()


class MetricSums:
    """Adds up the sums and means of a loss over micro-batches and then over ranks, in float64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[str, Tensor] = {}
        self._means: set[str] = set()

    def add(self, parts: LossParts, *, real: bool) -> None:
        """Add the values of a micro-batch. One that is not `real` adds 0 under each name, so that all ranks have all
        names."""
        self._means.update(parts.means)
        for name, value in [("loss", parts.loss), *parts.sums.items(), *parts.means.items()]:
            part = value.detach().double().sum() if real else torch.zeros((), dtype=torch.float64, device=self._device)
            self._values[name] = self._values[name] + part if name in self._values else part

    def over_ranks(self, add: Callable[[Tensor], Tensor], *, num_tokens: float, counts: bool) -> dict[str, float]:
        """Return the sums and means over all ranks. `counts` is False if another rank reports the same sums."""
        names = sorted(self._values)
        totals = add(torch.stack([self._values[name] for name in names]) * counts).tolist()
        sums = dict(zip(names, totals, strict=True))
        return {name: value / num_tokens if name in self._means else value for name, value in sums.items()}


MIN_ACTIVATION_BYTES = 1 << 20
"""Smaller tensors are not copied, because starting the copy costs more than the memory is worth."""


@contextmanager
def activations_on_cpu(shapes: Set[torch.Size] = frozenset(), min_bytes: int = MIN_ACTIVATION_BYTES) -> Iterator[None]:
    """Within the context, keep what a forward pass saves for the backward pass, except weights, in (pinned) CPU memory.

    With gradient checkpointing, a pass saves only the inputs of the layers.

    Args:
        shapes: shapes of the weights, if autocast copies them: a copy is not a parameter, so it is recognized by its
            shape. Activations have one more dimension; an activation that has the shape of a weight is not copied.
    """

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        whole, part = tensor if tensor._base is None else tensor._base, local_part(tensor)
        if isinstance(whole, nn.Parameter) or whole.shape in shapes or part.nbytes < min_bytes:
            return lambda: tensor
        copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
        device, whole_of = part.device, layout_of(tensor)
        return lambda: whole_of(copy.to(device, non_blocking=True))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
        yield
