"""The search for the number of threads of each rank keeps what is faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.trainer_rig import TrainerRig
from trainer.thread_search import MEASURED, WARM_UP, ThreadSearch

ROUND = WARM_UP + MEASURED


def search(speed: Callable[[int], float], *, first: int = 1, most: int = 4, wait: float = 0.0) -> list[int]:
    """Return the threads of each measured round of a search, until they stay the same for three rounds.

    `speed`: tokens per second by threads. `wait`: the share of the time in which the Trainer waits.
    """
    threads = ThreadSearch(first, most)
    tried = [first]
    while len(tried) < 3 or len(set(tried[-3:])) > 1:
        for _ in range(ROUND):
            seconds = 100 / speed(threads.threads)
            tried_next = threads.batch_ended(seconds, wait * seconds, 100)
        tried.append(tried_next)
    return tried


def test_more_threads_are_kept_while_they_are_faster() -> None:
    assert search(lambda threads: threads) == [1, 2, 3, 4, 4, 4]
    assert search(lambda threads: [0, 10, 12, 12.5, 13][threads]) == [1, 2, 3, 2, 2, 2]
    assert search(lambda threads: [0, 10, 7][threads], most=2) == [1, 2, 1, 1, 1]


def test_nothing_is_tried_while_the_trainer_waits_for_samples() -> None:
    assert search(lambda threads: threads, wait=0.2) == [1, 1, 1]


def test_nothing_is_tried_beyond_the_limit() -> None:
    assert search(lambda threads: threads, first=2, most=2) == [2, 2, 2]


def test_batches_after_a_change_are_not_measured() -> None:
    threads = ThreadSearch(1, 2)
    for number in range(2 * ROUND):
        threads.batch_ended(100.0 if number % ROUND < WARM_UP else 1.0 / threads.threads, 0.0, 100)
    assert threads.threads == 2


@given(st.lists(st.floats(0.1, 100.0), min_size=9, max_size=9), st.integers(1, 8), st.integers(1, 8))
def test_a_search_ends_with_a_number_that_is_not_slower_than_the_first(
    speeds: list[float], first: int, most: int
) -> None:
    tried = search(lambda threads: speeds[threads], first=first, most=most)
    assert speeds[tried[-1]] >= speeds[first]
    assert all(first <= threads <= max(first, most) for threads in tried)


@pytest.mark.parametrize(("faster", "expected"), [(True, [2]), (False, [2, 1])])
async def test_the_loop_gives_the_ranks_the_threads_of_the_search(faster: bool, expected: list[int]) -> None:
    steps = 3 * ROUND
    rig = TrainerRig(total_steps=steps, threads=ThreadSearch(1, 2))

    def take_time(step: int) -> None:
        threads = rig.actor.threads[-1] if rig.actor.threads else 1
        rig.clock.now_s += 1 / threads if faster else threads

    rig.actor.on_step = take_time
    await rig.run(2 * steps)
    assert rig.actor.threads == expected
    used = [record.metrics["trainer/cpu_threads"] for record in rig.records]
    assert used[:ROUND] == [1] * ROUND
    assert list(dict.fromkeys(used[ROUND:])) == expected
