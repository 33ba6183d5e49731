"""Place bars: track, colour and phases of each event, tracks from top to bottom, levels of detail. Pure.

Times are whole microseconds; heights are in units of a track that is alone in its group.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.observe.timeline.reader import EventChunk, TimelineEvent

_MAX_PAUSES = 256
"""Number of a replica's newest pauses that are remembered; no request spans more pauses than these."""
_LONGEST_S = 1e10
"""More than three centuries: a longer duration is damage."""

# ---------------------------------------------------------------------------------------------- places of events


class BarState(NamedTuple):
    """The meaning of a bar's colour."""

    name: str
    colour: str
    meaning: str


STATES: tuple[BarState, ...] = (
    BarState("gate", "#a8a29e", "held back while weights are loaded"),
    BarState("queued", "#f2c94c", "in the engine, not scheduled yet"),
    BarState("prefill", "#3f78b5", "from scheduling to the first token"),
    BarState("decode", "#58a65c", "sampling tokens"),
    BarState("paused", "#d64550", "the engine stands still for a weight sync, or sleeps"),
    BarState("tool", "#f08a24", "a tool call"),
    BarState("user", "#9b6fb8", "a user, an environment or an agent program answers"),
    BarState("reward", "#ef8fa8", "scoring"),
    BarState("wait", "#d6d9dd", "waiting"),
    BarState("experience", "#5fb3b3", "log-probs, values, scores, advantages"),
    BarState("update", "#1f5c7a", "forward, backward, optimizer"),
    BarState("weights", "#96705b", "publishing, fetching and loading weights"),
    BarState("sample", "#a9c9e8", "a sample or a trajectory as a whole"),
    BarState("files", "#8a8f6a", "reading and writing files"),
    BarState("trouble", "#8b0000", "a stall, a replaced part or a loss"),
    BarState("other", "#9aa0a6", "anything else"),
)
STATE: dict[str, int] = {state.name: place for place, state in enumerate(STATES)}
PHASES = ("gate", "queued", "prefill", "decode", "paused")
"""Phases of a request, in order; its event has them as `<name>_s`."""

REQUEST = "request"
SAMPLES, TRAJECTORIES = "samples", "trajectories"
"""Samples and trajectories have separate blocks, because hundreds may be in flight."""

_PART_GROUPS: dict[str, tuple[str, str]] = {
    "step": ("steps", "other"),
    "trainer.wait_samples": ("wait", "wait"),
    "trainer.wait_gpus": ("GPUs", "wait"),
    "trainer.offload": ("GPUs", "weights"),
    "gpus.lent": ("GPUs", "decode"),
    "trainer.fetch": ("fetch", "files"),
    "trainer.experience": ("experience", "experience"),
    "trainer.critic": ("critic", "update"),
    "trainer.update": ("update", "update"),
    "trainer.commit": ("commit", "files"),
    "trainer.publish": ("publish", "weights"),
    "trainer.checkpoint": ("checkpoint", "files"),
    "sample.leased": ("samples", "sample"),
    "sample.trained": ("samples", "update"),
    "rank.call": ("calls", "experience"),
    "rank.forward": ("passes", "experience"),
    "rank.backward": ("passes", "update"),
    "rank.optimizer": ("passes", "update"),
    "sync.drain": ("weights", "wait"),
    "sync.pause": ("weights", "paused"),
    "engine.asleep": ("asleep", "paused"),
    **dict.fromkeys(("sync.gather", "sync.put", "sync.fetch", "sync.load", "sync.verify", "sync.apply"),
                    ("weights", "weights")),
    REQUEST: ("requests", "other"),
    "tool.execute": ("tools", "tool"),
    "reward.score": ("rewards", "reward"),
    "user.step": ("users", "user"),
    "agent.run": ("programs", "user"),
    "validation": ("validation", "sample"),
    "generate.call": ("calls", "decode"),
    "rollout.permit": ("permits", "wait"),
    **dict.fromkeys(("turn.parse", "turn.tokenize"), ("tokens", "other")),
    **dict.fromkeys(("sample.payload", "sample.offer", "turnlog.write"), ("files", "files")),
    **dict.fromkeys(("dump.write", "kept.write"), ("files", "files")),
    "queue.commit": ("commits", "files"),
    **dict.fromkeys(("skip.read", "skip.write"), ("skip", "files")),
    **dict.fromkeys(("part.restarted", "loop.stall", "profiler.dropped"), ("trouble", "trouble")),
}  # fmt: skip
_SAMPLE_GROUPS: dict[str, tuple[str, str]] = {
    "sample.admitted": ("admitted", "sample"),
    "sample.slot": ("waits", "wait"),
    "sample.generate": ("generated", "sample"),
    "sample.surplus": ("waits", "wait"),
    "sample.reward": ("scored", "reward"),
    "sample.ready": ("ready", "decode"),
    "sample.dropped": ("lost", "trouble"),
    "sample.cut": ("lost", "trouble"),
}
_GROUP_ORDER = list(dict.fromkeys(group for group, _ in (*_PART_GROUPS.values(), *_SAMPLE_GROUPS.values())))
_BLOCK_ORDER = ("trainer", "rank-", "rollouter", "worker-", "replica-", SAMPLES, TRAJECTORIES, "queue", "driver")


