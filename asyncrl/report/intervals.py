"""Sets of intervals in time, as arrays `[n, 2]` of starts and ends, sorted and disjoint. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]

NONE: Intervals = np.empty((0, 2))


def union(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> Intervals:
    """What any of them covers. In any order; empty ones count for nothing."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return NONE
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((starts[first], reach[last]))


def total(intervals: Intervals) -> float:
    """Seconds covered."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def complement(intervals: Intervals, start: float, end: float) -> Intervals:
    """What of `start` to `end` is not covered."""
    inner = clip(intervals, start, end)
    starts = np.concatenate(([start], inner[:, 1]))
    ends = np.concatenate((inner[:, 0], [end]))
    return union(starts, ends)


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    """The part of it within `start` to `end`."""
    return union(np.clip(intervals[:, 0], start, end), np.clip(intervals[:, 1], start, end))


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """The part of it that `others` does not cover."""
    if not len(intervals) or not len(others):
        return intervals
    low, high = float(intervals[0, 0]), float(intervals[-1, 1])
    return intersection(intervals, complement(others, low, high))


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """What both cover."""
    if not len(left) or not len(right):
        return NONE
    edges = np.unique(np.concatenate((left.ravel(), right.ravel())))
    middles = (edges[1:] + edges[:-1]) / 2
    both = _covers(left, middles) & _covers(right, middles)
    return union(edges[:-1][both], edges[1:][both])


def covered(intervals: Intervals, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of each bin between consecutive `edges` that is covered."""
    if not len(intervals):
        return np.zeros(len(edges) - 1)
    before = np.concatenate(([0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])))
    place = np.searchsorted(intervals[:, 0], edges, side="right") - 1
    inside = np.where(place >= 0, np.clip(edges - intervals[place, 0], 0, intervals[place, 1] - intervals[place, 0]), 0)
    until = before[np.maximum(place, 0)] + inside
    width = np.diff(edges)
    return np.divide(np.diff(until), width, out=np.zeros(len(width)), where=width > 0)


def _covers(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1])
