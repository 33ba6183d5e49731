"""Text and JSON of unknown origin: from models, tools, users, environments, agents and data sets. Pure.

JSON may contain a lone surrogate, half of a pair (`"\\ud83d"`), which no tokenizer accepts and UTF-8 cannot encode. It
is replaced where it enters: in the calls of a model, the results of tools, the replies of users and environments, the
requests of agents, and the messages of errors. A row of a data set is refused instead, because its author can mend it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
