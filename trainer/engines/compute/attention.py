"""Attention over packed sequences, registered with transformers as a separate attention implementation.

All sequences of a micro-batch are concatenated in one row, and each attends to itself only. On a GPU in half precision
this is one kernel (`torch.nn.attention.varlen`). Elsewhere a loop computes causal attention for each sequence, without
a `T x T` mask and without padding. On one CPU core, forward and backward of one layer in ms:

| heads (kv) x size | sequences                     | one by one | padded groups of like length | block-diagonal mask |
|-------------------|-------------------------------|------------|------------------------------|---------------------|
| 4 (2) x 32        | 60 of 20 to 60 tokens         | 7          | 7                            | 144                 |
| 4 (2) x 32        | 30, long-tailed, 4,648 tokens | 36         | 46                           | 613                 |
| 9 (3) x 64        | 60 of 20 to 60 tokens         | 21         | 29                           | 552                 |
| 9 (3) x 64        | 14 of 100 to 300 tokens       | 70         | 80                           | 889                 |
| 9 (3) x 64        | 30, long-tailed, 4,648 tokens | 145        | 176                          | 2175                |

Sequence parallelism (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509): `P` ranks share each packed row.

Every rank computes `T / P` adjacent positions through all layers. Only attention needs whole sequences: an all-to-all
exchanges positions for heads, so that each rank attends over all `T` positions with `H / P` heads, and another one
exchanges them back. Scores are gathered, so that every rank of the group computes the same complete loss.

Gradients: each rank's backward pass computes the part that went through its positions (and, in attention, its heads).
The sum over the group and over all data ranks equals the gradient of a single process; no rank divides by `P`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.core.failures import ConfigError
from trainer.engines.dist import make_mesh
from trainer.engines.models import head_of

logger = logging.getLogger(__name__)

NAME = "packed_sdpa"
"""Name of the attention implementation in transformers. Without a `Packing` it is the same as `sdpa`."""

PROBE_LENGTHS = (5, 3)


class Packing:
    """The layout of a packed row, passed through the model to attention as the keyword `packing`.

    It is a plain class, because FSDP rebuilds tuples and dataclasses among a module's arguments.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> None:
        self.lengths = list(lengths)
        """Number of positions of each sequence, over all ranks of `group`; they add up to the length of the row."""
        self.longest = max(self.lengths)
        ends = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.cu_seqlens = ends.to(device, non_blocking=True)
        """int32 `[sequences + 1]`: the position at which each sequence begins, and the length of the row."""
        self.group = group
        """Ranks that share the row; None: this rank has the whole row."""
        self.num_calls = 0
        """Number of attention layers that have used it."""

    def inputs(self) -> dict[str, Any]:
        """Return keyword arguments of the model. The mask has four dimensions, because transformers leaves such masks
        unchanged."""
        return {"attention_mask": self.cu_seqlens.new_ones((1, 1, 1, 1), dtype=torch.bool), "packing": self}


class UnsupportedError(Exception):
    """A model needs an attention feature that packed attention lacks. `enable_packing` catches this error."""


@torch.compiler.disable  # lengths differ in every micro-batch, so compiled code would be recompiled for each
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each sequence of a packed row, with the interface of transformers' attention functions.

    `query` `[1, H, T, D]`, `key`, `value` `[1, H_kv, T, D]` → `[1, T, H, D]`.
    """
    if packing is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    _refuse_odd(dropout, kwargs)
    packing.num_calls += 1
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings return float32; autocast casts only for torch's SDPA
        query, key, value = (part.to(torch.get_autocast_dtype(device)) for part in (query, key, value))
    if packing.group is not None:
        key, value = (spread_kv(part, query.shape[1], packing.group) for part in (key, value))
        query, key, value = (heads_to_sequence(part, packing.group) for part in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    if _has_varlen_kernel(query, value):
        result = _varlen(query, key, value, packing, scaling, window)
    else:
        result = _one_by_one(query, key, value, packing, scaling, window)
    if packing.group is not None:
        result = sequence_to_heads(result, packing.group)
    return result.transpose(1, 2).contiguous(), None


def enable_packing(model: PreTrainedModel) -> bool:
    """Let `model` take packed rows if its attention supports that; otherwise leave it unchanged.

    To find out, two short sequences are run packed and one by one. The results differ if a layer lets one sequence see
    the other (recurrent or convolutional layers, custom attention), or needs more than causal attention with an
    optional sliding window (soft caps, sinks, biases). The model must have its weights, on one device; it may be
    sharded by FSDP2, and then this is collective.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    try:
        model.set_attn_implementation(NAME)
        reason = _difference(model)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, UnsupportedError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        return True
    model.set_attn_implementation("sdpa")
    logger.warning(
        "%s runs with padded rows, because its attention cannot be packed (%s)", type(model).__name__, reason
    )
    return False


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str:
    """Return why packing fails; empty if sequences don't see each other in a packed row."""
    weight = model.get_input_embeddings().weight
    ids = (torch.arange(sum(PROBE_LENGTHS), device=weight.device) * 7 + 1) % weight.shape[0]
    alone = [_hidden_states(model, input_ids=part[None]) for part in ids.split(PROBE_LENGTHS)]
    packing = Packing(PROBE_LENGTHS, weight.device)
    places = torch.cat([torch.arange(length, device=weight.device) for length in PROBE_LENGTHS])
    got = _hidden_states(model, input_ids=ids[None], position_ids=places[None], **packing.inputs())
    if packing.num_calls == 0:
        return "it uses its own attention"
    expected = torch.cat(alone)
    error = float((got - expected).abs().max() / expected.abs().max())
    # The limit is at least that of float32, because many models compute norms and rotations in float32 even if their
    # weights are float64.
    limit = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return "" if error <= limit else f"sequences in one row change each other by {error:.1e}"


