"""The layout of the timeline: tracks, phases, rows and levels of detail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.timeline.layout import (
    MERGED,
    STATE,
    STATES,
    Bar,
    Bars,
    TrackGroup,
    Tracks,
    block_order,
    lay_out,
    merge,
    merge_to_limit,
    occupancy,
    place_of,
    request_phases,
)
from asyncrl.observe.timeline.view import clock, duration

Spans = list[tuple[int, int]]
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40).map(
    lambda found: sorted((start, start + length) for start, length in found)
)


def overlapping(spans: Spans) -> bool:
    """Return whether any two spans overlap; touching is not overlapping."""
    spans = sorted(spans)
    return any(after[0] < max(end for _, end in spans[: place + 1]) for place, after in enumerate(spans[1:]))


def depth(spans: Spans) -> int:
    """Return the largest number of concurrent spans."""
    moments = [(start, 1) for start, end in spans if end > start] + [(end, -1) for start, end in spans if end > start]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


# ------------------------------------------------------------------------------------------------ tracks


@given(st.lists(SPANS, max_size=4))
def test_spans_of_a_track_do_not_overlap(batches: list[Spans]) -> None:
    tracks, found = Tracks(), {}
    for batch in batches:
        for span, track in zip(batch, tracks.assign(*columns(batch)), strict=True):
            found.setdefault(track, []).append(span)
    assert sorted(found) == list(range(len(tracks)))
    assert not any(map(overlapping, found.values()))
    assert sum(map(len, found.values())) == sum(map(len, batches))


@given(SPANS)
def test_a_batch_uses_as_many_tracks_as_it_has_overlapping_spans(spans: Spans) -> None:
    spans = [(start, end) for start, end in spans if end > start]
    tracks = Tracks()
    tracks.assign(*columns(spans))
    assert len(tracks) == depth(spans)


def test_spans_that_arrive_late_fill_gaps() -> None:
    tracks = Tracks()
    assert tracks.assign([0, 100], [10, 110]) == [0, 0]
    assert tracks.assign([20, 50, 105], [30, 60, 120]) == [0, 0, 1]
    assert tracks.assign([10, 60], [20, 100]) == [0, 0]


def columns(spans: Spans) -> tuple[list[int], list[int]]:
    return [start for start, _ in spans], [end for _, end in spans]


# ------------------------------------------------------------------------------------------------ phases


def named(found: Sequence[Bar]) -> list[tuple[str, int, int]]:
    return [(STATES[phase.state].name, phase.start, phase.end) for phase in found]


GATED = {"gate_s": 1e-6, "queued_s": 2e-6, "prefill_s": 3e-6, "decode_s": 3e-6, "paused_s": 0.0}


@pytest.mark.parametrize(
    ("fields", "pauses", "expected"),
    [
        (GATED, [(7, 8)], [("gate", 0, 1), ("queued", 1, 3), ("prefill", 3, 6), ("decode", 6, 10)]),
        ({"queued_s": 4e-6, "decode_s": 4e-6, "paused_s": 2e-6}, [(2, 4), (50, 60)],
         [("queued", 0, 2), ("paused", 2, 4), ("queued", 4, 6), ("decode", 6, 10)]),
        ({"decode_s": 7e-6, "paused_s": 3e-6}, [], [("decode", 0, 7), ("paused", 7, 10)]),
        ({}, [], [("other", 0, 10)]),
    ],
    ids=["the last phase takes the remaining time", "a pause interrupts a phase", "unknown pause", "no phases"],
)  # fmt: skip
def test_phases_of_a_request(fields: dict[str, float], pauses: Spans, expected: list[tuple[str, int, int]]) -> None:
    assert named(request_phases(0, 10, fields, pauses)) == expected


def test_a_request_without_duration_has_one_bar() -> None:
    assert named(request_phases(5, 5, {"gate_s": 0.0, "decode_s": 0.0, "paused_s": 1.0})) == [("other", 5, 5)]


SECONDS = st.none() | st.floats(0, 30e-6)


@given(
    st.integers(0, 20),
    st.fixed_dictionaries({f"{name}_s": SECONDS for name in ("gate", "queued", "prefill", "decode", "paused")}),
    st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)).map(lambda each: (each[0], sum(each))), max_size=4),
)
def test_phases_fill_the_request_without_overlap(end: int, fields: dict[str, float], pauses: Spans) -> None:
    found = request_phases(0, end, fields, pauses)
    assert (found[0].start, found[-1].end) == (0, end)
    assert all(before.end == after.start for before, after in itertools.pairwise(found))
    assert all(phase.start < phase.end for phase in found) or end == 0


# ------------------------------------------------------------------------------------------------ levels of detail


@st.composite
def bars(draw: st.DrawFn) -> Bars:
    spans = [(track, *span) for track in range(3) for span in disjoint(draw(SPANS))]
    states = [draw(st.integers(0, 3)) for _ in spans]
    track, start, end = np.array(spans, np.int64).reshape(-1, 3).T
    count = len(spans)
    return Bars(track, start, end, np.array(states, np.int64), np.arange(count), np.ones(count, np.int64))


def disjoint(spans: Spans) -> Spans:
    found: Spans = []
    for start, end in spans:
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found


@given(bars(), st.integers(1, 30))
def test_merged_bars_are_sorted_and_disjoint_and_cover_all(all_bars: Bars, resolution: int) -> None:
    merged = merge(all_bars, resolution)
    assert merged.num_bars.sum() == len(all_bars)
    for track in range(3):
        whole, parts = (each.take(each.track == track) for each in (all_bars, merged))
        spans = list(zip(parts.start.tolist(), parts.end.tolist(), strict=True))
        assert spans == sorted(spans)
        assert not overlapping(spans)
        assert all((spans[0][0] <= whole.start) & (whole.end <= spans[-1][1])) if len(whole) else not spans
    long = all_bars.take(all_bars.end - all_bars.start >= resolution)
    kept = merged.take(merged.event != MERGED)
    assert set(long.event.tolist()) <= set(kept.event.tolist())


@given(bars(), st.integers(1, 10))
def test_merging_respects_the_limit_except_for_one_bar_a_track(all_bars: Bars, limit: int) -> None:
    merged, _ = merge_to_limit(all_bars, 1, limit)
    assert len(merged) <= max(limit, 3)
    assert merged.num_bars.sum() == len(all_bars)
    assert merge(all_bars, 1) is all_bars


def test_a_merged_bar_has_the_state_of_its_longest_bar() -> None:
    def column(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    three = Bars(column(0, 0, 0), column(0, 2, 9), column(1, 6, 10), column(1, 2, 1), column(7, 8, 8), column(1, 1, 1))
    assert [each.tolist() for each in merge(three, 10)] == [[0], [0], [10], [2], [MERGED], [3]]
    of_one = three.take(np.array([1, 2]))
    assert merge(of_one, 10).event.tolist() == [8]


@given(bars(), st.integers(1, 30))
def test_occupancy_adds_up_to_the_time_of_all_bars(all_bars: Bars, resolution: int) -> None:
    whole = int(all_bars.end.max(initial=0))
    found = occupancy(all_bars, int(all_bars.start.min(initial=0)), whole, resolution)
    for state in range(4):
        mine = all_bars.take(all_bars.state == state)
        shown = found.mean[found.state == state].sum() * resolution
        assert np.isclose(shown, (mine.end - mine.start).sum())
    assert not len(found.start) or not (found.start % resolution).any()


def test_a_narrow_window_has_no_cells_outside() -> None:
    """A bar lasts an hour and a cell lasts a microsecond, so cells for whole bars would exhaust the memory."""
    hour = 3_600_000_000
    tracks = np.arange(500)
    long = Bars(tracks, tracks, tracks + hour, tracks % 2, tracks, np.ones_like(tracks))
    found = occupancy(long, hour // 2, hour // 2 + 1000, 1)
    assert len(found.start) == 2 * 1000 and set(found.start.tolist()) == set(range(hour // 2, hour // 2 + 1000))
    assert set(found.mean.tolist()) == {250.0}
    assert not len(occupancy(long, 2 * hour, 2 * hour + 10, 3).start)


# ------------------------------------------------------------------------------------------------ places


def test_blocks_are_sorted_by_part_and_number() -> None:
    names = ["driver", "replica-10", "queue", "rank-actor-1", "replica-2", "rollouter", "trainer", "elsewhere"]
    ordered = ["trainer", "rank-actor-1", "rollouter", "replica-2", "replica-10", "queue", "driver", "elsewhere"]
    assert sorted(names, key=block_order) == ordered


def test_an_event_of_the_users_code_has_a_group_with_its_name() -> None:
    assert place_of("rollouter", "something.new") == ("rollouter", "something.new", STATE["other"])
    assert place_of("queue", "commits").group == "commits (own)" != place_of("queue", "queue.commit").group
    assert place_of("trainer", "sample.dropped").block == "samples"


def test_hidden_blocks_take_no_space_and_tracks_are_disjoint() -> None:
    groups = [
        TrackGroup("trainer", "wait", (0,)),
        TrackGroup("replica-0", "requests", (1, 2, 3)),
        TrackGroup("queue", "commits", (4,)),
    ]
    whole = lay_out(groups)
    rows = sorted(whole.tracks.values())
    assert all(above[1] <= below[0] for above, below in itertools.pairwise(rows))
    assert rows[-1][1] <= whole.height
    less = lay_out(groups, {"replica-0"})
    assert (sorted(less.tracks), [row.name for row in less.blocks]) == ([0, 4], ["trainer", "queue"])
    assert less.height < whole.height


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.floats(1, 300))
def test_large_groups_give_way_until_every_group_has_room_for_its_label(counts: list[int], room: float) -> None:
    numbers = iter(range(sum(counts)))
    groups = [
        TrackGroup(f"part-{each // 3}", str(each), tuple(itertools.islice(numbers, n))) for each, n in enumerate(counts)
    ]
    natural = lay_out(groups)
    heights, full = ([row.bottom - row.top for row in one.groups] for one in (lay_out(groups, room=room), natural))
    assert min(heights) > 0.999 and max(heights) <= max(full)
    most = max(heights)
    assert heights == pytest.approx([min(each, most) for each in full])
    smallest = natural.height - sum(full) + len(groups)
    height = lay_out(groups, room=room).height
    assert height == pytest.approx(min(natural.height, room) if smallest < room else smallest)


def test_times_have_suitable_units() -> None:
    durations = [duration(us) for us in (0, 12, 1_500, 2_500_000, 130_000_000)]
    assert durations == ["0 s", "12 µs", "1.5 ms", "2.5 s", "2:10"]
    assert [clock(us) for us in (0, -1_000, 3_723_456_000)] == ["0:00.000", "-0:00.001", "1:02:03.456"]
