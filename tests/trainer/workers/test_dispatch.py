"""The rows of each rank, and the order of the collected results."""

from __future__ import annotations

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
    share_rows,
    to_wire,
)
from trainer.workers.worker import TrainingWorker

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=24)


def layouts(world_size: int, per_group: int = 1) -> list[Layout]:
    """Return ranks of which `per_group` neighbours share sequences; the first of each group reports."""
    size = world_size // per_group
    return [Layout(rank, world_size, rank // per_group, size, rank % per_group == 0) for rank in range(world_size)]


def batch_of(num_rows: int) -> TensorDict:
    return make_batch([1 + row % 5 for row in range(num_rows)], [1 + row % 7 for row in range(num_rows)], vocab=9)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 9))
def test_every_row_goes_to_one_rank_and_every_rank_has_a_row(lengths: list[int], num_ranks: int) -> None:
    shares = share_rows(lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(row for share in shares for row in share.rows) == list(range(len(lengths)))
    for share in shares:
        assert share.rows == sorted(share.rows)
        assert len(share.rows) + len(share.padding) >= 1
        assert bool(share.padding) == (not share.rows)
        assert all(lengths[row] == min(lengths) for row in share.padding)


def test_long_rows_are_distributed_over_ranks() -> None:
    shares = share_rows([1000, 10, 10, 1000, 10, 10], 2)
    assert {0, 3}.isdisjoint(set(shares[0].rows) & set(shares[1].rows))
    assert sum(row in (0, 3) for row in shares[0].rows) == 1


@given(num_rows=st.integers(1, 12), groups=st.integers(1, 4), per_group=st.integers(1, 3))
def test_results_are_collected_in_the_order_of_rows(num_rows: int, groups: int, per_group: int) -> None:
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
def test_padding_rows_are_not_trained(num_rows: int, num_ranks: int) -> None:
    batch = batch_of(num_rows)
    before = batch["loss_mask"].clone()
    calls, _ = scatter(Dispatch("rows", "first"), layouts(num_ranks), RankCall((batch,), {}))
    assert sum(int(call.args[0]["loss_mask"].sum()) for call in calls.values()) == int(before.sum())
    assert torch.equal(batch["loss_mask"], before), "padding is masked in a copy of the batch"


def test_calls_go_to_all_ranks_or_to_rank_zero() -> None:
    call, ranks = RankCall(("x",), {}), layouts(3)
    assert scatter(Dispatch("all", "first"), ranks, call) == ({0: call, 1: call, 2: call}, [])
    assert scatter(Dispatch("rank_zero", "first"), ranks, call) == ({0: call}, [])
    assert collect(Dispatch("all", "first"), ranks, [], {0: "zero", 1: "one", 2: "two"}) == "zero"


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="the batch has no rows"):
        scatter(Dispatch("rows", "first"), layouts(2), RankCall((batch_of(3)[:0],), {}))


def test_methods_declare_their_dispatch() -> None:
    assert dispatch_of(TrainingWorker, "infer_batch") == Dispatch("rows", "rows")
    assert dispatch_of(TrainingWorker, "reset") == Dispatch("all", "first")
    with pytest.raises(BugError, match=r"train_batches cannot be called on a group; did you mean train_batch\?"):
        dispatch_of(TrainingWorker, "train_batches")
    with pytest.raises(BugError, match="close cannot be called on a group"):
        dispatch_of(TrainingWorker, "close")


def test_batches_are_sent_as_arrays_and_are_writable_on_arrival() -> None:
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
