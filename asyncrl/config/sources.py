"""Where the values of a configuration come from: files with their lines, groups, recipes, and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.yaml_files import read_yaml

COMMAND_LINE, DEFAULT, SYNC, EVALUATION = "command line", "default", "asyncrl launch sync", "evaluation"
ARGUMENT = "argument of the application"
QUANTIZATION, DTYPE = "rollout.quantization", "a dtype of 16 bits"


def lines(node: yaml.Node | None, prefix: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each dotted key of a file, and each number of a list's entry, with its line."""
    for number, entry in enumerate(node.value if isinstance(node, yaml.SequenceNode) else ()):
        yield f"{prefix}{number}", f"{name} line {entry.start_mark.line + 1}"
        yield from lines(entry, f"{prefix}{number}.", name)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{key.value}", f"{name} line {key.start_mark.line + 1}"
        yield from lines(value, f"{prefix}{key.value}.", name)


def sources_of_files(
    read: Sequence[tuple[str, str]], packaged: Path, own: Path | None, known: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the source of each key that files set.

    Args:
        read: names of files without suffix, with the section that each sets ("": the top), in the order of composition.
        packaged: the folder of packaged files; a group's option is named `group=option`, and a recipe by its name.
        own: the folder of the user's files.
        known: sources of files that have been read already, by name.
    """
    found: dict[str, str] = {}
    for name, section in read:
        prefix = f"{section}." if section else ""
        for key, place in known.get(name, _places(name, packaged, own)).items():
            found = {other: one for other, one in found.items() if not other.startswith(f"{prefix}{key}.")}
            found[prefix + key] = place
    return found


def _places(name: str, packaged: Path, own: Path | None) -> dict[str, str]:
    """Return the source of each scalar or list of a file; empty if it is no YAML file."""
    for folder in filter(None, (own, packaged)):
        if (file := (folder / name).with_suffix(".yaml")).is_file():
            root = yaml.compose(read_yaml(file), Loader=yaml.SafeLoader)
            group, _, option = name.rpartition("/")
            place = "" if folder != packaged else f"{group}={option}" if group else f"recipe {name}"
            return {key: place or line for key, line in lines(root, "", file.name) if _is_leaf(root, key)}
    return {}


def _is_leaf(node: yaml.Node | None, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            return False
        node = next((value for name, value in node.value if name.value == part), None)
    return not isinstance(node, yaml.MappingNode) and not key.startswith("defaults")


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a key, which may be that of the section it is in, or those of the values in it."""
    below = dict.fromkeys(place for name, place in sources.items() if name.startswith(f"{key}."))
    if below:
        own = [sources[key]] if key in sources else []
        return ", ".join(dict.fromkeys([*own, *below]))
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return sources.get(key, DEFAULT)


def commented_yaml(values: Mapping[str, tuple[Any, str]], *, above: bool = False) -> str:
    """Return values by dotted key as nested YAML, each with a comment behind it, or `above` it.

    The keys of a section follow each other.
    """
    text: list[str] = []
    open_sections: list[str] = []
    for name, (value, comment) in values.items():
        *sections, last = name.split(".")
        pairs = zip(sections, open_sections, strict=False)
        depth = next((level for level, (a, b) in enumerate(pairs) if a != b), min(len(sections), len(open_sections)))
        text += [f"{'  ' * level}{sections[level]}:" for level in range(depth, len(sections))]
        open_sections, indent = sections, "  " * len(sections)
        line = f"{indent}{last}: {inline(value)}"
        text += [f"{indent}# {comment}", line] if above else [f"{line}  # {comment}"]
    return "\n".join(text)


def inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
