"""Every key of the schema by its dotted name, and the nearest key to an unknown name. Pure.

Keys of entries of a list have `*` in the place of the entry's number: `rollout.multi_turn.tools.*.class_name`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from asyncrl.config.schema import Config
from asyncrl.config.sections.base import ConfigSection

_TYPES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Any: "anything",
    type(None): "null",
}
_BOUNDS: tuple[tuple[type, str, str], ...] = ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key that users can set."""

    name: str
    kind: str
    """Its type in words: `an integer > 0`, `one of drop, mask, keep`."""
    default: Any
    """Its default as JSON; `...` if it is required within a section that is off by default."""
    doc: str
    section: type[ConfigSection] | None
    """The class of its keys, if it is a section."""
    takes_text: bool
    """Whether its values are free text, so that `key=007` on the command line means the text 007."""
    open_ended: bool
    """Whether it is a mapping with arbitrary keys."""


@cache
def all_keys() -> Mapping[str, ConfigKey]:
    """Return sections and keys by dotted name, in the schema's order."""
    return {key.name: key for key in _walk(Config, "", Config())}


def _walk(section: type[ConfigSection], prefix: str, defaults: ConfigSection | None) -> Iterator[ConfigKey]:
    """Yield the keys of `section`, whose values by default are `defaults` (None: the section is off by default)."""
    for name, field in section.model_fields.items():
        if defaults is not None:
            # The default of a section within a section may differ from its class's: critic.optim.lr.
            default = getattr(defaults, name)
        else:
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
        key, entry = _key(prefix + name, field, default)
        yield key
        if entry is not None:
            yield ConfigKey(f"{key.name}.*", "a section of keys", ..., "", entry, False, False)
            yield from _walk(entry, f"{key.name}.*.", None)
        elif key.section is not None:
            yield from _walk(key.section, f"{key.name}.", default if isinstance(default, ConfigSection) else None)


def _key(name: str, field: FieldInfo, default: Any) -> tuple[ConfigKey, type[ConfigSection] | None]:
    """Return the key and, if it is a list of sections, the class of its entries."""
    options = _options(field.annotation)
    section = next((option for option in options if _is_section(option)), None)
    entry = next((get_args(option)[0] for option in options if get_origin(option) is tuple), None)
    key = ConfigKey(
        name=name,
        kind=describe(field.annotation, tuple(field.metadata)),
        default=_as_json(default),
        doc=field.description or "",
        section=section,
        takes_text=str in options and not {int, float, bool, tuple} & {get_origin(one) or one for one in options},
        open_ended=any(get_origin(option) is dict for option in options),
    )
    return key, entry if _is_section(entry) else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigSection)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _as_json(value: Any) -> Any:
    if isinstance(value, ConfigSection):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return a type in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], tuple(args[1:]) + metadata)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option, metadata) for option in args)
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in args)
    if origin is dict:
        return "a mapping"
    if origin is tuple:
        item = describe(args[0])
        return f"a list, each {item}" if args[-1] is ... else f"a list of {len(args)}, each {item}"
    if _is_section(annotation):
        return "a section of keys"
    constraints = [one for item in metadata for one in getattr(item, "metadata", [item])]
    bounds = [
        f"{sign} {getattr(one, name)}" for one in constraints for kind, sign, name in _BOUNDS if type(one) is kind
    ]
    return " ".join([_TYPES[annotation], " and ".join(bounds)]).strip()


def unknown_keys(
    tree: Mapping[str, Any], section: type[ConfigSection] = Config, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths and values in `tree` that are not in the schema.

    An unknown section whose name resembles a known one is yielded as a whole. Every other unknown mapping is yielded
    leaf by leaf, because the leaves show better which keys the user meant.
    """
    known = all_keys()
    for name, value in tree.items():
        here = (*path, str(name))
        key = known.get(".".join(here))
        if key is None:
            if isinstance(value, Mapping) and value and not get_close_matches(str(name), list(section.model_fields)):
                yield from _leaves(value, here)
            else:
                yield here, value
        elif key.section is not None and isinstance(value, Mapping):
            yield from unknown_keys(value, key.section, here)


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in `tree` by dotted key; a mapping that is the value of a key is not flattened."""
    return {".".join(path): value for path, value in _leaves(tree)}


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    known = all_keys()
    for name, value in tree.items():
        here = (*path, str(name))
        key = known.get(".".join(here))
        if isinstance(value, Mapping) and value and not (key and key.open_ended):
            yield from _leaves(value, here)
        else:
            yield here, value


def nearest(unknown: str) -> str | None:
    """Return the most likely key: a misspelt sibling, the same name elsewhere, or another similar name."""
    known = [name for name in all_keys() if "*" not in name]
    parent, _, leaf = unknown.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    if close := get_close_matches(leaf, siblings, n=1, cutoff=0.7):
        return siblings[close[0]]
    if namesakes := [name for name in known if name.rpartition(".")[2] == leaf]:
        return max(namesakes, key=lambda name: _shared_sections(name, unknown))  # of several, the first in the schema
    if close := get_close_matches(unknown, known, n=1, cutoff=0.75):
        return close[0]
    by_leaf = {name.rpartition(".")[2]: name for name in known}
    close = get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[close[0]] if close else None


def _shared_sections(a: str, b: str) -> int:
    pairs = zip(a.split(".")[:-1], b.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def known_section(unknown: str) -> tuple[str, list[str]]:
    """Return the deepest known section on the path to `unknown` ("" is the top), and its keys."""
    known = all_keys()
    parent = unknown.rpartition(".")[0]
    while parent and not (parent in known and known[parent].section):
        parent = parent.rpartition(".")[0]
    return parent, list(((known[parent].section if parent else None) or Config).model_fields)
