"""Finds by trial how many threads each rank should have on CPU (`trainer.max_cpu_threads`). Pure.

measure ─▶ the Trainer waits for samples? ─▶ keep
   │ no
   ▼
try more ─▶ measure ─▶ faster? ─▶ keep, and try more
                          │ no
                          ▼
                       as before

While the engines wait for the Trainer, their CPUs are idle, and ranks with more threads than their share of the CPUs
compute faster. While both sides compute, such threads slow both down. Which it is depends on the model, the lengths and
the machine, so the search compares measured speeds.
"""

from __future__ import annotations

import logging

WARM_UP = 2
"""Batches that are not measured after a change of the threads: engines and queue first adapt to the new speed."""
MEASURED = 4
FASTER = 1.05
"""A smaller gain is within the noise of a machine that does other work as well."""
MOST_WAIT = 0.1
"""If the Trainer waits for samples for a larger share of the time, the engines need the CPUs more."""

logger = logging.getLogger(__name__)


class ThreadSearch:
    """Decides after each batch with how many threads the ranks continue."""

    def __init__(self, threads: int, most: int) -> None:
        """
        Args:
            threads: what a rank begins with.
            most: what a rank may have.
        """
        self.threads = threads
        self._most = most
        self._best: tuple[int, float] | None = None
        """The fastest number of threads so far, and its speed in trained tokens per second."""
        self._batches = 0
        """Batches since the last change of the threads."""
        self._seconds = self._waited_s = 0.0
        self._tokens = 0
        self._over = threads >= most

    def batch_ended(self, seconds: float, waited_s: float, tokens: int) -> int:
        """Return the number of threads for the next batch.

        Args:
            seconds: the time of the batch, with the wait for its samples.
            waited_s: the time for which the Trainer waited for them.
            tokens: the number of tokens trained.
        """
        self._batches += 1
        if self._over or self._batches <= WARM_UP:
            return self.threads
        self._seconds += seconds
        self._waited_s += waited_s
        self._tokens += tokens
        if self._batches == WARM_UP + MEASURED:
            self._decide(self._tokens / self._seconds, self._waited_s / self._seconds)
            self._batches = self._tokens = 0
            self._seconds = self._waited_s = 0.0
        return self.threads

    def _decide(self, speed: float, wait: float) -> None:
        if self._best is not None and speed < FASTER * self._best[1]:
            self._over = True
            logger.info(
                "each rank keeps %d threads: %d make %.0f tokens/s of %.0f",
                self._best[0],
                self.threads,
                speed,
                self._best[1],
            )
            self.threads = self._best[0]
            return
        if self._best is not None:
            logger.info(
                "each rank has %d threads now: %.0f instead of %.0f tokens/s", self.threads, speed, self._best[1]
            )
        self._best = self.threads, speed
        self._over = self.threads == self._most or wait > MOST_WAIT
        if not self._over:
            self.threads = min(self._most, self.threads + max(1, self.threads // 4))
