"""Divide the rows of a batch into shares of equal cost and micro-batches within a token budget; lay out forward passes.

A forward pass takes padded rows, or all sequences one after another without padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.import_path import load_function
from asyncrl.core.failures import UserCodeError
from asyncrl.core.types import Media
from asyncrl.storage.media import split
from trainer.engines.base import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of a batch laid out for one forward pass, on CPU.

    Padded: `B` rows padded on the right to `T`. Causal attention never sees later positions, so padding needs no mask.
    Packed: one row of `T` positions; attention has to keep the sequences apart (`trainer.engines.compute.attention`).
    """

    input_ids: Tensor
    """int64 `[B, T]`, packed `[1, T]`."""
    position_ids: Tensor | None
    """Packed: int64 `[1, T]`, from 0 in each sequence. Padded: None."""
    lengths: tuple[int, ...]
    """Packed: number of positions of each sequence and of the filler at the end, if there is one. Padded: empty."""
    positions: Tensor
    """int64 `[N]`, ascending: flat index into `B·T` of the position that each score is read from."""
    targets: Tensor
    """int64 `[N]`: the scored tokens."""
    rows: Tensor
    """int64 `[rows]`: each row's number in the batch."""
    row: Tensor
    """int64 `[N]`: each scored token's row, as an index into `rows`."""
    offset: Tensor
    """int64 `[N]`: each scored token's index within its response."""
    real: Tensor
    """bool `[B, T]`, packed `[1, T]`: False for padding and for the filler."""
    media: tuple[tuple[Media, ...], ...] | None = None
    """Padded only: images and videos of each row; None: no row of the batch has any."""
    prompt_lens: Tensor | None = None
    """int64 `[B]`, only with `media`: length of each prompt. All placeholders of media are in prompts."""


def lay_out(
    batch: TensorDict, rows: Sequence[int], mask: Tensor, *, packed: bool = False, multiple: int = 1
) -> MicroBatch:
    """Lay out rows so that response tokens are scored.

    Each score is read from the position before its token, so the last token is not computed. A batch with media is
    never packed.

    Args:
        batch: see `trainer.workers.tensors`.
        rows: row numbers, at least one.
        mask: bool `[B, R]` over the whole batch: which response tokens are scored; False beyond a response.
        packed: lay out without padding, except for a filler that makes `T` a multiple of `multiple`.
    """
    numbers = torch.as_tensor(rows, dtype=torch.int64)
    row, offset = mask[numbers].nonzero(as_tuple=True)
    if "media" in batch:
        micro = _lay_out(batch, numbers, row, offset, last=False, packed=False, multiple=1)
        media = tuple(split(one.numpy().tobytes()) for one in batch["media"][numbers])
        return replace(micro, media=media, prompt_lens=batch["prompt_lens"][numbers])
    return _lay_out(batch, numbers, row, offset, last=False, packed=packed, multiple=multiple)


def lay_out_ends(batch: TensorDict, rows: Sequence[int], *, packed: bool = False, multiple: int = 1) -> MicroBatch:
    """Lay out rows so that whole responses are scored: one score per row, read from the position of its last token."""
    numbers = torch.as_tensor(rows, dtype=torch.int64)
    offset = batch["response_lens"][numbers] - 1
    return _lay_out(batch, numbers, torch.arange(len(numbers)), offset, last=True, packed=packed, multiple=multiple)


def unpack(values: Tensor, micro: MicroBatch, width: int) -> Tensor:
    """Put scores `[N]` in their places among the response tokens, `[rows, width]`; tokens without a score get 0."""
    result = values.new_zeros(len(micro.rows), width)
    result[micro.row.to(values.device), micro.offset.to(values.device)] = values
    return result


