"""The details of one event as HTML: its fields, the other events of its sample, and the conversation."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from asyncrl.core.failures import AsyncRLError
from asyncrl.core.types import SampleId
from asyncrl.observe.kept_samples import ConfiguredRun, find_sample
from asyncrl.observe.terminal import conversation as printed
from asyncrl.observe.timeline.layout import PHASES, REQUEST, STATES, BarState, microseconds
from asyncrl.observe.timeline.page import TEMPLATES
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
    """Remarks about the conversation, or the reason why there is none."""


Conversations = Callable[[str, int | None], Conversation]
"""Returns the conversation of a sample's trajectory (None for the first one). Blocking; never raises."""


def conversation_of(run_dir: Path, sample: str, trajectory: int | None) -> Conversation:
    """Return a conversation as `asyncrl show` prints it, or the reason why there is none. Blocking."""
    if not re.fullmatch(r"sample_\d+_\d+", sample, re.ASCII):
        return Conversation(notes=["Runs keep the conversations of training samples only, and this is not one."])
    try:
        found = find_sample(ConfiguredRun(run_dir), SampleId.parse(sample).index, sample)
    except (AsyncRLError, ValueError) as error:
        return Conversation(notes=[error.message if isinstance(error, AsyncRLError) else str(error)])
    one = next((each for each in found.trajectories if trajectory is None or each.asked == trajectory), None)
    if one is None:
        return Conversation(notes=[*found.notes, f"Trajectory {trajectory} was not kept; it may have been cancelled."])
    lines = [*printed.conversation(one), *printed.closing(one, "")]
    return Conversation([printed.title(one), *lines], found.notes)


def sample_of(fields: Mapping[str, Any]) -> str | None:
    sample = fields.get("sample")
    return None if sample is None else str(sample)


def trajectory_of(fields: Mapping[str, Any]) -> int | None:
    """Return the trajectory of an event; None without one, and for the greedy baseline, which is not dumped."""
    trajectory = fields.get("trajectory")
    return trajectory if isinstance(trajectory, int) and trajectory >= 0 else None


def details(number: int, events: Mapping[int, Mapping[str, Any]], conversation: Conversation, origin: int) -> str:
    """Return the details of an event as HTML.

    Args:
        number: the number of the event.
        events: the fields of this event and of the others of its sample, by number; empty fields if an event can no
            longer be read.
        origin: when the run began, in Unix microseconds.
    """
    fields = events[number]
    if not fields:
        return TEMPLATES.get_template("details.html").render(fields=fields)
    trajectory = trajectory_of(fields)
    # The events of the trajectory and those of the sample as a whole, by time.
    own = [
        (other, event)
        for other, event in events.items()
        if event and (trajectory is None or trajectory_of(event) in (None, trajectory))
    ]
    own.sort(key=lambda each: each[1]["timestamp"])
    return TEMPLATES.get_template("details.html").render(
        fields=fields,
        facts={"at": _at(fields, origin), "took": _took(fields) or "0 s", **readable(fields)},
        phases=list(_phases(fields)) if fields["event"] == REQUEST else [],
        sample=sample_of(fields),
        trajectory=trajectory,
        notes=conversation.notes,
        conversation=_as_html(conversation.lines) if conversation.lines else "",
        num_events=len(own),
        events=[
            {
                "is_this": other == number,
                "at": _at(event, origin),
                "name": event["event"],
                "turn": event.get("turn", ""),
                "took": _took(event),
                "title": " · ".join(
                    f"{key} {value}"
                    for key, value in readable(event).items()
                    if key not in ("sample", "trajectory", "step")
                ),
            }
            for other, event in own[:MAX_EVENTS]
        ],
    )


def _at(fields: Mapping[str, Any], origin: int) -> str:
    return clock(round(fields["timestamp"] * 1_000_000) - origin)


def _took(fields: Mapping[str, Any]) -> str:
    """Format the duration; empty for an event without duration."""
    took = round(fields["duration_s"] * 1_000_000)
    return duration(took) if took else ""


def _phases(fields: Mapping[str, Any]) -> Iterator[tuple[BarState, str, float]]:
    """Yield the phases of a request: state, duration, and percent of the request."""
    total = microseconds(fields["duration_s"]) or 0
    for state in STATES:
        us = microseconds(fields.get(f"{state.name}_s")) if state.name in PHASES else None
        if us and us > 0 and total > 0:
            yield state, duration(us), round(min(100.0, 100 * us / total), 2)


def _as_html(lines: Sequence[Text]) -> str:
    console = Console(record=True, file=io.StringIO(), width=10_000, highlight=False, force_terminal=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_html(theme=_ON_WHITE, code_format="{code}", inline_styles=True).strip("\n")
