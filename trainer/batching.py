"""Rows → micro-batches. Pure numpy: which rows go together, how they are laid out, what each token weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.failures import DataError
from asyncrl.ports import TrainRow

AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows laid out for one forward pass: `B` rows padded on the right to `T`, `N` tokens to score.

    Causal attention never looks right, so padding needs no attention mask.
    """

    input_ids: NDArray[np.int64]
    """`[B, T]`: prompt and response without its last token, which predicts nothing; padded with 0."""
    positions: NDArray[np.int64]
    """`[N]`: flat index into `B·T` of the position that predicts each scored token."""
    targets: NDArray[np.int64]
    """`[N]`: the scored tokens."""


def pack(rows: Sequence[TrainRow], selected: Sequence[NDArray[np.bool_]]) -> MicroBatch:
    """Lay out `rows`; `selected[i]`, bool `[L]`, says which response tokens of row i are scored."""
    width = max(input_length(row) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    positions, targets = [], []
    for number, (row, chosen) in enumerate(zip(rows, selected, strict=True)):
        prompt = len(row.prompt_ids)
        input_ids[number, :prompt] = row.prompt_ids
        input_ids[number, prompt : input_length(row)] = row.response_ids[:-1]
        offsets = np.flatnonzero(chosen)
        positions.append(number * width + prompt - 1 + offsets)
        targets.append(row.response_ids[offsets].astype(np.int64))
    return MicroBatch(input_ids, np.concatenate(positions), np.concatenate(targets))


def input_length(row: TrainRow) -> int:
    """Positions the model has to compute for `row`."""
    return len(row.prompt_ids) + len(row.response_ids) - 1


def split(lengths: Sequence[int], *, max_tokens: int, overhead_tokens: int) -> list[list[int]]:
    """Group row numbers into micro-batches of at most `max_tokens` tokens, padding included; the longest rows first.

    Rows are sorted by length and cut where padding plus `overhead_tokens` per micro-batch (what one pass costs beyond
    its tokens) is least: shortest path over the cuts. A row longer than `max_tokens` is a micro-batch of its own.
    """
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


def loss_weights(trained_tokens: Sequence[int], mode: AggMode) -> NDArray[np.float64]:
    """What one token of each row weighs in the mini-batch's loss, so that the loss is a plain weighted sum.

    Args:
        trained_tokens: per row of the whole mini-batch, its number of trained tokens, all > 0. Because denominators
            span the mini-batch, the loss does not depend on how it is cut into micro-batches.
        mode: `token-mean`: over all trained tokens; `seq-mean-token-mean`: mean over rows of the row's token mean;
            `seq-mean-token-sum`: mean over rows of the row's token sum.
    """
    tokens = np.asarray(trained_tokens, dtype=np.float64)
    if mode == "token-mean":
        return np.full(len(tokens), 1.0 / tokens.sum())
    if mode == "seq-mean-token-mean":
        return 1.0 / (len(tokens) * tokens)
    return np.full(len(tokens), 1.0 / len(tokens))


def check_row(row: TrainRow, *, vocab_size: int) -> None:
    """Refuse what would train on nonsense or crash in the model.

    Raises:
        DataError: empty prompt or response, arrays of unequal length, a token id outside the vocabulary, or a
            behaviour log-prob or advantage of a trained token that is not finite.
    """
    length = len(row.response_ids)
    problem = ""
    if len(row.prompt_ids) == 0 or length == 0:
        problem = f"prompt of {len(row.prompt_ids)} and response of {length} tokens; both need at least one"
    elif {len(row.response_mask), len(row.rollout_log_probs), len(row.advantages)} != {length}:
        problem = (
            f"{length} response tokens but mask, rollout_log_probs and advantages of "
            f"{len(row.response_mask)}, {len(row.rollout_log_probs)} and {len(row.advantages)}"
        )
    else:
        low = int(min(row.prompt_ids.min(), row.response_ids.min()))
        high = int(max(row.prompt_ids.max(), row.response_ids.max()))
        if low < 0 or high >= vocab_size:
            problem = f"token id {low if low < 0 else high} outside the model's vocabulary of {vocab_size}"
        elif not np.all(np.isfinite(row.rollout_log_probs[row.response_mask])):
            problem = "a behaviour log-prob that is not finite: its probability ratio would be 0 or infinite"
        elif not np.all(np.isfinite(row.advantages[row.response_mask])):
            problem = "an advantage that is not finite"
    if problem:
        raise DataError(f"{row.sample_id} cannot be trained on: {problem}. Check the engine's and the reward's output.")
