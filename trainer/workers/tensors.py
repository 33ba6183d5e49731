"""The batch that the loop sends to the ranks: a `TensorDict` on CPU with `B` rows, padded on the right.

A row is a trajectory, unless the chat template rewrote history: then a trajectory has several rows
(`trainer.algorithms.rewards`). `T`: longest prompt + response, `R`: longest response. Padding is 0, False in
masks; it has no gradient, and engines drop it before they compute (`trainer.engines.compute.packing`).

| key               | dtype, shape     | what                                                                  |
|-------------------|------------------|-----------------------------------------------------------------------|
| input_ids         | int64 `[B, T]`   | prompt, then response                                                 |
| prompt_lens       | int64 `[B]`      | prompt tokens, at least 1                                             |
| response_lens     | int64 `[B]`      | response tokens, at least 1                                           |
| response_mask     | bool `[B, R]`    | sampled by the policy (not a tool's tokens)                           |
| loss_mask         | bool `[B, R]`    | trained: sampled, and neither too stale nor rejected                  |
| rollout_log_probs | float32 `[B, R]` | behaviour policy, nats                                                |
| versions          | int64 `[B, R]`   | weights that sampled each token                                       |
| groups            | int64 `[B]`      | number of the row's sample, from 0; its rows are adjacent             |
| trajectories      | int64 `[B]`      | number of its trajectory over all samples; its rows are adjacent      |
| rewards           | float64 `[B]`    | score of the whole trajectory, the same in all its rows               |
| turn_rewards      | float64 `[B, R]` | optional: parts of the reward, on the last token of their turn        |
| baseline_rewards  | float64 `[B]`    | ReMax only: score of the greedy response to the same prompt           |
| media             | uint8 `[B, W]`   | only if there are any: images and videos (`asyncrl.storage.media.join`)       |

The Trainer adds before training, all float32 `[B, R]`: `old_log_probs` (proximal policy), `ref_log_probs`,
`values`, `returns`, `advantages`, `is_weights` (off-policy correction, multiplied into the policy loss), `token_ages`
(versions between the Trainer and the weights that sampled each token). If the Trainer runs a reward model, it also adds
`model_scores`, float32 `[B]`. A teacher's `teacher_log_probs` become part of the advantages. If a trajectory has
several rows, it adds `trajectory_tokens`, int64 `[B]`: the number of trained tokens in the row's whole trajectory, so
that a mean over trajectories counts the trajectory once (`trainer.engines.compute.packing.token_weights`).

A batch of demonstrations has the first five keys only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from asyncrl.core.types import Demonstration, Media
from asyncrl.storage.media import join
from trainer.batches import TrainRow

MEDIA_KEYS = ("media",)
"""Keys of model inputs other than tokens, which a batch may have."""


def to_batch(rows: Sequence[TrainRow]) -> TensorDict:
    """Lay out `rows`, which are checked (`trainer.batches.check_row`) and grouped by sample."""
    same_sample = [row.sample_id == before.sample_id for before, row in pairwise(rows)]
    same_trajectory = [
        same and row.trajectory == before.trajectory
        for same, (before, row) in zip(same_sample, pairwise(rows), strict=True)
    ]
    batch = TensorDict(
        {
            "input_ids": _padded([np.concatenate([row.prompt_ids, row.response_ids]) for row in rows], np.int64),
            "prompt_lens": torch.tensor([len(row.prompt_ids) for row in rows]),
            "response_lens": torch.tensor([len(row.response_ids) for row in rows]),
            "response_mask": _padded([row.response_mask for row in rows], np.bool_),
            "loss_mask": _padded([row.loss_mask for row in rows], np.bool_),
            "rollout_log_probs": _padded([row.rollout_log_probs for row in rows], np.float32),
            "versions": _padded([row.versions for row in rows], np.int64),
            "groups": _numbered(same_sample),
            "trajectories": _numbered(same_trajectory),
            "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float64),
        },
        batch_size=[len(rows)],
    )
    if any(row.turn_rewards for row in rows):
        batch["turn_rewards"] = _turn_rewards(rows, batch["response_mask"].shape[1])
    if rows[0].baseline_reward is not None:
        batch["baseline_rewards"] = torch.tensor([row.baseline_reward for row in rows], dtype=torch.float64)
    if any(row.media for row in rows):
        batch["media"] = _media(rows)
    return batch


def demonstration_batch(rows: Sequence[Demonstration]) -> TensorDict:
    """Lay out demonstrations. The response of a row begins with its first trained token, and later tokens that are not
    trained are masked."""
    starts = [int(row.mask.argmax()) for row in rows]
    mask = _padded([row.mask[start:] for row, start in zip(rows, starts, strict=True)], np.bool_)
    return TensorDict(
        {
            "input_ids": _padded([row.token_ids for row in rows], np.int64),
            "prompt_lens": torch.tensor(starts),
            "response_lens": torch.tensor([len(row.mask) - start for row, start in zip(rows, starts, strict=True)]),
            "response_mask": mask,
            "loss_mask": mask.clone(),
        },
        batch_size=[len(rows)],
    )


def _padded(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    """Return a copy `[B, longest]`. It is a copy because torch warns about a payload's arrays, which are read-only."""
    table = np.zeros((len(parts), max(len(part) for part in parts)), dtype=dtype)
    for index, part in enumerate(parts):
        table[index, : len(part)] = part
    return torch.from_numpy(table)


def _numbered(same: Sequence[bool]) -> Tensor:
    """Return the number of each row's group, from 0. `same`: whether each later row belongs to the group before."""
    return torch.tensor([0, *accumulate(not one for one in same)], dtype=torch.int64)


def _media(rows: Sequence[TrainRow]) -> Tensor:
    """Return the media of each row as uint8 `[B, W]`, padded with zeros."""
    joined: dict[tuple[Media, ...], Tensor] = {}
    for row in rows:
        if row.media and row.media not in joined:
            joined[row.media] = torch.frombuffer(bytearray(join(row.media)), dtype=torch.uint8)
    table = torch.zeros(len(rows), max(len(part) for part in joined.values()), dtype=torch.uint8)
    for index, row in enumerate(rows):
        if row.media:
            table[index, : len(joined[row.media])] = joined[row.media]
    return table


def _turn_rewards(rows: Sequence[TrainRow], width: int) -> Tensor:
    """Return turn rewards as float64 `[B, width]`; rewards of several turns on one token are added."""
    table = torch.zeros(len(rows), width, dtype=torch.float64)
    for index, row in enumerate(rows):
        for token, reward in row.turn_rewards:
            table[index, token] += reward
    return table
