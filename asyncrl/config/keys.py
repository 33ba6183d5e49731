"""Every key of the schema by its dotted name, the key that an unknown name means, and what is wrong with a value. Pure.

Keys of entries of a list have `*` in the place of the entry's number: `rollout.multi_turn.tools.*.class_name`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from asyncrl.config import foreign_keys
from asyncrl.config.foreign_keys import ForeignKey
from asyncrl.config.interpolation import secret_name, without_secrets
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import ConfigSection, ImportPath

_TYPES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Any: "anything",
    type(None): "null",
}
_MOST_LONGER = 3
_SIMILAR = 0.75
"""Similarity above which a key is taken for a misspelt one of the same section."""
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "weight_sync.probe": ("weight_sync.verify", "weight_sync.max_mismatch_kl"),
    "rollout.engine": ("rollout.engine_kwargs",),
    "trainer.context_parallel_size": ("trainer.ulysses_sequence_parallel_size",),
}
"""Names of keys and sections that do not exist, and the keys that they mean: others are spelt more similarly."""
_OTHER_VALUES: Mapping[str, str] = {"gpu": "cuda"}
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
    if annotation == ImportPath:
        return "module:name or path/file.py:name"
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
    words = [one for one in constraints if isinstance(one, str)]  # that stand for a value
    return " or ".join([" ".join([_TYPES[annotation], " and ".join(bounds)]).strip(), *words])


def choices(kind: str) -> list[str]:
    """Return the values that a type in words (`describe`) lists; empty if it lists none."""
    parts = [part.removeprefix("one of ") for part in kind.split(" or ") if part.startswith("one of ")]
    return [value for part in parts for value in part.split(", ")]


def unknown_keys(
    tree: Mapping[str, Any], section: type[ConfigSection] = Config, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths and values in `tree` that are not in the schema.

    An unknown section whose name resembles a known one, and is none of another system, is yielded as a whole. Every
    other unknown mapping is yielded leaf by leaf, because the leaves show better which keys the user meant.
    """
    known = all_keys()
    for name, value in tree.items():
        here = (*path, str(name))
        key = known.get(".".join(here))
        if key is None:
            meant = get_close_matches(str(name), list(section.model_fields))
            if isinstance(value, Mapping) and value and (not meant or foreign_keys.has_section(".".join(here))):
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


def advice(unknown: str) -> str:
    """Return the fix for a key that does not exist: the key that the user means, or what the section has.

    A key of another system comes before similar spellings: `trainer.logger` of verl is `logging.sinks`.
    """
    for name, meant in _OTHER_NAMES.items():
        if f"{unknown}.".startswith(f"{name}."):
            return f"did you mean {' or '.join(meant)}?"
    if foreign := foreign_keys.exact(unknown):
        return _translated(unknown, foreign)
    if longer := _longer(unknown):
        return f"did you mean {' or '.join(longer)}?"
    if sibling := _sibling(unknown):
        return f"did you mean {sibling}?"
    namesake = _namesake(unknown)
    if namesake and _shared_sections(namesake, unknown):
        return f"did you mean {namesake}?"
    if foreign := foreign_keys.by_last_part(unknown):
        return _translated(unknown, foreign)
    if close := namesake or _similar(unknown):
        return f"did you mean {close}?"
    if foreign := foreign_keys.misspelt(unknown) or foreign_keys.by_section(unknown, frozenset(Config.model_fields)):
        return _translated(unknown, foreign)
    section, names = known_section(unknown)
    return f"{section or 'the top level'} has {', '.join(names)}"


def _translated(unknown: str, foreign: ForeignKey) -> str:
    parent, _, last = unknown.rpartition(".")
    if foreign.name in all_keys():  # rollout.nn is our rollout.n, and not verl's
        return f"did you mean {foreign.name}?"
    ours = foreign.targets(unknown)[0] if foreign.to else ""
    if f"{parent}.{ours.rpartition('.')[2]}" in all_keys():  # critic.optim.learning_rate is critic.optim.lr
        ours = f"{parent}.{ours.rpartition('.')[2]}"
    if ours.rpartition(".")[2] == last and not foreign.note and unknown != foreign.name:
        return f"did you mean {ours}?"
    return foreign.advice(ours)


