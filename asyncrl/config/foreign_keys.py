"""Keys of verl, TRL, prime-rl, AReaL and slime, and the keys of asyncrl that mean the same. Pure.

The table is foreign_keys.toml: errors about unknown keys, `asyncrl migrate` and docs/coming-from.md read it.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

VERL = "verl"
VERL_SECTION = "actor_rollout_ref"
"""The section that only configurations of verl have."""
_ENOUGH = 3
"""Keys of another system that show that a file is one of its configurations."""
_SIMILAR = 0.85
"""Similarity above which a name is taken for a misspelt name of another system."""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another system; foreign_keys.toml explains the fields."""

    system: str
    name: str
    """The key, or a pattern of keys."""
    to: tuple[str, ...] = ()
    note: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    by: str = ""
    default: Any = None
    async_default: Any = None

    @property
    def is_pattern(self) -> bool:
        return "*" in self.name

    def targets(self, name: str) -> tuple[str, ...]:
        """Return our keys for the key `name`, which matches the pattern: `*` stands for the same text in both."""
        rest = name[len(self.name) - 1 :] if self.name.endswith("*") else ""
        return tuple(key.replace("*", rest) for key in self.to)

    def advice(self, ours: str) -> str:
        """Return what to write instead, as the fix of a problem; `ours` is the key that means it ("": none does)."""
        note = f"; {self.note}" if self.note else ""
        if ours:
            return f"use {ours}, which {self.system} calls {self.name}{note}"
        return f"leave it out, it is a key of {self.system}{note}"


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """Return the whole table in its order."""
    table = tomllib.loads(resources.files("asyncrl.config").joinpath("foreign_keys.toml").read_text(encoding="utf-8"))
    return tuple(_key(system, name, entry) for system, entries in table.items() for name, entry in entries.items())


def _key(system: str, name: str, entry: str | dict[str, Any]) -> ForeignKey:
    fields = {"to": entry} if isinstance(entry, str) else dict(entry)
    to = fields.pop("to", ())
    return ForeignKey(system, name, (to,) if isinstance(to, str) else tuple(to), **fields)


def of_verl(name: str) -> ForeignKey | None:
    """Return the first entry of verl that matches a key; exact names come before patterns."""
    mine = [key for key in foreign_keys() if key.system == VERL]
    exact = next((key for key in mine if key.name == name), None)
    return exact or next((key for key in mine if key.is_pattern and fnmatchcase(name, key.name)), None)


def exact(name: str) -> ForeignKey | None:
    """Return the entry of exactly this name in any system."""
    return next((key for key in foreign_keys() if key.name == name and not key.is_pattern), None)


def system_of(names: Collection[str]) -> str | None:
    """Return the system whose configuration has these unknown keys: verl by its section, others by several keys that
    no other system has."""
    if any(name.startswith(f"{VERL_SECTION}.") for name in names):
        return VERL
    systems: dict[str, set[str]] = {name: {key.system for key in foreign_keys() if key.name == name} for name in names}
    counts = Counter(system for found in systems.values() if len(found) == 1 for system in found)
    return next((system for system, count in counts.most_common(1) if count >= _ENOUGH), None)


def by_last_part(name: str) -> ForeignKey | None:
    """Return the entry whose last part is that of `name`, such as `trainer.num_generations` for `num_generations`.

    Of several, the one that shares the most parts with the end of the name is returned, then one without sections.
    A word such as `name` is not enough.
    """
    parts = name.replace("-", "_").split(".")
    same = [key for key in foreign_keys() if not key.is_pattern and key.name.rpartition(".")[2] == parts[-1]]
    if "_" not in parts[-1]:
        same = [key for key in same if "." not in key.name or _shared_end(key.name.split("."), parts) > 1]
    return max(same, key=lambda key: (_shared_end(key.name.split("."), parts), -key.name.count(".")), default=None)


def _shared_end(a: list[str], b: list[str]) -> int:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((number for number, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def has_section(name: str) -> bool:
    """Whether another system has keys below this name."""
    return any(key.name.startswith(f"{name}.") for key in foreign_keys())


def by_section(name: str, own_sections: frozenset[str]) -> ForeignKey | None:
    """Return the pattern that a key below a section of another system matches; `own_sections` are ours."""
    if name.partition(".")[0] in own_sections:
        return None
    return next((key for key in foreign_keys() if key.is_pattern and fnmatchcase(name, key.name)), None)


def misspelt(name: str) -> ForeignKey | None:
    """Return the entry that a misspelt name probably means: a similar name as a whole, or a similar last part."""
    names = {key.name: key for key in foreign_keys() if not key.is_pattern}
    if close := get_close_matches(name, names, n=1, cutoff=_SIMILAR):
        return names[close[0]]
    lasts = {key.name.rpartition(".")[2]: key for key in reversed(foreign_keys()) if not key.is_pattern}
    lasts = {last: key for last, key in lasts.items() if "_" in last}
    close = get_close_matches(name.rpartition(".")[2], lasts, n=1, cutoff=_SIMILAR)
    return lasts[close[0]] if close else None


def tables() -> Iterator[str]:
    """Yield the lines of the tables in docs/coming-from.md."""
    for system in dict.fromkeys(key.system for key in foreign_keys()):
        yield f"### {system}\n"
        yield f"| {system} | asyncrl | remark |\n|---|---|---|"
        for key in foreign_keys():
            if key.system == system:
                ours = ", ".join(f"`{one}`" for one in key.to) or "–"
                yield f"| `{key.name}` | {ours} | {_remark(key)} |".replace("|  |", "| |")
        yield ""


def _remark(key: ForeignKey) -> str:
    values = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in key.values.items())
    return "; ".join(filter(None, (key.note, values)))
