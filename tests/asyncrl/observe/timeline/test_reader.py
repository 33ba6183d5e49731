"""Event files that grow, are damaged or cannot be read."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from asyncrl.timeline.details import Conversation
from asyncrl.timeline.index import Index
from asyncrl.timeline.reading import Chunk, Event, EventReader
from asyncrl.timeline.server import Timeline
from tests.asyncrl.timeline.fake_run import FakeRun
from tests.asyncrl.timeline.looks import DONE, Opened, read, shown


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "runs" / "fake" / "20260101-000000")


def test_a_torn_line_waits_until_it_is_whole_and_a_damaged_one_is_counted(run: FakeRun) -> None:
    run.add("trainer", "step", 0, 1, step=1)
    run.flush()
    path = run.path / "events/step_000001/trainer.jsonl"
    line = path.read_bytes()
    reader = EventReader(run.path)
    assert [len(chunk.events) for chunk in reader.new()] == [1]
    with path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert list(reader.new()) == []
        file.write(line[20:] + line[:20] + b"\n[1]\n" + line)
    (chunk,) = reader.new()
    assert (len(chunk.events), reader.damaged) == (2, 2)
    last = chunk.events[-1]
    assert reader.read_lines({7: (chunk.file, last.offset, last.length)}) == {7: json.loads(line)}
    assert list(reader.new()) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"step"}',
        '{"timestamp":NaN,"event":"step","duration_s":0}',
        '{"timestamp":"x","event":"a","duration_s":0}',
        '{"timestamp":1e15,"event":"step","duration_s":0}',
        '{"timestamp":1e400,"event":"step","duration_s":0}',
        '{"timestamp":1780000000,"event":"step","duration_s":1e15}',
        '{"timestamp":1780000000,"event":"step","duration_s":-1e400}',
        '{"timestamp":12,"event":"step","duration_s":1}',
        '{"timestamp":1' + "0" * 400 + ',"event":"step","duration_s":0}',
        '{"timestamp":1780000000,"event":"step","duration_s":0,"step":1e400}',
        "[" * 100_000,
    ],
)
def test_what_is_no_event_is_left_out(run: FakeRun, line: str) -> None:
    run.add("trainer", "step", 0, 1, step=1)
    run.flush()
    (run.path / "events/step_000001/queue.jsonl").write_text(line + "\n")
    answer = shown(read(run))
    assert (answer["events"], answer["damaged"]) == (1, 1)


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


def test_an_event_of_which_only_what_it_says_is_odd_is_shown(run: FakeRun) -> None:
    odd = {"gate_s": 1e308, "queued_s": float("inf"), "decode_s": float("nan"), "paused_s": -1e300}
    run.add("replica-r0", "request", 0, 1, step=1, sample="sample_0_1", **odd)
    run.flush()
    timeline = read(run)
    assert shown(timeline)["bars"]["right"] == [1000.0]
    assert "sample_0_1" in timeline.details(DONE, 0, lambda *_: Conversation())


def test_halves_of_surrogate_pairs_can_be_shown(run: FakeRun) -> None:
    (directory := run.path / "events/step_000001").mkdir(parents=True)
    line = '{"timestamp":1780000000,"event":"tool.execute","duration_s":1,'
    line += r'"tool":"\\ud800 \ud800","\udc00":["\ud83d\ude00"]}'
    (directory / "rollouter.jsonl").write_text(line + "\n")
    timeline = read(run)
    (chunk,) = EventReader(run.path).new()
    assert chunk.events[0].fields["tool"] == r"\ud800 ?"
    assert chunk.events[0].fields["?"] == ["\U0001f600"]
    json.dumps(shown(timeline), ensure_ascii=False).encode()
    timeline.details(DONE, 0, lambda *_: Conversation()).encode()


@pytest.mark.parametrize("lanes", [40, 3000])
def test_bars_decades_apart_are_in_order_of_lane_and_time(lanes: int) -> None:
    index, far = Index(), 2 * 10**15
    events = [Event(at + lane, at + 10_000, "step", {}, 0, 2) for at in (0, far) for lane in range(lanes)]
    for some in (events[:lanes], events[lanes:]):
        index.add(Chunk("trainer", 0, some))
    bars = index.bars(-1, 2 * far, range(lanes))
    places = list(zip(bars.lane.tolist(), bars.start.tolist(), strict=True))
    assert len(places) == 2 * lanes
    assert places == sorted(places)


def test_a_file_that_cannot_be_read_is_left_out_until_it_can(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(1)
    opened, timeline = Opened(monkeypatch), Timeline(run.path)
    opened.error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    timeline.keep_up(lambda: DONE)
    status = timeline.status(DONE)
    assert status["events"] > 100
    assert re.fullmatch(r"cannot be read: /.*/step_000001/trainer\.jsonl: Stale file handle", status["trouble"])
    opened.error = None
    timeline.keep_up(lambda: DONE)
    after = timeline.status(DONE)
    assert (after["trouble"], after["events"]) == ("", shown(read(run))["events"])
    assert after["events"] > status["events"]


def test_whatever_stops_the_reading_is_told_and_the_next_look_goes_on(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(1)
    whole, timeline, add = shown(read(run))["events"], Timeline(run.path), Index.add
    failed: list[int] = []

    def odd(index: Index, chunk: Chunk) -> None:
        if not failed:
            failed.append(len(chunk.events))
            raise OverflowError("too large")
        add(index, chunk)

    monkeypatch.setattr(Index, "add", odd)
    timeline.keep_up(lambda: DONE)
    assert timeline.status(DONE)["trouble"] == "reading stopped: OverflowError: too large"
    timeline.keep_up(lambda: DONE)
    answer = shown(timeline)
    assert timeline.status(DONE)["trouble"] == ""
    assert (answer["events"], answer["damaged"]) == (whole - failed[0], failed[0])


def test_most_looks_leave_out_what_no_longer_changes(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(12)
    run.add("queue", "queue.commit", 0)
    run.flush()
    now = 1000.0
    opened, reader = Opened(monkeypatch), EventReader(run.path, lambda: now)

    def looked() -> tuple[set[str], int]:
        opened.directories.clear()
        count = sum(len(chunk.events) for chunk in reader.new())
        return {name.removeprefix("step_0000") for name in opened.directories} - {"events"}, count

    assert looked()[0] == {f"{step:02d}" for step in range(13)}
    assert looked() == ({f"{step:02d}" for step in range(13)}, 0)
    run.add("queue", "queue.commit", 1)  # of no step, as events of the queue are
    run.add("trainer", "step", 1, step=5)
    run.flush()
    now += 1
    assert looked() == ({"00", "09", "10", "11", "12"}, 1)
    run.add("driver", "part.restarted", 1, step=3)  # a new file
    run.flush()
    os.utime(run.path / "events/step_000003", (1, 1))
    now += 1
    assert looked() == ({"00", "03", "09", "10", "11", "12"}, 1)
    now += 60
    assert looked() == ({f"{step:02d}" for step in range(13)}, 1)  # step 5's
    run.add("trainer", "step", 2, step=5)  # it went back to there
    run.flush()
    now += 1
    assert looked() == ({"00", "03", "05", "09", "10", "11", "12"}, 1)


def test_nobody_looks_once_the_run_is_over_and_all_is_read(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(2)
    timeline, opened = Timeline(run.path), Opened(monkeypatch)
    timeline.keep_up(lambda: DONE)
    timeline.keep_up(lambda: DONE)
    opened.directories.clear()
    timeline.keep_up(lambda: DONE)
    assert opened.directories == []
    run.write(1, first=3, at=12.0)  # it was resumed
    timeline.keep_up(lambda: DONE._replace(live=True))
    assert shown(timeline)["events"] == shown(read(run))["events"]
