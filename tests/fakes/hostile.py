"""Hypothesis strategies for text and JSON that models, tools, users, agents and data sets may send."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

LONE = "\ud83d"
"""Half of a surrogate pair, which JSON may contain but UTF-8 cannot encode."""
DEEP = "[" * 100_000
NESTED = '{"a": ' + "[" * 300 + "]" * 300 + "}"
"""JSON that Python parses, but that is too deep for code that walks it."""
LONG_INTEGER = '{"x": ' + "7" * 5_000 + "}"
LONG_TEXT = "ab c" * 2_500_000
"""10 MB."""
BROKEN_JSON = (DEEP, '{"x":' * 100_000, NESTED, LONG_INTEGER, "{", "", "[1, 2", '"\\ud83d', "\0", LONE)

_SURROGATES = ("\ud83d", "\udc00", "\ud83d\ude00")
_CONTROLS = ("\0", "\u202e", "\u2066", "\ufdd0", "\ufffe", "\x1b[2J")
_ODD = (*_SURROGATES, *_CONTROLS, "<eos>", "<user>", "{{ 1 }}", "plain")
_ROLES = ("system", "developer", "user", "assistant", "tool", "", "function")


def texts() -> st.SearchStrategy[str]:
    """Return texts with lone surrogates, NUL, marks of direction and names of special tokens."""
    letters = st.text(st.characters(codec="utf-8"), max_size=4)
    return st.lists(st.sampled_from(_ODD) | letters, max_size=5).map("".join)


def values() -> st.SearchStrategy[Any]:
    """Return JSON values of any type, up to several levels deep or nested 300 levels deep. Python converts the integers
    with 4,000 digits to text, but not those with 5,000."""
    plain = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | texts()
        | st.sampled_from([4000, 5000]).map(lambda digits: 10**digits)
    )
    nested = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3), max_leaves=6
    )
    return nested | st.sampled_from([_nested(300), {"a": _nested(300)}])


def dumps(value: Any, write: Callable[[Any], str] = json.dumps) -> str:
    """Return `value` as JSON, or as `write` writes it, with integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return write(value)
    finally:
        sys.set_int_max_str_digits(limit)


def messages() -> st.SearchStrategy[Any]:
    """Return chat messages in which any field may be missing or of a wrong type."""
    function = st.fixed_dictionaries({}, optional={"name": texts() | values(), "arguments": texts() | values()})
    call = st.fixed_dictionaries({}, optional={"id": texts() | values(), "function": function | values()})
    part = st.fixed_dictionaries(
        {},
        optional={"type": st.sampled_from(["text", "image"]) | values(), "text": texts() | values(), "image": values()},
    )
    message = st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(_ROLES) | values(),
            "content": texts() | st.lists(part, max_size=2) | values(),
            "tool_calls": st.lists(call, max_size=2) | values(),
            **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "text"), texts() | values()),
        },
    )
    return message | values()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _places(inner, (*path, key))


def damaged(value: Any) -> st.SearchStrategy[Any]:
    """Return copies of a JSON value in which some values are of another type, of another size, or missing."""
    odd = values() | st.sampled_from([-1, 0, 1e308, 10**30, 2**63, float("nan"), float("inf"), "", {}, []])
    changes = st.lists(st.tuples(st.sampled_from(sorted(_places(value), key=repr)), odd | st.just(...)), max_size=3)
    return changes.map(lambda chosen: _with_changes(value, chosen)) | odd


def _with_changes(value: Any, changes: Sequence[tuple[tuple[Any, ...], Any]]) -> Any:
    changed = copy.deepcopy(value)
    for (*above, last), new in changes:
        inner = changed
        try:
            for key in above:
                inner = inner[key]
            if new is ...:
                del inner[last]
            else:
                inner[last] = copy.deepcopy(new)
        except (KeyError, IndexError, TypeError):  # an earlier change has removed the place
            pass
    return changed


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value
