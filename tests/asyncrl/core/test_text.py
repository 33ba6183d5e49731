"""Text that cannot be encoded, and JSON that cannot be parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from asyncrl.core.failures import AsyncRLError, UserCodeError
from asyncrl.core.text import MAX_DEPTH, TOO_DEEP, TOO_LONG, encodable, encodable_values, parse_json, safe_repr
from tests.fakes.hostile import BROKEN_JSON, DEEP, LONE, LONG_INTEGER, texts, values


@given(texts())
def test_only_lone_surrogates_are_replaced(text: str) -> None:
    replaced = encodable(text)
    assert replaced.encode().decode() == replaced and encodable(replaced) == replaced
    assert replaced == "".join("?" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


@given(values())
def test_json_values_can_be_encoded_or_are_refused(value: Any) -> None:
    try:
        replaced = encodable_values(value)
    except ValueError as error:
        assert str(error) in (TOO_DEEP, TOO_LONG)
    else:
        json.dumps(replaced, ensure_ascii=False).encode()


def test_keys_are_replaced_and_other_types_are_unchanged() -> None:
    other = object()
    assert encodable_values({LONE: (LONE, 1, other, None)}) == {"?": ["?", 1, other, None]}


def test_the_deepest_values_are_at_the_limit() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH):
        value = [value]
    assert encodable_values(value) == value
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        encodable_values([value])


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_broken_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        encodable_values(parse_json(text))


def test_errors_of_json_name_their_reason() -> None:
    with pytest.raises(ValueError, match="an integer of 5000 digits; at most 4300 are allowed"):
        parse_json(LONG_INTEGER)
    with pytest.raises(ValueError, match="nested more than"):
        parse_json(DEEP)
    assert parse_json('{"a": "\\ud83d", "b": NaN}')["a"] == LONE
    for text in ("NaN", "-Infinity", "1e999"):
        with pytest.raises(ValueError, match="which is not finite"):
            parse_json(text, finite=True)
    with pytest.raises(ValueError, match="it is not JSON"):
        parse_json(b"\xff")


def test_json_within_the_limits_is_parsed() -> None:
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(nested, finite=True)) == nested
    assert parse_json('{"a": [1, -2, 0.5, "é", null, true]}'.encode()) == {"a": [1, -2, 0.5, "é", None, True]}
    assert parse_json("-" + "9" * 18, max_digits=18) == 1 - 10**18
    with pytest.raises(ValueError, match="more than 64 levels deep"):
        parse_json(f"[{nested}]")


def test_a_repr_that_raises_is_described() -> None:
    assert safe_repr([1]) == "[1]"
    assert safe_repr(10**5000) == "<int whose repr raised ValueError>"


def test_messages_of_errors_can_be_written() -> None:
    """Tools and reward functions quote the model in their exceptions."""
    error = UserCodeError.wrap(f"tool {LONE}", ValueError(LONE))
    assert isinstance(error, AsyncRLError) and error.message == "tool ?"
    assert "ValueError: ?" in str(error) and str(error).encode()
