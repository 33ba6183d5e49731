"""Sets of intervals, against sets of whole seconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.report.intervals import Intervals, clip, complement, covered, intersection, total, union, without

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def made(rows: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    starts = np.array([start for start, _ in rows], dtype=float)
    ends = np.array([start + length for start, length in rows], dtype=float)
    return union(starts, ends), {second for start, length in rows for second in range(start, start + length)}


def seconds(intervals: Intervals) -> set[int]:
    return {second for start, end in intervals for second in range(int(start), int(end))}


@given(spans, spans)
def test_they_are_what_sets_of_seconds_are(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    (a, in_a), (b, in_b) = made(left), made(right)
    assert seconds(a) == in_a
    assert total(a) == len(in_a)
    assert seconds(intersection(a, b)) == in_a & in_b
    assert seconds(without(a, b)) == in_a - in_b
    assert seconds(complement(a, 5.0, 25.0)) == set(range(5, 25)) - in_a
    assert seconds(clip(a, 5.0, 25.0)) == in_a & set(range(5, 25))
    assert (a[1:, 0] > a[:-1, 1]).all()


@given(spans)
def test_covered_is_the_share_of_each_bin(rows: list[tuple[int, int]]) -> None:
    intervals, inside = made(rows)
    edges = np.arange(0.0, 41.0, 4.0)
    expected = [len(inside & set(range(start, start + 4))) / 4 for start in range(0, 40, 4)]
    assert np.allclose(covered(intervals, edges), expected)
