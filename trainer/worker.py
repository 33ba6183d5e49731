"""One training process behind `ports.TrainingWorker`: rows in, one optimizer step and its metrics out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.failures import DataError
from asyncrl.ports import Metrics, TrainRow
from trainer.algorithms.kl import kl_loss
from trainer.algorithms.losses import clipped_policy_loss, mismatch_kl
from trainer.batching import check_row, input_length, loss_weights, pack, split
from trainer.engine.local import LocalEngine
from trainer.engine.state import export_weights, load_engine, save_engine

SUMS = (
    "actor/loss",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/ratio_mean",
    "actor/clip_fraction",
    "rollout/mismatch_kl",
)


class LocalTrainingWorker:
    """`ports.TrainingWorker` on `LocalEngine`. Blocking, one call at a time.

    Args:
        config: of the run.

    Raises:
        ConfigError: see `LocalEngine`.
    """

    def __init__(self, config: Config) -> None:
        self.engine = LocalEngine(config)
        self._model = config.model
        self._algorithm = config.algorithm

    def plan(self, total_steps: int) -> None:
        """Before the first step: how many the whole run has, which is where the learning rate's decay ends."""
        self.engine.total_steps = total_steps

    def train_mini_batch(self, rows: Sequence[TrainRow]) -> Metrics:
        """One optimizer step. Rows without a trained token are left out of every mean.

        Raises:
            DataError: a malformed row, or no trained token at all.
            DivergenceError: loss or gradient not finite; no step was taken.
        """
        self._check(rows)
        rows = [row for row in rows if row.response_mask.any()]
        if not rows:
            raise DataError(
                "a mini-batch without a single trained token: response_mask is 0 everywhere; no step was taken"
            )
        trained = [int(row.response_mask.sum()) for row in rows]
        weights = loss_weights(trained, self._algorithm.loss_agg_mode)
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.engine.device)
        for needs_grad, group in self._by_gradient(rows):
            for numbers in self._split([rows[number] for number in group]):
                chosen = [group[number] for number in numbers]
                sums += self._micro_batch([rows[i] for i in chosen], weights[chosen], 1.0 / sum(trained), needs_grad)
        metrics = dict(zip(SUMS, sums.tolist(), strict=True))
        outcome = self.engine.optimizer_step(metrics["actor/loss"])
        return metrics | {"actor/grad_norm": outcome.grad_norm, "actor/lr": outcome.lr}

    def infer_batch(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        """Current policy's log-probs of all response tokens, masked ones too: float32 `[L]` a row."""
        self._check(rows)
        results: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
        for numbers in self._split(rows):
            chosen = [rows[number] for number in numbers]
            scores = self.engine.infer(pack(chosen, [np.ones(len(row.response_ids), np.bool_) for row in chosen]))
            ends = np.cumsum([len(row.response_ids) for row in chosen])[:-1]
            for number, log_probs in zip(numbers, np.split(scores.log_probs.cpu().numpy(), ends), strict=True):
                results[number] = log_probs
        return results

    def weights(self, dtype: Literal["float32", "bfloat16", "float16"]) -> Iterator[tuple[str, NDArray[Any]]]:
        """See `export_weights`: on CPU in float32 these are views, valid until the next `train_mini_batch`."""
        return export_weights(self.engine, dtype)

    def save_checkpoint(self, directory: Path) -> None:
        save_engine(self.engine, directory, self._model)

    def load_checkpoint(self, directory: Path) -> None:
        load_engine(self.engine, directory)

    def _micro_batch(
        self, rows: Sequence[TrainRow], weights: NDArray[np.float64], token_share: float, needs_grad: bool
    ) -> Tensor:
        """Forward, and backward if asked; returns this part of `SUMS`, float64."""
        masks = [row.response_mask for row in rows]
        batch = pack(rows, masks)
        rollout_log_probs = self._trained_tokens([row.rollout_log_probs for row in rows], masks)
        advantages = self._trained_tokens([row.advantages for row in rows], masks)
        weight = self._to_device(np.repeat(weights, [int(mask.sum()) for mask in masks]).astype(np.float32))
        reference = self.engine.reference_log_probs(batch)
        with torch.set_grad_enabled(needs_grad):
            log_probs, entropy = self.engine.policy.score(batch)
            policy = clipped_policy_loss(
                log_probs,
                rollout_log_probs,
                advantages,
                clip_ratio_low=self._algorithm.clip_ratio_low,
                clip_ratio_high=self._algorithm.clip_ratio_high,
            )
            pg_loss = (policy.loss * weight).sum()
            divergence = torch.zeros_like(pg_loss)
            if reference is not None:
                divergence = (kl_loss(log_probs, reference, self._algorithm.kl_loss_type) * weight).sum()
            loss = pg_loss + self._algorithm.kl_loss_coef * divergence
        if needs_grad:
            loss.backward()
        mismatch = mismatch_kl(log_probs.detach(), rollout_log_probs)
        per_token = torch.stack([entropy, policy.ratio, policy.clipped.float(), mismatch])
        parts = torch.stack([loss, pg_loss, divergence]).detach()
        return torch.cat([parts.double(), per_token.double().sum(dim=1) * token_share])

    def _by_gradient(self, rows: Sequence[TrainRow]) -> list[tuple[bool, list[int]]]:
        """Row numbers with and without a gradient.

        Without a KL loss a row whose advantages are all 0 has a gradient of exactly 0: its backward pass is not run.
        """
        learns = [self.engine.reference is not None or bool(row.advantages[row.response_mask].any()) for row in rows]
        return [(flag, [i for i, learn in enumerate(learns) if learn is flag]) for flag in (True, False)]

    def _split(self, rows: Sequence[TrainRow]) -> list[list[int]]:
        return split(
            [input_length(row) for row in rows],
            max_tokens=self.engine.micro_batch_tokens,
            overhead_tokens=self.engine.overhead_tokens,
        )

    def _check(self, rows: Sequence[TrainRow]) -> None:
        for row in rows:
            check_row(row, vocab_size=self.engine.policy.vocab_size)

    def _trained_tokens(self, values: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]) -> Tensor:
        return self._to_device(np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)]))

    def _to_device(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self.engine.device)
