"""The phases of a request: they never overlap, and pauses count as pauses only."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.serving.replica.request_phases import (
    MAX_PAUSES,
    EnginePauses,
    RequestMoments,
    RequestPhases,
    request_phases,
)

WHOLE = RequestMoments(
    received=10.0, admitted=11.0, queued=11.5, scheduled=13.0, first_token=14.0, last_token=20.0, ended=20.5
)


def paused(*windows: tuple[float, float]) -> EnginePauses:
    pauses = EnginePauses()
    for begin, end in windows:
        pauses.begin(begin)
        pauses.end(end)
    return pauses


def test_the_phases_of_an_uninterrupted_request() -> None:
    assert request_phases(WHOLE, EnginePauses()) == RequestPhases(
        gate_s=1.0, queued_s=1.5, prefill_s=1.0, decode_s=6.0, paused_s=0.0
    )


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(15.0, 17.0)], RequestPhases(1.0, 1.5, 1.0, 4.0, 2.0)),
        ([(12.0, 13.5), (16.0, 16.5)], RequestPhases(1.0, 0.5, 0.5, 5.5, 2.0)),
        ([(10.2, 11.0)], RequestPhases(1.0, 1.5, 1.0, 6.0, 0.0)),  # the pause falls into the wait at the gate
        ([(19.0, 30.0)], RequestPhases(1.0, 1.5, 1.0, 5.0, 1.0)),  # the pause ends after the last token
        ([(0.0, 1.0), (30.0, 40.0)], RequestPhases(1.0, 1.5, 1.0, 6.0, 0.0)),
    ],
)
def test_pauses_are_subtracted_from_the_phases_they_overlap(
    windows: list[tuple[float, float]], expected: RequestPhases
) -> None:
    assert request_phases(WHOLE, paused(*windows)) == pytest.approx(expected)


def test_an_open_pause_counts_up_to_now() -> None:
    pauses = paused((15.0, 15.5))
    pauses.begin(18.0)
    assert request_phases(WHOLE, pauses).paused_s == 2.5
    pauses.end(18.5)
    pauses.end(99.0)
    assert request_phases(WHOLE, pauses).paused_s == 1.0, "an end without a beginning is ignored"


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        (RequestMoments(10.0, ended=13.0), RequestPhases(3.0, 0.0, 0.0, 0.0, 0.0)),
        (RequestMoments(10.0, admitted=11.0, ended=13.0), RequestPhases(1.0, 2.0, 0.0, 0.0, 0.0)),
        (
            RequestMoments(10.0, admitted=11.0, queued=11.0, scheduled=12.0, ended=15.0),
            RequestPhases(1.0, 1.0, 3.0, 0.0, 0.0),
        ),
        (
            RequestMoments(
                10.0, admitted=11.0, queued=11.0, scheduled=12.0, first_token=12.5, last_token=13.0, ended=15.0
            ),
            RequestPhases(1.0, 1.0, 0.5, 0.5, 0.0),
        ),
    ],
)
def test_the_phase_of_an_aborted_request_ends_with_the_request(
    moments: RequestMoments, expected: RequestPhases
) -> None:
    assert request_phases(moments, EnginePauses()) == expected


def test_a_bounded_number_of_pauses_is_remembered() -> None:
    pauses = paused(*((float(second), second + 0.5) for second in range(MAX_PAUSES + 10)))
    assert pauses.overlap(0.0, math.inf) == 0.5 * MAX_PAUSES
    assert pauses.overlap(MAX_PAUSES + 5.0, math.inf) == 2.5


SECONDS = st.floats(0, 1e6, allow_nan=False)


@given(
    st.builds(RequestMoments, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS),
    st.lists(SECONDS, max_size=20).map(sorted),
    st.booleans(),
)
def test_phases_add_up_to_at_most_the_duration_of_the_request(
    moments: RequestMoments, edges: list[float], still: bool
) -> None:
    """This holds even if the clocks disagree."""
    pauses = paused(*zip(edges[::2], edges[1::2], strict=False))
    if still and edges:
        pauses.begin(edges[-1])
    expected = request_phases(moments, pauses)
    assert all(seconds >= 0 for seconds in expected)
    assert sum(expected) <= max(0.0, moments.ended - moments.received) + 1e-3


@given(
    st.lists(st.floats(0.001, 100), min_size=6, max_size=6),
    st.lists(st.floats(0.001, 50), max_size=20),
)
def test_phases_add_up_to_the_time_until_the_last_token(steps: list[float], gaps: list[float]) -> None:
    at = [1.0]
    for step in steps:
        at.append(at[-1] + step)
    asked, admitted, queued, scheduled, first, last, ended = at
    edges = [1.0]
    for gap in gaps:
        edges.append(edges[-1] + gap)
    pauses = paused(*zip(edges[::2], edges[1::2], strict=False))
    expected = request_phases(RequestMoments(asked, admitted, queued, scheduled, first, last, ended), pauses)
    assert sum(expected) == pytest.approx((admitted - asked) + (last - queued))
    assert expected.paused_s == pytest.approx(pauses.overlap(queued, last))
