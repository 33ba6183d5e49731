"""Checks names and JSON that were read from files, before a name becomes a path and JSON becomes values. Pure.

Run directories, checkpoints, records and archives travel between machines and people, so their content may be made to
delete, overwrite or reveal other files. A module that reads a name from a file checks it here, or against the pattern
of its own names (`asyncrl.storage.segments`), and its error names the file and the fix.
"""

from __future__ import annotations

import json
import re
from typing import Any

from asyncrl.core.text import parse_json

MAX_NAME_BYTES = 255
"""The limit of Linux's file systems."""
MAX_DEPTH = 100
"""Maximum nesting of JSON values. Python cannot write JSON that is nested about ten times deeper."""
_NAME = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]+")
_MAX_SHOWN = 100


def checked_name(name: object) -> str:
    """Return `name` if it can only be an entry of the directory to which it is joined.

    Raises:
        ValueError: it is no text, empty, `.`, `..` or longer than 255 bytes, or it contains a slash, a control
            character or half of a character.
    """
    if not isinstance(name, str) or not _is_name(name):
        raise ValueError(f"{shown(name)} is not a valid name of a file")
    return name


def checked_path(path: object) -> str:
    """Return `path` if it can only lead below the directory to which it is joined, apart from links: valid names that
    are separated by single slashes.

    Raises:
        ValueError: it is absolute, or one of its names is not valid, see `checked_name`.
    """
    if not isinstance(path, str) or not all(map(_is_name, path.split("/"))):
        raise ValueError(f"{shown(path)} is not a valid path within a directory")
    return path


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name not in (".", "..") and len(name.encode()) <= MAX_NAME_BYTES


def shown(value: object) -> str:
    """Return the beginning of the value's `repr`, in which control characters are escaped."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def parse_file(data: bytes) -> Any:
    """Parse the JSON of a file whose value can be written again.

    Raises:
        ValueError: see `parse_json` with finite numbers; or it contains half of a character.
    """
    value = parse_json(data, finite=True, max_depth=MAX_DEPTH)
    if b"\\ud" in data.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a character (a lone surrogate)") from None
    return value
