"""Where a configuration starts: a shipped recipe or the user's YAML file, made ready for Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

import asyncrl
from asyncrl.config.keys import leaves
from asyncrl.config.problems import Problem

CONF = Path(asyncrl.__file__).parent / "conf"
QUICKSTART = "quickstart"
BASE = "base"
"""The packaged config under every other: the schema's defaults and a place for each group."""
SCHEMA_NODE = "schema"
USER_NODE = "user"


class SourceError(Exception):
    """A problem that leaves nothing to go on with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Source:
    """What Hydra gets as its primary config, and what the user wrote where."""

    name: str
    primary: str
    node: dict[str, Any] | None = None
    """The user's file with its defaults list completed; None: a shipped recipe."""
    folder: Path | None = None
    """Where further group options of the user may lie."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """What the file sets, by dotted key."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Dotted key → `file line N`."""

    def search_path(self) -> list[str]:
        """The Hydra override that makes `folder` known."""
        if self.folder is None:
            return []
        return [f"hydra.searchpath=[{quoted(f'file://{self.folder}')}]"]

    def options(self, group: str) -> list[str]:
        """What can be chosen for `group`."""
        folders = [CONF / group, *([self.folder / group] if self.folder else [])]
        return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def quoted(text: str) -> str:
    """`text` as a string in Hydra's override grammar, where a backslash is itself unless a quote follows."""
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text) + '"'


def groups() -> list[str]:
    """Names of the packaged groups."""
    return sorted(entry.name for entry in CONF.iterdir() if entry.is_dir() and any(entry.glob("*.yaml")))


def recipes() -> list[str]:
    """Names of the packaged configs that can be launched as they are."""
    return sorted(file.stem for file in CONF.glob("*.yaml") if file.stem != BASE)


def read_source(name: str) -> Source:
    """The file or the shipped recipe called `name`.

    Raises:
        SourceError: neither exists, or the file is not a YAML mapping.
    """
    file = Path(name).expanduser()
    if file.is_file():
        return _read_file(name, file)
    if name in recipes():
        return Source(name, primary=name)
    raise SourceError(Problem("config", name, "there is no such file", _other_source(name, file)))


def _other_source(name: str, file: Path) -> str:
    folder = file.parent
    files = (
        [str(folder / f.name) for pattern in ("*.yaml", "*.yml") for f in folder.glob(pattern)]
        if folder.is_dir()
        else []
    )
    close = get_close_matches(name, [*recipes(), *files], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}Give a YAML file or one of the recipes {', '.join(recipes())}; overrides are written key=value"


def _read_file(name: str, file: Path) -> Source:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        places = dict(_places(file))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        text = " ".join(str(error).split())
        raise SourceError(Problem("config", name, f"it cannot be read as YAML: {text}", "mend the file")) from error
    if not isinstance(tree, dict):
        raise SourceError(Problem("config", name, "it is not a mapping of keys to values", "write it as `key: value`"))
    node: dict[str, Any] = {str(key): value for key, value in tree.items()}
    written = leaves({key: value for key, value in node.items() if key != "defaults"})
    node["defaults"] = _defaults(node.get("defaults"), name)
    return Source(name, USER_NODE, node, file.parent.resolve(), written, places)


def _defaults(listed: Any, name: str) -> list[Any]:
    """The file's defaults list as Hydra needs it.

    It starts from `base` unless it names a recipe, its choices of packaged groups override those of the recipe, and
    the file itself comes after what it builds on. Overrides must come last in Hydra's lists.
    """
    if listed is None:
        return [BASE, "_self_"]
    if not isinstance(listed, list):
        fix = "write it as a list: `defaults: [quickstart, {algorithm: grpo_kl}]`"
        raise SourceError(Problem("defaults", listed, f"{name}: Hydra's defaults are a list", fix))
    known = groups()
    starts: list[Any] = []
    choices: list[Any] = []
    for entry in listed:
        if not isinstance(entry, Mapping) or len(entry) != 1:
            starts.append(entry)
            continue
        group, option = next(iter(entry.items()))
        bare = str(group).removeprefix("override ").strip().removeprefix("/")
        if bare in known:
            choices.append({f"override /{bare}": option})
        else:
            starts.append(dict(entry))
    if not any(entry in (BASE, *recipes()) for entry in starts):
        starts.insert(0, BASE)
    if "_self_" not in starts:
        starts.append("_self_")
    return [*starts, *choices]


def _places(file: Path) -> Iterator[tuple[str, str]]:
    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from _node_places(root, "", file.name)


def _node_places(node: yaml.MappingNode, prefix: str, name: str) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        yield dotted, f"{name} line {key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            yield from _node_places(value, f"{dotted}.", name)
