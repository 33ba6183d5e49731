"""Advantages, loss and optimizer pull the right way: a tiny model learns what is rewarded, on its own samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from asyncrl.ports import TrainRow
from asyncrl.types import SampleId
from tests.fakes.trainer_model import VOCAB, make_config, write_model
from trainer.algorithms.advantages import grpo_advantages
from trainer.worker import LocalTrainingWorker

LENGTH, GROUP, GROUPS = 4, 8, 4
REWARDED = 3


def sample_group(worker: LocalTrainingWorker, index: int, generator: torch.Generator) -> tuple[list[TrainRow], float]:
    """`GROUP` responses to one prompt, drawn token by token; the reward is the share of `REWARDED` tokens."""
    prompt = torch.tensor([1 + index % 5, 2])
    tokens, log_probs = prompt.repeat(GROUP, 1), []
    with torch.inference_mode():
        for _ in range(LENGTH):
            logits = worker.engine.model(tokens).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(logits.exp(), 1, generator=generator)
            log_probs.append(logits.gather(-1, drawn))
            tokens = torch.cat([tokens, drawn], dim=1)
    responses = tokens[:, len(prompt) :].numpy().astype(np.int32)
    behaviour = torch.cat(log_probs, dim=1).numpy()
    rewards = (responses == REWARDED).mean(axis=1)
    advantages = grpo_advantages(rewards, norm_by_std=True)
    rows = [
        TrainRow(
            sample_id=SampleId(0, index + 1),
            prompt_ids=prompt.numpy().astype(np.int32),
            response_ids=responses[row],
            response_mask=np.ones(LENGTH, dtype=np.bool_),
            rollout_log_probs=behaviour[row],
            advantages=np.full(LENGTH, advantages[row], dtype=np.float32),
        )
        for row in range(GROUP)
    ]
    return rows, float(rewards.mean())


def test_a_policy_learns_what_is_rewarded(tmp_path: Path) -> None:
    worker = LocalTrainingWorker(make_config(write_model(tmp_path)))
    generator = torch.Generator().manual_seed(0)
    history = []
    for step in range(30):
        groups = [sample_group(worker, step * GROUPS + number, generator) for number in range(GROUPS)]
        metrics = worker.train_mini_batch([row for rows, _ in groups for row in rows])
        history.append(np.mean([reward for _, reward in groups]))
        # on-policy: the engine scores the tokens as they were drawn
        assert abs(metrics["rollout/mismatch_kl"]) < 1e-6
        assert abs(metrics["actor/ratio_mean"] - 1) < 1e-4
    assert np.mean(history[:3]) < 3 / VOCAB
    assert np.mean(history[-3:]) > 0.8
