"""The sample queue of a simulated run: the operations of `asyncrl.queue` on a state without a journal. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.queue.core import Operation, QueueCore, QueueOptions
from asyncrl.queue.state import QueueState
from asyncrl.simulate.clock import Signal, SimulatedClock

_PROMPTS_PER_EPOCH = 2**40


class SimulatedQueue:
    """Performs operations, and lets waiting calls see a change once everything that happens at that time has
    happened."""

    def __init__(self, clock: SimulatedClock, config: Config, *, total_samples: int) -> None:
        self._clock = clock
        options = QueueOptions.from_config(config, _PROMPTS_PER_EPOCH, total_samples=total_samples)
        state = QueueState.begin(_PROMPTS_PER_EPOCH, keeps_payloads=False, total_samples=total_samples)
        self._core = QueueCore(options, state, None)
        self.changed = Signal(clock)
        self.on_change: Callable[[], None] = lambda: None
        """Called after a change, when `changed` has fired."""
        self._settling = False

    @property
    def state(self) -> QueueState:
        return self._core.state

    @property
    def has_surplus(self) -> bool:
        return self._core.has_surplus

    def perform(self, operation: Operation) -> Any:
        """Return the answer of an operation, or `WAIT`. An operation that waits may have changed the state, too: stale
        samples are dropped before a lease."""
        before = self._core.num_recorded
        answer = operation.perform(self._core, retried=False)
        if self._core.num_recorded > before and not self._settling:
            self._settling = True
            self._clock.after(0.0, self.settle)
        return answer

    def settle(self) -> None:
        """Let both sides continue."""
        self._settling = False
        self.changed.fire()
        self.on_change()
