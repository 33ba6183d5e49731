"""Which checkpoints are of the surviving line, where training has gone back. Pure.

    lineage 0   ──1──2──3──4──5          went back to step 3
    lineage 1            └──4──5──6      went back to step 5
    lineage 2                  └──6──7   the line: 1 to 3 of lineage 0, 4 and 5 of lineage 1, 6 and 7 of lineage 2

A step alone does not name a checkpoint: 4 of lineage 0 is another future, in which other samples were trained. Its
samples have been handed out again since, so going on from it would train some of them twice and others never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Rewind(NamedTuple):
    """Training went back."""

    lineage: int
    """The one that began with that."""
    step: int
    """Of the checkpoint that it went back to; 0: to the initial model."""


@dataclass(frozen=True, slots=True)
class Line:
    """The surviving line of training, as far as it is known: where it went back."""

    rewinds: tuple[Rewind, ...] = ()
    """By lineage, and so by step: a later one that went further back has taken the place of those before."""

    @property
    def lineage(self) -> int:
        """The newest."""
        return self.rewinds[-1].lineage if self.rewinds else 0

    def rewound(self, step: int, lineage: int | None = None) -> Line:
        """The line once training has gone back to `step`, in that lineage; None: the next one."""
        kept = tuple(rewind for rewind in self.rewinds if rewind.step < step)
        return Line((*kept, Rewind(self.lineage + 1 if lineage is None else lineage, step)))

    def holds(self, step: int, lineage: int) -> bool:
        """A checkpoint of `step` that was written in `lineage` is on it."""
        return self.left(step, lineage) is None

    def left(self, step: int, lineage: int) -> Rewind | None:
        """Where training went back behind a checkpoint of `step` that was written in `lineage`; None: nowhere."""
        return next((rewind for rewind in self.rewinds if rewind.lineage > lineage and rewind.step < step), None)

    def dump(self) -> list[list[int]]:
        """As JSON values."""
        return [list(rewind) for rewind in self.rewinds]

    @classmethod
    def load(cls, raw: Sequence[Sequence[int]]) -> Line:
        """What `dump` gave. Raises `TypeError` or `ValueError` if it is no such thing."""
        return cls(tuple(Rewind(lineage, step) for lineage, step in raw))


NO_REWINDS = Line()
