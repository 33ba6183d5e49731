"""From top to bottom: which lane is where. Pure. Heights are in units of a lane that is alone in its group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from asyncrl.timeline.index import Group

GAP = 0.6
"""Between blocks."""
_FEW, _SMALL, _HIGHEST = 2, 0.55, 8.0
_THICKNESS = 0.86
"""Of a bar, in its lane."""


class Row(NamedTuple):
    """A block, or a group of one."""

    name: str
    top: float
    bottom: float
    lanes: tuple[int, ...] = ()
    """Of a group."""


class Layout(NamedTuple):
    height: float
    blocks: list[Row]
    groups: list[Row]
    lanes: dict[int, tuple[float, float]]
    """Id → top and bottom of its bars; 0 is the top of all, and what is below is more."""


def lay_out(groups: Iterable[Group], hidden: Collection[str] = ()) -> Layout:
    """Groups with many lanes have thinner ones. Blocks in `hidden` have no lanes."""
    at = 0.0
    blocks: list[Row] = []
    rows: list[Row] = []
    lanes: dict[int, tuple[float, float]] = {}
    for group in groups:
        if group.block in hidden:
            continue
        if not blocks or blocks[-1].name != group.block:
            at += GAP if blocks else GAP / 2
            blocks.append(Row(group.block, at, at))
        top, height = at, _height(len(group.lanes))
        for lane in group.lanes:
            lanes[lane] = (at, at + height * _THICKNESS)
            at += height
        rows.append(Row(group.name, top, at, group.lanes))
        blocks[-1] = blocks[-1]._replace(bottom=at)
    return Layout(at + GAP / 2, blocks, rows, lanes)


def spread(row: Row, lanes: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Places for some lanes of a group, where the others are not drawn: together they have its whole height, each at
    most that of a lane which is alone."""
    height = min(1.0, (row.bottom - row.top) / max(1, len(lanes)))
    tops = (row.top + number * height for number in range(len(lanes)))
    return {lane: (top, top + height * _THICKNESS) for lane, top in zip(lanes, tops, strict=True)}


def _height(num_lanes: int) -> float:
    return 1.0 if num_lanes <= _FEW else min(_HIGHEST, num_lanes * _SMALL) / num_lanes
