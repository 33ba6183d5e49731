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
(versions between the Trainer and the weights that sampled each token). `model_scores`, float32 `[B]`, where the Trainer
runs a reward model. And, where a trajectory has several rows, `trajectory_tokens`, int64 `[B]`: trained tokens of the
row's whole trajectory, so that a mean over trajectories counts it once
(`trainer.engines.compute.packing.token_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.core.types import Media
from asyncrl.storage.media import join
from trainer.batches import TrainRow

MEDIA_KEYS = ("media",)
"""Keys of model inputs other than tokens, which a batch may have."""


def to_batch(rows: Sequence[TrainRow]) -> TensorDict:
    """Lay out `rows`, which are checked (`trainer.batches.check_row`) and grouped by sample."""
    prompts = np.array([len(row.prompt_ids) for row in rows])
    responses = np.array([len(row.response_ids) for row in rows])
    size, longest = len(rows), int(responses.max())
    # Filled as NumPy arrays: those of a payload are read-only maps of its file, which torch warns of.
    input_ids = np.zeros((size, int((prompts + responses).max())), dtype=np.int64)
    response_mask, loss_mask = np.zeros((size, longest), dtype=np.bool_), np.zeros((size, longest), dtype=np.bool_)
    rollout_log_probs = np.zeros((size, longest), dtype=np.float32)
    versions = np.zeros((size, longest), dtype=np.int64)
    groups, trajectories = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for index, row in enumerate(rows):
        prompt, response = len(row.prompt_ids), len(row.response_ids)
        input_ids[index, :prompt] = row.prompt_ids
        input_ids[index, prompt : prompt + response] = row.response_ids
        response_mask[index, :response] = row.response_mask
        loss_mask[index, :response] = row.loss_mask
        rollout_log_probs[index, :response] = row.rollout_log_probs
        versions[index, :response] = row.versions
        if index:
            before = rows[index - 1]
            same_sample = row.sample_id == before.sample_id
            same_trajectory = same_sample and row.trajectory == before.trajectory
            groups[index] = groups[index - 1] + int(not same_sample)
            trajectories[index] = trajectories[index - 1] + int(not same_trajectory)
    batch = TensorDict(
        {
            "input_ids": torch.from_numpy(input_ids),
            "prompt_lens": torch.from_numpy(prompts),
            "response_lens": torch.from_numpy(responses),
            "response_mask": torch.from_numpy(response_mask),
            "loss_mask": torch.from_numpy(loss_mask),
            "rollout_log_probs": torch.from_numpy(rollout_log_probs),
            "versions": torch.from_numpy(versions),
            "groups": torch.from_numpy(groups),
            "trajectories": torch.from_numpy(trajectories),
            "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float64),
        },
        batch_size=[size],
    )
    if any(row.turn_rewards for row in rows):
        batch["turn_rewards"] = _turn_rewards(rows, longest)
    if rows[0].baseline_reward is not None:
        batch["baseline_rewards"] = torch.tensor([row.baseline_reward for row in rows], dtype=torch.float64)
    if any(row.media for row in rows):
        batch["media"] = _media(rows)
    return batch


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
