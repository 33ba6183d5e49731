"""What a window of time looks like, as plain JSON values for the page. Times are milliseconds since the run began."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.timeline.detail import SEVERAL, Bars, Ints, Share, at_most, shares
from asyncrl.timeline.index import Index, Mark
from asyncrl.timeline.kinds import PHASES, STATES
from asyncrl.timeline.layout import Layout, Row, lay_out, spread
from asyncrl.timeline.phases import microseconds

MAX_BARS = 5000
MAX_CELLS = 2400
"""Of groups whose lanes are too thin; up to one bar for each state in each."""
LANE_PIXELS = 2.0
"""A thinner lane is not drawn by itself."""
COLUMNS = ("left", "right", "top", "bottom", "state", "colour", "edge", "event", "title", "told", "at")
"""Of a bar."""
MAX_LINES = 400
"""Of versions."""
LINE_PIXELS = 12
"""Between two of them, on average."""
LABEL_PIXELS = 34
"""That the number of a version takes."""
EDGED = 4
"""Pixels from which on a bar has an edge, that tells it from its neighbour; shorter ones would be all edge."""
_EDGE = "#ffffff"
_LONGEST_VALUE = 80
_SAID = ("timestamp", "event", "duration_s")


class Window(NamedTuple):
    """What is asked for. Times in milliseconds since the run began, heights as in `layout`."""

    start: float
    end: float
    pixels: int
    """Of the plot's width."""
    pixels_high: int = 10_000
    """Of its height."""
    top: float = float("-inf")
    bottom: float = float("inf")
    hidden: Collection[str] = ()
    """Blocks."""


class Look(NamedTuple):
    """What is in a window, without what its events say: that is in their files."""

    origin: int
    """When the run began, in Unix microseconds."""
    layout: Layout
    bars: Bars
    resolution: int
    """Microseconds: shorter bars are merged."""
    crowded: list[tuple[Row, Share]]
    width: int
    """Microseconds of a cell of those."""
    versions: dict[str, list[Any]]

    @property
    def events(self) -> Ints:
        """Those that are drawn by themselves."""
        return np.unique(self.bars.event[self.bars.event != SEVERAL])


