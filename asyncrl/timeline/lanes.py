"""Spans of time in lanes, so that no two of one lane overlap. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

KEPT = 4096
"""Spans that a lane remembers, so that what comes late may still go between them."""


class Lanes:
    """Of one kind of spans. They come in batches, and a later batch may be of earlier spans: a process sends what it
    recorded when it can, and a run that goes back to a checkpoint writes into the files of earlier steps again.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lanes: list[_Lane] = []

    def __len__(self) -> int:
        return len(self._lanes)

    def assign(self, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """The lane of each span, the lowest that is free; `starts` must not decrease.

        Spans may touch. Of spans in one batch no more lanes are used than overlap at a time.
        """
        lanes, found = self._lanes, []
        busy = [(lane.end, number) for number, lane in enumerate(lanes)]
        heapify(busy)
        free: list[int] = []
        for start, end in zip(starts, ends, strict=True):
            while busy and busy[0][0] <= start:
                heappush(free, heappop(busy)[1])
            if free:
                number = heappop(free)
                lanes[number].append(start, end, self._kept)
            elif (gap := self._gap(start, end)) is not None:
                found.append(gap)
                continue
            else:
                number = len(lanes)
                lanes.append(_Lane(start, end))
            heappush(busy, (end, number))
            found.append(number)
        return found

    def _gap(self, start: int, end: int) -> int | None:
        return next((number for number, lane in enumerate(self._lanes) if lane.insert(start, end)), None)


class _Lane:
    __slots__ = ("_ends", "_floor", "_starts", "end")

    def __init__(self, start: int, end: int) -> None:
        self._starts, self._ends = array("q", [start]), array("q", [end])
        self._floor: int | None = None
        """What is forgotten ended there; None: nothing is."""
        self.end = end

    def append(self, start: int, end: int, kept: int) -> None:
        """Behind all others."""
        self._starts.append(start)
        self._ends.append(end)
        self.end = end
        if len(self._starts) > 2 * kept:
            self._floor = self._ends[-kept - 1]
            self._starts, self._ends = self._starts[-kept:], self._ends[-kept:]

    def insert(self, start: int, end: int) -> bool:
        """Between others; False: there is no room."""
        starts, ends = self._starts, self._ends
        place = bisect_right(starts, start)
        before = ends[place - 1] if place else self._floor
        if (before is not None and before > start) or place == len(starts) or starts[place] < end:
            return False
        starts.insert(place, start)
        ends.insert(place, end)
        return True
