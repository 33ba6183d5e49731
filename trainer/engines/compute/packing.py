"""Rows of a batch → one forward pass and back: padded rows, or all sequences one after another without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.media import split
from asyncrl.types import Media
from trainer.engine.base import AggMode, Tokens


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of a batch laid out for one forward pass, on CPU.

    Padded: `B` rows padded on the right to `T`. Causal attention never looks right, so padding needs no mask. Packed:
    one row of `T` positions; attention has to keep the sequences apart (`trainer.engine.attention`).
    """

    input_ids: Tensor
    """int64 `[B, T]`, packed `[1, T]`."""
    position_ids: Tensor | None
    """Packed: int64 `[1, T]`, from 0 in each sequence. Padded: None."""
    lengths: tuple[int, ...]
    """Packed: positions of each sequence, of a filler at the end too. Padded: empty."""
    positions: Tensor
    """int64 `[N]`, ascending: flat index into `B·T` of the position that each score is read from."""
    targets: Tensor
    """int64 `[N]`: the scored tokens."""
    rows: Tensor
    """int64 `[rows]`: numbers of these rows in the batch."""
    row: Tensor
    """int64 `[N]`: each scored token's row, as an index into `rows`."""
    offset: Tensor
    """int64 `[N]`: each scored token's place in its response."""
    media: tuple[tuple[Media, ...], ...] | None = None
    """Padded only: images and videos of each row; None: no row of the batch has any."""
    prompt_lens: Tensor | None = None
    """With `media`: int64 `[B]`. Behind the prompt there are no placeholders."""


def lay_out(
    batch: TensorDict, rows: Sequence[int], mask: Tensor, *, packed: bool = False, multiple: int = 1
) -> MicroBatch:
    """Score response tokens: each is read from the position before it, so that the last token is not computed.

    A batch with media is never packed.

    Args:
        batch: see `trainer.tensors`.
        rows: row numbers, at least one.
        mask: bool `[B, R]` over the whole batch: which response tokens are scored; False beyond a response.
        packed: without padding, but for a filler that makes `T` a multiple of `multiple`.
    """
    numbers = torch.as_tensor(rows, dtype=torch.int64)
    row, offset = mask[numbers].nonzero(as_tuple=True)
    if "media" in batch:
        micro = _lay_out(batch, numbers, row, offset, last=False, packed=False, multiple=1)
        media = tuple(split(one.numpy().tobytes()) for one in batch["media"][numbers])
        return replace(micro, media=media, prompt_lens=batch["prompt_lens"][numbers])
    return _lay_out(batch, numbers, row, offset, last=False, packed=packed, multiple=multiple)


def lay_out_ends(batch: TensorDict, rows: Sequence[int], *, packed: bool = False, multiple: int = 1) -> MicroBatch:
    """Score whole responses: one score a row, read from the last token's own position."""
    numbers = torch.as_tensor(rows, dtype=torch.int64)
    offset = batch["response_lens"][numbers] - 1
    return _lay_out(batch, numbers, torch.arange(len(numbers)), offset, last=True, packed=packed, multiple=multiple)


def unpack(values: Tensor, micro: MicroBatch, width: int) -> Tensor:
    """Scores `[N]` → `[rows, width]`, the response tokens of the micro-batch's rows; 0 where nothing was scored."""
    result = values.new_zeros(len(micro.rows), width)
    result[micro.row.to(values.device), micro.offset.to(values.device)] = values
    return result


def select_tokens(
    batch: TensorDict, micro: MicroBatch, weights: Tensor, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tokens:
    """What a loss sees of the scored tokens.

    Args:
        weights: `[B]`: what each token of a row weighs, see `token_weights`.
        dtype: of the weights; float64 in comparisons.
    """
    numbers = micro.rows[micro.row]
    fields = {
        key: value[numbers, micro.offset].to(device)
        for key, value in batch.items()
        if value.ndim == 2 and value.is_floating_point()
    }
    return Tokens(fields, weights[numbers].to(device, dtype), micro.row.to(device), len(micro.rows))


def token_weights(batch: TensorDict, totals: tuple[float, float], agg_mode: AggMode, scale: float) -> Tensor:
    """What one trained token of each row weighs, so that the loss of an optimizer step is a plain sum. float64 `[B]`.

    Args:
        totals: trained tokens, and trajectories with a trained token, of the whole optimizer step
            over all ranks. Because denominators span the step, the loss does not depend on how it is cut up or laid
            out.
        agg_mode: `token-mean`: over all trained tokens; `seq-mean-token-mean`: mean over trajectories of the
            trajectory's token mean; `seq-mean-token-sum`: mean over trajectories of the trajectory's token sum;
            `seq-mean-token-sum-norm`: that, divided by `scale` (Dr.GRPO, https://arxiv.org/abs/2503.20783).
        scale: tokens.
    """
    num_tokens, num_trajectories = totals
    trained = _trajectory_tokens(batch)
    if agg_mode == "token-mean":
        return torch.full_like(trained, 1.0 / num_tokens)
    if agg_mode == "seq-mean-token-mean":
        return 1.0 / (num_trajectories * trained.clamp(min=1.0))
    divisor = num_trajectories * (scale if agg_mode == "seq-mean-token-sum-norm" else 1.0)
    return torch.full_like(trained, 1.0 / divisor)


def trajectory_share(batch: TensorDict) -> Tensor:
    """float64 `[B]`: the part of its trajectory's trained tokens that each row has. Over all rows of a step, wherever
    they are, these add up to its trajectories with a trained token; a row that pads a rank has none."""
    return batch["loss_mask"].sum(dim=1) / _trajectory_tokens(batch).clamp(min=1.0)


def _trajectory_tokens(batch: TensorDict) -> Tensor:
    """float64 `[B]`: trained tokens of each row's trajectory, which is the row unless the batch says otherwise."""
    return batch.get("trajectory_tokens", batch["loss_mask"].sum(dim=1)).double()


def _lay_out(
    batch: TensorDict, rows: Tensor, row: Tensor, offset: Tensor, *, last: bool, packed: bool, multiple: int
) -> MicroBatch:
    """`last`: the last token is computed too, and scores are read from the tokens' own positions."""
    prompts = batch["prompt_lens"][rows]
    lengths = prompts + batch["response_lens"][rows] - int(not last)
    width = int(lengths.max())
    ids, places = batch["input_ids"][rows], torch.arange(width).expand(len(rows), -1)
    real = places < lengths[:, None]
    tokens = torch.where(real, ids[:, :width], 0)
    scored = prompts[row] + offset
    targets, read = ids[row, scored], scored - int(not last)
    if not packed:
        return MicroBatch(tokens, None, (), row * width + read, targets, rows, row, offset)
    starts = lengths.cumsum(0) - lengths
    filler = -int(lengths.sum()) % multiple
    input_ids = torch.cat([tokens[real], tokens.new_zeros(filler)])
    position_ids = torch.cat([places[real], torch.arange(filler)])
    parts = (*lengths.tolist(), *([filler] if filler else []))
    return MicroBatch(input_ids[None], position_ids[None], parts, starts[row] + read, targets, rows, row, offset)
