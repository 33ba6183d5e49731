"""All bars of a run in memory, in numpy columns of about 50 bytes an event; what an event says stays in its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.timeline.detail import Bars, Ints
from asyncrl.timeline.kinds import block_order, group_order
from asyncrl.timeline.placing import Placing
from asyncrl.timeline.reading import Chunk

_BAR = np.dtype([("lane", "i4"), ("start", "i8"), ("end", "i8"), ("state", "u1"), ("event", "i4")])
_EVENT = np.dtype([("file", "i4"), ("offset", "i8"), ("length", "i4"), ("sample", "i4")])
_KEY_BITS = 63
_NO_SAMPLE = -1


class Group(NamedTuple):
    """Lanes of one kind."""

    block: str
    name: str
    lanes: tuple[int, ...]
    """Their ids, from top to bottom."""


class Mark(NamedTuple):
    """A version was there."""

    at: int
    version: int


class Place(NamedTuple):
    """Of a line."""

    file: int
    offset: int
    length: int


class Index:
    """Grows by `add`. Times are Unix microseconds. Not safe for threads."""

    def __init__(self) -> None:
        self._placing = Placing()
        self._groups: dict[tuple[str, str], list[int]] = {}
        self._num_lanes = 0
        self._samples: dict[str, int] = {}
        self._bars = np.empty(0, _BAR)
        """By lane and start."""
        self._late: list[npt.NDArray[Any]] = []
        """Not among them yet."""
        self._events = np.empty(1024, _EVENT)
        self.num_events = 0
        self.first: int | None = None
        self.last: int | None = None
        """When the first event began and the last one ended; None: there are none."""
        self.admitted: int | None = None
        """When the first sample was; before, parts only start."""
        self._applied: list[Mark] = []
        self._published: list[Mark] = []

    def add(self, chunk: Chunk) -> None:
        bars, events, number = [], [], self.num_events
        for event, place, lane, phases in self._placing.place(chunk):
            lane_id = self._lane(place.block, place.group, lane)
            bars += [(lane_id, phase.start, phase.end, phase.state, number) for phase in phases]
            sample = event.fields.get("sample")
            known = _NO_SAMPLE if sample is None else self._samples.setdefault(str(sample), len(self._samples))
            events.append((chunk.file, event.offset, event.length, known))
            number += 1
            if event.name == "sample.admitted":
                self.admitted = event.start if self.admitted is None else min(self.admitted, event.start)
            if event.name in ("sync.apply", "trainer.publish") and isinstance(event.fields.get("version"), int):
                marks = self._applied if event.name == "sync.apply" else self._published
                marks.append(Mark(event.end, event.fields["version"]))
        if not events:
            return
        added, more = np.array(bars, _BAR), np.array(events, _EVENT)
        self._late.append(added)
        if number > len(self._events):
            self._events = np.resize(self._events, max(number, 2 * len(self._events)))
        self._events[self.num_events : number] = more
        self.num_events = number
        first, last = int(added["start"].min()), int(added["end"].max())
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    @property
    def versions(self) -> list[Mark]:
        """When every replica served a version, or where that is not known, when it was published; by time."""
        return sorted(self._applied or self._published)

    def groups(self) -> list[Group]:
        """From top to bottom."""
        names = sorted(self._groups, key=lambda name: (block_order(name[0]), group_order(name[1])))
        return [Group(block, name, tuple(self._groups[block, name])) for block, name in names]

    def bars(self, start: int, end: int, lanes: Iterable[int]) -> Bars:
        """What is at least partly between `start` and `end`, in these lanes."""
        self._sort()
        shown = np.zeros(self._num_lanes, bool)
        shown[list(lanes)] = True
        found = self._bars
        places = np.flatnonzero((found["start"] <= end) & (found["end"] >= start) & shown[found["lane"]])
        lane, begun, ended, state, event = (found[name][places].astype(np.int64) for name in _BAR.names or ())
        return Bars(lane, begun, ended, state, event, np.ones(len(places), np.int64))

    def places_of(self, events: Ints) -> dict[int, Place]:
        """Raises `IndexError`: there is no such event."""
        if len(events) and not 0 <= events.min() <= events.max() < self.num_events:
            raise IndexError(f"there is no event {events.max()}: there are {self.num_events}")
        found = self._events[events]
        columns = (found[name].tolist() for name in ("file", "offset", "length"))
        return dict(zip(events.tolist(), map(Place, *columns), strict=True))

    def events_of(self, sample: str) -> Ints:
        """The numbers of all events of a sample."""
        known = self._samples.get(sample)
        if known is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._events["sample"][: self.num_events] == known).astype(np.int64)

    def _lane(self, block: str, group: str, lane: int) -> int:
        lanes = self._groups.setdefault((block, group), [])
        while lane >= len(lanes):
            lanes.append(self._num_lanes)
            self._num_lanes += 1
        return lanes[lane]

    def _sort(self) -> None:
        if self._late:
            bars = np.concatenate([self._bars, *self._late])
            self._late = []
            origin = int(bars["start"].min())
            time_bits = (int(bars["start"].max()) - origin).bit_length()
            if time_bits + self._num_lanes.bit_length() > _KEY_BITS:
                order = np.lexsort((bars["start"], bars["lane"]))
            else:
                key = (bars["lane"].astype(np.int64) << time_bits) + (bars["start"] - origin)
                order = np.argsort(key, kind="stable")  # two runs that are sorted already, so it is quick
            self._bars = bars[order]


def sample_of(fields: Mapping[str, Any]) -> str | None:
    """The sample that an event is of."""
    sample = fields.get("sample")
    return None if sample is None else str(sample)
