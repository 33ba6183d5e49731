"""Names and JSON from files: a name leads nowhere else, and what is parsed can be written again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.core.text import MAX_FILE_DEPTH, checked_name, checked_path, parse_file, shown

ROOT = Path("/some/root")


@pytest.mark.parametrize("name", ["a", "1-1.safetensors", "..a", "a..", ".hidden", "ü", "a b", "x" * 255])
def test_names_of_files_are_accepted(name: str) -> None:
    assert checked_name(name) == checked_path(name) == name
    assert checked_path(f"{name}/{name}") == f"{name}/{name}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a\0", "a\n", "\x1b[31m", "\x7f", "\ud800", "x" * 256, "ü" * 128, None, 7, b"a"]
)
def test_anything_else_is_refused_with_the_name(name: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid name of a file") as raised:
        checked_name(name)
    assert str(raised.value).startswith(shown(name)) and str(raised.value).isprintable()
    for path in (name, f"a/{name}", f"{name}/a") if isinstance(name, str) else (name,):
        with pytest.raises(ValueError, match="is not a valid path within a directory"):
            checked_path(path)


@given(st.text() | st.lists(st.sampled_from(["..", ".", "", "a", "/", "\0"])).map("/".join))
@example("/etc/passwd")
@example("../../victim")
def test_a_checked_path_stays_below_the_directory_to_which_it_is_joined(path: str) -> None:
    try:
        joined = ROOT / checked_path(path)
    except ValueError:
        return
    assert os.path.normpath(joined) == str(joined)
    assert joined.is_relative_to(ROOT) and joined != ROOT
    assert "/" in path or checked_name(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON, st.booleans())
def test_json_is_parsed_as_it_was_written(value: Any, ascii_only: bool) -> None:
    assert parse_file(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"NaN", "it contains the number NaN, which is not finite"),
        (b"[-Infinity]", "it contains the number -Infinity"),
        (b"-1e400", "it contains the number -1e400, which is not finite"),
        (b"1" * 5000, "an integer of 5000 digits"),
        (b'{"\\uD800": 1}', "half of a character"),
        (b'"\xed\xa0\x80"', "not JSON: 'utf-8' codec can't decode"),
        (b"[" * (MAX_FILE_DEPTH + 1) + b"]" * (MAX_FILE_DEPTH + 1), "more than 100 levels deep"),
        (b'{"a":' * 100_000, "more than 100 levels deep"),
        (b"", "Expecting value"),
        (b"{}{}", "Extra data"),
    ],
)
def test_json_that_cannot_be_written_again_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_file(text)


def test_json_may_be_nested_up_to_the_limit() -> None:
    for leaf in (b"", b"1"):
        assert parse_file(b"[" * MAX_FILE_DEPTH + leaf + b"]" * MAX_FILE_DEPTH)
    assert parse_file(b'"\\ud83d\\ude00"') == "\U0001f600"