def select_tokens(
    batch: TensorDict, micro: MicroBatch, weights: Tensor, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tokens:
    """Select the inputs of a loss for the scored tokens.

    Args:
        weights: `[B]`: the weight of each token of a row (`token_weights`).
        dtype: dtype of the weights; float64 in comparisons.
    """
    numbers = micro.rows[micro.row]
    fields = {
        key: value[numbers, micro.offset].to(device)
        for key, value in batch.items()
        if value.ndim == 2 and value.is_floating_point()
    }
    return Tokens(fields, weights[numbers].to(device, dtype), micro.row.to(device), len(micro.rows))


class LossCounts(NamedTuple):
    """What an aggregation mode divides by."""

    row_tokens: Tensor
    """float64 `[B]`: trained tokens of the trajectory of each row."""
    num_tokens: float
    """Trained tokens of the optimizer step, over all ranks."""
    num_trajectories: float
    """Trajectories with a trained token of the optimizer step, over all ranks."""
    scale: float
    """`algorithm.loss_scale_factor`, in tokens."""


AGGREGATIONS: dict[str, Callable[[LossCounts], Tensor | float]] = {
    "token-mean": lambda counts: 1.0 / counts.num_tokens,
    "token-sum": lambda counts: 1.0,
    "seq-mean-token-mean": lambda counts: 1.0 / (counts.num_trajectories * counts.row_tokens.clamp(min=1.0)),
    "seq-mean-token-sum": lambda counts: 1.0 / counts.num_trajectories,
    "seq-mean-token-sum-norm": lambda counts: 1.0 / (counts.num_trajectories * counts.scale),
}
"""Names of `algorithm.loss_agg_mode`: the weight of each token, for all rows or `[B]`."""


def token_weights(batch: TensorDict, totals: tuple[float, float], agg_mode: str, scale: float) -> Tensor:
    """Return the weight of the trained tokens of each row, float64 `[B]`, with which a step's loss is a plain sum.

    Args:
        totals: trained tokens, and trajectories with a trained token, of the whole optimizer step over all ranks.
            Because denominators span the step, the loss does not depend on micro-batches and layout.
        agg_mode: `token-mean`: over all trained tokens; `token-sum`: their sum; `seq-mean-token-mean`: mean over
            trajectories of the trajectory's token mean; `seq-mean-token-sum`: mean over trajectories of the
            trajectory's token sum;
            `seq-mean-token-sum-norm`: the same, divided by `scale` (Dr.GRPO, https://arxiv.org/abs/2503.20783).
        scale: the divisor, in tokens.

    Raises:
        UserCodeError: the user's function raised, or returned something else.
    """
    key, trained = "algorithm.loss_agg_mode", _trajectory_tokens(batch)
    found = load_function(agg_mode, key, AGGREGATIONS)(LossCounts(trained, *totals, scale))
    try:
        weights = torch.as_tensor(found, dtype=trained.dtype)
        if weights.shape not in ((), trained.shape):
            raise ValueError(f"a shape of {tuple(weights.shape)}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserCodeError.wrap(
            f"{key}: {agg_mode} returned {found!r}; expected a number or a tensor of shape {tuple(trained.shape)}, "
            "the weight of each token of a row",
            error,
        ) from error
    return weights.expand(trained.shape)


def trajectory_share(batch: TensorDict) -> Tensor:
    """Return each row's share of the trained tokens of its trajectory, float64 `[B]`.

    Over all rows of a step, on any ranks, the shares add up to the number of trajectories with a trained token. A row
    that pads a rank has a share of 0.
    """
    return batch["loss_mask"].sum(dim=1) / _trajectory_tokens(batch).clamp(min=1.0)


def _trajectory_tokens(batch: TensorDict) -> Tensor:
    """Return the number of trained tokens of each row's trajectory, float64 `[B]`. Without `trajectory_tokens`, each
    row is a trajectory."""
    return batch.get("trajectory_tokens", batch["loss_mask"].sum(dim=1)).double()


def _lay_out(
    batch: TensorDict, rows: Tensor, row: Tensor, offset: Tensor, *, last: bool, packed: bool, multiple: int
) -> MicroBatch:
    """Lay out rows. With `last`, the last token is computed too, and each score is read from its token's position."""
    prompts = batch["prompt_lens"][rows]
    lengths = prompts + batch["response_lens"][rows] - int(not last)
    width = int(lengths.max())
    ids, places = batch["input_ids"][rows], torch.arange(width).expand(len(rows), -1)
    real = places < lengths[:, None]
    tokens = torch.where(real, ids[:, :width], 0)
    scored = prompts[row] + offset
    targets, read = ids[row, scored], scored - int(not last)
    if not packed:
        return MicroBatch(tokens, None, (), row * width + read, targets, rows, row, offset, real)
    starts = lengths.cumsum(0) - lengths
    filler = -int(lengths.sum()) % multiple
    input_ids = torch.cat([tokens[real], tokens.new_zeros(filler)])
    position_ids = torch.cat([places[real], torch.arange(filler)])
    parts = (*lengths.tolist(), *([filler] if filler else []))
    read, is_real = starts[row] + read, torch.arange(input_ids.shape[0]) < int(lengths.sum())
    return MicroBatch(input_ids[None], position_ids[None], parts, read, targets, rows, row, offset, is_real[None])


QUADRATIC_COST = 1 / 12288
"""Cost of L² relative to L in a row of L tokens. In a layer of hidden size h, the dense parts take 24h² operations per
token and causal attention takes 2hL, which is L / 12h as many. This value is for h = 1024."""


def cut_rows(
    lengths: Sequence[int], *, max_tokens: int, overhead_tokens: int, num_parts: int | None = None, packed: bool
) -> list[list[int]]:
    """Group row numbers into micro-batches of at most `max_tokens` tokens; a longer row is alone in its micro-batch.

    Args:
        lengths: positions to compute for each row, at least 1.
        overhead_tokens: the fixed cost of one pass, in tokens. It decides how finely padded rows are cut.
        num_parts: the minimum number of micro-batches (at most one for each row), because other ranks have as many;
            None: the cheapest number.
        packed: sequences are concatenated, so micro-batches are balanced by cost. Otherwise rows are padded to the
            longest of their micro-batch, so rows of similar length are grouped.
    """
    if packed:
        parts = _balanced_within(lengths, max_tokens, num_parts or 1)
    else:
        parts = _cheapest_cuts(lengths, max_tokens, overhead_tokens)
    return _at_least(parts, num_parts or 1, lengths)


def balance(lengths: Sequence[int], num_parts: int, *, quadratic: float = QUADRATIC_COST) -> list[list[int]]:
    """Divide rows into `num_parts` parts of similar cost. With at least as many rows as parts, no part is empty.

    A row of `L` tokens costs `L + quadratic * L²`. Largest differencing method (Karmarkar and Karp 1982): the two most
    uneven partial partitions are joined, heavy parts of one with light parts of the other. The result is deterministic;
    the rows of a part are in ascending order, and the parts in the order of their first rows.
    """
    costs = np.asarray(lengths, dtype=np.float64)
    costs = costs + quadratic * costs**2
    # A heap entry is one partition: (-spread, first row, parts as (cost, rows), heaviest first).
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for row, cost in enumerate(costs.tolist()):
        heap.append((-cost, row, [(cost, [row])] + [(0.0, [])] * (num_parts - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, left = heapq.heappop(heap)
        _, second, right = heapq.heappop(heap)
        joined = [(a + b, rows + more) for (a, rows), (b, more) in zip(left, reversed(right), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    parts = [sorted(rows) for _, rows in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted(parts, key=lambda rows: rows or [len(costs)])


def _cheapest_cuts(lengths: Sequence[int], max_tokens: int, overhead_tokens: int) -> list[list[int]]:
    """Cut the rows, sorted by length, into groups with the least padding and overhead: a shortest path over the cuts.
    The group of the longest rows comes first."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    ordered = np.asarray(lengths)[order]
    best = np.zeros(len(order) + 1)
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        width = int(ordered[end - 1])
        first = min(end - 1, max(0, end - max_tokens // width))
        starts = np.arange(first, end)
        costs = best[starts] + (end - starts) * width + overhead_tokens
        choice = int(np.argmin(costs))
        best[end], cut[end] = costs[choice], starts[choice]
    groups = []
    end = len(order)
    while end > 0:
        groups.append([int(number) for number in order[cut[end] : end]])
        end = int(cut[end])
    return groups


def _balanced_within(lengths: Sequence[int], max_tokens: int, num_parts: int) -> list[list[int]]:
    """Return the fewest balanced parts within the budget, but at least `num_parts`, the largest first. A row that
    reaches the budget is a part by itself."""
    tokens = np.asarray(lengths, dtype=np.int64)
    over = [int(row) for row in np.flatnonzero(tokens >= max_tokens)]
    rest = [int(row) for row in np.flatnonzero(tokens < max_tokens)]
    parts = [[row] for row in over]
    if rest:
        kept = tokens[rest]
        count = min(len(rest), max(num_parts - len(over), -(-int(kept.sum()) // max_tokens), 1))
        shares = balance(kept.tolist(), count)
        while max(int(kept[share].sum()) for share in shares) > max_tokens:
            count += 1
            shares = balance(kept.tolist(), count)
        parts += [[rest[index] for index in share] for share in shares]
    return sorted(parts, key=lambda part: -int(tokens[part].sum()))


def _at_least(parts: list[list[int]], num_parts: int, lengths: Sequence[int]) -> list[list[int]]:
    """Halve the largest part of several rows until there are `num_parts` parts, or each part has one row."""
    parts = list(parts)
    while len(parts) < num_parts:
        sizes = [_width(part, lengths) * (len(part) > 1) for part in parts]
        largest = int(np.argmax(sizes)) if sizes else 0
        if not sizes or sizes[largest] == 0:
            break
        rows = parts[largest]
        edges = [0, len(rows) // 2, len(rows)]
        parts[largest : largest + 1] = [rows[start:end] for start, end in pairwise(edges)]
    return parts


def _width(part: Sequence[int], lengths: Sequence[int]) -> int:
    chosen: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)[list(part)]
    return int(chosen.max()) * len(part)


def input_lengths(batch: TensorDict) -> list[int]:
    """Return the number of positions to compute for each row: all but the last token, which predicts nothing."""
    lengths: Tensor = batch["prompt_lens"] + batch["response_lens"] - 1
    return lengths.tolist()
