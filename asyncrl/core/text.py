"""Text, JSON and names of unknown origin: from models, tools, users, environments, agents, data sets and files. Pure.

JSON may contain a lone surrogate, half of a pair (`"\\ud83d"`), which no tokenizer accepts and UTF-8 cannot encode. It
is replaced where it enters: in the calls of a model, the results of tools, the replies of users and environments, the
requests of agents, and the messages of errors. A row of a data set is refused instead, because its author can mend it.

Run directories, checkpoints, records and archives travel between machines and people, so their content may be made to
delete, overwrite or reveal other files. A module that reads a name from a file checks it here, or against the pattern
of its own names (`asyncrl.storage.segments`), and its error names the file and the fix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of JSON values. Code that walks them needs some frames of Python's stack for each level."""
MAX_FILE_DEPTH = 100
"""Maximum nesting in files of runs. Python cannot write JSON that is nested about ten times deeper."""
MAX_DIGITS = 4300
"""Maximum number of digits of an integer. Python refuses to convert longer ones, because that takes quadratic time."""
MAX_NAME_BYTES = 255
"""The limit of Linux's file systems."""
TOO_LONG = f"it contains an integer of more than {MAX_DIGITS:,} digits"
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
_NAME = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]+")
_MAX_SHOWN = 100
_LONG_INTEGER = 10**MAX_DIGITS


def encodable(text: str) -> str:
    """Return `text` with `?` in place of every lone surrogate."""
    return text.encode(errors="replace").decode()


def encodable_values(value: Any, depth: int = 0) -> Any:
    """Return a copy of JSON values in which all texts and keys are `encodable`. Other types are returned unchanged.

    Raises:
        ValueError: the values are nested more than `MAX_DEPTH` levels deep, or an integer `is_long`.
    """
    if not isinstance(value, Mapping | list | tuple):
        return _encodable_item(value)
    if depth == MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if isinstance(value, Mapping):
        return {_encodable_item(key): encodable_values(item, depth + 1) for key, item in value.items()}
    return [encodable_values(item, depth + 1) for item in value]


def _encodable_item(value: Any) -> Any:
    if is_long(value):
        raise ValueError(TOO_LONG)
    return encodable(value) if isinstance(value, str) else value


def is_long(value: Any) -> bool:
    """Return whether Python refuses to convert an integer to text."""
    return isinstance(value, int) and abs(value) >= _LONG_INTEGER


def parse_json(
    data: str | bytes, *, finite: bool = False, max_depth: int = MAX_DEPTH, max_digits: int = MAX_DIGITS
) -> Any:
    """Parse JSON, which may contain lone surrogates; bytes are UTF-8.

    Args:
        finite: refuse NaN, infinity, and numbers that are too large for a float.

    Raises:
        ValueError: `data` is not JSON or not UTF-8, it is nested more than `max_depth` levels deep, or it contains a
            number that is not allowed. The message is a clause such as "it is nested …".
    """

    def integer(digits: str) -> int:
        if (count := len(digits.lstrip("-"))) > max_digits:
            raise ValueError(f"it contains an integer of {count} digits; at most {max_digits} are allowed")
        return int(digits)

    def number(text: str) -> float:
        value = float(text)
        if finite and not math.isfinite(value):
            raise ValueError(f"it contains the number {text[:40]}, which is not finite")
        return value

    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_int=integer, parse_float=number, parse_constant=number)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    check_depth(value, max_depth)
    return value


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raise `ValueError` if JSON values are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth + 1):
        containers = [each for each in level if isinstance(each, dict | list | tuple)]
        if not containers:
            return
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> ValueError:
    return ValueError(f"it is nested more than {max_depth} levels deep")


def safe_repr(value: Any) -> str:
    """Return the `repr` of a value of any class, or a description if that raises: that of a long integer does."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  the class is a user's
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


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
    value = parse_json(data, finite=True, max_depth=MAX_FILE_DEPTH)
    if b"\\ud" in data.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains half of a character (a lone surrogate)") from None
    return value
