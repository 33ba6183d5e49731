"""A run's transitions one after another: who keeps them, and what is asked of all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from asyncrl.transitions import Committed, Dropped, Marked, Rewound, Transition
from asyncrl.types import SampleId


class TransitionLog(Protocol):
    """Where a queue's transitions go. A failed one raises in every call."""

    @property
    def durable(self) -> int:
        """The last transition that a crash cannot take."""

    def append(self, transition: Transition) -> int:
        """Takes it in, in order; returns its number, from 1, without waiting."""

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        """Called behind each `append`: keep `dump()`, of about `size` entries, if rebuilding takes long without."""

    async def flushed(self, seq: int) -> None:
        """Returns once that transition, and all before it, are durable."""

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        """`trained_since` over the whole run."""


class MemoryLog:
    """`TransitionLog` that keeps the values: for a queue without files."""

    def __init__(self, transitions: Iterable[Transition] = ()) -> None:
        self.transitions = list(transitions)

    @property
    def durable(self) -> int:
        return len(self.transitions)

    def append(self, transition: Transition) -> int:
        self.transitions.append(transition)
        return len(self.transitions)

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        pass

    async def flushed(self, seq: int) -> None:
        pass

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        return trained_since(step, self.transitions)


def surviving_marks(transitions: Iterable[tuple[int, Transition]]) -> dict[int, int]:
    """By step, the number of the transition that marked it: of the checkpoints that training has not gone back behind.

    Args:
        transitions: with their numbers, in order; marks and rewinds will do.
    """
    marks: dict[int, int] = {}
    for number, transition in transitions:
        if isinstance(transition, Marked):
            marks[transition.step] = number
        elif isinstance(transition, Rewound):
            marks = {step: mark for step, mark in marks.items() if step <= transition.step}
    return marks


def trained_since(
    step: int, transitions: Iterable[Transition], *, from_start: bool = True
) -> tuple[SampleId, ...] | None:
    """What was TRAINED since the surviving mark of `step`, by index; None: there is no such mark, or training went back
    behind it.

    It is asked when training goes back behind the newest checkpoint, to samples whose end is not kept any more. Of the
    answer, what is live or kept by now was rewound since.

    Args:
        transitions: of the run, in order; marks, rewinds, commits and drops will do.
        from_start: they begin with the run's first, which is where step 0 ends. If not, they begin at a checkpoint: the
            one to which training goes back before anything is trained.
    """
    found = from_start and step == 0
    begun = False
    last: dict[SampleId, bool] = {}
    for transition in transitions:
        match transition:
            case Marked(step=marked) if marked == step:
                found = True
                last.clear()
            case Rewound(step=back_to) if back_to == step and not begun:
                found = True
            case Rewound(step=back_to) if back_to < step:
                found = False
            case Committed(sample_ids=trained):
                begun = True
                last |= dict.fromkeys(trained, True)
            case Dropped(sample_ids=dropped):
                last |= dict.fromkeys(dropped, False)
    return tuple(sorted(sample_id for sample_id, trained in last.items() if trained)) if found else None
