"""What an event is to those who read it: `asyncrl report` and `asyncrl timeline` leave out the same lines. Pure."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

SOONEST, LATEST = 946_684_800, 4_102_444_800
"""The years 2000 to 2100, in Unix seconds: an event at another time is damage."""
MOST = 2**53
"""What is no smaller was not counted or measured: a double would not even tell it from its neighbour."""
WHOLE = ("step", "version", "turn", "trajectory")
"""Fields that are whole numbers; `trajectory` may be a name instead."""


def parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line, its text fit to be written as UTF-8; None: the line is damaged, or no event.

    An event has a name, a time and a duration, and its fields of `WHOLE` are whole. What else it says may be odd.
    """
    try:
        found = json.loads(line)
        if b"\\ud" in line.lower():
            # Halves of surrogate pairs, as a model may write them.
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_event(found) else None


def _is_event(found: dict[str, Any]) -> bool:
    name, at, took = (found.get(field) for field in ("event", "timestamp", "duration_s"))
    if not (isinstance(name, str) and is_number(at) and is_number(took) and at >= SOONEST and at + took <= LATEST):
        return False
    return all(_is_whole(found.get(name)) or (name == "trajectory" and isinstance(found[name], str)) for name in WHOLE)


def is_number(value: Any) -> TypeGuard[float]:
    """One that can have been counted or measured."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def _is_whole(value: Any) -> bool:
    return value is None or (is_number(value) and value == int(value))
