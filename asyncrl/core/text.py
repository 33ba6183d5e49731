"""Text and JSON of unknown origin: from models, tools, users, environments, agents and data sets. Pure.

JSON may contain a lone surrogate, half of a pair (`"\\ud83d"`), which no tokenizer accepts and UTF-8 cannot encode. It
is replaced where it enters: in the calls of a model, the results of tools, the replies of users and environments, the
requests of agents, and the messages of errors. A row of a data set is refused instead, because its author can mend it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of JSON values. Code that walks them needs some frames of Python's stack for each level."""
MAX_DIGITS = 4300
"""Maximum number of digits of an integer. Python refuses to convert longer ones, because that takes quadratic time."""
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def encodable(text: str) -> str:
    """Return `text` with `?` in place of every lone surrogate."""
    return text.encode(errors="replace").decode()


def encodable_values(value: Any, depth: int = 0) -> Any:
    """Return a copy of JSON values in which all texts and keys are `encodable`. Other types are returned unchanged.

    Raises:
        ValueError: the values are nested more than `MAX_DEPTH` levels deep.
    """
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if isinstance(value, Mapping):
        return {
            encodable(key) if isinstance(key, str) else key: encodable_values(item, depth + 1)
            for key, item in value.items()
        }
    return [encodable_values(item, depth + 1) for item in value]


def parse_json(text: str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON, which may contain lone surrogates. `parse_constant` is called for NaN and infinity.

    Raises:
        ValueError: the text is not JSON, is nested too deeply to be parsed, or contains an integer of more than
            `MAX_DIGITS` digits; or `parse_constant` raises it.
    """
    try:
        return json.loads(text, parse_int=_parse_int, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it contains an integer of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def safe_repr(value: Any) -> str:
    """Return the `repr` of a value of any class, or a description if that raises: that of a long integer does."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  the class is a user's
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
