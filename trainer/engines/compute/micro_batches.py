"""A batch in pieces that fit: how it is cut, alike on all ranks, and what is done with each piece."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.failures import DataError
from asyncrl.profiling import profile
from trainer.batching import split
from trainer.engine import dist, offload
from trainer.engine.base import EngineSpec, Loss, ModelType
from trainer.engine.figures import Figures
from trainer.engine.packing import select_tokens, trajectory_share, unpack
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


class MicroBatches:
    """Args:
    dtype: of the weights.
    vocab_size: ids of tokens are below.
    gradient_scale: what a loss is multiplied with, where the model's wrapper divides its gradient.
    copied_weights: shapes of the weights, if the forward pass casts them (see `offload.activations_on_cpu`).
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
        """Of the passes inside `timed`."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What the passes inside have taken, added up, is told as one event for each kind."""
        began, self._forward_s, self._backward_s = time.time(), 0.0, 0.0
        yield
        profile.record("rank.forward", began, self._forward_s)
        if self._backward_s > 0:
            profile.record("rank.backward", began + self._forward_s, self._backward_s)

    def totals(self, batch: TensorDict, *, counts: bool) -> tuple[float, float]:
        """Trained tokens, and trajectories with a trained token, of all ranks. Refuses what no rank should begin with.

        Args:
            counts: whether this rank's rows are not another's as well.
        """
        mask, ids, limit = batch["loss_mask"], batch["input_ids"], self._vocab_size
        odd = int(ids.min() < 0 or ids.max() >= limit)
        shares = float(trajectory_share(batch).sum())
        mine = torch.tensor([int(mask.sum()), shares, odd], dtype=torch.float64) * counts
        tokens, trajectories, num_odd = dist.all_sum(mine.to(self._device)).tolist()
        if num_odd:
            raise DataError(f"token ids outside the model's vocabulary of {limit}; check the tokenizer")
        return tokens, float(round(trajectories))  # thirds and the like do not add up to whole numbers

    def cut(self, batch: TensorDict, chosen: Tensor) -> list[list[int]]:
        """Rows of each micro-batch, as many on every rank: a rank that has too few rows ends with empty ones."""
        numbers = chosen.nonzero().flatten().tolist()
        all_lengths = input_lengths(batch)
        lengths = [all_lengths[number] for number in numbers]
        limit = self._spec.engine.ppo_max_token_len
        cut = partial(
            split,
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

    def train(self, batch: TensorDict, rows: list[int], weights: Tensor, loss: Loss, figures: Figures) -> None:
        """Forward, and backward where gradients are on. No rows: this rank only keeps the others company."""
        mask = batch["loss_mask"]
        real = bool(rows)
        if not real:
            rows, mask = [0], torch.zeros_like(mask).index_fill_(1, torch.tensor([0]), True)
        micro = self._scorer.lay_out(batch, rows, mask)
        tokens = select_tokens(batch, micro, weights * real, device=self._device, dtype=self._dtype)
        if not real:  # what stands in untrained tokens may be anything; 0 · inf would be NaN
            tokens = tokens._replace(fields={key: torch.zeros_like(field) for key, field in tokens.fields.items()})
        began = _now()
        with self._activations():
            parts = loss(self._scorer(micro, entropy_gradient=loss.entropy_gradient), tokens)
        passed = _now()
        self._forward_s += passed - began
        if torch.is_grad_enabled():
            (parts.loss * self._gradient_scale).backward()
            self._backward_s += _now() - passed
        figures.add(parts, real=real)

    def empty_results(self, batch: TensorDict) -> TensorDict:
        """For `infer` to fill."""
        size, width = batch["loss_mask"].shape
        shape = (size,) if self._spec.model_type == "reward_model" else (size, width)
        return TensorDict({key: torch.zeros(shape) for key in RESULTS[self._spec.model_type]}, batch_size=[size])

    def infer(self, batch: TensorDict, rows: list[int], results: TensorDict) -> None:
        """Forward, for every response token of the rows. No rows: see `train`."""
        width = batch["loss_mask"].shape[1]
        mask = torch.arange(width) < batch["response_lens"][:, None]
        micro = self._scorer.lay_out(batch, rows or [0], mask)
        began = _now()
        scores = self._scorer(micro)
        self._forward_s += _now() - began
        if not rows:
            return
        if self._spec.model_type == "reward_model":
            results["scores"][micro.rows] = scores.log_probs.float().cpu()
            return
        # Of a value model the first are the values, and there is no second.
        for key, values in zip(RESULTS[self._spec.model_type], scores, strict=False):
            results[key][micro.rows] = unpack(values.float().cpu(), micro, width)

    def _activations(self) -> AbstractContextManager[None]:
        offloads = self._spec.engine.activation_offload and self._device.type != "cpu"
        return offload.activations_on_cpu(self._copied_weights) if offloads else nullcontext()


def _now() -> float:
    """Seconds. If the run asks for it the GPU has done by then what it was given, so that differences say what took the
    time."""
    if profile.records("rank.forward"):
        profile.synchronize()
    return time.perf_counter()
