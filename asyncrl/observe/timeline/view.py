"""The view of a window of time, as plain JSON values for the page; times are milliseconds since the run began."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.observe.formats import elapsed, seconds
from asyncrl.observe.timeline.index import Index, VersionMark
from asyncrl.observe.timeline.layout import (
    MERGED,
    PHASES,
    REQUEST,
    STATES,
    Bars,
    Ints,
    Occupancy,
    RowPlace,
    TrackLayout,
    lay_out,
    merge_to_limit,
    microseconds,
    occupancy,
    spread,
)

MAX_BARS = 5000
MAX_CELLS = 2400
"""Largest number of cells of all crowded groups; each cell has up to one bar for each state."""
COLUMNS = ("left", "right", "top", "bottom", "state", "colour", "edge", "event", "title", "description", "at")
"""Columns of the bars."""
_MIN_TRACK_PIXELS = 2.0
"""A group with thinner tracks is crowded: its tracks are not drawn one by one."""
_MAX_VERSION_LINES = 400
_LINE_PIXELS = 12
"""Least average distance of version lines."""
_LABEL_PIXELS = 34
"""Width of a version's label."""
_NUMBERS_PIXELS, _ROW_PIXELS = 18, 12.5
"""Height of the version numbers above, and least height of a group that has its label."""
_EDGE_PIXELS = 4
"""Shorter bars have no edge in another colour, which would cover them completely."""
_EDGE = "#ffffff"
_MAX_VALUE = 80
_SHOWN_OTHERWISE = ("timestamp", "event", "duration_s")


class Window(NamedTuple):
    """The requested part of the timeline: milliseconds since the run began, heights as in `layout`."""

    start: float
    end: float
    pixels: int
    """Width of the plot."""
    pixels_high: int = 10_000
    top: float = float("-inf")
    bottom: float = float("inf")
    hidden: Collection[str] = ()
    """Names of blocks that are not shown."""


class Selection(NamedTuple):
    """The bars of a window, without the fields of their events, which are still in the files."""

    origin: int
    """The start of the run, in Unix microseconds."""
    layout: TrackLayout
    bars: Bars
    resolution: int
    """Shorter bars are merged; microseconds."""
    crowded: list[tuple[RowPlace, Occupancy]]
    cell: int
    """Width of a cell of the crowded groups, in microseconds."""
    versions: dict[str, list[Any]]

    @property
    def events(self) -> Ints:
        """Return the events with at least one bar that is not merged."""
        return np.unique(self.bars.event[self.bars.event != MERGED])


