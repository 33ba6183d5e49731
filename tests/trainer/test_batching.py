"""Micro-batches: every row once, within the budget, cheapest cuts; weights that add up; rows refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.failures import DataError
from tests.fakes.trainer_model import VOCAB, make_rows
from trainer.batching import check_row, input_length, loss_weights, pack, split


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    max_tokens=st.integers(1, 200),
    overhead_tokens=st.integers(0, 50),
)
def test_every_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], max_tokens: int, overhead_tokens: int
) -> None:
    groups = split(lengths, max_tokens=max_tokens, overhead_tokens=overhead_tokens)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[number] for number in group)
        assert width * len(group) <= max_tokens or len(group) == 1


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), overhead_tokens=st.integers(0, 40))
def test_cuts_are_the_cheapest_of_all(lengths: list[int], overhead_tokens: int) -> None:
    def cost(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + overhead_tokens for group in groups)

    ordered, best = sorted(lengths), None
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            edges = [0, *cuts, len(ordered)]
            groups = [ordered[a:b] for a, b in pairwise(edges)]
            if all(len(group) * max(group) <= 60 or len(group) == 1 for group in groups):
                best = cost(groups) if best is None else min(best, cost(groups))
    found = split(lengths, max_tokens=60, overhead_tokens=overhead_tokens)
    assert cost([[lengths[number] for number in group] for group in found]) == best


def test_pack_points_each_scored_token_at_the_position_before_it() -> None:
    rows = make_rows(5)
    batch = pack(rows, [row.response_mask for row in rows])
    width = max(input_length(row) for row in rows)
    assert batch.input_ids.shape == (5, width)
    expected = []
    for number, row in enumerate(rows):
        tokens = [*row.prompt_ids, *row.response_ids]
        assert batch.input_ids[number].tolist() == [*tokens[:-1], *[0] * (width - len(tokens) + 1)]
        for offset in np.flatnonzero(row.response_mask):
            expected.append((number * width + len(row.prompt_ids) + offset - 1, row.response_ids[offset]))
    assert list(zip(batch.positions, batch.targets, strict=True)) == expected


def test_loss_weights() -> None:
    losses = [np.array([1.0, 2.0, 6.0]), np.array([4.0])]
    weighted = {
        mode: sum(weight * loss.sum() for weight, loss in zip(loss_weights([3, 1], mode), losses, strict=True))
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    }
    assert weighted == pytest.approx(
        {"token-mean": 13 / 4, "seq-mean-token-mean": (3 + 4) / 2, "seq-mean-token-sum": (9 + 4) / 2}
    )


def test_bad_rows_are_refused_by_name() -> None:
    row = replace(make_rows(1)[0], response_mask=np.ones(len(make_rows(1)[0].response_ids), dtype=np.bool_))
    empty = np.empty(0, dtype=np.int32)
    nan = row.rollout_log_probs.copy()
    nan[0] = np.nan
    bad = {
        "prompt of 0": replace(row, prompt_ids=empty),
        "response of 0": replace(row, response_ids=empty),
        "mask": replace(row, response_mask=row.response_mask[:-1]),
        "vocabulary of 24": replace(row, prompt_ids=np.array([VOCAB], dtype=np.int32)),
        "behaviour log-prob": replace(row, rollout_log_probs=nan),
        "advantage": replace(row, advantages=np.full_like(row.advantages, np.inf)),
    }
    for reason, broken in bad.items():
        with pytest.raises(DataError, match=f"sample_0_1 .*{reason}"):
            check_row(broken, vocab_size=VOCAB)
    # what is not trained on may be anything
    check_row(replace(row, rollout_log_probs=nan, response_mask=np.zeros_like(row.response_mask)), vocab_size=VOCAB)