class TrackPlace(NamedTuple):
    block: str
    """Tracks that belong together: those of a part, of all samples or of all trajectories."""
    group: str
    """Tracks of one kind in a block."""
    state: int
    """An index of `STATES`."""


@cache
def place_of(part: str, event: str) -> TrackPlace:
    """Return the place of an event recorded by `part`. An event of the user's code has a group with its name."""
    if event == "trajectory":
        return TrackPlace(TRAJECTORIES, "conversations", STATE["sample"])
    if event in _SAMPLE_GROUPS:
        part, (group, state) = SAMPLES, _SAMPLE_GROUPS[event]
    else:
        own = f"{event} (own)" if event in _GROUP_ORDER else event
        group, state = _PART_GROUPS.get(event, (own, "other"))
    return TrackPlace(part, group, STATE[state])


def block_order(block: str) -> tuple[int, str, int, str]:
    """Sort blocks from training to generation to the rest, and numbers in their names as numbers."""
    kind = next((place for place, name in enumerate(_BLOCK_ORDER) if block.startswith(name)), len(_BLOCK_ORDER))
    head = block.rstrip("0123456789")
    return kind, head, int(block[len(head) :] or 0), block


def group_order(group: str) -> tuple[int, str]:
    return (_GROUP_ORDER.index(group) if group in _GROUP_ORDER else len(_GROUP_ORDER)), group


# ---------------------------------------------------------------------------------------------- tracks of a group


