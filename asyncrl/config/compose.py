"""From packaged YAML, the user's file and overrides to one typed Config. Hydra composes; DictConfig stops here.

The composed tree has, in this order: the schema's defaults, the chosen groups and recipe, the user's file, overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic
import yaml

from asyncrl.config import checks, rules
from asyncrl.config.keys import all_keys, nearest, neighbours, unknown_keys
from asyncrl.config.overrides import parse_overrides
from asyncrl.config.problems import Problem, errors, report
from asyncrl.config.schema import Config, Section
from asyncrl.config.sources import CONF, QUICKSTART, SCHEMA_NODE, USER_NODE, Source, SourceError, read_source
from asyncrl.failures import ConfigError

Mode = Literal["fully_async", "sync"]
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A configuration and what was found about it; no `config` if it could not even be typed."""

    config: Config | None
    problems: tuple[Problem, ...]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    def require(self) -> Config:
        """The configuration.

        Raises:
            ConfigError: there is an error among the problems; it tells all of them.
        """
        failed = errors(self.problems)
        if failed or self.config is None:
            raise ConfigError(report(failed))
        return self.config


def load_config(
    source: str | Path | None = None, overrides: Sequence[str] = (), *, mode: Mode = "fully_async"
) -> Config:
    """Compose, type and check a configuration.

    Args:
        source: a YAML file, or the name of a shipped recipe; None: the quickstart.
        overrides: `key=value` or `group=option`.
        mode: `sync` puts a barrier between generation and training (`rules.as_sync`).

    Raises:
        ConfigError: with every problem in one message.
    """
    return examine(source, overrides, mode=mode).require()


def examine(
    source: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    mode: Mode = "fully_async",
    serve_only: bool = False,
) -> Outcome:
    """Like `load_config`, with all problems and warnings as values. `serve_only`: engines without training."""
    try:
        origin = read_source(QUICKSTART if source is None else str(source))
        parsed = parse_overrides(overrides, origin)
        tree = _compose(origin, parsed.arguments)
    except SourceError as error:
        return Outcome(None, (error.problem,))
    written = {**origin.written, **parsed.written}
    found = [*parsed.problems, *_unknown(tree), *_wrong_mode(tree, written, mode)]
    config, mistyped = _typed(tree | {"mode": "fully_async"})
    found += mistyped
    if config is not None:
        config = rules.as_sync(config) if mode == "sync" else config
        found += rules.problems(config, _given(written), serve_only=serve_only)
        found += checks.problems(config, serve_only=serve_only)
    places = {**origin.places, **dict.fromkeys(parsed.written, "command line")}
    return Outcome(config, tuple(_located(found, places)))


def to_yaml(config: Config) -> str:
    """Every key with its value; as a file, it composes to the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _compose(origin: Source, arguments: Sequence[str]) -> Tree:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance()
    store.store(name=SCHEMA_NODE, node=Config().model_dump(mode="json"))
    if origin.node is not None:
        store.store(name=USER_NODE, node=origin.node)
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            composed = compose(origin.primary, overrides=[*origin.search_path(), *arguments])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or origin.name)
        raise SourceError(Problem(key, "?", _first_line(error), "mend the ${...} or give the value")) from error
    except HydraException as error:
        raise SourceError(
            Problem(origin.name, "?", _first_line(error), f"see the groups and recipes in {CONF}")
        ) from error
    assert isinstance(tree, dict)  # the schema node is a mapping, and merging keeps it one
    return {str(key): value for key, value in tree.items()}


def _first_line(error: Exception) -> str:
    return "Hydra: " + " ".join(str(error).split("\n    full_key")[0].split())


def _unknown(tree: Tree) -> Iterator[Problem]:
    """Problems with keys the schema does not have, which are taken out of `tree` so that the rest can be looked at."""
    for key, value in list(unknown_keys(tree)):
        _remove(tree, key.split("."))
        if meant := nearest(key):
            fix = f"did you mean {meant}?"
        else:
            section, names = neighbours(key)
            fix = f"{section or 'the top'} has {', '.join(names)}"
        yield Problem(key, value, "there is no such key, so it would have no effect", fix)


def _remove(tree: Tree, path: Sequence[str]) -> None:
    """Delete `path` from nested mappings. Names of the user's own may hold dots, so parts are joined until one fits."""
    for end in range(1, len(path) + 1):
        name = ".".join(path[:end])
        if name in tree:
            if end == len(path):
                del tree[name]
            else:
                _remove(tree[name], path[end:])
                if not tree[name]:
                    del tree[name]
            return