def select_bars(index: Index, origin: int, window: Window) -> Selection:
    """Select what to draw; `origin` is when the run began, in Unix microseconds."""
    room = (window.pixels_high - _NUMBERS_PIXELS) / _ROW_PIXELS
    layout = lay_out(index.groups(), window.hidden, room=room)
    start, end = origin + round(window.start * 1000), origin + round(window.end * 1000)
    height = min(layout.height, window.bottom) - max(0.0, window.top)

    def is_crowded(row: RowPlace, num_tracks: int) -> bool:
        track_pixels = (row.bottom - row.top) / num_tracks * window.pixels_high if num_tracks else 0.0
        return num_tracks > 1 and track_pixels < _MIN_TRACK_PIXELS * height

    crowded: list[tuple[RowPlace, Bars]] = []
    tracks: list[int] = []
    for row in layout.groups:
        if row.bottom < window.top or row.top > window.bottom:
            continue
        if not is_crowded(row, len(row.tracks)):
            tracks += row.tracks
            continue
        bars = index.bars(start, end, row.tracks)
        used = np.unique(bars.track).tolist()
        if is_crowded(row, len(used)):
            crowded.append((row, bars))
        else:  # the few tracks used in this window share the height of all
            tracks += used
            layout.tracks.update(spread(row, used))
    resolution = max(1, (end - start) // max(1, window.pixels))
    bars, resolution = merge_to_limit(index.bars(start, end, tracks), resolution, MAX_BARS)
    cell = max(resolution, (end - start) * max(1, len(crowded)) // MAX_CELLS)
    occupancies = [(row, occupancy(own, start, end, cell)) for row, own in crowded]
    versions = _version_lines(index.versions, origin, start, end, window.pixels)
    return Selection(origin, layout, bars, resolution, occupancies, cell, versions)


def view(selection: Selection, fields: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return everything to draw; `fields` are those of `selection.events`."""
    rows = [_bar(selection, fields, *bar) for bar in zip(*(column.tolist() for column in selection.bars), strict=True)]
    for row, found in selection.crowded:
        rows += _occupancy_bars(found, row, selection.cell, selection.origin)
    blocks, groups = (
        [{"name": row.name, "top": row.top, "bottom": row.bottom} for row in some]
        for some in (selection.layout.blocks, selection.layout.groups)
    )
    return {
        "height": selection.layout.height,
        "blocks": blocks,
        "groups": groups,
        "bars": {name: [row[place] for row in rows] for place, name in enumerate(COLUMNS)},
        "versions": selection.versions,
        "merged": int(np.count_nonzero(selection.bars.event == MERGED)),
        "crowded": len(selection.crowded),
        "resolution_ms": selection.resolution / 1000,
    }


def _bar(
    selection: Selection, fields: Mapping[int, Mapping[str, Any]],
    track: int, start: int, end: int, state: int, event: int, count: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the values of `COLUMNS`."""
    name, colour, _ = STATES[state]
    edge = colour if end - start < _EDGE_PIXELS * selection.resolution else _EDGE
    if event == MERGED:
        title = f"{count:,} bars in {duration(end - start)}"
        description = f"too short to be drawn one by one: zoom in, or click. The longest: {name}"
    else:
        title, description = describe(fields[event], state, start, end)
    start, end = start - selection.origin, end - selection.origin
    place = selection.layout.tracks[track]
    return start / 1000, end / 1000, *place, name, colour, edge, event, title, description, clock(start)


def _occupancy_bars(found: Occupancy, row: RowPlace, cell: int, origin: int) -> list[tuple[Any, ...]]:
    """Return bars stacked by state, as high as the number of the group's bars in that state."""
    bars: list[tuple[Any, ...]] = []
    unit = (row.bottom - row.top) / len(row.tracks)
    at, bottom = None, row.bottom
    for start, state, mean in zip(*(column.tolist() for column in found), strict=True):
        if start != at:
            at, bottom = start, row.bottom
        top, begin = bottom - mean * unit, start - origin
        name, colour, _ = STATES[state]
        title = f"{row.name}: {mean:.3g} at a time in {name}"
        description = f"click to see its {len(row.tracks)} tracks one by one"
        end = begin + cell
        place = (begin / 1000, end / 1000, top, bottom)
        bars.append((*place, name, colour, colour, MERGED, title, description, clock(begin)))
        bottom = top
    return bars


def describe(fields: Mapping[str, Any], state: int, start: int, end: int) -> tuple[str, str]:
    """Return the title of a bar, and the fields of its event as HTML."""
    name, took = str(fields.get("event", "?")), duration(end - start)
    phase = STATES[state].name
    text = "<br>".join(f"<b>{html.escape(key)}</b> {html.escape(value)}" for key, value in readable(fields).items())
    if name == REQUEST and phase in PHASES:
        total = duration(microseconds(fields["duration_s"]) or 0)
        return f"{name} · {phase} {took}", f"<b>total</b> {total}<br>{text}"
    return f"{name} · {took}", text


def readable(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an event as text, without its name and time."""
    return {
        key: _format(key, value) for key, value in fields.items() if key not in _SHOWN_OTHERWISE and value is not None
    }


def _format(key: str, value: Any) -> str:
    if key.endswith("_s") and (us := microseconds(value)) is not None:
        return duration(us)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(value) if key in ("step", "version", "turn", "trajectory") else f"{value:,}"
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


def _version_lines(
    versions: Sequence[VersionMark], origin: int, start: int, end: int, pixels: int
) -> dict[str, list[Any]]:
    """Return lines and labels of versions. A version has a label where there is room, and a line without a label only
    while lines are sparse. The newest version always has a label."""
    inside = [mark for mark in versions if start <= mark.at <= end]
    inside = inside[:: len(inside) // _MAX_VERSION_LINES + 1]
    label_width = (end - start) * _LABEL_PIXELS / max(1, pixels)
    is_sparse = len(inside) * _LINE_PIXELS <= pixels
    lines: list[tuple[float, str]] = []
    free_until = float("inf")
    for mark in reversed(inside):
        has_room = mark.at <= free_until
        if has_room:
            free_until = mark.at - label_width
        if has_room or is_sparse:
            lines.append(((mark.at - origin) / 1000, f"v{mark.version}" if has_room else ""))
    lines.reverse()
    return {"x": [x for x, _ in lines], "label": [label for _, label in lines]}


def duration(us: int) -> str:
    """Format a duration in a suitable unit."""
    if us < 1000:
        return f"{us} µs" if us else "0 s"
    return seconds(us / 1_000_000) if us < 100_000_000 else elapsed(us / 1_000_000)


def clock(us: int) -> str:
    """Format a time since the run began as `1:02:03.456`."""
    sign, us = ("-" if us < 0 else ""), abs(us)
    minutes, rest_s = divmod(us / 1_000_000, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{sign}{hours}:{minutes:02d}:{rest_s:06.3f}" if hours else f"{sign}{minutes}:{rest_s:06.3f}"