def _hidden_states(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Return the input of the head, `[T, H]`. The whole model is called, because FSDP gathers weights only then."""
    found: list[Tensor] = []
    head = model.get_output_embeddings() or head_of(model)
    # Before FSDP's hook, which may convert the input to the dtype of the head.
    hook = head.register_forward_pre_hook(lambda _head, given: found.append(given[0][0]), prepend=True)
    try:
        with torch.compiler.set_stance("force_eager"):
            model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return found[0]


def _refuse_odd(dropout: float, kwargs: dict[str, Any]) -> None:
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd or dropout or kwargs.get("is_causal") is False:
        raise UnsupportedError(f"attention with {', '.join(odd) or 'dropout or without causality'}")


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if size > 256 or size % 8 or value.shape[-1] != size:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    ends, longest = packing.cu_seqlens, packing.longest
    output: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    packed: Tensor = output.transpose(0, 1).unsqueeze(0)
    return packed


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    # split, not slices: its backward pass is one concatenation; that of each slice would fill a whole row with zeros
    parts = zip(*(part.split(packing.lengths, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([_causal(q, k, v, scaling, window) for q, k, v in parts], dim=2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    if window is None or length <= window:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return scaled_dot_product_attention(query, key, value, attn_mask=band, scale=scaling)


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)

ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


KEY = "ulysses_sequence_parallel_size"


def sequence_mesh(num_ranks: int, size: int, device: torch.device, *, timeout_s: float) -> DeviceMesh | None:
    """Return the mesh with dimensions `data` and `sequence`; None if ranks don't share sequences. Collective.

    Raises:
        ConfigError: `size`, the number of ranks that share a sequence, does not divide `num_ranks`.
    """
    if num_ranks % size:
        raise ConfigError(f"trainer.{KEY}={size} does not divide the {num_ranks} ranks; choose a divisor")
    if size == 1:
        return None
    return make_mesh(device, {"data": num_ranks // size, "sequence": size}, timeout_s=timeout_s)


def check_heads(model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the model's attention heads evenly."""
    heads = int(model.config.get_text_config().num_attention_heads)
    if heads % size:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"trainer.{KEY}={size}: does not divide the model's {heads} attention heads, which the ranks share; "
            f"use one of {fitting}"
        )


class Shard:
    """This rank's positions of a packed row of `num_positions`, a multiple of the group's size."""

    def __init__(self, num_positions: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self._size = num_positions // dist.get_world_size(group)
        self._edges = list(range(0, num_positions + 1, self._size))
        self.start = dist.get_rank(group) * self._size
        """The first position of this rank."""

    def cut(self, row: Tensor) -> Tensor:
        """Return this rank's positions of a row: `[1, T]` → `[1, T / P]`."""
        return row[:, self.start : self.start + self._size]

    def scored(self, positions: Tensor) -> tuple[slice, list[int]]:
        """Return which of the ascending `positions` `[N]`, on CPU, are this rank's, and how many each rank has."""
        bounds: list[int] = torch.searchsorted(positions, torch.tensor(self._edges)).tolist()
        rank = dist.get_rank(self.group)
        return slice(bounds[rank], bounds[rank + 1]), [end - start for start, end in pairwise(bounds)]


def gather_scores(scores: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gather `[K, n]` scores of each rank's positions, `n = counts[rank]`, in order as `[K, N]` on every rank.

    In the backward pass a rank keeps only the gradient of its own scores. This is correct because every rank
    computes the same complete loss, and gradients are then summed over the ranks.
    """
    gathered: Tensor = _Gather.apply(scores, list(counts), group)
    return gathered


def spread_kv(states: Tensor, num_heads: int, group: dist.ProcessGroup) -> Tensor:
    """Repeat heads of keys or values `[1, H_kv, t, D]` so that each rank can get the heads that its queries need."""
    ranks, num_kv = dist.get_world_size(group), states.shape[1]
    if num_kv % ranks == 0:
        return states
    return repeat_kv(states, (ranks if ranks % num_kv == 0 else num_heads) // num_kv)


def heads_to_sequence(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's positions, `[1, H, T / P, D]`, for its heads of all positions,
    `[1, H / P, T, D]`."""
    ranks = dist.get_world_size(group)
    _, heads, length, size = states.shape
    received = _all_to_all(states.reshape(ranks, heads // ranks, length, size), group)
    return received.transpose(0, 1).reshape(1, heads // ranks, ranks * length, size)


def sequence_to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert `heads_to_sequence`: `[1, H / P, T, D]` → `[1, H, T / P, D]`."""
    ranks = dist.get_world_size(group)
    _, heads, length, size = states.shape
    received = _all_to_all(states.reshape(heads, ranks, length // ranks, size).transpose(0, 1), group)
    return received.reshape(1, ranks * heads, length // ranks, size)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange parts `[P, ...]`: part `i` goes to rank `i`, and part `i` of the result comes from rank `i`."""
    received: Tensor = _AllToAll.apply(parts, group)
    return received


class _AllToAll(torch.autograd.Function):
    """A differentiable all-to-all, whose backward pass is an all-to-all as well."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        rank = dist.get_rank(group)
        ctx.start, ctx.count = sum(counts[:rank]), counts[rank]
        padded = scores.new_zeros(scores.shape[0], max(counts))
        padded[:, : counts[rank]] = scores
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(received, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[:, ctx.start : ctx.start + ctx.count].contiguous(), None, None
