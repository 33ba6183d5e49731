"""The phases of a request, one after the other. Pure; times are whole microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from asyncrl.timeline.kinds import STATE

_LONGEST_S = 1e10
"""More than three centuries: what says so is damaged."""


class Phase(NamedTuple):
    state: int
    start: int
    end: int


def phases(start: int, end: int, fields: Mapping[str, Any], pauses: Iterable[tuple[int, int]] = ()) -> list[Phase]:
    """A request from `start` to `end`, in parts that touch and fill it.

    A request knows for how long it stood still, in whatever phase, and its replica knows when that was. A phase that is
    interrupted goes on afterwards; the last one takes what is left.

    Args:
        fields: of its event: `gate_s`, `queued_s`, `prefill_s`, `decode_s`, `paused_s`.
        pauses: when its replica stood still; if none is in it, what was paused comes last.
    """
    found: list[Phase] = []
    at = min(end, start + _us(fields, "gate_s"))
    if at > start:
        found.append(Phase(STATE["gate"], start, at))
    todo = [(STATE[name], us) for name in ("queued", "prefill", "decode") if (us := _us(fields, f"{name}_s"))]
    if not todo:
        todo = [(found[-1].state if found else STATE["other"], 0)]
    for first, last in [*_stood(at, end, _us(fields, "paused_s"), pauses), (end, end)]:
        while at < first:
            state, us = todo[0]
            until = first if len(todo) == 1 else min(first, at + us)
            found.append(Phase(state, at, until))
            if len(todo) > 1:
                todo[0] = (state, us - (until - at))
                if not todo[0][1]:
                    todo.pop(0)
            at = until
        if last > at:
            found.append(Phase(STATE["paused"], at, last))
            at = last
    return found or [Phase(todo[-1][0], start, end)]


def _stood(at: int, end: int, paused: int, pauses: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Between `at` and `end`, by time."""
    if not paused or at == end:
        return []
    known = sorted((max(at, first), min(end, last)) for first, last in pauses if first < end and last > at)
    return known or [(max(at, end - paused), end)]


def _us(fields: Mapping[str, Any], name: str) -> int:
    return max(0, microseconds(fields.get(name)) or 0)


def microseconds(seconds: object) -> int | None:
    """None: it is no time."""
    if not isinstance(seconds, (int, float)) or not abs(seconds) < _LONGEST_S:
        return None
    return round(seconds * 1_000_000)
