"""Hypothesis strategies for text and JSON that models, tools, users, agents and data sets may send."""

from __future__ import annotations

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
    """Return JSON values of any type, up to several levels deep or nested 300 levels deep."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | texts() | st.just(10**4000)
    nested = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3), max_leaves=6
    )
    return nested | st.sampled_from([_nested(300), {"a": _nested(300)}])


def messages() -> st.SearchStrategy[Any]:
    """Return chat messages in which any field may be missing or of a wrong type."""
    function = st.fixed_dictionaries({}, optional={"name": texts() | values(), "arguments": texts() | values()})
    call = st.fixed_dictionaries({}, optional={"id": texts() | values(), "function": function | values()})
    part = st.fixed_dictionaries({}, optional={"type": st.just("text") | values(), "text": texts() | values()})
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


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value
