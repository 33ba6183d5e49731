"""Queues that are rebuilt from what happened to them, and journals that are let go of."""

from __future__ import annotations

import os
from collections.abc import Iterable

from asyncrl.history import TransitionLog
from asyncrl.journal import Journal
from asyncrl.recovery import QueueState
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.transitions import Transition


def replay(state: QueueState, transitions: Iterable[Transition]) -> QueueState:
    """The state after them; it is changed in place, and returned. Raises `BugError` if one is illegal there."""
    for transition in transitions:
        state.apply(transition)
    return state


def rebuilt(options: QueueOptions, transitions: Iterable[Transition], journal: TransitionLog) -> LocalSampleQueue:
    """The queue that made these transitions, in another process."""
    begin = QueueState.begin(options.prompts_per_epoch, keeps_payloads=True, total_samples=options.pacing.total_samples)
    return LocalSampleQueue(options, journal=journal, state=replay(begin, transitions))


async def end(journal: Journal) -> None:
    """What the end of its process does, once what is pending is written."""
    try:
        await journal.flushed(journal._seq)
    finally:
        journal._connection.close()
        os.close(journal._lock)
