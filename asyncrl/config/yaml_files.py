"""Reads YAML files within limits, so that no file can occupy the memory or the processor.

A few aliases of aliases stand for billions of values, deep nesting exceeds Python's recursion limit, an integer of many
digits takes quadratic time, and so do nested `${…}`. The events of YAML's parser show all of them before any value is
built.
"""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 256 << 10
"""Limit for a file."""
MAX_DEPTH = 50
"""Limit for nested lists and mappings."""
MAX_EXPANDED = 1_000_000
"""Limit for the characters of a file's values if every alias is replaced by what it refers to. Each value counts as
`_VALUE` characters in addition to its text, and a text with `${` counts `_REFERENCE` times, because OmegaConf takes
about 0.2 ms for a value and 40 µs for a character of a reference."""
_VALUE, _PLAIN_VALUE, _REFERENCE = 200, 50, 50
"""The first is for files that OmegaConf reads, the second for others, such as traces of thousands of turns."""
MAX_NUMBER = 300
"""Limit for the characters of a number, with which every number fits a float. Hexadecimal integers and those to the
base 60 can be too long to be shown."""
MAX_REFERENCES = 20
"""Limit for the `${` in a value."""
_NUMBERS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float"))
_TYPED = _NUMBERS | {f"tag:yaml.org,2002:{name}" for name in ("bool", "null", "timestamp", "binary")}
"""The tags of values whose text has to fit the tag."""


def read_yaml(file: Path, value_size: int = _VALUE) -> str:
    """Return the text of a YAML file after checking that its values are within the limits.

    Args:
        value_size: what each value counts in addition to its text.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read, is not a regular file, or is not UTF-8.
        yaml.YAMLError: it is not YAML, or exceeds a limit; the message names the limit.
    """
    if file.exists() and not file.is_file():  # to open a pipe could block forever
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    with file.open("rb") as opened:
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise yaml.YAMLError(f"{file} has more than {MAX_BYTES >> 10} KiB, the limit for a YAML file")
    text = data.decode("utf-8")
    _check(text, file, value_size)
    return text


class NamedText(io.StringIO):
    """A text whose file YAML's errors name."""

    def __init__(self, text: str, file: Path) -> None:
        super().__init__(text)
        self.name = str(file)


def load_yaml(file: Path) -> Any:
    """Return the values of a YAML file. Raises as `read_yaml` does."""
    text = read_yaml(file, _PLAIN_VALUE)
    try:
        return yaml.safe_load(NamedText(text, file))
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML has no error of its own for a text that does not fit its tag, such as the date 2024-02-30.
        raise yaml.YAMLError(f"{file}: a value cannot be read: {type(error).__name__}: {error}") from None


def _check(text: str, file: Path, value_size: int) -> None:
    loader = yaml.SafeLoader("")
    expanded = 0
    nesting: list[tuple[str | None, int]] = []
    """For each open list or mapping its anchor, and `expanded` before it."""
    sizes: dict[str, int] = {}
    for event in yaml.parse(NamedText(text, file), Loader=yaml.SafeLoader):
        before = expanded
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in nesting):
                raise _refusal(file, event, f"the alias *{event.anchor} refers to a value that contains it")
            expanded += sizes.get(event.anchor or "", value_size)
        elif isinstance(event, yaml.ScalarEvent):
            expanded += value_size + len(event.value) * (_REFERENCE if "${" in event.value else 1)
            if len(event.value) > MAX_NUMBER:
                has_tag = event.tag not in (None, "!")  # as PyYAML's composer decides
                tag = event.tag if has_tag else loader.resolve(yaml.ScalarNode, event.value, event.implicit)
                if tag in _NUMBERS:
                    raise _refusal(file, event, f"a number has more than {MAX_NUMBER} characters")
            if event.tag in _TYPED:
                _check_fits_tag(loader, event, file)
            if event.value.count("${") > MAX_REFERENCES:
                raise _refusal(file, event, f"a value has more than {MAX_REFERENCES} references ${{…}}")
            if event.anchor is not None:
                sizes[event.anchor] = expanded - before
        elif isinstance(event, yaml.CollectionStartEvent):
            if event.tag in _TYPED:  # PyYAML takes the value of the key `=`
                raise _refusal(file, event, f"a list or mapping has the tag {event.tag}")
            expanded += value_size
            nesting.append((event.anchor, before))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = nesting.pop()
            if anchor is not None:
                sizes[anchor] = expanded - start
        if len(nesting) > MAX_DEPTH:
            raise _refusal(file, event, f"its values are nested more than {MAX_DEPTH} levels deep")
        if expanded > MAX_EXPANDED:
            why = (
                f"its values exceed {MAX_EXPANDED} characters once its aliases are expanded, where each value counts "
                f"as {value_size} more, and each character of a text with ${{…}} as {_REFERENCE}"
            )
            raise _refusal(file, event, why)


def _check_fits_tag(loader: yaml.SafeLoader, event: yaml.ScalarEvent, file: Path) -> None:
    try:
        loader.construct_object(yaml.ScalarNode(str(event.tag), event.value))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # PyYAML has no error of its own for `!!bool no!`
        raise _refusal(file, event, f"a value does not fit its tag {event.tag}") from None


def _refusal(file: Path, event: yaml.Event, why: str) -> yaml.YAMLError:
    line = f" line {event.start_mark.line + 1}" if event.start_mark is not None else ""
    return yaml.YAMLError(f"{file}{line}: {why}")