def _own_names() -> list[str]:
    return [name for name in all_keys() if "*" not in name]


def _longer(unknown: str) -> list[str]:
    """Return the keys of the same section whose names end with the unknown one, totals first: `total_epochs` and
    `ppo_epochs` for `epochs`."""
    parent, _, last = unknown.rpartition(".")
    siblings = [name for name in _own_names() if name.rpartition(".")[0] == parent and name.endswith(f"_{last}")]
    return sorted(siblings, key=lambda name: not name.removeprefix(f"{parent}.").startswith("total_"))[:_MOST_LONGER]


def _sibling(unknown: str) -> str | None:
    parent, _, last = unknown.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in _own_names() if name.rpartition(".")[0] == parent}
    close = get_close_matches(last, siblings, n=1, cutoff=_SIMILAR)
    return siblings[close[0]] if close else None


def _namesake(unknown: str) -> str | None:
    """Return the key of the same name that shares most sections with `unknown`; of several, the first in the schema."""
    namesakes = [name for name in _own_names() if name.rpartition(".")[2] == unknown.rpartition(".")[2]]
    return max(namesakes, key=lambda name: _shared_sections(name, unknown), default=None)


def _similar(unknown: str) -> str | None:
    """Return a key whose own name is similar; the names of sections, which many keys share, do not count."""
    by_last = {name.rpartition(".")[2]: name for name in reversed(_own_names())}
    close = get_close_matches(unknown.rpartition(".")[2], by_last, n=1, cutoff=0.8)
    return by_last[close[0]] if close else None


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


def validate(tree: dict[str, Any]) -> tuple[Config | None, list[ConfigProblem]]:
    """Validate with strict JSON types: an integer is no text and true is no integer; a list is valid for a tuple."""
    try:
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except pydantic.ValidationError as error:
        problems = [_type_problem(detail) for detail in error.errors(include_url=False)]
        return None, list({problem.key: problem for problem in reversed(problems)}.values())[::-1]  # one of a union


def _type_problem(detail: Any) -> ConfigProblem:
    known = all_keys()
    path = list(detail["loc"])
    parts = ["*" if isinstance(part, int) else str(part) for part in path]
    while parts and ".".join(parts) not in known:  # an item of a list, or a branch of a union
        parts.pop()
    if not parts:
        return ConfigProblem("configuration", "?", detail["msg"], "see docs/config.md")
    key, given = known[".".join(parts)], without_secrets(detail["input"], secret_name(path))
    name = ".".join(map(str, path[: len(parts)]))
    if detail["type"] == "extra_forbidden" and key.section is not None:  # in an entry of a list
        unknown, names = str(path[-1]), list(key.section.model_fields)
        close = get_close_matches(unknown, names, n=1)
        fix = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
        return ConfigProblem(f"{name}.{unknown}", given, "there is no such key", fix)
    if detail["type"] == "missing":
        return ConfigProblem(name, None, "it is required here and was not given", f"give {key.kind}: {key.doc}")
    # Validators of sections raise "consequence; fix".
    message, _, fix = detail["msg"].removeprefix("Value error, ").partition("; ")
    if detail["type"] == "literal_error":  # of a union, pydantic names the values of the first branch
        message = "there is no such value"
    default = "" if key.section or key.default is ... else f" (default {json.dumps(key.default)})"
    fix = fix or _valid_value(key.kind, given, is_list=detail["type"] == "tuple_type")
    return ConfigProblem(name, given, f"it cannot be used: {message[0].lower()}{message[1:]}", fix + default)


def _valid_value(kind: str, given: Any, *, is_list: bool) -> str:
    """Return the fix for a value that is not of `kind`."""
    if isinstance(given, str):
        named = [value for value in choices(kind) if value == _OTHER_VALUES.get(given) or value.startswith(f"{given}_")]
        close = named or get_close_matches(given, choices(kind), n=1)
        if close and close[0] != given:
            return f"did you mean {' or '.join(close)}? It is {kind}"
    example = f", e.g. [{given}]" if is_list and isinstance(given, (str, int, float)) else ""
    return f"give {kind}{example}"