def look(index: Index, origin: int, window: Window) -> Look:
    """What is to be drawn; `origin`: when the run began, in Unix microseconds."""
    layout = lay_out(index.groups(), window.hidden)
    start, end = origin + round(window.start * 1000), origin + round(window.end * 1000)
    resolution = max(1, (end - start) // max(1, window.pixels))
    shown = [row for row in layout.groups if row.bottom >= window.top and row.top <= window.bottom]
    crowded: list[tuple[Row, Bars]] = []
    lanes: list[int] = []
    for row in shown:
        if not _is_crowded(row, len(row.lanes), layout, window):
            lanes += row.lanes
            continue
        found = index.bars(start, end, row.lanes)
        used = np.unique(found.lane).tolist()
        if _is_crowded(row, len(used), layout, window):
            crowded.append((row, found))
        else:  # in this window there are few enough: they have the room of all
            lanes += used
            layout = layout._replace(lanes=layout.lanes | spread(row, used))
    bars, resolution = at_most(index.bars(start, end, lanes), resolution, MAX_BARS)
    width = max(resolution, (end - start) * max(1, len(crowded)) // MAX_CELLS)
    drawn = [(row, shares(found, start, end, width)) for row, found in crowded]
    versions = _lines(index.versions, origin, start, end, window.pixels)
    return Look(origin, layout, bars, resolution, drawn, width, versions)


def view(seen: Look, fields: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that is drawn.

    Args:
        fields: of `seen.events`.
    """
    columns = _columns(seen, fields)
    for row, found in seen.crowded:
        for name, more in _shares(found, row, seen.width, seen.origin).items():
            columns[name] += more
    return {
        "height": seen.layout.height,
        "blocks": [_named(row) for row in seen.layout.blocks],
        "groups": [_named(row) for row in seen.layout.groups],
        "bars": columns,
        "versions": seen.versions,
        "merged": int(np.count_nonzero(seen.bars.event == SEVERAL)),
        "crowded": len(seen.crowded),
        "resolution_ms": seen.resolution / 1000,
    }


def _named(row: Row) -> dict[str, Any]:
    return {"name": row.name, "top": row.top, "bottom": row.bottom}


def _is_crowded(row: Row, num_lanes: int, layout: Layout, window: Window) -> bool:
    """So many lanes in it are too thin to be seen one by one."""
    height = min(layout.height, window.bottom) - max(0.0, window.top)
    return num_lanes > 1 and (row.bottom - row.top) / num_lanes * window.pixels_high < LANE_PIXELS * height


def _shares(found: Share, row: Row, width: int, origin: int) -> dict[str, list[Any]]:
    """Bars upon each other, as high as there is of each state in the group."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    unit = (row.bottom - row.top) / len(row.lanes)
    at, bottom = None, row.bottom
    for start, state, amount in zip(found.start.tolist(), found.state.tolist(), found.at_a_time.tolist(), strict=True):
        if start != at:
            at, bottom = start, row.bottom
        top = bottom - amount * unit
        colour = STATES[state].colour
        bar = {
            "left": (start - origin) / 1000,
            "right": (start + width - origin) / 1000,
            "top": top,
            "bottom": bottom,
            "state": STATES[state].name,
            "colour": colour,
            "edge": colour,
            "event": SEVERAL,
            "title": f"{row.name}: {amount:.3g} at a time in {STATES[state].name}",
            "told": f"click to see its {len(row.lanes)} lanes one by one",
            "at": clock(start - origin),
        }
        for name, value in bar.items():
            columns[name].append(value)
        bottom = top
    return columns


def _columns(seen: Look, fields: Mapping[int, Mapping[str, Any]]) -> dict[str, list[Any]]:
    bars, resolution, origin, layout = seen.bars, seen.resolution, seen.origin, seen.layout
    titles, told = [], []
    for start, end, state, event, count in zip(
        bars.start.tolist(),
        bars.end.tolist(),
        bars.state.tolist(),
        bars.event.tolist(),
        bars.number.tolist(),
        strict=True,
    ):
        if event == SEVERAL:
            titles.append(f"{count:,} bars in {duration(end - start)}")
            told.append(f"too short to be drawn one by one: zoom in, or click. The longest: {STATES[state].name}")
        else:
            title, more = describe(fields[event], state, start, end)
            titles.append(title)
            told.append(more)
    rows = [layout.lanes[lane] for lane in bars.lane.tolist()]
    return {
        "left": ((bars.start - origin) / 1000).tolist(),
        "right": ((bars.end - origin) / 1000).tolist(),
        "top": [top for top, _ in rows],
        "bottom": [bottom for _, bottom in rows],
        "state": [STATES[state].name for state in bars.state.tolist()],
        "colour": [STATES[state].colour for state in bars.state.tolist()],
        "edge": [
            STATES[state].colour if thin else _EDGE
            for state, thin in zip(
                bars.state.tolist(), (bars.end - bars.start < EDGED * resolution).tolist(), strict=True
            )
        ],
        "event": bars.event.tolist(),
        "title": titles,
        "told": told,
        "at": [clock(start - origin) for start in bars.start.tolist()],
    }


def describe(fields: Mapping[str, Any], state: int, start: int, end: int) -> tuple[str, str]:
    """Title and fields of one bar; the fields as HTML."""
    name, took = str(fields.get("event", "?")), duration(end - start)
    phase = STATES[state].name
    title = f"{name} · {phase} {took}" if name == "request" and phase in PHASES else f"{name} · {took}"
    told = "<br>".join(f"<b>{html.escape(key)}</b> {html.escape(value)}" for key, value in readable(fields).items())
    if name == "request" and phase in PHASES:
        told = f"<b>in all</b> {duration(microseconds(fields['duration_s']) or 0)}<br>{told}"
    return title, told


def readable(fields: Mapping[str, Any]) -> dict[str, str]:
    """What an event says, other than its name and time."""
    return {key: _short(key, value) for key, value in fields.items() if key not in _SAID and value is not None}


def _short(key: str, value: Any) -> str:
    if key.endswith("_s") and (us := microseconds(value)) is not None:
        return duration(us)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(value) if key in ("step", "version", "turn", "trajectory") else f"{value:,}"
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _lines(versions: Sequence[Mark], origin: int, start: int, end: int, pixels: int) -> dict[str, list[Any]]:
    """Labels only where there is room for them, and lines without one only where they do not hide what is behind; the
    newest is always labelled."""
    inside = [mark for mark in versions if start <= mark.at <= end]
    inside = inside[:: len(inside) // MAX_LINES + 1]
    room = (end - start) * LABEL_PIXELS / max(1, pixels)
    labels: list[str] = []
    free = float("inf")
    for mark in reversed(inside):
        labels.append(f"v{mark.version}" if mark.at <= free else "")
        free = mark.at - room if mark.at <= free else free
    labels.reverse()
    if len(inside) * LINE_PIXELS > pixels:
        inside = [mark for mark, label in zip(inside, labels, strict=True) if label]
        labels = [label for label in labels if label]
    return {"x": [(mark.at - origin) / 1000 for mark in inside], "label": labels}


def duration(us: int) -> str:
    """In the unit that suits it."""
    seconds = us / 1_000_000
    if us < 1000:
        return f"{us} µs" if us else "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else clock(us, parts=False)


def clock(us: int, *, parts: bool = True) -> str:
    """`1:02:03.456` since the run began."""
    sign, us = ("-" if us < 0 else ""), abs(us)
    minutes, seconds = divmod(us / 1_000_000, 60)
    hours, minutes = divmod(int(minutes), 60)
    told = f"{seconds:06.3f}" if parts else f"{int(seconds):02d}"
    return f"{sign}{hours}:{minutes:02d}:{told}" if hours else f"{sign}{minutes}:{told}"
