"""Levels of detail: bars that are too short to be seen become one. Pure; times are whole microseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
SEVERAL = -1
"""Instead of an event: a bar that stands for more than one."""
_STATE_BITS = 8


class Bars(NamedTuple):
    """Columns, by lane and then start; bars of a lane do not overlap."""

    lane: Ints
    start: Ints
    end: Ints
    state: Ints
    event: Ints
    """Of one event there may be several bars, and they are neighbours; `SEVERAL`: merged."""
    number: Ints
    """How many bars one stands for."""

    def __len__(self) -> int:
        return len(self.lane)

    def take(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Bars:
        return Bars(*(column[places] for column in self))


def merge(bars: Bars, resolution: int) -> Bars:
    """Bars shorter than `resolution` whose starts are in the same cell of that width become one, from the start of the
    first to the end of the last, in the state of the longest. Longer ones stay as they are.

    Cells begin at multiples of `resolution`, so that what is merged does not change when the window is moved.
    """
    if resolution <= 1 or not len(bars):
        return bars
    length = bars.end - bars.start
    cell = bars.start // resolution
    long = length >= resolution
    # A long bar reaches at least to the end of its cell, so that no two short ones of one cell have it between them.
    begins = np.ones(len(bars), bool)
    begins[1:] = long[1:] | long[:-1] | (cell[1:] != cell[:-1]) | (bars.lane[1:] != bars.lane[:-1])
    first = np.flatnonzero(begins)
    longest = np.maximum.reduceat(length << _STATE_BITS | bars.state, first)
    event = bars.event[first]
    same = np.minimum.reduceat(bars.event, first) == np.maximum.reduceat(bars.event, first)
    return Bars(
        bars.lane[first],
        bars.start[first],
        np.maximum.reduceat(bars.end, first),
        longest & ((1 << _STATE_BITS) - 1),
        np.where(same, event, SEVERAL),
        np.add.reduceat(bars.number, first),
    )


def at_most(bars: Bars, resolution: int, most: int) -> tuple[Bars, int]:
    """`merge`d, with the smallest resolution of this one, its double, … that leaves at most `most` bars, as far as any
    does: a lane keeps one. Also that resolution."""
    merged = merge(bars, resolution)
    while len(merged) > max(most, len(np.unique(merged.lane))):
        resolution *= 2
        merged = merge(bars, resolution)
    return merged, resolution


class Share(NamedTuple):
    """How much of what was going on, by cell and then state; columns."""

    start: Ints
    """Of the cell."""
    state: Ints
    at_a_time: npt.NDArray[np.float64]
    """On average in the cell: bars in this state."""


def shares(bars: Bars, start: int, end: int, resolution: int) -> Share:
    """Of all bars together from `start` to `end`, in cells that begin at multiples of `resolution`; cells of nothing
    are left out."""
    # Bars reach far beyond a narrow window, and have as many cells there as it is narrow.
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
    return Share((keys >> _STATE_BITS) * resolution, keys & ((1 << _STATE_BITS) - 1), total / resolution)
