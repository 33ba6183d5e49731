"""When the Trainer lends its GPUs to generation while it waits for samples (`trainer.lend_after_s`). Pure.

It gets them back once it has its samples, so that one wait lends at most once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.core.ports import QueueStatus


class SampleWait(NamedTuple):
    """The Trainer's wait for the samples of its next lease, at one moment."""

    waited_s: float
    num_arrived: int
    """Samples that have become READY during the wait."""
    num_missing: int
    has_permits: bool
    """Whether further samples may be generated. If not, engines that wake up would get hardly any request."""

    @property
    def rest_s(self) -> float:
        """How long the wait goes on if samples arrive as until now; infinite if none has arrived."""
        if self.num_missing <= 0:
            return 0.0
        return self.waited_s * self.num_missing / self.num_arrived if self.num_arrived > 0 else math.inf

    @classmethod
    def of(cls, waited_s: float, first: QueueStatus, now: QueueStatus, num_wanted: int) -> SampleWait:
        """Return the wait for `num_wanted` samples. `first` is the queue's status at its beginning."""
        counts, ready = now.counts, now.counts.ready
        permits = now.paced_to - (counts.fed - counts.num_dropped)
        return cls(waited_s, ready - first.counts.ready, num_wanted - ready, permits > 0 and not now.closed)


@dataclass(frozen=True, slots=True)
class LendingPolicy:
    """The rule by which the Trainer lends its GPUs."""

    after_s: float

    def lends(self, wait: SampleWait, *, switch_s: float) -> bool:
        """Return whether to lend now.

        Args:
            switch_s: how long the last lending has kept the GPUs from both sides: the time to offload the ranks and to
                let the engines sleep. The rest of the wait has to be longer.
        """
        return wait.waited_s >= self.after_s and wait.has_permits and wait.rest_s > switch_s
