"""A causal language model as a function from micro-batches to log-probs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.batching import MicroBatch


class TokenScores(NamedTuple):
    """Of the scored tokens of a micro-batch, in its order. float32 `[N]`, nats."""

    log_probs: Tensor
    entropy: Tensor
    """Of the distribution each token was drawn from; detached."""


class PolicyModel:
    """Wraps a Hugging Face causal LM.

    The output head sees only the hidden states of scored positions: a pre-hook picks them, so prompt and padding cost
    no logits, and whatever the architecture does behind the head (soft caps, scales) still happens.

    Log-probs are those of `softmax(logits / temperature)`: with a sampling temperature the behaviour policy is the
    tempered one. Top-p, top-k and min-p are not modelled.
    """

    def __init__(
        self, model: PreTrainedModel, *, device: torch.device, autocast: torch.dtype | None, temperature: float
    ):
        self.model = model.to(device)
        self._device = device
        self._autocast = autocast
        self._temperature = temperature
        self._positions: Tensor | None = None
        head = model.get_output_embeddings()
        assert head is not None, "a causal language model has an output head"
        head.register_forward_pre_hook(self._pick_scored)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def score(self, batch: MicroBatch) -> TokenScores:
        """One forward pass; differentiable unless the caller turned gradients off."""
        targets = torch.from_numpy(batch.targets).to(self._device)
        self._positions = torch.from_numpy(batch.positions).to(self._device)
        try:
            with self._precision():
                output = self.model(input_ids=torch.from_numpy(batch.input_ids).to(self._device), use_cache=False)
        finally:
            self._positions = None
        logits = output.logits.squeeze(0).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        return _score(logits, targets)

    def _pick_scored(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        if self._positions is None:  # the model is being called by someone else, for all its logits
            return inputs
        return (hidden.flatten(0, 1).index_select(0, self._positions).unsqueeze(0), *inputs[1:])

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)


def _score(logits: Tensor, targets: Tensor) -> TokenScores:
    """Log-prob of `targets` and entropy, of logits `[N, V]`, keeping no second `[N, V]` for the backward pass."""
    log_normalizer = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
    with torch.no_grad():
        probs = torch.exp(logits - log_normalizer.unsqueeze(-1))
        entropy = log_normalizer.detach() - torch.einsum("nv,nv->n", probs, logits.detach())
    return TokenScores(log_probs, entropy)
