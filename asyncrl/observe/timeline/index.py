"""The bars of a run in numpy columns of about 50 bytes per event; the events' fields stay in their files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.observe.timeline.layout import Bars, Ints, TrackAssigner, TrackGroup, block_order, group_order
from asyncrl.observe.timeline.reader import EventChunk, LinePosition

_BAR = np.dtype([("track", "i4"), ("start", "i8"), ("end", "i8"), ("state", "u1"), ("event", "i4")])
_EVENT = np.dtype([("file", "i4"), ("offset", "i8"), ("length", "i4"), ("sample", "i4")])
_KEY_BITS = 63
_NO_SAMPLE = -1


class VersionMark(NamedTuple):
    """The time from which a weights version was available."""

    at: int
    version: int


class Index:
    """All bars of a run, and the events that they belong to. Times are Unix microseconds. Not safe for threads."""

    def __init__(self) -> None:
        self._assigner = TrackAssigner()
        self._groups: dict[tuple[str, str], list[int]] = {}
        self._num_tracks = 0
        self._samples: dict[str, int] = {}
        self._bars = np.empty(0, _BAR)
        """Sorted by track and start."""
        self._unsorted: list[npt.NDArray[Any]] = []
        self._events = np.empty(1024, _EVENT)
        self.num_events = 0
        self.first: int | None = None
        self.last: int | None = None
        """Start of the first event and end of the last one; None without events."""
        self.admitted: int | None = None
        """When the first sample was admitted; the parts start before that."""
        self._applied: list[VersionMark] = []
        self._published: list[VersionMark] = []

    def add(self, chunk: EventChunk) -> None:
        bars, events, number = [], [], self.num_events
        for event, place, track, event_bars in self._assigner.place(chunk):
            track_id = self._track_id(place.block, place.group, track)
            bars += [(track_id, bar.start, bar.end, bar.state, number) for bar in event_bars]
            name = event.fields.get("sample")
            sample = _NO_SAMPLE if name is None else self._samples.setdefault(str(name), len(self._samples))
            events.append((chunk.file, event.offset, event.length, sample))
            number += 1
            if event.name == "sample.admitted":
                self.admitted = min(event.start, event.start if self.admitted is None else self.admitted)
            if event.name in ("sync.apply", "trainer.publish") and isinstance(event.fields.get("version"), int):
                marks = self._applied if event.name == "sync.apply" else self._published
                marks.append(VersionMark(event.end, event.fields["version"]))
        if not events:
            return
        added = np.array(bars, _BAR)
        self._unsorted.append(added)
        if number > len(self._events):
            self._events = np.resize(self._events, max(number, 2 * len(self._events)))
        self._events[self.num_events : number] = np.array(events, _EVENT)
        self.num_events = number
        first, last = int(added["start"].min()), int(added["end"].max())
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    @property
    def versions(self) -> list[VersionMark]:
        """Return when every replica served each version or, if no such event is known, when each was published."""
        return sorted(self._applied or self._published)

    def groups(self) -> list[TrackGroup]:
        """Return all groups from top to bottom."""
        names = sorted(self._groups, key=lambda name: (block_order(name[0]), group_order(name[1])))
        return [TrackGroup(block, name, tuple(self._groups[block, name])) for block, name in names]

    def bars(self, start: int, end: int, tracks: Iterable[int]) -> Bars:
        """Return the bars of these tracks that overlap `start` to `end`."""
        self._sort()
        shown = np.zeros(self._num_tracks, bool)
        shown[list(tracks)] = True
        bars = self._bars
        bars = bars[(bars["start"] <= end) & (bars["end"] >= start) & shown[bars["track"]]]
        track, begin, until, state, event = (bars[name].astype(np.int64) for name in _BAR.names or ())
        return Bars(track, begin, until, state, event, np.ones(len(bars), np.int64))

    def positions(self, events: Ints) -> dict[int, LinePosition]:
        """Return the positions of the lines of events. Raises `IndexError`: an event does not exist."""
        if len(events) and not 0 <= events.min() <= events.max() < self.num_events:
            raise IndexError(f"there is no event {events.max()}: there are {self.num_events}")
        columns = (self._events[events][name].tolist() for name in ("file", "offset", "length"))
        return dict(zip(events.tolist(), map(LinePosition, *columns), strict=True))

    def events_of(self, sample: str) -> Ints:
        """Return the numbers of all events of a sample."""
        known = self._samples.get(sample)
        if known is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._events["sample"][: self.num_events] == known).astype(np.int64)

    def _track_id(self, block: str, group: str, track: int) -> int:
        tracks = self._groups.setdefault((block, group), [])
        while track >= len(tracks):
            tracks.append(self._num_tracks)
            self._num_tracks += 1
        return tracks[track]

    def _sort(self) -> None:
        if not self._unsorted:
            return
        bars = np.concatenate([self._bars, *self._unsorted])
        self._unsorted = []
        origin = int(bars["start"].min())
        time_bits = (int(bars["start"].max()) - origin).bit_length()
        if time_bits + self._num_tracks.bit_length() > _KEY_BITS:
            order = np.lexsort((bars["start"], bars["track"]))
        else:
            key = (bars["track"].astype(np.int64) << time_bits) + (bars["start"] - origin)
            order = np.argsort(key, kind="stable")  # fast, because it merges parts that are sorted
        self._bars = bars[order]
