"""Mini-batches of whole samples; micro-batches within the budget, cheapest or balanced; shares of similar cost."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.engines.compute.packing import balance, cut_rows
from trainer.schedule import mini_batches

lengths_of = st.lists(st.integers(1, 40), max_size=30)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_each_epoch_has_every_whole_sample_once(sizes: list[int], size: int, epochs: int, seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes).tolist()
    batches = mini_batches(groups, size=size, epochs=epochs, seed=seed)
    per_epoch = -(-len(sizes) // size)
    assert len(batches) == per_epoch * epochs
    for first in range(0, len(batches), per_epoch):
        epoch = batches[first : first + per_epoch]
        assert sorted(row for batch in epoch for row in batch) == list(range(len(groups)))
        samples = [list(dict.fromkeys(groups[row] for row in batch)) for batch in epoch]
        assert [len(batch) for batch in samples[:-1]] == [size] * (per_epoch - 1)
        assert sorted(group for batch in samples for group in batch) == list(range(len(sizes)))  # no sample is split
        if first == 0:
            assert [row for batch in epoch for row in batch] == list(range(len(groups)))
    assert batches == mini_batches(groups, size=size, epochs=epochs, seed=seed)


def test_later_epochs_are_shuffled_by_the_seed() -> None:
    groups = list(range(20))
    first, second, third = (mini_batches(groups, size=20, epochs=3, seed=1)[epoch] for epoch in range(3))
    assert first == groups and second != groups and third not in (groups, second)
    assert mini_batches(groups, size=20, epochs=2, seed=2)[1] != second


@given(
    lengths=lengths_of,
    max_tokens=st.integers(1, 200),
    overhead_tokens=st.integers(0, 50),
    num_parts=st.none() | st.integers(1, 12),
    packed=st.booleans(),
)
def test_every_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], max_tokens: int, overhead_tokens: int, num_parts: int | None, packed: bool
) -> None:
    parts = cut_rows(
        lengths, max_tokens=max_tokens, overhead_tokens=overhead_tokens, num_parts=num_parts, packed=packed
    )
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) >= min(num_parts or 1, len(lengths))
    for part in parts:
        chosen = [lengths[row] for row in part]
        assert (sum(chosen) if packed else max(chosen) * len(chosen)) <= max_tokens or len(part) == 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), packed=st.booleans(), extra=st.integers(0, 5))
def test_the_number_of_parts_is_exactly_as_requested(lengths: list[int], packed: bool, extra: int) -> None:
    natural = len(cut_rows(lengths, max_tokens=80, overhead_tokens=16, packed=packed))
    wanted = natural + extra
    parts = cut_rows(lengths, max_tokens=80, overhead_tokens=16, num_parts=wanted, packed=packed)
    assert len(parts) == min(wanted, len(lengths))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7), overhead_tokens=st.integers(0, 40))
def test_padded_micro_batches_have_the_minimal_cost(lengths: list[int], overhead_tokens: int) -> None:
    def cost(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + overhead_tokens for group in groups)

    ordered, best = sorted(lengths), None
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            edges = [0, *cuts, len(ordered)]
            groups = [ordered[a:b] for a, b in pairwise(edges)]
            if all(len(group) * max(group) <= 60 or len(group) == 1 for group in groups):
                best = cost(groups) if best is None else min(best, cost(groups))
    found = cut_rows(lengths, max_tokens=60, overhead_tokens=overhead_tokens, packed=False)
    assert cost([[lengths[number] for number in group] for group in found]) == best


def test_packed_parts_are_few_and_balanced() -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 1.0, 60).astype(int).clip(1, 900).tolist()
    parts = cut_rows(lengths, max_tokens=1000, overhead_tokens=96, packed=True)
    sizes = [sum(lengths[row] for row in part) for part in parts]
    assert len(parts) <= -(-sum(lengths) // 1000) + 1
    assert max(sizes) - min(sizes) < 0.1 * max(sizes)


@given(lengths=lengths_of, num_parts=st.integers(1, 9), quadratic=st.sampled_from([0.0, 1 / 12288, 0.1]))
def test_each_rank_has_a_share_and_none_is_empty_if_there_are_enough_rows(
    lengths: list[int], num_parts: int, quadratic: float
) -> None:
    parts = balance(lengths, num_parts, quadratic=quadratic)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert sum(map(bool, parts)) == min(num_parts, len(lengths))
    assert all(part == sorted(part) for part in parts)
    assert parts == balance(lengths, num_parts, quadratic=quadratic)


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8), num_parts=st.integers(2, 3))
def test_the_largest_cost_of_a_share_is_near_the_minimum(lengths: list[int], num_parts: int) -> None:
    costs = [length + 0.05 * length**2 for length in lengths]

    def heaviest(assignment: tuple[int, ...]) -> float:
        return max(
            sum(cost for cost, to in zip(costs, assignment, strict=True) if to == part) for part in range(num_parts)
        )

    least = min(heaviest(assignment) for assignment in product(range(num_parts), repeat=len(lengths)))
    parts = balance(lengths, num_parts, quadratic=0.05)
    # largest differencing is within 4/3 - 1/3k of the best (Michiels et al. 2007, for k parts)
    assert max(sum(costs[row] for row in part) for part in parts) <= least * (4 / 3) + 1e-9


def test_the_cost_of_long_rows_grows_faster_than_their_tokens() -> None:
    lengths = [800, *[100] * 16]
    assert [len(part) for part in balance(lengths, 2, quadratic=0.0)] == [5, 12]  # both have 1,200 tokens
    # the long row costs 1,440 and a short one 110
    assert [len(part) for part in balance(lengths, 2, quadratic=0.001)] in ([2, 15], [3, 14])


@pytest.mark.parametrize("rows", [0, 3])
def test_some_ranks_have_no_rows_if_there_are_more_ranks_than_rows(rows: int) -> None:
    parts = balance([5] * rows, 5)
    assert [len(part) for part in parts] == [1] * rows + [0] * (5 - rows)
