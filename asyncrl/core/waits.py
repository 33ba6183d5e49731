"""Records what each part waits on and since when, which explains a stalled run (`asyncrl.observe.status.why`).

queue      permit      free permits: the staleness gate, or the run's total
           samples     READY samples for a lease
Rollouter  permit      an admission          slot        a place in generation
           engine      turns from replicas   isolation   inside `engine`: finding out which sample crashes engines
           tool, user, agent     inside `engine`: a tool, a simulated user, an external agent's program
           worker      a worker process (`rollout.num_workers`), while none is up
           surplus     storage of surplus samples that were aborted    dump    files of trajectories
           reward      scores                weights     the next publication; delays nothing
           records     files of recorded stages (`skip`), also in the Trainer
           apply       replicas to load a version        validation  responses to the validation set, and their scores
Trainer    model       ranks to start and load           samples     a lease and its payloads
           experience, critic, train                     calls to the ranks
           publish     a version to become available     checkpoint  reading or writing a checkpoint
           trace       ranks to write the profiler's trace of a step
           served      the last version to be applied and validated, because the ranks hold its weights
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Wait(NamedTuple):
    edge: str
    """What a task waits on; see the table of this module."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Tasks of this part that wait on it now."""
    since_s: float
    """How long the longest of them has waited."""
    bounded: bool = False
    """At least one of them waits on something whose own deadline has not passed."""


class WaitBoard:
    """The waits of one part. Not thread-safe: one board belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, tuple[str, float, float]] = {}
        self._next = 0
        self._total: dict[str, float] = {}

    @contextmanager
    def waiting(self, edge: str, *, limit_s: float = 0.0) -> Iterator[None]:
        """Count the block as waiting on `edge`. `limit_s`: time within which a deadline inside the block ends the wait;
        0: there is no such deadline."""
        key, started = self._next, self._clock()
        self._next += 1
        self._open[key] = (edge, started, started + limit_s)
        try:
            yield
        finally:
            del self._open[key]
            self._total[edge] = self._total.get(edge, 0.0) + self._clock() - started

    def snapshot(self) -> list[Wait]:
        """Return the open waits, the longest first."""
        now = self._clock()
        edges: dict[str, list[tuple[float, bool]]] = {}
        for edge, started, ends in self._open.values():
            edges.setdefault(edge, []).append((now - started, now < ends))
        waits = [
            Wait(edge, len(found), max(age for age, _ in found), any(bounded for _, bounded in found))
            for edge, found in edges.items()
        ]
        return sorted(waits, key=lambda wait: -wait.since_s)

    def total_s(self, edge: str) -> float:
        """Return the total duration in seconds of the waits on `edge` that have ended."""
        return self._total.get(edge, 0.0)
