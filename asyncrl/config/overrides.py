"""Overrides from the command line: which choose a group's option, which set a key, and which are neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from asyncrl.config.keys import all_keys
from asyncrl.config.problems import Problem
from asyncrl.config.sources import Source, groups, quoted, recipes


@dataclass(frozen=True, slots=True)
class ParsedOverrides:
    arguments: tuple[str, ...]
    """For Hydra."""
    written: Mapping[str, Any]
    """What they set, by dotted key."""
    problems: tuple[Problem, ...]


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def parse_overrides(texts: Sequence[str], origin: Source) -> ParsedOverrides:
    """Sort `texts` into choices of groups and values of keys.

    Keys are set with Hydra's `++`, so that keys below a section that is off, or in a mapping of the user's own, can be
    set like any other; whether the schema has the key is found out after composition.
    """
    arguments: list[str] = []
    written: dict[str, Any] = {}
    found: list[Problem] = []
    for text in texts:
        try:
            name, raw = _split(text)
            if name in groups():
                arguments.append(f"{name}={_option(name, raw, origin)}")
            else:
                argument, value = _value(name, raw, text)
                arguments.append(argument)
                written[name] = value
        except _Refused as refused:
            found.append(refused.problem)
    return ParsedOverrides(tuple(arguments), written, tuple(found))


def _refuse(key: str, value: Any, consequence: str, fix: str) -> _Refused:
    return _Refused(Problem(key, value, consequence, fix, where="command line"))


def _split(text: str) -> tuple[str, str]:
    name, equals, raw = text.partition("=")
    if text.startswith("~"):
        raise _refuse(text, "?", "every key has a default, so none can be taken away", f"set {text[1:] or 'KEY'}=null")
    if text in recipes() or (not equals and Path(text).expanduser().is_file()):
        raise _refuse(
            text, "?", "a config comes before all overrides, and there can be only one",
            f"put it first: {text} KEY=VALUE ...; a group's option is chosen with GROUP=OPTION",
        )  # fmt: skip
    if not equals or not name.strip("+ "):
        raise _refuse(text, "?", "it is neither a config file nor an override", "write key=value")
    name = name.lstrip("+").strip()
    if name.partition(".")[0] == "hydra" or name.startswith("hydra/"):
        raise _refuse(name, raw, "Hydra only composes here; its run and sweep settings have no effect", "leave it out")
    if "@" in name:
        raise _refuse(
            name, raw, "groups have one place here, their own section", f"write {name.partition('@')[0]}={raw}"
        )
    return name, raw


def _option(group: str, raw: str, origin: Source) -> str:
    options = origin.options(group)
    if raw in options or raw == "null":
        return raw
    close = get_close_matches(raw, options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise _refuse(
        group, raw, f"{group} is a group and has no option of this name",
        f"{hint}Options are {', '.join(options)}; single keys are set as {group}.KEY=VALUE",
    )  # fmt: skip


def _value(name: str, raw: str, text: str) -> tuple[str, Any]:
    """Hydra's argument for `name=raw`, and the value as it will be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    known = all_keys().get(name)
    if known is not None and known.takes_text and raw != "null" and raw[:1] not in ("'", '"'):
        # Free text needs none of Hydra's quoting: 007, a (b).py and x,y are taken as they are.
        raw = quoted(raw)
    try:
        override = OverridesParser.create().parse_override(f"++{name}={raw}")
        if override.is_sweep_override():
            raise _refuse(
                name, raw, "that is several values, and a launch is one run",
                f"run the command once for each value; a list is written {name}=[{raw}]",
            )  # fmt: skip
        return f"++{name}={raw}", override.value()
    except HydraException as error:
        why = str(error).partition("\nSee ")[0].splitlines()[0]
        raise _refuse(
            name, raw, f"it cannot be read: {why}", f"put the value in quotes, twice for the shell: {name}='\"{raw}\"'"
        ) from error
