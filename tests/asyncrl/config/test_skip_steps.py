"""Sets of steps, as configuration keys name them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.sections.skip import StepSet


@pytest.mark.parametrize(
    ("value", "inside", "outside", "text"),
    [
        ([], (), (0, 1), ""),
        (3, (3,), (2, 4), "3"),
        ([1, 2, 5], (1, 2, 5), (0, 3, 6), "1-2,5"),
        ("1-128,200", (1, 128, 200), (0, 129, 199), "1-128,200"),
        (["1-3", 4, " 9 - 9 "], (1, 4, 9), (5, 8), "1-4,9"),
        ("all", (0, 10**9), (), "all"),
        (["all", 3], (7,), (), "all"),
        ("5-7,1-5", (1, 7), (8,), "1-7"),
    ],
)
def test_steps_are_parsed(value: object, inside: tuple[int, ...], outside: tuple[int, ...], text: str) -> None:
    steps = StepSet.parse(value)
    assert all(step in steps for step in inside)
    assert not any(step in steps for step in outside)
    assert str(steps) == text and bool(steps) == bool(text)
    assert not text or StepSet.parse(text) == steps


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1..5", r"'1\.\.5' is no step; expected a step \(12\), a range \(1-128\)"),
        ("8-3", "'8-3' ends before it begins"),
        (-1, "-1 is no step"),
        (True, "True is no step"),
        (1.5, "1.5 is no step"),
        (None, "None is no step"),
        ("", "'' is no step"),
        (["1", "every"], "'every' is no step"),
    ],
)
def test_an_invalid_set_of_steps_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepSet.parse(value)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))), st.integers(0, 45))
def test_ranges_behave_like_the_sets_of_their_steps(drawn: list[tuple[int, int]], first: int) -> None:
    ranges = [(low, low + length) for low, length in drawn]
    steps, expected = StepSet(ranges), {step for low, high in ranges for step in range(low, high + 1)}
    assert {step for step in range(60) if step in steps} == expected
    assert steps.has_from(first) == any(step >= first for step in expected)
    assert not expected or StepSet.parse(str(steps)) == steps
