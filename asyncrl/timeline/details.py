"""What the page says of one event: its fields, everything that is known of its sample, and the conversation. As HTML;
all that comes out of the run is escaped."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from asyncrl.timeline.index import sample_of
from asyncrl.timeline.kinds import PHASES, STATES
from asyncrl.timeline.phases import microseconds
from asyncrl.timeline.view import clock, duration, readable

MAX_EVENTS = 1000
"""Listed of a sample."""
_DARK = ["#1d2939", "#b42318", "#06643c", "#a15c07", "#175cd3", "#7a279b", "#0e7090", "#667085"]
_BRIGHT = ["#475467", "#d92d20", "#38761d", "#b56e0a", "#2e6cdc", "#8f3cb4", "#1482a5", "#1d2939"]
_ON_WHITE = TerminalTheme(
    (255, 255, 255),
    (29, 41, 57),
    [parse_rgb_hex(colour[1:]) for colour in _DARK],
    [parse_rgb_hex(colour[1:]) for colour in _BRIGHT],
)
"""Rich's colours, dark enough for white paper."""


class Conversation(NamedTuple):
    """What was said in a trajectory."""

    lines: Sequence[Text] = ()
    notes: Sequence[str] = ()
    """What is to be known of that; or without lines, why there are none."""


Conversations = Callable[[str, int | None], Conversation]
"""Of a sample, and a trajectory of it (None: the first). Blocking; never fails."""


class Listed(NamedTuple):
    """One of the events of a sample."""

    number: int
    fields: Mapping[str, Any]


def details(number: int, fields: Mapping[str, Any], others: Iterable[Listed], said: Conversation, origin: int) -> str:
    """HTML.

    Args:
        number: of the event.
        fields: of it; none: they cannot be read any more.
        others: all events of its sample, itself too.
        origin: when the run began, in Unix microseconds.
    """
    if not fields:
        return '<p class="note">The file that had this event has changed or is gone.</p>'
    name = str(fields["event"])
    begun = round(fields["timestamp"] * 1_000_000) - origin
    took = round(fields["duration_s"] * 1_000_000)
    facts = {"at": clock(begun), "took": duration(took), **readable(fields)}
    parts = [
        f"<h2>{html.escape(name)}</h2>",
        _phases(fields) if name == "request" else "",
        f'<table class="fields">{"".join(map(_fact, facts.items()))}</table>',
    ]
    sample, trajectory = sample_of(fields), trajectory_of(fields)
    if sample is not None:
        of = f"{sample} · trajectory {trajectory}" if trajectory is not None else sample
        parts.append(f"<h3>Conversation of {html.escape(of)}</h3>{_conversation(said)}")
        parts.append(_events(number, sample, trajectory, others, origin))
    return "\n".join(parts)


def trajectory_of(fields: Mapping[str, Any]) -> int | None:
    """The number of the trajectory that an event is of; None: of none, or of the baseline, which is not kept."""
    found = fields.get("trajectory")
    return found if isinstance(found, int) and found >= 0 else None


def _fact(fact: tuple[str, str]) -> str:
    return f"<tr><td>{html.escape(fact[0])}</td><td>{html.escape(fact[1])}</td></tr>"


def _phases(fields: Mapping[str, Any]) -> str:
    total = microseconds(fields["duration_s"]) or 0
    parts = []
    for state in STATES:
        us = microseconds(fields.get(f"{state.name}_s")) if state.name in PHASES else None
        if us and us > 0 and total > 0:
            width = min(100.0, 100 * us / total)
            title = f"{state.name} {duration(us)}"
            parts.append(f'<i title="{title}" style="background:{state.colour};width:{width:.2f}%"></i>')
    return f'<div class="phases">{"".join(parts)}</div>' if parts else ""


def _conversation(said: Conversation) -> str:
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in said.notes)
    if not said.lines:
        return notes
    console = Console(record=True, file=io.StringIO(), width=10_000, highlight=False, force_terminal=True)
    for line in said.lines:
        console.print(line, soft_wrap=True)
    shown = console.export_html(theme=_ON_WHITE, code_format="{code}", inline_styles=True).strip("\n")
    return f'{notes}<pre class="conversation">{shown}</pre>'


def _events(number: int, sample: str, trajectory: int | None, others: Iterable[Listed], origin: int) -> str:
    """By time: of the trajectory, and what concerns the sample as a whole."""
    found = [
        each
        for each in others
        if each.fields and (trajectory is None or trajectory_of(each.fields) in (None, trajectory))
    ]
    found.sort(key=lambda each: each.fields["timestamp"])
    rows = []
    for each in found[:MAX_EVENTS]:
        begun = round(each.fields["timestamp"] * 1_000_000) - origin
        took = round(each.fields["duration_s"] * 1_000_000)
        about = " · ".join(
            f"{key} {value}"
            for key, value in readable(each.fields).items()
            if key not in ("sample", "trajectory", "step")
        )
        rows.append(
            f'<tr{" class=this" if each.number == number else ""} title="{html.escape(about)}">'
            f'<td class="n">{clock(begun)}</td><td>{html.escape(str(each.fields["event"]))}</td>'
            f"<td>{html.escape(str(each.fields.get('turn', '')))}</td>"
            f'<td class="n">{duration(took) if took else ""}</td></tr>'
        )
    more = f'<p class="note">and {len(found) - MAX_EVENTS:,} more</p>' if len(found) > MAX_EVENTS else ""
    of = f" and its trajectory {trajectory}" if trajectory is not None else ""
    head = '<tr class="head"><td class="n">at</td><td>event</td><td>turn</td><td class="n">took</td></tr>'
    return (
        f"<h3>{len(found):,} events of {html.escape(sample)}{of}</h3>"
        f'<div class="events"><table>{head}{"".join(rows)}</table></div>{more}'
    )
