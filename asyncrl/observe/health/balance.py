"""The threads of engines and ranks with which a run on CPUs would be fastest, from how long each side waits. Pure."""

from __future__ import annotations

from typing import NamedTuple

WORTHWHILE = 1.1
"""A predicted speed-up below this is within the error of the prediction."""


class ThreadSplit(NamedTuple):
    """The threads of the processes that compute on one machine, as they are configured."""

    cpus: int
    engines: int
    engine_threads: int
    ranks: int
    rank_threads: int
    searches: bool = False
    """Whether the run tries more threads for the ranks (`trainer.max_cpu_threads`)."""


class BetterSplit(NamedTuple):
    engine_threads: int
    rank_threads: int
    speedup: float
    """Steps per second over those of now, if the speed of each side is proportional to its threads."""


def find_better_split(now: ThreadSplit, idle_trainer: float, idle_rollouter: float) -> BetterSplit | None:
    """Return the numbers of threads with the shortest steps among those that this machine has CPUs for; None if no
    split is worth a change.

    A side's work is its threads times the share of the time in which it does not wait. With other threads, a step takes
    as long as the side that then needs longer. Of equal splits, the one with the fewest threads is returned.

    Args:
        idle_trainer: share of the time in which the Trainer waits for samples.
        idle_rollouter: share of the time in which no sample is in generation.
    """
    engine_work = now.engines * now.engine_threads * (1.0 - idle_rollouter)
    rank_work = now.ranks * now.rank_threads * (1.0 - idle_trainer)
    best: tuple[float, int, int, int] | None = None
    for engine_threads in range(1, now.cpus // now.engines + 1):
        for rank_threads in range(1, (now.cpus - now.engines * engine_threads) // now.ranks + 1):
            used = now.engines * engine_threads + now.ranks * rank_threads
            step = max(engine_work / (now.engines * engine_threads), rank_work / (now.ranks * rank_threads))
            if best is None or (step, used) < best[:2]:
                best = (step, used, engine_threads, rank_threads)
    if best is None or best[0] <= 0 or 1 / best[0] < WORTHWHILE:
        return None
    return BetterSplit(best[2], best[3], 1 / best[0])


def describe_split(now: ThreadSplit, better: BetterSplit | None) -> str:
    """Return which keys to set and what they would bring, or that this machine has no faster split."""
    if better is None:
        return f"with {now.cpus} CPUs, no other numbers of threads are faster"
    keys = {
        f"rollout.cpu_threads={better.engine_threads}": better.engine_threads != now.engine_threads,
        f"trainer.cpu_threads={better.rank_threads}": better.rank_threads != now.rank_threads,
    }
    changes = " and ".join(key for key, changed in keys.items() if changed)
    return f"set {changes}, with which steps would be up to {better.speedup:.1f} times as fast"
