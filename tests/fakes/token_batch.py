"""A batch of random tokens, as `trainer.workers.tensors` lays them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict


def make_batch(
    prompts: Sequence[int], responses: Sequence[int], *, vocab: int, seed: int = 0, masked: float = 0.2
) -> TensorDict:
    """Return rows with these prompt and response lengths, in which a share `masked` of the response tokens is not
    trained."""
    generator = torch.Generator().manual_seed(seed)
    size, width = len(prompts), max(responses)
    prompt_lens, response_lens = torch.tensor(prompts), torch.tensor(responses)
    lengths = prompt_lens + response_lens
    ids = torch.randint(0, vocab, (size, int(lengths.max())), generator=generator)
    real = torch.arange(width) < response_lens[:, None]
    trained = real & (torch.rand(size, width, generator=generator) >= masked)
    trained[:, 0] = True

    def numbers() -> torch.Tensor:
        return torch.randn(size, width, generator=generator) * real

    return TensorDict(
        {
            "input_ids": ids * (torch.arange(ids.shape[1]) < lengths[:, None]),
            "prompt_lens": prompt_lens,
            "response_lens": response_lens,
            "response_mask": trained.clone(),
            "loss_mask": trained,
            "rollout_log_probs": -numbers().abs(),
            "versions": torch.zeros(size, width, dtype=torch.int64),
            "groups": torch.arange(size) // 2,
            "rewards": torch.randn(size, generator=generator, dtype=torch.float64),
            "old_log_probs": -numbers().abs(),
            "advantages": numbers(),
        },
        batch_size=[size],
    )
