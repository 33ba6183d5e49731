"""The baseline of the training engine: a plain loop over a transformers model with AdamW.

Sequences keep their order, are padded to the longest of the batch, and are split into micro-batches with the token
budget of the engine. The loss (PPO's clip, mean over all trained tokens), the gradient clipping and the fused AdamW
are the same as the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.trainer import OptimConfig
from asyncrl.core.types import SampleId
from trainer.batches import TrainRow

GROUP = 4
"""Number of rows of a sample."""


SIGMAS = {"equal": 0.0, "long-tailed": 0.9}
"""Response lengths are lognormal. With sigma 0.9, the longest of 32 has about four times as many tokens as the mean."""


@dataclass(frozen=True)
class Workload:
    """The batch that is trained on."""

    rows: int
    prompt_tokens: int
    mean_tokens: int
    """Mean length of the responses."""
    longest_tokens: int
    """Maximum length of a response."""
    micro_batch_tokens: int

    def lengths(self, sigma: float) -> list[int]:
        """Draw response lengths whose mean does not depend on `sigma`, except for the cut at `longest_tokens`."""
        drawn = np.exp(np.random.default_rng(0).normal(0.0, sigma, self.rows))
        scaled = np.rint(self.mean_tokens * drawn / drawn.mean())
        return np.clip(scaled, 8, self.longest_tokens).astype(int).tolist()


def make_rows(lengths: Sequence[int], prompt_tokens: int, vocab_size: int) -> list[TrainRow]:
    """Make rows of random tokens, `GROUP` for each sample, all of them trained."""
    rng = np.random.default_rng(0)
    return [
        TrainRow(
            sample_id=SampleId(0, 1 + number // GROUP),
            prompt_ids=rng.integers(0, vocab_size, prompt_tokens, dtype=np.int32),
            response_ids=rng.integers(0, vocab_size, length, dtype=np.int32),
            response_mask=np.ones(length, dtype=np.bool_),
            loss_mask=np.ones(length, dtype=np.bool_),
            rollout_log_probs=np.full(length, -np.log(vocab_size), dtype=np.float32),
            versions=np.zeros(length, dtype=np.int64),
            reward=float(number % GROUP),
            trajectory=number % GROUP,
        )
        for number, length in enumerate(lengths)
    ]


class PlainTrainer:
    """A transformers model with AdamW and a loop over micro-batches."""

    def __init__(self, path: Path, optim: OptimConfig, algorithm: AlgorithmConfig, device: str, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._clip = optim.clip_grad
        self._low, self._high = 1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high
        self._device, self._dtype = device, dtype

    def update(self, rows: Sequence[TrainRow], advantages: Sequence[float], micro_batch_tokens: int) -> float:
        """Take one optimizer step over `rows` with their advantages and return the loss."""
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        width = max(lengths)
        step = max(1, micro_batch_tokens // width)
        trained = sum(len(row.response_ids) for row in rows)
        total = 0.0
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            total += self._micro_batch(rows[part], advantages[part], width, trained)
        clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _micro_batch(self, rows: Sequence[TrainRow], advantages: Sequence[float], width: int, trained: int) -> float:
        ids, mask, old = (torch.zeros(len(rows), width) for _ in range(3))
        ids = ids.long()
        attention = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            prompt, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
            ids[number, :end] = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
            attention[number, :end] = 1
            mask[number, prompt:end] = 1
            old[number, prompt:end] = torch.from_numpy(row.rollout_log_probs)
        ids, attention, mask, old = (part.to(self._device) for part in (ids, attention, mask, old))
        with torch.autocast(self._device, self._dtype, enabled=self._dtype is not torch.float32):
            logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        gain = torch.tensor(advantages, device=self._device)[:, None]
        loss = self._clipped(log_probs, old[:, 1:], gain).mul(mask[:, 1:]).sum() / trained
        loss.backward()
        return float(loss.detach())

    def _clipped(self, log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio = torch.exp(log_probs - old)
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(self._low, self._high))
