"""The faster split of threads between engines and ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.health.balance import WORTHWHILE, BetterSplit, ThreadSplit, describe_split, find_better_split

shares = st.floats(0, 0.95)


def test_threads_move_from_the_side_that_waits() -> None:
    even = ThreadSplit(cpus=16, engines=1, engine_threads=8, ranks=1, rank_threads=8)
    # 8 and 4 threads' work: 10 and 5 threads need 0.8 of the time, like 11 and 5.
    assert find_better_split(even, idle_trainer=0.5, idle_rollouter=0.0) == BetterSplit(10, 5, 1.25)
    assert find_better_split(even, idle_trainer=0.05, idle_rollouter=0.05) is None


def test_unused_cpus_are_given_to_the_slower_side_alone() -> None:
    now = ThreadSplit(cpus=4, engines=1, engine_threads=1, ranks=1, rank_threads=1)
    assert find_better_split(now, idle_trainer=0.0, idle_rollouter=0.5) == BetterSplit(1, 2, 2.0)


def test_a_machine_without_a_faster_split_says_so() -> None:
    now = ThreadSplit(cpus=2, engines=1, engine_threads=1, ranks=1, rank_threads=1)
    assert find_better_split(now, idle_trainer=0.6, idle_rollouter=0.0) is None
    assert describe_split(now, None) == "with 2 CPUs, no other numbers of threads are faster"
    assert find_better_split(now._replace(ranks=2), idle_trainer=0.6, idle_rollouter=0.0) is None


def test_only_keys_that_change_are_named() -> None:
    now = ThreadSplit(cpus=8, engines=2, engine_threads=1, ranks=1, rank_threads=1)
    text = describe_split(now, BetterSplit(3, 1, 1.84))
    assert text == "set rollout.cpu_threads=3, with which steps would be up to 1.8 times as fast"


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 16), st.integers(1, 4), st.integers(1, 16), shares, shares)
def test_a_better_split_fits_the_machine_and_no_side_needs_longer_than_now(
    cpus: int, engines: int, engine_threads: int, ranks: int, rank_threads: int, trainer: float, rollouter: float
) -> None:
    now = ThreadSplit(cpus, engines, engine_threads, ranks, rank_threads)
    better = find_better_split(now, trainer, rollouter)
    if better is None:
        return
    assert engines * better.engine_threads + ranks * better.rank_threads <= cpus
    assert better.speedup >= WORTHWHILE
    for before, after, idle in (
        (engine_threads, better.engine_threads, rollouter),
        (rank_threads, better.rank_threads, trainer),
    ):
        assert before * (1 - idle) / after <= 1 / better.speedup + 1e-9