def _wrong_mode(tree: Tree, written: Mapping[str, Any], mode: Mode) -> Iterator[Problem]:
    if "mode" in written and tree.get("mode") != mode:
        yield Problem(
            "mode",
            tree.get("mode"),
            f"`asyncrl launch {mode}` says otherwise",
            "leave the key out; the command sets it",
        )


def _typed(tree: Tree) -> tuple[Config | None, list[Problem]]:
    """Strict JSON typing: an integer is no text and true is no integer; a list is fine where a tuple is wanted."""
    try:
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except pydantic.ValidationError as error:
        return None, list(_mistyped(error))


def _mistyped(error: pydantic.ValidationError) -> Iterator[Problem]:
    known = all_keys()
    for detail in error.errors(include_url=False):
        names = [str(part) for part in detail["loc"]]
        while names and ".".join(names) not in known:  # an item of a list, or a branch of a union
            names.pop()
        key = known.get(".".join(names))
        if key is not None and _in_entry(detail["loc"]):
            yield _mistyped_item(detail)
            continue
        if key is None:
            yield Problem("configuration", "?", detail["msg"], "see docs/config.md")
            continue
        if detail["type"] == "missing":
            yield Problem(key.name, None, "it is required here and was not given", f"give {key.kind}: {key.doc}")
            continue
        default = "" if key.section or key.default is ... else f" (default {json.dumps(key.default)})"
        consequence = f"it cannot be used: {detail['msg'][0].lower()}{detail['msg'][1:]}"
        yield Problem(key.name, detail["input"], consequence, _fix(key.kind, detail) + default)


def _fix(kind: str, detail: Any) -> str:
    """For a value that is not `kind`."""
    given = detail["input"]
    example = f", e.g. [{given}]" if detail["type"] == "tuple_type" and isinstance(given, (str, int, float)) else ""
    if isinstance(given, str) and "one of " in kind:
        options = kind.partition("one of ")[2].split(", ")
        close = get_close_matches(given, options, n=1)
        if close and close[0] != given:
            return f"did you mean {f'[{close[0]}]' if example else close[0]}? It is {kind}"
        example = example if close else ""
    return f"give {kind}{example}"


def _in_entry(loc: Sequence[str | int]) -> bool:
    """It is in an entry of a list of sections, or such an entry."""
    numbers = [place for place, part in enumerate(loc) if isinstance(part, int)]
    return bool(numbers) and _section_at(loc[: numbers[0] + 1]) is not None


def _mistyped_item(detail: Any) -> Problem:
    """Of a key in an entry of a list, which tables of keys do not have."""
    loc = [str(part) for part in detail["loc"]]
    fix = "see docs/config.md"
    if detail["type"] == "extra_forbidden" and (section := _section_at(detail["loc"][:-1])) is not None:
        close = get_close_matches(loc[-1], section.model_fields, n=1)
        fix = f"did you mean {close[0]}?" if close else f"it has {', '.join(section.model_fields)}"
        return Problem(".".join(loc), detail["input"], "there is no such key", fix)
    if detail["type"] == "missing":
        return Problem(".".join(loc), None, "it is required here and was not given", "give it")
    consequence = f"it cannot be used: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    return Problem(".".join(loc), detail["input"], consequence, fix)


def _section_at(loc: Sequence[str | int]) -> type[Section] | None:
    """The section that a place in the configuration holds."""
    kind: Any = Config
    for part in loc:
        if isinstance(part, int):
            kind = get_args(kind)[0] if get_args(kind) else None
        elif isinstance(kind, type) and issubclass(kind, Section) and part in kind.model_fields:
            kind = kind.model_fields[part].annotation
        else:
            return None
        options = [option for option in get_args(kind) if option is not type(None)]
        if type(None) in get_args(kind) and len(options) == 1:
            (kind,) = options
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _given(written: Mapping[str, Any]) -> set[str]:
    known = all_keys()
    return {key for key, value in written.items() if key in known and value != known[key].default}


def _located(found: Sequence[Problem], places: Mapping[str, str]) -> Iterator[Problem]:
    for problem in found:
        yield problem if problem.where else replace(problem, where=_place(problem.key, places))


def _place(key: str, places: Mapping[str, str]) -> str:
    below = next((place for name, place in places.items() if name.startswith(f"{key}.")), "")
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places[key] if key else below
