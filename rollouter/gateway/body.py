"""Parses the JSON of requests.

`json.loads` accepts more than JSON, and what it returns can break the code that receives it: nesting that exceeds
Python's recursion limit, integers that fit into no array, numbers that are not finite. `parse_json` refuses all of them
with a `ValueError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Limit for nested arrays and objects: chat templates, serializers and Ray recurse into the values."""
MAX_DIGITS = 18
"""Limit for the digits of an integer, which therefore fits into 64 bits."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; bytes are UTF-8.

    Raises:
        ValueError: the text is not JSON or not UTF-8, it is nested more than `MAX_DEPTH` levels deep, or a number is
            not finite or has more than `MAX_DIGITS` digits. The message is a clause such as "it is nested …".
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        value = json.loads(decoded, parse_int=_integer, parse_float=_number, parse_constant=_not_finite)
    except RecursionError:
        raise _too_deep() from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(text.lstrip('-'))} digits; at most {MAX_DIGITS} are allowed")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:40]} is not finite")
