"""The catalog of all events that a run may record, with their levels and meanings, read from `events.toml`.

An event has `timestamp` (when it started, in Unix seconds), `event` (its name) and `duration_s` (0 for an instant). If
they apply, it also has `step`, `version`, `replica`, `request`, `sample`, `trajectory`, `turn`, and the extra fields
listed there. `make docs` generates docs/events.md from this catalog.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from asyncrl.core.failures import BugError

EventLevel = Literal["off", "summary", "full"]
LEVELS: tuple[EventLevel, ...] = ("off", "summary", "full")
FIELDS = ("step", "version", "replica", "request", "sample", "trajectory", "turn")
"""Fields that any event may have besides its extra fields. `step` is the optimizer step that the recording process
considered current, and `version` the weights version that it used. During validation, `sample` is the name of a prompt
(`val_…`). `trajectory` -1 is the greedy baseline of ReMax."""


class EventInfo(NamedTuple):
    name: str
    level: EventLevel
    """The event is recorded at this level and above."""
    meaning: str
    extras: Mapping[str, str] = {}
    """Meaning and unit of each extra field, by its name."""


def _event(name: str, level: EventLevel, meaning: str, *extras: str) -> EventInfo:
    return EventInfo(name, level, meaning, dict(extra.split(": ", 1) for extra in extras))


SECTIONS: dict[str, tuple[EventInfo, ...]] = {
    title: tuple(_event(name, *row) for name, row in rows.items())
    for title, rows in tomllib.loads(Path(__file__).with_name("events.toml").read_text(encoding="utf-8")).items()
}
"""All events, by section of docs/events.md."""
EVENTS: dict[str, EventInfo] = {info.name: info for section in SECTIONS.values() for info in section}


def enabled(level: EventLevel) -> frozenset[str]:
    """Return the names of the events that are recorded at `level`."""
    rank = LEVELS.index(level)
    return frozenset(name for name, info in EVENTS.items() if LEVELS.index(info.level) <= rank)


@cache
def describe(name: str) -> EventInfo:
    """Return the registered event of this name.

    Raises:
        BugError: `name` is not registered.
    """
    if name in EVENTS:
        return EVENTS[name]
    near = difflib.get_close_matches(name, EVENTS, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"event {name!r} is not registered{hint}. Events without documentation cannot be recorded: add it to "
        "asyncrl/profiling/events.toml with its level and meaning."
    )


_FAMILIES = frozenset(name.partition(".")[0] for name in EVENTS)
_OWN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)
_FIXED_FIELDS = frozenset({"timestamp", "event", "duration_s"})


def is_own_event(name: str) -> bool:
    """Return whether the user's code may record events of this name (`asyncrl.profile`)."""
    return name.partition(".")[0] not in _FAMILIES and _OWN_NAME.fullmatch(name) is not None


def check_own_name(name: str, fields: Mapping[str, object]) -> None:
    """Check an event of the user's code.

    Raises:
        ValueError: the name belongs to asyncrl, or the name or a field cannot be used.
    """
    if (family := name.partition(".")[0]) in _FAMILIES:
        raise ValueError(f"event {name!r}: names that begin with {family!r} are asyncrl's; call it 'my.{name}'")
    if not is_own_event(name):
        raise ValueError(f"event {name!r}: use at most 100 letters, digits, '.', '_' and '-', with a letter first")
    if fixed := sorted(_FIXED_FIELDS & fields.keys()):
        raise ValueError(f"event {name!r}: every event has a field {fixed[0]!r} already; give yours another name")


_HEAD = """\
# Events

Generated from `asyncrl/profiling/events.toml` by `make docs`.

If `profiler.level` is `summary` or `full`, every process of a run records events. The run directory contains them in
`events/step_<step>/<part>.jsonl`, with one JSON object per line; parts are `rollouter`, `trainer`, `queue`, `driver`,
`replica-<id>` and `rank-<group>-<number>`. `asyncrl report RUN` and `asyncrl timeline RUN` read these files.

Every line has `timestamp` (when the event started, in Unix seconds), `event` and `duration_s` (0 for an instant). If
they apply, it also has `step` (the optimizer step that the process considered current), `version` (of the weights that
the process used), `replica`, `request`, `sample`, `trajectory`, `turn`, and the extra fields listed below. Durations
are wall clock; `tokens` are counts. Your own code may record further events ([profiling.md](profiling.md#events)).
"""


def markdown() -> str:
    """Return the page `docs/events.md`."""
    lines = [_HEAD]
    for title, infos in SECTIONS.items():
        lines += [f"## {title}", "", "| event | level | meaning | extras |", "|---|---|---|---|"]
        for info in infos:
            extras = "; ".join(f"`{name}`: {meaning}" for name, meaning in info.extras.items())
            lines.append(f"| `{info.name}` | {info.level} | {info.meaning} | {extras} |")
        lines.append("")
    return "\n".join(lines)
