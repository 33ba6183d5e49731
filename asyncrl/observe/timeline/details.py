"""The details of one event as HTML: its fields, the other events of its sample, and the conversation.

Everything that comes from the run is escaped.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from asyncrl.observe.timeline.layout import PHASES, REQUEST, STATES, microseconds
from asyncrl.observe.timeline.view import clock, duration, readable

MAX_EVENTS = 1000
"""Events of a sample in the list."""
_DARK = ["#1d2939", "#b42318", "#06643c", "#a15c07", "#175cd3", "#7a279b", "#0e7090", "#667085"]
_BRIGHT = ["#475467", "#d92d20", "#38761d", "#b56e0a", "#2e6cdc", "#8f3cb4", "#1482a5", "#1d2939"]
_ON_WHITE = TerminalTheme(
    (255, 255, 255),
    (29, 41, 57),
    [parse_rgb_hex(colour[1:]) for colour in _DARK],
    [parse_rgb_hex(colour[1:]) for colour in _BRIGHT],
)
"""Rich's colours, dark enough for a white page."""


class Conversation(NamedTuple):
    """The messages of a trajectory."""

    lines: Sequence[Text] = ()
    notes: Sequence[str] = ()
    """Remarks about it or, without lines, why there is none."""


Conversations = Callable[[str, int | None], Conversation]
"""Returns the conversation of a sample's trajectory (None: its first one). Blocking; never raises."""


def sample_of(fields: Mapping[str, Any]) -> str | None:
    sample = fields.get("sample")
    return None if sample is None else str(sample)


def trajectory_of(fields: Mapping[str, Any]) -> int | None:
    """Return the trajectory of an event; None without one, and for the greedy baseline, which is not recorded."""
    trajectory = fields.get("trajectory")
    return trajectory if isinstance(trajectory, int) and trajectory >= 0 else None


def details(number: int, events: Mapping[int, Mapping[str, Any]], conversation: Conversation, origin: int) -> str:
    """Return HTML.

    Args:
        number: of the event.
        events: the fields of this event and of the others of its sample, by number; empty fields: cannot be read any
        more. origin: when the run began, in Unix microseconds.
    """
    fields = events[number]
    if not fields:
        return '<p class="note">The file that had this event has changed or is gone.</p>'
    facts = {"at": _at(fields, origin), "took": _took(fields) or "0 s", **readable(fields)}
    rows = (f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in facts.items())
    parts = [
        f"<h2>{html.escape(str(fields['event']))}</h2>",
        _phases(fields) if fields["event"] == REQUEST else "",
        f'<table class="fields">{"".join(rows)}</table>',
    ]
    sample, trajectory = sample_of(fields), trajectory_of(fields)
    if sample is not None:
        name = f"{sample} · trajectory {trajectory}" if trajectory is not None else sample
        parts.append(f"<h3>Conversation of {html.escape(name)}</h3>{_conversation(conversation)}")
        parts.append(_events(number, sample, trajectory, events, origin))
    return "\n".join(parts)


def _at(fields: Mapping[str, Any], origin: int) -> str:
    return clock(round(fields["timestamp"] * 1_000_000) - origin)


def _took(fields: Mapping[str, Any]) -> str:
    """Format the duration; empty for a moment."""
    took = round(fields["duration_s"] * 1_000_000)
    return duration(took) if took else ""


def _phases(fields: Mapping[str, Any]) -> str:
    total = microseconds(fields["duration_s"]) or 0
    parts = []
    for state in STATES:
        us = microseconds(fields.get(f"{state.name}_s")) if state.name in PHASES else None
        if us and us > 0 and total > 0:
            title, width = f"{state.name} {duration(us)}", min(100.0, 100 * us / total)
            parts.append(f'<i title="{title}" style="background:{state.colour};width:{width:.2f}%"></i>')
    return f'<div class="phases">{"".join(parts)}</div>' if parts else ""


def _conversation(conversation: Conversation) -> str:
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in conversation.notes)
    if not conversation.lines:
        return notes
    console = Console(record=True, file=io.StringIO(), width=10_000, highlight=False, force_terminal=True)
    for line in conversation.lines:
        console.print(line, soft_wrap=True)
    text = console.export_html(theme=_ON_WHITE, code_format="{code}", inline_styles=True).strip("\n")
    return f'{notes}<pre class="conversation">{text}</pre>'


def _events(
    number: int, sample: str, trajectory: int | None, events: Mapping[int, Mapping[str, Any]], origin: int
) -> str:
    """List the events of the trajectory and those of the sample as a whole, by time."""
    own = [
        (other, fields)
        for other, fields in events.items()
        if fields and (trajectory is None or trajectory_of(fields) in (None, trajectory))
    ]
    own.sort(key=lambda each: each[1]["timestamp"])
    rows = []
    for other, fields in own[:MAX_EVENTS]:
        facts = readable(fields).items()
        title = " · ".join(f"{key} {value}" for key, value in facts if key not in ("sample", "trajectory", "step"))
        rows.append(
            f'<tr{" class=this" if other == number else ""} title="{html.escape(title)}">'
            f'<td class="n">{_at(fields, origin)}</td><td>{html.escape(str(fields["event"]))}</td>'
            f'<td>{html.escape(str(fields.get("turn", "")))}</td><td class="n">{_took(fields)}</td></tr>'
        )
    more = f'<p class="note">and {len(own) - MAX_EVENTS:,} more</p>' if len(own) > MAX_EVENTS else ""
    subject = html.escape(sample) + (f" and its trajectory {trajectory}" if trajectory is not None else "")
    head = '<tr class="head"><td class="n">at</td><td>event</td><td>turn</td><td class="n">took</td></tr>'
    return (
        f'<h3>{len(own):,} events of {subject}</h3><div class="events"><table>{head}{"".join(rows)}</table></div>{more}'
    )
