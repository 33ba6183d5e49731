"""The conversion of rows to a batch: groups, trajectories and turn rewards."""

from __future__ import annotations

from dataclasses import replace

import torch

from asyncrl.core.types import Sample, SampleId
from tests.fakes.trainer_parts import forked, make_sample
from trainer.batches import RowRules, TrainRow, prepare_sample
from trainer.workers.tensors import to_batch

RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)


def rows_of(*samples: Sample) -> list[TrainRow]:
    prepared = [prepare_sample(sample, lease_id=1, trainer_version=0, rules=RULES) for sample in samples]
    return [row for sample in prepared for row in sample.rows]


def test_trajectories_are_numbered_over_all_samples() -> None:
    """This holds even if the last trajectory of a sample and the first one of the next sample have the same number."""
    third = make_sample(SampleId(0, 3), (1.0,))
    samples = [
        forked(make_sample(SampleId(0, 1), (0.0, 1.0)), 1, [1, 1], [1, 0, 1]),
        replace(third, sample_id=SampleId(0, 2), rows=(replace(third.rows[0], trajectory=1),)),
        third,
    ]
    batch = to_batch(rows_of(*samples))
    assert batch["groups"].tolist() == [0, 0, 0, 1, 2]
    assert batch["trajectories"].tolist() == [0, 1, 1, 2, 3]
    assert batch["trajectories"].dtype == torch.int64
    assert batch["rewards"].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert "turn_rewards" not in batch


def test_turn_rewards_are_on_their_tokens() -> None:
    parts = [[(1, 0.5)], [(0, 0.1), (2, -2.0), (2, 0.25)]]
    sample = forked(make_sample(SampleId(0, 1), (0.0, 1.0)), 1, [1, 1], [1, 0, 1], turn_rewards=parts)
    found = to_batch(rows_of(sample))["turn_rewards"]
    assert found.dtype == torch.float64
    assert found.tolist() == [[0, 0, 0, 0], [0, 0.5, 0, 0], [0.1, 0, -1.75, 0]]
