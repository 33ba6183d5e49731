from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.report.statistics import (
    Intervals,
    clip,
    complement,
    coverage,
    difference,
    find_outliers,
    intersection,
    to_json,
    total,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def intervals_and_seconds(rows: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    starts, lengths = (np.array([row[column] for row in rows], dtype=float) for column in (0, 1))
    return union(starts, starts + lengths), {at for start, length in rows for at in range(start, start + length)}


def seconds(intervals: Intervals) -> set[int]:
    return {second for start, end in intervals for second in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_interval_sets_behave_like_sets_of_seconds(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    (a, in_a), (b, in_b) = intervals_and_seconds(left), intervals_and_seconds(right)
    assert seconds(a) == in_a
    assert total(a) == len(in_a)
    assert seconds(intersection(a, b)) == in_a & in_b
    assert seconds(difference(a, b)) == in_a - in_b
    assert seconds(complement(a, 5.0, 25.0)) == set(range(5, 25)) - in_a
    assert seconds(clip(a, 5.0, 25.0)) == in_a & set(range(5, 25))
    assert (a[1:, 0] > a[:-1, 1]).all()
    shares = [len(in_a & set(range(start, start + 4))) / 4 for start in range(0, 40, 4)]
    assert np.allclose(coverage(a, np.arange(0.0, 41.0, 4.0)), shares)


def calls(*durations: float) -> pd.DataFrame:
    starts = 1000.0 * np.arange(len(durations))
    return pd.DataFrame({"timestamp": starts, "duration_s": durations, "end": starts + np.array(durations)})


def test_an_outlier_loses_the_time_beyond_the_median() -> None:
    late = find_outliers(calls(1.0, 1.0, 1.1, 0.9, 31.0))
    assert late is not None
    assert (len(late.calls), late.num_calls, late.median_s, late.worst["duration_s"]) == (1, 5, 1.0, 31.0)
    assert late.lost.tolist() == [[4001.0, 4031.0]]


@pytest.mark.parametrize(
    "durations", [(1.0, 1.0, 4.0), (0.001, 0.001, 0.001, 0.5), (1.0, 30.0), tuple(math.exp(k) for k in range(-3, 4))]
)
def test_short_or_few_or_widely_varying_calls_have_no_outlier(durations: tuple[float, ...]) -> None:
    assert find_outliers(calls(*durations)) is None


def test_an_outlier_is_found_among_calls_of_which_some_are_very_fast() -> None:
    late = find_outliers(calls(*np.geomspace(0.001, 0.09, 100), *np.linspace(0.09, 0.2, 100), 5.0))
    assert late is not None and len(late.calls) == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1795314480.7353, 1795314480.735), (12_345_678.0, 12_345_678), (123_456.7891, 123_456.789),
        (0.12345678, 0.123457), (float("nan"), None), (7, 7), (True, True), (np.int64(3), 3), (np.bool_(True), True),
    ],
)  # fmt: skip
def test_numbers_in_json_are_rounded_and_nan_is_null(value: Any, expected: Any) -> None:
    assert to_json(value) == expected