class Tracks:
    """The tracks of one group: no two spans of a track overlap.

    Spans come in batches, and a later batch may have earlier spans: processes send their events with a delay, and a run
    that goes back to a checkpoint writes into the files of earlier steps again.
    """

    def __init__(self) -> None:
        self._tracks: list[_Track] = []

    def __len__(self) -> int:
        return len(self._tracks)

    def assign(self, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Return the lowest free track for each span of a batch; `starts` must not decrease.

        Spans may touch. A batch uses no more tracks than it has overlapping spans.
        """
        tracks, numbers = self._tracks, []
        busy = [(track.ends[-1], number) for number, track in enumerate(tracks)]
        heapify(busy)
        free: list[int] = []
        for start, end in zip(starts, ends, strict=True):
            while busy and busy[0][0] <= start:
                heappush(free, heappop(busy)[1])
            if free:
                number = heappop(free)
                tracks[number].insert(start, end)
            else:
                number = next((number for number, track in enumerate(tracks) if track.insert(start, end)), len(tracks))
                if number < len(tracks):  # a gap
                    numbers.append(number)
                    continue
                tracks.append(_Track(array("q", [start]), array("q", [end])))
            heappush(busy, (end, number))
            numbers.append(number)
        return numbers


class _Track(NamedTuple):
    starts: array[int]
    ends: array[int]

    def insert(self, start: int, end: int) -> bool:
        """Add a span, and return whether there was room for it."""
        starts, ends = self
        place = bisect_right(starts, start)
        if (place and ends[place - 1] > start) or (place < len(starts) and starts[place] < end):
            return False
        starts.insert(place, start)
        ends.insert(place, end)
        return True


# ---------------------------------------------------------------------------------------------- bars of an event


class Bar(NamedTuple):
    state: int
    start: int
    end: int


def request_phases(
    start: int, end: int, fields: Mapping[str, Any], pauses: Iterable[tuple[int, int]] = ()
) -> list[Bar]:
    """Return the phases of a request, which fill it without gaps.

    The event of a request contains how long it was paused, and the events of its replica contain when. A phase that is
    interrupted continues afterwards; the last phase takes the remaining time.

    Args:
        fields: the fields of its event: `gate_s`, `queued_s`, `prefill_s`, `decode_s`, `paused_s`.
        pauses: when its replica was paused; if none overlaps the request, its pause comes last.
    """
    us = {name: max(0, microseconds(fields.get(f"{name}_s")) or 0) for name in PHASES}
    bars: list[Bar] = []
    at = min(end, start + us["gate"])
    if at > start:
        bars.append(Bar(STATE["gate"], start, at))
    phases = [(STATE[name], us[name]) for name in ("queued", "prefill", "decode") if us[name]]
    phases = phases or [(bars[-1].state if bars else STATE["other"], 0)]
    stops: list[tuple[int, int]] = []
    if us["paused"] and at < end:
        stops = sorted((max(at, first), min(end, last)) for first, last in pauses if first < end and last > at)
        stops = stops or [(max(at, end - us["paused"]), end)]
    for first, last in [*stops, (end, end)]:
        while at < first:
            state, remaining = phases[0]
            until = first if len(phases) == 1 else min(first, at + remaining)
            bars.append(Bar(state, at, until))
            phases[0] = (state, remaining - (until - at))
            if len(phases) > 1 and not phases[0][1]:
                phases.pop(0)
            at = until
        if last > at:
            bars.append(Bar(STATE["paused"], at, last))
            at = last
    return bars or [Bar(phases[-1][0], start, end)]


def microseconds(seconds: object) -> int | None:
    """Convert a duration; None if it is not one."""
    if not isinstance(seconds, (int, float)) or not abs(seconds) < _LONGEST_S:
        return None
    return round(seconds * 1_000_000)


class PlacedEvent(NamedTuple):
    event: TimelineEvent
    place: TrackPlace
    track: int
    """The number of the track in its group, from 0."""
    bars: list[Bar]


class TrackAssigner:
    """Places the events of a run, chunk by chunk."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, str], Tracks] = {}
        self._pauses: dict[str, deque[tuple[int, int]]] = {}

    def place(self, chunk: EventChunk) -> Iterator[PlacedEvent]:
        """Yield the events of a chunk with their places, sorted by group and start."""
        groups: dict[tuple[str, str], list[tuple[TimelineEvent, TrackPlace]]] = {}
        for event in chunk.events:
            place = place_of(chunk.part, event.name)
            groups.setdefault((place.block, place.group), []).append((event, place))
            if event.name == "sync.pause":
                self._pauses.setdefault(chunk.part, deque(maxlen=_MAX_PAUSES)).append((event.start, event.end))
        for key, events in groups.items():
            events.sort(key=lambda each: each[0].start)
            tracks = self._tracks.setdefault(key, Tracks())
            numbers = tracks.assign([event.start for event, _ in events], [event.end for event, _ in events])
            for (event, place), track in zip(events, numbers, strict=True):
                bars = [Bar(place.state, event.start, event.end)]
                if event.name == REQUEST:
                    pauses = self._pauses.get(chunk.part, ()) if event.fields.get("paused_s") else ()
                    bars = request_phases(event.start, event.end, event.fields, pauses)
                yield PlacedEvent(event, place, track, bars)


# ---------------------------------------------------------------------------------------------- from top to bottom

Ints = npt.NDArray[np.int64]
MERGED = -1
"""The event number of a bar that merges several events."""
_GAP = 0.6
"""The space between two blocks."""
_MAX_FULL_TRACKS, _SMALL_TRACK, _MAX_GROUP = 2, 0.55, 8.0
_BAR_HEIGHT = 0.86
"""The height of a bar, as a share of the height of its track."""
_STATE_BITS = 8


class TrackGroup(NamedTuple):
    """Tracks of one kind."""

    block: str
    name: str
    tracks: tuple[int, ...]
    """Their ids, from top to bottom."""


class RowPlace(NamedTuple):
    """The place of a block or a group."""

    name: str
    top: float
    bottom: float
    tracks: tuple[int, ...] = ()
    """The tracks of a group; empty for a block."""


class TrackLayout(NamedTuple):
    height: float
    blocks: list[RowPlace]
    groups: list[RowPlace]
    tracks: dict[int, tuple[float, float]]
    """Id → top and bottom of its bars; 0 is the top of the page, and values grow downwards."""


def lay_out(groups: Iterable[TrackGroup], hidden: Collection[str] = (), *, room: float = math.inf) -> TrackLayout:
    """Lay out groups without the `hidden` blocks; the tracks of large groups are thinner.

    Args:
        room: the height in which every group has a label of height 1: large groups give way to it.
    """
    shown = [group for group in groups if group.block not in hidden]
    at = 0.0
    layout = TrackLayout(0.0, [], [], {})
    heights = [_height(len(group.tracks)) for group in shown]
    most = _largest_height(heights, room - _GAP * len({group.block for group in shown}))
    for group, natural in zip(shown, heights, strict=True):
        if not layout.blocks or layout.blocks[-1].name != group.block:
            at += _GAP if layout.blocks else _GAP / 2
            layout.blocks.append(RowPlace(group.block, at, at))
        top, count = at, len(group.tracks)
        height = min(natural, most) / max(1, count)
        for track in group.tracks:
            layout.tracks[track] = (at, at + height * _BAR_HEIGHT)
            at += height
        layout.groups.append(RowPlace(group.name, top, at, group.tracks))
        layout.blocks[-1] = layout.blocks[-1]._replace(bottom=at)
    return layout._replace(height=at + _GAP / 2)


def _height(num_tracks: int) -> float:
    return num_tracks if num_tracks <= _MAX_FULL_TRACKS else min(_MAX_GROUP, num_tracks * _SMALL_TRACK)


def _largest_height(heights: Sequence[float], room: float) -> float:
    """Return the height of the largest groups with which all fit into `room`; at least 1."""
    for number, height in enumerate(sorted(heights)):
        share = room / (len(heights) - number)
        if height > share:
            return max(1.0, share)
        room -= height
    return math.inf


def spread(row: RowPlace, tracks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return places for some tracks of a group that share its whole height."""
    height = min(1.0, (row.bottom - row.top) / max(1, len(tracks)))
    tops = (row.top + number * height for number in range(len(tracks)))
    return {track: (top, top + height * _BAR_HEIGHT) for track, top in zip(tracks, tops, strict=True)}


class Bars(NamedTuple):
    """Columns of bars, by track and then start; bars of a track do not overlap."""

    track: Ints
    start: Ints
    end: Ints
    state: Ints
    event: Ints
    """`MERGED` for several events; the phases of a request have the same event and are neighbours."""
    num_bars: Ints
    """Number of bars that were merged into this one."""

    def __len__(self) -> int:
        return len(self.track)

    def take(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Bars:
        return Bars(*(column[places] for column in self))


def merge(bars: Bars, resolution: int) -> Bars:
    """Merge bars shorter than `resolution` that start in the same cell of that width.

    A merged bar reaches from the start of the first bar to the end of the last, in the state of the longest. Cells
    begin at multiples of `resolution`, so that panning does not change the bars.
    """
    if resolution <= 1 or not len(bars):
        return bars
    length = bars.end - bars.start
    cell = bars.start // resolution
    is_long = length >= resolution
    # A long bar reaches at least the end of its cell, so it never lies between two short bars of one cell.
    begins = np.ones(len(bars), bool)
    begins[1:] = is_long[1:] | is_long[:-1] | (cell[1:] != cell[:-1]) | (bars.track[1:] != bars.track[:-1])
    first = np.flatnonzero(begins)
    longest = np.maximum.reduceat(length << _STATE_BITS | bars.state, first)
    is_single = np.minimum.reduceat(bars.event, first) == np.maximum.reduceat(bars.event, first)
    return Bars(
        bars.track[first],
        bars.start[first],
        np.maximum.reduceat(bars.end, first),
        longest & ((1 << _STATE_BITS) - 1),
        np.where(is_single, bars.event[first], MERGED),
        np.add.reduceat(bars.num_bars, first),
    )


def merge_to_limit(bars: Bars, resolution: int, limit: int) -> tuple[Bars, int]:
    """Merge, and double the resolution until at most `limit` bars remain, or one for each track.

    Returns:
        The bars and the final resolution.
    """
    merged = merge(bars, resolution)
    while len(merged) > max(limit, len(np.unique(merged.track))):
        resolution *= 2
        merged = merge(bars, resolution)
    return merged, resolution


class Occupancy(NamedTuple):
    """The number of bars in each state, as columns sorted by cell and then state."""

    start: Ints
    """The start of the cell."""
    state: Ints
    mean: npt.NDArray[np.float64]
    """Bars in this state, averaged over the cell."""


def occupancy(bars: Bars, start: int, end: int, resolution: int) -> Occupancy:
    """Return the occupancy from `start` to `end`, in cells that begin at multiples of `resolution`, without empty
    cells."""
    # Clip the bars first: if they reach far beyond a narrow window, they would have very many of its narrow cells.
    start, end = start // resolution * resolution, -(-end // resolution) * resolution
    bars = bars.take((bars.end > start) & (bars.start < end))
    begins, ends = np.maximum(bars.start, start), np.minimum(bars.end, end)
    first = begins // resolution
    num_cells = np.maximum(first, (ends - 1) // resolution) - first + 1
    bar = np.repeat(np.arange(len(bars)), num_cells)
    cell = np.arange(len(bar)) - np.repeat(np.cumsum(num_cells) - num_cells, num_cells) + first[bar]
    inside = np.minimum(ends[bar], (cell + 1) * resolution) - np.maximum(begins[bar], cell * resolution)
    keys, place = np.unique((cell << _STATE_BITS) | bars.state[bar], return_inverse=True)
    total = np.bincount(place, weights=inside, minlength=len(keys))
    keys, total = keys[total > 0], total[total > 0]
    return Occupancy((keys >> _STATE_BITS) * resolution, keys & ((1 << _STATE_BITS) - 1), total / resolution)
