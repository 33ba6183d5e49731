"""Logits → log-probs and entropies, keeping no second `[N, V]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

BLOCK_LOGITS = {"cpu": 2**18, "cuda": 2**26}
"""Logits worked on at a time: what a CPU's cache holds; on a GPU, what its memory can spare in float32."""


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` `[N]` and entropy, both `[N]` in nats, of `softmax(logits / temperature)`, logits `[N, V]`.

    float32, or float64 of such logits. The entropy is detached unless `entropy_gradient`. Kept for the backward pass:
    the logits as they are, and two numbers a row.
    """
    log_probs, entropy = _Score.apply(logits, targets, temperature)
    return log_probs, entropy if entropy_gradient else entropy.detach()


class _Score(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H the entropy and t the target:
    d log p_t / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs, entropy, normalizer = (torch.empty(len(logits), dtype=dtype, device=logits.device) for _ in range(3))
        for block in _blocks(logits):
            scaled = _scaled(logits[block], dtype, temperature)
            chosen = scaled.gather(-1, targets[block].unsqueeze(-1)).squeeze(-1)
            peak = scaled.amax(dim=-1, keepdim=True)
            weights = scaled.sub_(peak).exp()
            total = weights.sum(dim=-1)
            mean = torch.einsum("nv,nv->n", weights, scaled) / total  # of z - peak
            normalizer[block] = total.log() + peak.squeeze(-1)
            log_probs[block] = chosen - normalizer[block]
            entropy[block] = total.log() - mean
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        if of_log_probs is None and of_entropy is None:
            return None, None, None
        gradient = torch.empty_like(logits)
        for block in _blocks(logits):
            log_p = _scaled(logits[block], normalizer.dtype, ctx.temperature).sub_(normalizer[block].unsqueeze(-1))
            if of_entropy is None:
                assert of_log_probs is not None
                part = log_p.exp_().mul_(-of_log_probs[block].unsqueeze(-1))
            else:
                part = (log_p + entropy[block].unsqueeze(-1)).mul_(-of_entropy[block].unsqueeze(-1))
                if of_log_probs is not None:
                    part.sub_(of_log_probs[block].unsqueeze(-1))
                part.mul_(log_p.exp_())
            if of_log_probs is not None:
                part.scatter_add_(-1, targets[block].unsqueeze(-1), of_log_probs[block].unsqueeze(-1))
            gradient[block] = part.div_(ctx.temperature)
        return gradient, None, None


def behind_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor] | None:
    """What the architecture does to the logits between its head and its output; None: what this cannot tell.

    The model's own forward method is run around a stub of its body and one of its head, so that no weights are needed.
    """
    head = model.get_output_embeddings()
    vocab = getattr(head, "out_features", None)
    if not isinstance(vocab, int):
        return None
    numbers = torch.linspace(-5.0, 5.0, vocab, dtype=torch.float64)[None, None]
    shell = object.__new__(type(model))  # not a copy: FSDP's classes don't let themselves be copied
    shell.__dict__.update(model.__dict__)
    shell._modules = {
        name: _Stub(numbers if module is head else _BodyOutput()) for name, module in model._modules.items()
    }
    try:
        got = type(model).forward(shell, input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    if got.shape != numbers.shape:
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) or math.inf
    scale = float(got[0, 0, -1] / numbers[0, 0, -1])
    for candidate in (_as_is, partial(torch.mul, other=scale), partial(_softly_capped, cap=cap)):
        if torch.allclose(got, candidate(numbers)):
            return candidate
    return None


class _Stub(nn.Module):
    """Answers every call with the same."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._answer


class _BodyOutput:
    """What any architecture's body may return: hidden states, and nothing under every other name."""

    last_hidden_state = torch.zeros(1, 1, 1)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _softly_capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


def _as_is(logits: Tensor) -> Tensor:
    return logits


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A copy to work in."""
    return logits.to(dtype, copy=True) if temperature == 1.0 else logits.to(dtype) / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_LOGITS.get(logits.device.type, BLOCK_LOGITS["cuda"]) // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
