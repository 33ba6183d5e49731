"""The layout of padded and packed rows, unpacking of scores, and the weights of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.fakes.token_batch import make_batch
from trainer.engines.compute.packing import (
    MicroBatch,
    lay_out,
    lay_out_ends,
    select_tokens,
    token_weights,
    trajectory_share,
    unpack,
)

PROMPTS, RESPONSES = [3, 1, 5, 2, 4], [4, 6, 1, 3, 2]
ROWS = [4, 0, 2, 3]


@pytest.fixture
def batch() -> TensorDict:
    return make_batch(PROMPTS, RESPONSES, vocab=50)


def tokens_of(batch: TensorDict, row: int) -> list[int]:
    tokens: list[int] = batch["input_ids"][row, : PROMPTS[row] + RESPONSES[row]].tolist()
    return tokens


def contexts(micro: MicroBatch) -> list[tuple[int, ...]]:
    """Return, for each score, the tokens of its sequence up to the position from which it is read."""
    flat = micro.input_ids.flatten().tolist()
    if micro.position_ids is None:
        width = micro.input_ids.shape[1]
        starts = [position // width * width for position in micro.positions.tolist()]
    else:
        places = micro.position_ids.flatten().tolist()
        starts = [position - places[position] for position in micro.positions.tolist()]
    return [tuple(flat[start : end + 1]) for start, end in zip(starts, micro.positions.tolist(), strict=True)]


@pytest.mark.parametrize("packed", [False, True])
def test_each_scored_token_is_read_from_the_position_before_it(batch: TensorDict, packed: bool) -> None:
    micro = lay_out(batch, ROWS, batch["loss_mask"], packed=packed)
    expected = []
    for index, row in enumerate(ROWS):
        for offset in batch["loss_mask"][row].nonzero().flatten().tolist():
            tokens, end = tokens_of(batch, row), PROMPTS[row] + offset
            expected.append((tuple(tokens[:end]), tokens[end], index, offset))
    assert (
        list(zip(contexts(micro), *(x.tolist() for x in (micro.targets, micro.row, micro.offset)), strict=True))
        == expected
    )
    assert micro.rows.tolist() == ROWS
    lengths = [PROMPTS[row] + RESPONSES[row] - 1 for row in ROWS]
    assert micro.input_ids.shape == ((1, sum(lengths)) if packed else (4, max(lengths)))
    assert micro.lengths == (tuple(lengths) if packed else ())


@pytest.mark.parametrize("packed", [False, True])
def test_the_score_of_a_whole_response_is_read_from_its_last_token(batch: TensorDict, packed: bool) -> None:
    micro = lay_out_ends(batch, ROWS, packed=packed)
    assert contexts(micro) == [tuple(tokens_of(batch, row)) for row in ROWS]
    assert unpack(torch.arange(1.0, 5.0), micro, 6)[1].tolist() == [0, 0, 0, 2, 0, 0]


def test_a_packed_row_is_padded_with_a_separate_sequence(batch: TensorDict) -> None:
    bare, filled = (lay_out(batch, ROWS, batch["loss_mask"], packed=True, multiple=count) for count in (1, 8))
    length = bare.input_ids.shape[1]
    filler = filled.input_ids.shape[1] - length
    assert 0 < filler < 8 and (length + filler) % 8 == 0
    assert filled.lengths == (*bare.lengths, filler)
    assert filled.position_ids is not None
    assert filled.position_ids[0, length:].tolist() == list(range(filler))
    assert torch.equal(filled.positions, bare.positions) and torch.equal(filled.input_ids[:, :length], bare.input_ids)
    even = lay_out(batch, ROWS, batch["loss_mask"], packed=True, multiple=length)
    assert even.lengths == bare.lengths


def test_unpack_is_the_inverse_of_selection(batch: TensorDict) -> None:
    mask = batch["loss_mask"]
    weights = torch.rand(5, dtype=torch.float64)
    micro = lay_out(batch, ROWS, mask, packed=True)
    tokens = select_tokens(batch, micro, weights, device=torch.device("cpu"), dtype=torch.float64)
    assert set(tokens.fields) == {"rollout_log_probs", "old_log_probs", "advantages"}
    for key, values in tokens.fields.items():
        assert torch.equal(unpack(values, micro, mask.shape[1]), (batch[key] * mask)[ROWS])
    assert torch.equal(unpack(tokens.weight, micro, mask.shape[1]), (weights[:, None] * mask)[ROWS])
    assert torch.equal(tokens.row, micro.row) and tokens.num_rows == 4


def test_a_micro_batch_may_have_nothing_to_score(batch: TensorDict) -> None:
    micro = lay_out(batch, [1], torch.zeros_like(batch["loss_mask"]), packed=True)
    assert len(micro.positions) == 0 and micro.input_ids.shape == (1, 6)


@pytest.mark.parametrize(
    ("mode", "of_rows", "of_trajectories"),
    [
        ("token-mean", (1 + 2 + 6 + 4) / 4, (9 + 4 + 5) / 6),
        ("token-sum", 1.0 + 2 + 6 + 4, 9.0 + 4 + 5),
        ("seq-mean-token-mean", (9 / 3 + 4) / 2, ((9 + 4) / 4 + 5 / 2) / 2),
        ("seq-mean-token-sum", (9 + 4) / 2, (9 + 4 + 5) / 2),
        ("seq-mean-token-sum-norm", (9 / 5 + 4 / 5) / 2, (9 + 4 + 5) / 5 / 2),
    ],
)
def test_weighted_losses_of_two_ranks_add_up_to_their_mean(mode: str, of_rows: float, of_trajectories: float) -> None:
    """In the second case rows 0 to 2 are one trajectory and row 3 is another one. Row 4 pads a rank: it repeats row 0
    without trained tokens.
    """
    losses = torch.tensor([[1.0, 2.0, 6.0], [4.0, 0, 0], [0, 0, 0], [2.0, 3.0, 0], [0, 0, 0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    rows = TensorDict({"loss_mask": mask[:3]}, batch_size=[3])
    forked = TensorDict({"loss_mask": mask, "trajectory_tokens": torch.tensor([4, 4, 4, 2, 4])}, batch_size=[5])
    for batch, ranks, totals, expected in (
        (rows, ([0], [1, 2]), (4.0, 2.0), of_rows),
        (forked, ([0, 1], [2, 3, 4]), (6.0, 2.0), of_trajectories),
    ):
        weights = torch.cat([token_weights(batch[rank], totals, mode, 5.0) for rank in ranks])
        assert weights.dtype == torch.float64
        total = float((weights[:, None] * losses[: len(batch)] * batch["loss_mask"]).sum())
        np.testing.assert_allclose(total, expected, rtol=1e-14)
        assert sum(float(trajectory_share(batch[rank]).sum()) for rank in ranks) == totals[1]
    # the same token counts by trajectory give the same weights
    plain = token_weights(rows, (4.0, 2.0), mode, 5.0)
    rows["trajectory_tokens"] = rows["loss_mask"].sum(dim=1)
    assert torch.equal(token_weights(rows, (4.0, 2.0), mode, 5.0), plain)
