"""A chain of waits, as `asyncrl.why` finds it, in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Driver = Literal["alive", "stopped", "gone", "unknown"]
"""The driver's process, as the reader of the state sees it: `stopped`: by SIGSTOP; `unknown`: it is not on this
machine."""

Cause = Literal[
    "starting",
    "completed",
    "failed",
    "interrupted",
    "driver",
    "unheard",
    "restarting",
    "ranks",
    "model",
    "checkpoint",
    "engine",
    "replica",
    "reward",
    "store",
    "gate",
    "ended",
    "busy",
    "unknown",
]
"""What a chain ends in, in one word."""


class Link(NamedTuple):
    """One of a chain: it waits on the next one. The last is the cause."""

    who: str
    does: str
    for_s: float | None = None
    """Since when, in seconds."""
    more: str = ""
    cause: Cause | Literal[""] = ""
    """Set in the last link, and in a first one that says how the run or its driver ended before what follows."""

    @property
    def text(self) -> str:
        since = "" if self.for_s is None else f" for {duration(self.for_s)}"
        return f"{self.who} {self.does}{since}" + (f" ({self.more})" if self.more else "")


def render(links: Sequence[Link]) -> str:
    """In one line: `Trainer waits for samples ◀ Rollouter waits on ... ◀ ...`."""
    text = ""
    for number, link in enumerate(links):
        if number:
            text += "; at that time: " if links[number - 1].cause else " ◀ "
        text += link.text
    return text


def as_json(links: Sequence[Link]) -> list[dict[str, Any]]:
    return [{**link._asdict(), "text": link.text} for link in links]


def duration(seconds: float) -> str:
    """`0.4 s`, `94 s`, `12 min`, `3.2 h`."""
    if not math.isfinite(seconds):
        return "an unknown time"
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
