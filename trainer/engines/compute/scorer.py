"""A model as a function from micro-batches to scores: log-probs and entropies, values, or rewards.

Log-probs and entropies are computed from logits without keeping a second tensor of their size, `[N, V]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.core.failures import ConfigError, DataError
from trainer.engines.base import ModelType, TokenScores
from trainer.engines.compute.attention import KEY, Packing, Shard, check_heads, gather_scores
from trainer.engines.compute.experts import ExpertLoad, Routers
from trainer.engines.compute.media import MediaEncoder, embedded
from trainer.engines.compute.packing import MicroBatch, lay_out, lay_out_ends
from trainer.engines.models import head_of

MAX_LOGITS = {"cpu": 2**28, "cuda": 2**31}
"""If a pass has more logits than this (1 GiB in float32, 4 GiB in bfloat16, and as much again for their gradient), they
are computed in pieces, and computed again in the backward pass."""

PIECE_LOGITS = 2**28


class Scorer:
    """Wraps a Hugging Face model with a language-model, token-classification or sequence-classification head.

    The head sees only the hidden states of scored positions: a pre-hook picks them, so prompt and padding cost no
    logits, and the operations of the architecture after the head (soft caps, scales) still apply.

    Log-probs are those of `softmax(logits / temperature)`: with a sampling temperature the behaviour policy is the
    tempered one. Top-p, top-k and min-p are not modelled.

    Args:
        model: the Hugging Face model itself, without a wrapper; the hooks are registered on its modules.
        module: the module to call, which is the wrapped model (DDP, FSDP); None: `model`.
        autocast: dtype of the forward pass; None: that of the weights.
        packed: lay out sequences without padding. Requires that `attention.enable_packing(model)` has returned True.
        sp_group: ranks that share each sequence (`trainer.engines.compute.attention`); needs `packed`.
        media_encoder: computes features of images and videos; None: rows with media are refused.
        routers: those of the model, for `with_experts`.

    Raises:
        ConfigError: the model has no head for `model_type`, or the ranks of `sp_group` cannot share its sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        module: nn.Module | None = None,
        model_type: ModelType,
        device: torch.device,
        autocast: torch.dtype | None,
        temperature: float = 1.0,
        packed: bool = False,
        sp_group: dist.ProcessGroup | None = None,
        media_encoder: MediaEncoder | None = None,
        routers: Routers | None = None,
    ) -> None:
        if sp_group is not None:
            _check_shareable(model, packed, dist.get_world_size(sp_group))
        self.module = module if module is not None else model
        self.packed = packed
        self._model_type = model_type
        self._device = device
        self._autocast = autocast
        self._temperature = temperature
        self._sp_group = sp_group
        self._media_encoder = media_encoder
        self._routers = routers
        self._embedding = model.get_input_embeddings()
        self._pass: _ForwardPass | None = None
        if model_type == "language_model":
            head, self._behind_head = model.get_output_embeddings(), behind_head(model)
            assert head is not None, "a causal language model has an output head"
        else:
            head, self._behind_head = head_of(model), None
            text = model.config.get_text_config()
            if text.pad_token_id is None:  # sequence classification requires one, for a pooling that is not used here
                text.pad_token_id = 0
        self._head: nn.Module = head
        self._hooks = [
            head.register_forward_pre_hook(self._pick_scored),
            # This hook runs before FSDP's, which free the head's gathered weights.
            head.register_forward_hook(self._take_scores, prepend=True),
        ]

    def detach(self) -> None:
        """Remove the hooks. The scorer cannot be used afterwards."""
        for hook in self._hooks:
            hook.remove()
        if self._routers is not None:
            self._routers.detach()

    def lay_out(self, batch: TensorDict, rows: Sequence[int], mask: Tensor) -> MicroBatch:
        """Lay out rows for one pass (`packing.lay_out`). A reward model ignores `mask` and scores each response once.

        Raises:
            DataError: the batch has images or videos, and the model takes text only.
        """
        if "media" in batch and self._media_encoder is None:
            raise DataError(
                f"a {self._model_type.replace('_', ' ')} takes no images or videos, but the batch has rows with them; "
                "train without this model, or remove these rows from the data"
            )
        multiple = dist.get_world_size(self._sp_group) if self._sp_group is not None else 1
        if self._model_type == "reward_model":
            return lay_out_ends(batch, rows, packed=self.packed, multiple=multiple)
        return lay_out(batch, rows, mask, packed=self.packed, multiple=multiple)

    def __call__(
        self, micro: MicroBatch, *, entropy_gradient: bool = False, temperature: float | None = None
    ) -> TokenScores:
        """Run one forward pass, which is differentiable unless the caller has turned gradients off. `temperature`: for
        this pass only, instead of the one of this scorer.

        Scores are float32, or float64 if the model is. With sequence parallelism, every rank of the group gets all
        scores; its backward pass computes its part of the gradient, and the parts add up to the whole gradient
        (`gather_scores`).
        """
        return self._run(micro, entropy_gradient, temperature)[0]

    def with_experts(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[TokenScores, ExpertLoad]:
        """Run one forward pass, as a call does, and also return the load of the experts. With sequence parallelism it
        is that of this rank's positions."""
        assert self._routers is not None, "an engine without the load-balancing loss does not ask for it"
        with self._routers.recording() as logits:
            scores, (rows, width) = self._run(micro, entropy_gradient)
        real = micro.real
        if self._sp_group is not None:
            real = Shard(real.shape[1], self._sp_group).cut(real)
        # With media, there may be another row, for a blank image.
        real = torch.nn.functional.pad(real, (0, width - real.shape[1], 0, rows - real.shape[0]))
        return scores, self._routers.load(logits, real.to(self._device))

    def _run(
        self, micro: MicroBatch, entropy_gradient: bool, temperature: float | None = None
    ) -> tuple[TokenScores, torch.Size]:
        """Return the scores, and the shape of the model's input, `[B, T]`."""
        inputs, positions, targets, counts = self._inputs(micro)
        sampled = inputs.pop("sampled", None)
        shape, temperature = inputs["input_ids"].shape[:2], self._temperature if temperature is None else temperature
        self._pass = current = _ForwardPass(positions, targets, shape, entropy_gradient, temperature)
        try:
            with self._precision(), embedded(self._embedding, sampled):
                logits = self.module(**inputs, use_cache=False).logits
        finally:
            self._pass = None
        scores = current.scores
        if scores is None:
            scores = torch.stack(current.score(logits.squeeze(0), targets))
        elif torch.is_grad_enabled():
            # FSDP registers its backward hooks on the module's output, so the scores have to depend on it
            scores = scores + 0.0 * logits.sum()
        if counts is not None and self._sp_group is not None:
            scores = gather_scores(scores, counts, self._sp_group)
        log_probs, entropy = scores
        return TokenScores(log_probs, entropy if entropy_gradient else entropy.detach()), shape

    def _inputs(self, micro: MicroBatch) -> tuple[dict[str, Any], Tensor, Tensor, list[int] | None]:
        """Return the model's keyword arguments, this rank's scored positions and targets, and, with sequence
        parallelism, the number of scored positions of each rank."""
        device, counts = self._device, None
        if micro.media is not None:
            return *self._media_inputs(micro), micro.targets.to(device), None
        ids, places, positions, targets = micro.input_ids, micro.position_ids, micro.positions, micro.targets
        inputs: dict[str, Any] = {}
        if places is not None:
            inputs = Packing(micro.lengths, device, self._sp_group).inputs()
            if self._sp_group is not None:
                shard = Shard(ids.shape[1], self._sp_group)
                ids, places = shard.cut(ids), shard.cut(places)
                mine, counts = shard.scored(positions)
                positions, targets = positions[mine] - shard.start, targets[mine]
            inputs["position_ids"] = places.to(device)
        return inputs | {"input_ids": ids.to(device)}, positions.to(device), targets.to(device), counts

    def _media_inputs(self, micro: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        """Return the model's keyword arguments, with `sampled` for its embedding, and the scored positions."""
        if self._sp_group is not None:
            raise ConfigError(f"trainer.{KEY}: ranks cannot share sequences with images or videos; set it to 1")
        assert self._media_encoder is not None, "rows with media were laid out"
        encoded, device = self._media_encoder.encode(micro), self._device
        width, wider = micro.input_ids.shape[1], encoded.input_ids.shape[1]
        positions = micro.positions // width * wider + micro.positions % width
        inputs = {"input_ids": encoded.input_ids, "sampled": encoded.sampled, **encoded.features}
        return {key: value.to(device) for key, value in inputs.items() if value is not None}, positions.to(device)

    def _pick_scored(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the head, select the hidden states of scored positions: `[B, T, H]` → `[1, N, H]`."""
        if self._pass is None:  # not a call of this scorer: the caller wants all logits
            return inputs
        hidden = inputs[0].flatten(0, 1).index_select(0, self._pass.positions).unsqueeze(0)
        if self._in_pieces(hidden):
            self._pass.hidden = hidden
            hidden = hidden[:, :0]
        return (hidden, *inputs[1:])

    def _take_scores(self, _head: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """After the head, keep the scores, which the model would change, and return a small placeholder."""
        current = self._pass
        if current is None:
            return None
        if self._model_type != "language_model":
            values = output.squeeze(0).squeeze(-1)
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            current.scores = torch.stack([values, torch.zeros_like(values)])
            return output.sum(dim=1, keepdim=True).expand(*current.shape, output.shape[-1]).clone()
        if current.hidden is None:
            return None
        current.scores = self._score_in_pieces(current)
        return current.scores.sum().to(output.dtype).expand(1, 1, 1).clone()  # FSDP2 accepts no views

    def _in_pieces(self, hidden: Tensor) -> bool:
        vocab = getattr(self._head, "out_features", 0)
        return self._behind_head is not None and hidden.shape[1] * vocab > MAX_LOGITS[self._device.type]

    def _score_in_pieces(self, current: _ForwardPass) -> Tensor:
        """Return scores, float32 `[2, N]`. The logits of a piece are freed at once, and computed again in the backward
        pass."""
        assert current.hidden is not None and self._behind_head is not None
        size = max(1, min(PIECE_LOGITS, MAX_LOGITS[self._device.type]) // int(self._head.out_features))  # type: ignore[arg-type]
        pieces = []
        for hidden, targets in zip(current.hidden.split(size, dim=1), current.targets.split(size), strict=True):
            pieces.append(
                checkpoint(self._score_piece, hidden, targets, current, use_reentrant=False)
                if torch.is_grad_enabled()
                else self._score_piece(hidden, targets, current)
            )
        return torch.cat(pieces, dim=1)

    def _score_piece(self, hidden: Tensor, targets: Tensor, current: _ForwardPass) -> Tensor:
        assert self._behind_head is not None
        logits = self._behind_head(self._head.forward(hidden)).squeeze(0)  # `forward` runs no hooks
        return torch.stack(current.score(logits, targets))

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)


class _ForwardPass:
    """State of one forward pass, between the hooks and the call."""

    def __init__(
        self, positions: Tensor, targets: Tensor, shape: torch.Size, entropy_gradient: bool, temperature: float
    ) -> None:
        self.positions = positions
        self.targets = targets
        self.shape = shape
        """Shape of the model's input, `[B, T]`."""
        self.entropy_gradient = entropy_gradient
        self.temperature = temperature
        self.hidden: Tensor | None = None
        """Hidden states `[1, N, H]`, if logits are computed in pieces."""
        self.scores: Tensor | None = None
        """`[2, N]`: log-probs (or values) and entropies, if the hooks have computed them."""

    def score(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return score_logits(logits, targets, self.temperature, entropy_gradient=self.entropy_gradient)


def _check_shareable(model: PreTrainedModel, packed: bool, size: int) -> None:
    if not packed:
        raise ConfigError(
            f"trainer.{KEY}={size}: ranks can share packed sequences only, but {type(model).__name__} runs with padded "
            f"ones; set trainer.use_remove_padding=true, or trainer.{KEY}=1 if its attention cannot be packed"
        )
    check_heads(model, size)


BLOCK_LOGITS = {"cpu": 2**18, "cuda": 2**26}
"""Number of logits to process at a time: as many as fit into a CPU's cache, or into the spare memory of a GPU in
float32."""


def score_logits(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` `[N]` and entropies of `softmax(logits / temperature)`, for logits `[N, V]`.

    Both are `[N]` in nats, in float32, or in float64 if the logits are. The entropies are detached unless
    `entropy_gradient`. The backward pass needs only the unchanged logits and two numbers per row.
    """
    log_probs, entropy = _Score.apply(logits, targets, temperature)
    return log_probs, entropy if entropy_gradient else entropy.detach()


class _Score(torch.autograd.Function):
    """Computes log-probs and entropies in blocks, with their gradients.

    With z = logits / temperature, p = softmax(z), H the entropy and t the target:
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
            mean = torch.einsum("nv,nv->n", weights, scaled) / total  # the mean of z - peak
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
    """Return the function that the architecture applies to the logits after its head; None if it is unknown.

    To find it, the model's `forward` method runs with stubs in place of its body and head, so no weights are needed.
    """
    head = model.get_output_embeddings()
    vocab = getattr(head, "out_features", None)
    if not isinstance(vocab, int):
        return None
    numbers = torch.linspace(-5.0, 5.0, vocab, dtype=torch.float64)[None, None]
    shell = object.__new__(type(model))  # not a copy: FSDP's classes cannot be copied
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
    """A module that returns the same value for every call."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._answer


class _BodyOutput:
    """A stub of the output of any architecture's body: hidden states, and None for every other attribute."""

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
    """Return a copy of `logits / temperature`, which the caller may change."""
    return logits.to(dtype, copy=True) if temperature == 1.0 else logits.to(dtype) / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_LOGITS.get(logits.device.type, BLOCK_LOGITS["cuda"]) // max(1, logits.shape[1]))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
