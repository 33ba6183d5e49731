"""Lanes, phases, levels of detail: the parts of the timeline that are arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.timeline.detail import SEVERAL, Bars, at_most, merge, shares
from asyncrl.timeline.index import Group
from asyncrl.timeline.kinds import STATE, STATES, block_order, place
from asyncrl.timeline.lanes import Lanes
from asyncrl.timeline.layout import lay_out
from asyncrl.timeline.phases import Phase, phases
from asyncrl.timeline.view import clock, duration

Spans = list[tuple[int, int]]
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40).map(
    lambda found: sorted((start, start + length) for start, length in found)
)


def overlapping(spans: Spans) -> bool:
    """Whether any two do; those that touch do not."""
    spans = sorted(spans)
    return any(after[0] < max(end for _, end in spans[: place + 1]) for place, after in enumerate(spans[1:]))


def depth(spans: Spans) -> int:
    """At most so many at a time."""
    moments = [(start, 1) for start, end in spans if end > start] + [(end, -1) for start, end in spans if end > start]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


# ------------------------------------------------------------------------------------------------ lanes


@given(st.lists(SPANS, max_size=4), st.integers(1, 8))
def test_no_two_spans_of_a_lane_overlap_however_late_they_come(batches: list[Spans], kept: int) -> None:
    lanes, found = Lanes(kept), {}
    for batch in batches:
        for span, lane in zip(batch, lanes.assign(*columns(batch)), strict=True):
            found.setdefault(lane, []).append(span)
    assert sorted(found) == list(range(len(lanes)))
    assert not any(map(overlapping, found.values()))
    assert sum(map(len, found.values())) == sum(map(len, batches))


@given(SPANS)
def test_one_batch_takes_as_many_lanes_as_overlap(spans: Spans) -> None:
    spans = [(start, end) for start, end in spans if end > start]
    lanes = Lanes()
    lanes.assign(*columns(spans))
    assert len(lanes) == depth(spans)


def test_what_comes_late_goes_into_a_gap() -> None:
    lanes = Lanes()
    assert lanes.assign([0, 100], [10, 110]) == [0, 0]
    assert lanes.assign([20, 50, 105], [30, 60, 120]) == [0, 0, 1]
    assert lanes.assign([10, 60], [20, 100]) == [0, 0]


def columns(spans: Spans) -> tuple[list[int], list[int]]:
    return [start for start, _ in spans], [end for _, end in spans]


# ------------------------------------------------------------------------------------------------ phases


def named(found: Sequence[Phase]) -> list[tuple[str, int, int]]:
    return [(STATES[phase.state].name, phase.start, phase.end) for phase in found]


def test_phases_come_in_order_and_the_last_takes_what_is_left() -> None:
    fields = {"gate_s": 1e-6, "queued_s": 2e-6, "prefill_s": 3e-6, "decode_s": 3e-6, "paused_s": 0.0}
    expected = [("gate", 0, 1), ("queued", 1, 3), ("prefill", 3, 6), ("decode", 6, 10)]
    assert named(phases(0, 10, fields, [(7, 8)])) == expected


def test_a_pause_is_where_the_replica_stood_still_and_its_phase_goes_on_afterwards() -> None:
    fields = {"queued_s": 4e-6, "decode_s": 4e-6, "paused_s": 2e-6}
    expected = [("queued", 0, 2), ("paused", 2, 4), ("queued", 4, 6), ("decode", 6, 10)]
    assert named(phases(0, 10, fields, [(2, 4), (50, 60)])) == expected


def test_a_pause_that_nobody_tells_of_comes_last() -> None:
    assert named(phases(0, 10, {"decode_s": 7e-6, "paused_s": 3e-6})) == [("decode", 0, 7), ("paused", 7, 10)]


def test_a_request_without_phases_is_one_bar_also_if_it_took_no_time() -> None:
    assert named(phases(0, 10, {})) == [("other", 0, 10)]
    assert named(phases(5, 5, {"gate_s": 0.0, "decode_s": 0.0, "paused_s": 1.0})) == [("other", 5, 5)]


SECONDS = st.none() | st.floats(0, 30e-6)


@given(
    st.integers(0, 20),
    st.fixed_dictionaries({f"{name}_s": SECONDS for name in ("gate", "queued", "prefill", "decode", "paused")}),
    st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)).map(lambda each: (each[0], sum(each))), max_size=4),
)
def test_phases_fill_the_request_without_overlap(end: int, fields: dict[str, float], pauses: Spans) -> None:
    found = phases(0, end, fields, pauses)
    assert (found[0].start, found[-1].end) == (0, end)
    assert all(before.end == after.start for before, after in itertools.pairwise(found))
    assert all(phase.start < phase.end for phase in found) or end == 0


# ------------------------------------------------------------------------------------------------ levels of detail


@st.composite
def bars(draw: st.DrawFn) -> Bars:
    spans = [(lane, *span) for lane in range(3) for span in apart(draw(SPANS))]
    states = [draw(st.integers(0, 3)) for _ in spans]
    lane, start, end = np.array(spans, np.int64).reshape(-1, 3).T
    count = len(spans)
    return Bars(lane, start, end, np.array(states, np.int64), np.arange(count), np.ones(count, np.int64))


def apart(spans: Spans) -> Spans:
    found: Spans = []
    for start, end in spans:
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found


@given(bars(), st.integers(1, 30))
def test_merged_bars_are_in_order_do_not_overlap_and_stand_for_all(all_bars: Bars, resolution: int) -> None:
    merged = merge(all_bars, resolution)
    assert merged.number.sum() == len(all_bars)
    for lane in range(3):
        whole, parts = (each.take(each.lane == lane) for each in (all_bars, merged))
        spans = list(zip(parts.start.tolist(), parts.end.tolist(), strict=True))
        assert spans == sorted(spans)
        assert not overlapping(spans)
        assert all((spans[0][0] <= whole.start) & (whole.end <= spans[-1][1])) if len(whole) else not spans
    long = all_bars.take(all_bars.end - all_bars.start >= resolution)
    kept = merged.take(merged.event != SEVERAL)
    assert set(long.event.tolist()) <= set(kept.event.tolist())


@given(bars())
def test_at_full_zoom_nothing_is_merged(all_bars: Bars) -> None:
    assert merge(all_bars, 1) is all_bars


@given(bars(), st.integers(1, 10))
def test_there_are_never_more_than_asked_for_but_one_a_lane(all_bars: Bars, most: int) -> None:
    merged, _ = at_most(all_bars, 1, most)
    assert len(merged) <= max(most, 3)
    assert merged.number.sum() == len(all_bars)


def test_a_merged_bar_has_the_state_of_the_longest() -> None:
    def column(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    three = Bars(column(0, 0, 0), column(0, 2, 9), column(1, 6, 10), column(1, 2, 1), column(7, 8, 8), column(1, 1, 1))
    assert [each.tolist() for each in merge(three, 10)] == [[0], [0], [10], [2], [SEVERAL], [3]]
    of_one = three.take(np.array([1, 2]))
    assert merge(of_one, 10).event.tolist() == [8]


@given(bars(), st.integers(1, 30))
def test_shares_add_up_to_the_time_of_all_bars(all_bars: Bars, resolution: int) -> None:
    whole = int(all_bars.end.max(initial=0))
    found = shares(all_bars, int(all_bars.start.min(initial=0)), whole, resolution)
    for state in range(4):
        mine = all_bars.take(all_bars.state == state)
        told = found.at_a_time[found.state == state].sum() * resolution
        assert np.isclose(told, (mine.end - mine.start).sum())
    assert not len(found.start) or not (found.start % resolution).any()


def test_a_narrow_window_of_long_bars_has_as_many_cells_as_it_is_wide() -> None:
    """A microsecond a cell, in bars of an hour: cells of their whole length filled the memory."""
    hour = 3_600_000_000
    lanes = np.arange(500)
    long = Bars(lanes, lanes, lanes + hour, lanes % 2, lanes, np.ones_like(lanes))
    found = shares(long, hour // 2, hour // 2 + 1000, 1)
    assert len(found.start) == 2 * 1000 and set(found.start.tolist()) == set(range(hour // 2, hour // 2 + 1000))
    assert set(found.at_a_time.tolist()) == {250.0}
    assert not len(shares(long, 2 * hour, 2 * hour + 10, 3).start)


# ------------------------------------------------------------------------------------------------ where things are


def test_blocks_come_in_the_order_of_the_work_and_numbers_as_numbers() -> None:
    names = ["driver", "replica-10", "queue", "rank-actor-1", "replica-2", "rollouter", "trainer", "elsewhere"]
    ordered = ["trainer", "rank-actor-1", "rollouter", "replica-2", "replica-10", "queue", "driver", "elsewhere"]
    assert sorted(names, key=block_order) == ordered


def test_an_event_that_is_not_known_has_a_lane_by_its_name() -> None:
    assert place("rollouter", "something.new") == ("rollouter", "something.new", STATE["other"])
    assert place("trainer", "sample.dropped").block == "samples"


def test_hidden_blocks_take_no_room_and_lanes_do_not_overlap() -> None:
    groups = [
        Group("trainer", "wait", (0,)),
        Group("replica-0", "requests", (1, 2, 3)),
        Group("queue", "commits", (4,)),
    ]
    whole = lay_out(groups)
    rows = sorted(whole.lanes.values())
    assert all(above[1] <= below[0] for above, below in itertools.pairwise(rows))
    assert rows[-1][1] <= whole.height
    less = lay_out(groups, {"replica-0"})
    assert (sorted(less.lanes), [row.name for row in less.blocks]) == ([0, 4], ["trainer", "queue"])
    assert less.height < whole.height


def test_times_are_told_in_units_that_suit_them() -> None:
    assert [duration(us) for us in (0, 12, 1_500, 2_500_000, 130_000_000)] == [
        "0 s",
        "12 µs",
        "1.5 ms",
        "2.5 s",
        "2:10",
    ]
    assert [clock(us) for us in (0, -1_000, 3_723_456_000)] == ["0:00.000", "-0:00.001", "1:02:03.456"]
