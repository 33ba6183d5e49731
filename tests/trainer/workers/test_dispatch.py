"""Who gets which rows, and that results find their way back. Pure, apart from the tensors that are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncrl.core.failures import BugError, DataError
from tests.fakes.token_batch import make_batch
from trainer.engines.base import Layout
from trainer.workers.dispatch import (
    Dispatch,
    RankCall,
    collect,
    dispatch_of,
    from_wire,
    scatter,
    share_mini_batches,
    share_rows,
    to_wire,
)
from trainer.workers.worker import TrainingWorker

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=24)


def layouts(world_size: int, per_group: int = 1) -> list[Layout]:
    """Ranks of which `per_group` neighbours share sequences; the first of each reports."""
    size = world_size // per_group
    return [Layout(rank, world_size, rank // per_group, size, rank % per_group == 0) for rank in range(world_size)]


def batch_of(num_rows: int) -> TensorDict:
    return make_batch([1 + row % 5 for row in range(num_rows)], [1 + row % 7 for row in range(num_rows)], vocab=9)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 9))
def test_every_row_goes_to_one_rank_and_every_rank_has_one(lengths: list[int], num_ranks: int) -> None:
    shares = share_rows(lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(row for share in shares for row in share.rows) == list(range(len(lengths)))
    for share in shares:
        assert share.rows == sorted(share.rows)
        assert len(share.rows) + len(share.padding) >= 1
        assert bool(share.padding) == (not share.rows)
        assert all(lengths[row] == min(lengths) for row in share.padding)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), data=st.data())
def test_mini_batches_keep_their_rows(lengths: list[int], num_ranks: int, data: st.DataObject) -> None:
    rows = st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True)
    mini_batches = data.draw(st.lists(rows, min_size=1, max_size=5))
    shares = share_mini_batches(lengths, mini_batches, num_ranks)
    for number, expected in enumerate(mini_batches):
        found = []
        for share in shares:
            given_rows = share.rows + share.padding
            mine = share.mini_batches[number]
            assert mine, "a rank without a row would not come to the step's collectives"
            if mine != [len(share.rows)]:
                found += [given_rows[position] for position in mine]
        assert sorted(found) == sorted(expected)
    for share in shares:
        assert len(set(share.rows)) == len(share.rows), "a row that several epochs train travels once"


def test_each_mini_batch_is_balanced_by_itself() -> None:
    shares = share_mini_batches([90, 10, 50, 50], [[0, 1], [2, 3]], 2)
    assert [[len(part) for part in share.mini_batches] for share in shares] == [[1, 1], [1, 1]]


def test_long_rows_are_spread() -> None:
    shares = share_rows([1000, 10, 10, 1000, 10, 10], 2)
    assert {0, 3}.isdisjoint(set(shares[0].rows) & set(shares[1].rows))
    assert sum(row in (0, 3) for row in shares[0].rows) == 1


@given(num_rows=st.integers(1, 12), groups=st.integers(1, 4), per_group=st.integers(1, 3))
def test_results_come_back_in_the_rows_order(num_rows: int, groups: int, per_group: int) -> None:
    ranks = layouts(groups * per_group, per_group)
    batch = batch_of(num_rows)
    mode = Dispatch("rows", "rows")
    calls, shares = scatter(mode, ranks, RankCall((batch,), {"adapters": False}))
    assert sorted(calls) == list(range(len(ranks)))
    results = {}
    for layout in ranks:
        call = calls[layout.rank]
        assert call.kwargs == {"adapters": False}
        assert call is calls[layout.data_rank * per_group], "ranks that share sequences get the same object"
        noise = 0.0 if layout.reports else float("nan")
        results[layout.rank] = TensorDict(
            {"sums": call.args[0]["input_ids"].sum(1) + noise, "rewards": call.args[0]["rewards"]},
            batch_size=[len(call.args[0])],
        )
    whole = collect(mode, ranks, shares, results)
    torch.testing.assert_close(whole["sums"], batch["input_ids"].sum(1).float())
    torch.testing.assert_close(whole["rewards"], batch["rewards"])


@given(num_rows=st.integers(1, 8), num_ranks=st.integers(1, 10))
def test_nothing_is_trained_twice(num_rows: int, num_ranks: int) -> None:
    batch = batch_of(num_rows)
    before = batch["loss_mask"].clone()
    calls, _ = scatter(Dispatch("rows", "first"), layouts(num_ranks), RankCall((batch,), {}))
    assert sum(int(call.args[0]["loss_mask"].sum()) for call in calls.values()) == int(before.sum())
    assert torch.equal(batch["loss_mask"], before), "padding is masked in a copy"


def test_mini_batches_become_positions_in_a_ranks_rows() -> None:
    batch, mini_batches = batch_of(5), [[0, 3], [4], [1, 2, 0]]
    calls, _ = scatter(Dispatch("mini_batches", "first"), layouts(2), RankCall((batch, mini_batches), {}))
    trained: list[list[torch.Tensor]] = [[], [], []]
    for call in calls.values():
        part, positions = call.args
        for number, rows in enumerate(positions):
            trained[number] += [part["rewards"][row] for row in rows if part["loss_mask"][row].any()]
    for number, rows in enumerate(mini_batches):
        assert sorted(torch.stack(trained[number]).tolist()) == sorted(batch["rewards"][rows].tolist())


def test_one_to_all_and_rank_zero() -> None:
    call, ranks = RankCall(("x",), {}), layouts(3)
    assert scatter(Dispatch("all", "first"), ranks, call) == ({0: call, 1: call, 2: call}, [])
    assert scatter(Dispatch("rank_zero", "first"), ranks, call) == ({0: call}, [])
    assert collect(Dispatch("all", "first"), ranks, [], {0: "zero", 1: "one", 2: "two"}) == "zero"


@pytest.mark.parametrize(
    ("mode", "args", "message"),
    [
        ("rows", (batch_of(3)[:0],), "the batch has no rows"),
        ("mini_batches", (batch_of(3), [[0], []]), "mini-batch 1 has no rows"),
        ("mini_batches", (batch_of(3), [[0, 3]]), "names row 3 of a batch of 3"),
        ("mini_batches", (batch_of(3), [[-1]]), "names row -1 of a batch of 3"),
    ],
)
def test_batches_that_cannot_be_shared_out_are_refused(mode: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        scatter(Dispatch(mode, "first"), layouts(2), RankCall(args, {}))


def test_methods_say_how_they_are_called() -> None:
    assert dispatch_of(TrainingWorker, "train_mini_batch") == Dispatch("mini_batches", "first")
    assert dispatch_of(TrainingWorker, "infer_batch") == Dispatch("rows", "rows")
    assert dispatch_of(TrainingWorker, "reset") == Dispatch("all", "first")
    with pytest.raises(BugError, match=r"train_batches cannot be called on a group; did you mean train_batch\?"):
        dispatch_of(TrainingWorker, "train_batches")
    with pytest.raises(BugError, match="close cannot be called on a group"):
        dispatch_of(TrainingWorker, "close")


def test_batches_travel_as_arrays_and_arrive_writable() -> None:
    batch = batch_of(4)
    wire = to_wire(batch)
    for array in wire.values.values():
        array.flags.writeable = False
    arrived = from_wire(wire)
    assert arrived.batch_size == batch.batch_size
    assert {key: value.dtype for key, value in arrived.items()} == {key: value.dtype for key, value in batch.items()}
    assert all(torch.equal(arrived[key], batch[key]) for key in arrived.sorted_keys)
    arrived["loss_mask"][:] = False
    assert batch["loss_mask"].any()
    assert to_wire(3) == from_wire(3) == 3
