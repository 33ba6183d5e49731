"""The batch that travels from the loop to the ranks: a `TensorDict` on CPU of `B` rows, padded right.

A row is a trajectory, unless the chat template rewrote history on the way: then a trajectory is several rows
(`trainer.algorithms.trajectories`). `T`: longest prompt + response, `R`: longest response. Padding is 0, False in
masks; nothing is learned from it, and engines drop it before they compute (`trainer.engine.packing`).

| key               | dtype, shape     | what                                                                  |
|-------------------|------------------|-----------------------------------------------------------------------|
| input_ids         | int64 `[B, T]`   | prompt, then response                                                 |
| prompt_lens       | int64 `[B]`      | prompt tokens, at least 1                                             |
| response_lens     | int64 `[B]`      | response tokens, at least 1                                           |
| response_mask     | bool `[B, R]`    | sampled by the policy (not a tool's tokens)                           |
| loss_mask         | bool `[B, R]`    | of these, what is trained: without what is too stale or rejected      |
| rollout_log_probs | float32 `[B, R]` | behaviour policy, nats                                                |
| versions          | int64 `[B, R]`   | weights that sampled each token                                       |
| groups            | int64 `[B]`      | number of the row's sample, from 0; rows of one are neighbours        |
| trajectories      | int64 `[B]`      | number of its trajectory over all samples; rows of one are neighbours |
| rewards           | float64 `[B]`    | score of the whole trajectory, the same in all its rows               |
| turn_rewards      | float64 `[B, R]` | only if there are any: parts of it, on the last token of their turn   |
| baseline_rewards  | float64 `[B]`    | ReMax only: score of the greedy response to the same prompt           |
| media             | uint8 `[B, W]`   | only if there are any: images and videos (`asyncrl.media.join`)       |

What the Trainer adds before it trains, all float32 `[B, R]`: `old_log_probs` (proximal policy), `ref_log_probs`,
`values`, `returns`, `advantages`, `is_weights` (off-policy correction, multiplied into the policy loss), `token_ages`
(versions between the Trainer and the weights that sampled each token). `model_scores`, float32 `[B]`, where the Trainer
runs a reward model. And, where a trajectory has several rows, `trajectory_tokens`, int64 `[B]`: trained tokens of the
row's whole trajectory, so that a mean over trajectories counts it once (`trainer.engine.packing.token_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.media import join
from asyncrl.types import Media
from trainer.rows import TrainRow

MEDIA_KEYS = ("media",)
"""What a model takes besides tokens, if there are any."""


def to_batch(rows: Sequence[TrainRow]) -> TensorDict:
    """Lay out `rows`, which are checked (`trainer.rows.check_row`) and grouped by sample."""
    prompts = np.array([len(row.prompt_ids) for row in rows])
    responses = np.array([len(row.response_ids) for row in rows])
    size, longest = len(rows), int(responses.max())
    input_ids = torch.zeros(size, int((prompts + responses).max()), dtype=torch.int64)
    response_mask = torch.zeros(size, longest, dtype=torch.bool)
    loss_mask = torch.zeros(size, longest, dtype=torch.bool)
    rollout_log_probs = torch.zeros(size, longest)
    versions = torch.zeros(size, longest, dtype=torch.int64)
    groups, trajectories = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    for index, row in enumerate(rows):
        prompt, response = len(row.prompt_ids), len(row.response_ids)
        input_ids[index, :prompt] = torch.from_numpy(row.prompt_ids)
        input_ids[index, prompt : prompt + response] = torch.from_numpy(row.response_ids)
        response_mask[index, :response] = torch.from_numpy(row.response_mask)
        loss_mask[index, :response] = torch.from_numpy(row.loss_mask)
        rollout_log_probs[index, :response] = torch.from_numpy(row.rollout_log_probs)
        versions[index, :response] = torch.from_numpy(row.versions)
        if index:
            before = rows[index - 1]
            same_sample = row.sample_id == before.sample_id
            same_trajectory = same_sample and row.trajectory == before.trajectory
            groups[index] = groups[index - 1] + int(not same_sample)
            trajectories[index] = trajectories[index - 1] + int(not same_trajectory)
    batch = TensorDict(
        {
            "input_ids": input_ids,
            "prompt_lens": torch.from_numpy(prompts),
            "response_lens": torch.from_numpy(responses),
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "rollout_log_probs": rollout_log_probs,
            "versions": versions,
            "groups": groups,
            "trajectories": trajectories,
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
    """uint8 `[B, W]`, zeros behind the end."""
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
    """float64 `[B, width]`; what several turns have on one token is added up."""
    table = torch.zeros(len(rows), width, dtype=torch.float64)
    for index, row in enumerate(rows):
        for token, reward in row.turn_rewards:
            table[index, token] += reward
    return table


def input_lengths(batch: TensorDict) -> list[int]:
    """Positions the model has to compute for each row: the last response token predicts nothing."""
    lengths: Tensor = batch["prompt_lens"] + batch["response_lens"] - 1
    return lengths.tolist()
