"""The timeline's reader of event files, which may grow, be damaged or be unreadable."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from asyncrl.observe.status.run_files import read_liveness
from asyncrl.observe.timeline.details import Conversation
from asyncrl.observe.timeline.index import Index
from asyncrl.observe.timeline.reader import EventChunk, EventReader, LinePosition, StepRange, TimelineEvent
from asyncrl.observe.timeline.server import Timeline
from tests.fakes.timeline_run import FakeRun, FileAccess, read, shown, timeline_of


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "runs" / "fake" / "20260101-000000")


def test_an_incomplete_line_is_read_once_complete_and_a_damaged_one_is_counted(run: FakeRun) -> None:
    run.add("trainer", "step", 0, 1, step=1)
    run.flush()
    path = run.path / "events/step_000001/trainer.jsonl"
    line = path.read_bytes()
    reader = EventReader(run.path)
    assert [len(chunk.events) for chunk in reader.read_new()] == [1]
    with path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert list(reader.read_new()) == []
        file.write(line[20:] + line[:20] + b"\n[1]\n" + line)
    (chunk,) = reader.read_new()
    assert (len(chunk.events), reader.num_damaged) == (2, 2)
    last = chunk.events[-1]
    assert reader.read_lines({7: LinePosition(chunk.file, last.offset, last.length)}) == {7: json.loads(line)}
    assert list(reader.read_new()) == []


def test_new_events_of_old_and_new_steps_are_read_once(run: FakeRun) -> None:
    at = run.write(2)
    timeline = read(run)
    before = shown(timeline)["events"]
    run.write(1, first=3, at=at)
    run.add("driver", "part.restarted", 9.0, step=1, part="trainer")
    run.flush()
    timeline.read()
    timeline.read()
    after = shown(timeline)
    assert after["events"] == before * 3 // 2 + 1
    assert set(shown(read(run))["bars"]["event"]) == set(range(after["events"]))


def test_files_that_a_live_run_deletes_are_not_reported(run: FakeRun) -> None:
    run.write(3)
    reader = EventReader(run.path)
    new = reader.read_new()
    next(new)
    for file in run.path.glob("events/step_000003/*"):
        file.unlink()
    list(new)
    assert (reader.unreadable, reader.read_share) == ([], 1.0)


def step_numbers(reader: EventReader) -> list[int]:
    return sorted({event.fields["step"] for chunk in reader.read_new() for event in chunk.events})


def test_of_a_long_run_only_the_newest_steps_are_read(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    at = run.write(9)
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in sorted(run.path.glob("events/step_*"))]
    access = FileAccess(monkeypatch)
    reader = EventReader(run.path, max_bytes=sum(sizes[-3:]))
    assert step_numbers(reader) == [7, 8, 9]
    assert reader.left_out_before == 7
    assert {name.partition("/")[0] for name in access.files} == {"step_000007", "step_000008", "step_000009"}
    run.write(1, first=10, at=at)
    run.add("driver", "part.restarted", 9.0, step=2, part="trainer")
    run.flush()
    assert step_numbers(reader) == [10], "earlier steps stay out"
    one = EventReader(run.path, max_bytes=1)
    assert (step_numbers(one), one.left_out_before) == ([10], 10), "the newest step is read in any case"
    everything = EventReader(run.path, max_bytes=10**9)
    assert (step_numbers(everything), everything.left_out_before) == (list(range(1, 11)), None)
    assert step_numbers(EventReader(run.path, steps=StepRange(3, 5))) == [3, 4, 5]
    some = EventReader(run.path, steps=StepRange(3, 5), max_bytes=sizes[4])
    assert (step_numbers(some), some.left_out_before) == ([5], 5)


def test_an_event_with_odd_values_is_shown(run: FakeRun) -> None:
    odd = {"gate_s": 1e308, "queued_s": float("inf"), "decode_s": float("nan"), "paused_s": -1e300}
    run.add("replica-r0", "request", 0, 1, step=1, sample="sample_0_1", **odd)
    run.flush()
    timeline = read(run)
    assert shown(timeline)["bars"]["right"] == [1000.0]
    assert "sample_0_1" in timeline.details(0, lambda *_: Conversation())


def test_events_with_lone_surrogates_are_shown(run: FakeRun) -> None:
    (directory := run.path / "events/step_000001").mkdir(parents=True)
    line = '{"timestamp":1780000000,"event":"tool.execute","duration_s":1,'
    line += r'"tool":"\\ud800 \ud800","\udc00":["\ud83d\ude00"]}'
    (directory / "rollouter.jsonl").write_text(line + "\n")
    timeline = read(run)
    (chunk,) = EventReader(run.path).read_new()
    assert chunk.events[0].fields["tool"] == r"\ud800 ?"
    assert chunk.events[0].fields["?"] == ["\U0001f600"]
    json.dumps(shown(timeline), ensure_ascii=False).encode()
    timeline.details(0, lambda *_: Conversation()).encode()


@pytest.mark.parametrize("tracks", [40, 3000])
def test_bars_that_lie_decades_apart_are_sorted_by_track_and_time(tracks: int) -> None:
    index, far = Index(), 2 * 10**15
    events = [TimelineEvent(at + track, at + 10_000, "step", {}, 0, 2) for at in (0, far) for track in range(tracks)]
    for some in (events[:tracks], events[tracks:]):
        index.add(EventChunk("trainer", 0, some))
    bars = index.bars(-1, 2 * far, range(tracks))
    places = list(zip(bars.track.tolist(), bars.start.tolist(), strict=True))
    assert len(places) == 2 * tracks
    assert places == sorted(places)


def test_an_unreadable_file_is_left_out_until_it_is_readable(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(1)
    access, timeline = FileAccess(monkeypatch), timeline_of(run)
    access.error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    timeline.keep_up()
    status = timeline.status()
    assert status["events"] > 100
    assert re.fullmatch(r"cannot be read: /.*/step_000001/trainer\.jsonl: Stale file handle", status["trouble"])
    access.error = None
    timeline.keep_up()
    after = timeline.status()
    assert (after["trouble"], after["events"]) == ("", shown(read(run))["events"])
    assert after["events"] > status["events"]


def test_a_failure_to_read_is_reported_and_the_next_read_continues(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(1)
    expected, timeline, add = shown(read(run))["events"], timeline_of(run), Index.add
    failed: list[int] = []

    def add_or_fail(index: Index, chunk: EventChunk) -> None:
        if not failed:
            failed.append(len(chunk.events))
            raise OverflowError("too large")
        add(index, chunk)

    monkeypatch.setattr(Index, "add", add_or_fail)
    timeline.keep_up()
    assert timeline.status()["trouble"] == "reading stopped: OverflowError: too large"
    timeline.keep_up()
    answer = shown(timeline)
    assert timeline.status()["trouble"] == ""
    assert (answer["events"], answer["damaged"]) == (expected - failed[0], failed[0])


def test_scans_leave_out_directories_that_no_longer_change(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(12)
    run.add("queue", "queue.commit", 0)
    run.flush()
    now = 1000.0
    access, reader = FileAccess(monkeypatch), EventReader(run.path, lambda: now)

    def scan() -> tuple[set[str], int]:
        access.directories.clear()
        count = sum(len(chunk.events) for chunk in reader.read_new())
        return {name.removeprefix("step_0000") for name in access.directories} - {"events"}, count

    assert scan()[0] == {f"{step:02d}" for step in range(13)}
    assert scan() == ({f"{step:02d}" for step in range(13)}, 0)
    run.add("queue", "queue.commit", 1)  # an event without a step
    run.add("trainer", "step", 1, step=5)
    run.flush()
    now += 1
    assert scan() == ({"00", "09", "10", "11", "12"}, 1)
    run.add("driver", "part.restarted", 1, step=3)  # a new file
    run.flush()
    os.utime(run.path / "events/step_000003", (1, 1))
    now += 1
    assert scan() == ({"00", "03", "09", "10", "11", "12"}, 1)
    now += 60
    assert scan() == ({f"{step:02d}" for step in range(13)}, 1)  # the event of step 5
    run.add("trainer", "step", 2, step=5)  # training went back to step 5
    run.flush()
    now += 1
    assert scan() == ({"00", "03", "05", "09", "10", "11", "12"}, 1)


def test_a_finished_run_is_not_scanned_again_until_it_is_resumed(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(2)
    run.state("completed", 2)
    timeline, access = Timeline(run.path, lambda: read_liveness(run.path)), FileAccess(monkeypatch)
    timeline.keep_up()
    timeline.keep_up()
    access.directories.clear()
    timeline.keep_up()
    assert access.directories == []
    run.write(1, first=3, at=12.0)  # the run was resumed
    run.state("running", 3)
    timeline.keep_up()
    assert shown(timeline)["events"] == shown(read(run))["events"]
