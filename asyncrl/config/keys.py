"""Every key of the schema by its dotted name, and the nearest one to a name that is none of them. Pure."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from asyncrl.config.schema import Config, Section

_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Any: "anything",
    type(None): "null",
}
_BOUNDS: tuple[tuple[type, str, str], ...] = ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key a user can set."""

    name: str
    kind: str
    """What it takes, in words: `an integer > 0`, `one of drop, mask, keep`."""
    default: Any
    """As JSON has it; `...`: required, within a section that is off by default."""
    doc: str
    section: type[Section] | None
    """The class of its keys, if it is a section."""
    takes_text: bool
    """Takes free text, no number and no list, so that `key=007` on the command line means the text."""
    open_ended: bool
    """A mapping of your own below it: any key goes."""


@cache
def all_keys() -> Mapping[str, Key]:
    """Sections and keys by dotted name, in the schema's order."""
    return {key.name: key for key in _walk(Config, "", Config())}


def _walk(section: type[Section], prefix: str, defaults: Section | None) -> Iterator[Key]:
    """The keys of `section` whose values by default are those of `defaults`; None: it is off by default."""
    for name, field in section.model_fields.items():
        if defaults is not None:
            # Where a section holds another, its default may differ from that section's own: critic.optim.lr.
            default = getattr(defaults, name)
        else:
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
        key = _key(prefix + name, field, default)
        yield key
        if key.section is not None:
            yield from _walk(key.section, f"{key.name}.", default if isinstance(default, Section) else None)


def _key(name: str, field: FieldInfo, default: Any) -> Key:
    options = _options(field.annotation)
    section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
    return Key(
        name=name,
        kind=describe(field.annotation, tuple(field.metadata)),
        default=_plain(default),
        doc=field.description or "",
        section=section,
        takes_text=str in options and not {int, float, bool, tuple} & {get_origin(one) or one for one in options},
        open_ended=any(get_origin(option) is dict for option in options),
    )


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type in words."""
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
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section of keys"
    return _NAMES[annotation] + _bounds(metadata)


def _bounds(metadata: tuple[Any, ...]) -> str:
    found = []
    for item in metadata:
        for constraint in getattr(item, "metadata", [item]):
            found += [
                f"{sign} {getattr(constraint, name)}" for kind, sign, name in _BOUNDS if isinstance(constraint, kind)
            ]
    return f" {' and '.join(found)}" if found else ""


def unknown_keys(
    tree: Mapping[str, Any], section: type[Section] = Config, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted names and values in `tree` that the schema does not have.

    A section whose name is a typo of a known one is told once, as a section; any other unknown mapping leaf by leaf,
    because its leaves say more about what was meant.
    """
    known = all_keys()
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        key = known.get(dotted)
        if key is None:
            siblings = list(section.model_fields)
            if isinstance(value, Mapping) and value and not get_close_matches(str(name), siblings):
                yield from _leaves(value, f"{dotted}.")
            else:
                yield dotted, value
        elif key.section is not None and isinstance(value, Mapping):
            yield from unknown_keys(value, key.section, f"{dotted}.")


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names of what `tree` sets; mappings that are values themselves stay whole."""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    known = all_keys()
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        key = known.get(dotted)
        if isinstance(value, Mapping) and value and not (key and key.open_ended):
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def nearest(unknown: str) -> str | None:
    """The key most likely meant: the same place misspelt, the same name elsewhere, or anything close."""
    known = all_keys()
    parent, _, leaf = unknown.rpartition(".")
    siblings = {name: name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent}
    if close := get_close_matches(leaf, siblings.values(), n=1, cutoff=0.7):
        return next(name for name, sibling in siblings.items() if sibling == close[0])
    namesakes = [name for name in known if name.rpartition(".")[2] == leaf]
    if namesakes:
        return max(namesakes, key=lambda name: _shared_sections(name, unknown))  # of several, the schema's first
    if close := get_close_matches(unknown, known, n=1, cutoff=0.75):
        return close[0]
    by_leaf = {name.rpartition(".")[2]: name for name in known}
    close = get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[close[0]] if close else None


def _shared_sections(a: str, b: str) -> int:
    pairs = list(zip(a.split(".")[:-1], b.split(".")[:-1], strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def neighbours(unknown: str) -> tuple[str, list[str]]:
    """The deepest known section on the way to `unknown` ("" is the top), and the keys it has."""
    known = all_keys()
    parent = unknown.rpartition(".")[0]
    while parent and not (parent in known and known[parent].section):
        parent = parent.rpartition(".")[0]
    section = known[parent].section if parent else Config
    assert section is not None  # the loop only stops at a section or at the top
    return parent, list(section.model_fields)
