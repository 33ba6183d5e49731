"""Which lane each event of a run is in. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.timeline.kinds import REQUEST, Place, place
from asyncrl.timeline.lanes import Lanes
from asyncrl.timeline.phases import Phase, phases
from asyncrl.timeline.reading import Chunk, Event

_PAUSES = 256
"""Remembered of a replica: its requests are shorter than these."""


class Placed(NamedTuple):
    event: Event
    place: Place
    lane: int
    """Within the place's group, from 0."""
    bars: list[Phase]
    """One; of a request: its phases."""


class Placing:
    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lanes] = {}
        self._pauses: dict[str, deque[tuple[int, int]]] = {}

    def place(self, chunk: Chunk) -> Iterator[Placed]:
        """The events of a chunk, by group and then start."""
        groups: dict[tuple[str, str], list[tuple[Event, Place]]] = {}
        for event in chunk.events:
            where = place(chunk.part, event.name)
            groups.setdefault((where.block, where.group), []).append((event, where))
            if event.name == "sync.pause":
                self._pauses.setdefault(chunk.part, deque(maxlen=_PAUSES)).append((event.start, event.end))
        for key, found in groups.items():
            found.sort(key=_start)
            lanes = self._lanes.setdefault(key, Lanes())
            numbers = lanes.assign([each.start for each, _ in found], [each.end for each, _ in found])
            for (event, where), lane in zip(found, numbers, strict=True):
                yield Placed(event, where, lane, self._bars(chunk.part, event, where))

    def _bars(self, part: str, event: Event, where: Place) -> list[Phase]:
        if event.name == REQUEST:
            pauses = self._pauses.get(part, ()) if event.fields.get("paused_s") else ()
            return phases(event.start, event.end, event.fields, pauses)
        return [Phase(where.state, event.start, event.end)]


def _start(found: tuple[Event, Place]) -> int:
    return found[0].start
