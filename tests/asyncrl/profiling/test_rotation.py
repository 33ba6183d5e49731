"""The events of a long run stay below a size; those of the oldest steps become sums."""

from __future__ import annotations

import json
import os
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.profiling import Profiler, ProfilerSettings
from asyncrl.profiling import rotation as module
from asyncrl.profiling.files import EventFiles, EventLine, event_files, parse_event
from asyncrl.profiling.rotation import (
    MAX_GAP,
    MAX_SPANS,
    NEWEST_STEPS,
    EventRotation,
    EventSummary,
    StepSpan,
    read_event_summary,
    unfolded_files,
)

START = 1_790_000_000.0


def line(part: str, step: int, event: str, at: float = 0.0, took: float = 0.0, **fields: Any) -> EventLine:
    return EventLine(part, {"timestamp": START + at, "event": event, "duration_s": took, "step": step, **fields})


def write_steps(run_dir: Path, steps: range) -> None:
    """Write the events of steps of 10 s, each over two samples with three requests, one of which was dropped."""
    files = EventFiles(run_dir / "events")
    for step in steps:
        at = 10.0 * step
        samples = {"samples": 2, "tokens": 100, "reward": 0.5, "wait_samples_s": 2.0}
        lines = [line("trainer", step, "step", at, 8.0, **samples)]
        lines += [line("trainer", step, "sample.trained", at + 8, staleness=1) for _ in range(2)]
        lines += [line("replica-a", step, "request", at, float(number)) for number in range(3)]
        lines.append(line("rollouter", step, "sample.dropped", at, reason="stale"))
        assert files.write(lines) == []
    files.close()


def step_sizes(run_dir: Path) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for file in event_files(run_dir):
        step = int(file.parent.name.removeprefix("step_"))
        sizes[step] = sizes.get(step, 0) + file.stat().st_size
    return sizes


def fold_all(rotation: EventRotation) -> int:
    """Work until nothing is left to do; return the number of calls that did something."""
    calls = 0
    while rotation.work():
        calls += 1
    return calls


def test_the_oldest_steps_are_replaced_by_sums(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 101))
    whole = step_sizes(tmp_path)
    keep = sum(whole[step] for step in range(71, 101))
    fold_all(EventRotation(tmp_path / "events", keep))
    assert list(step_sizes(tmp_path)) == list(range(71, 101))
    assert not list((tmp_path / "events").glob("folding_*"))
    summary = read_event_summary(tmp_path)
    assert summary is not None
    assert [(span.first_step, span.last_step) for span in summary.spans] == [(step, step) for step in range(1, 71)]
    assert summary.spans[4] == StepSpan(
        5, 5, START + 50, START + 58, steps=1, duration_s=8.0, wait_samples_s=2.0, samples=2, tokens=100, reward=1.0,
        staleness=2.0, requests=3, dropped=1,
    )  # fmt: skip
    requests = summary.events["request"]
    assert (requests.count, requests.duration_s, requests.max_s) == (210, 210.0, 2.0)


def test_a_run_below_the_size_keeps_its_events(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 30))
    before = step_sizes(tmp_path)
    assert fold_all(EventRotation(tmp_path / "events", sum(before.values()))) == 0
    assert step_sizes(tmp_path) == before
    assert read_event_summary(tmp_path) is None


def test_the_newest_steps_are_never_replaced(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 30))
    fold_all(EventRotation(tmp_path / "events", 1))
    assert list(step_sizes(tmp_path)) == list(range(30 - NEWEST_STEPS, 30))


def test_a_call_reads_a_bounded_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    write_steps(tmp_path, range(1, NEWEST_STEPS + 2))
    [size] = [size for step, size in step_sizes(tmp_path).items() if step == 1]
    assert fold_all(EventRotation(tmp_path / "events", 1)) > size / 300


def test_a_call_reads_many_small_files(tmp_path: Path) -> None:
    """A run of short steps writes small files faster than a call for each of them would read."""
    write_steps(tmp_path, range(1, NEWEST_STEPS + 51))
    assert fold_all(EventRotation(tmp_path / "events", 1)) < 5


def test_the_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing it again took 0.2 s of CPU and 4 MB after 7,000 steps, every five seconds."""
    listed: list[Path] = []
    numbered, now = module._numbered, iter(range(0, 10_000, 10))

    def listing(directory: Path, prefix: str) -> list[str]:
        listed.append(directory)
        return numbered(directory, prefix)

    monkeypatch.setattr(module, "_numbered", listing)
    write_steps(tmp_path, range(1, 20))
    rotation = EventRotation(tmp_path / "events", 40_000, clock=lambda: next(now))
    assert not rotation.work()
    num_listed = len(listed)
    write_steps(tmp_path, range(20 + MAX_GAP - 1, 150 + MAX_GAP))
    fold_all(rotation)
    assert min(step_sizes(tmp_path)) > 100 and sum(step_sizes(tmp_path).values()) <= 40_000
    assert {directory.parent.name for directory in listed[num_listed:]} == {"events"}, "only those that are folded"


class LongRun:
    """A run that writes an event of nearly 1 kB a step, and whose events are rotated meanwhile."""

    def __init__(self, run_dir: Path, keep_bytes: int) -> None:
        self.run_dir = run_dir
        self.num_lines = 0
        now = count(0, 10)
        self._rotation = EventRotation(run_dir / "events", keep_bytes, clock=lambda: next(now))
        self._files = EventFiles(run_dir / "events")

    def train(self, steps: range, max_calls: int = 10_000) -> None:
        """Write the events of steps, and call `work` up to `max_calls` times after each."""
        for step in steps:
            self.write(step, text="x" * 880)
            self.rotate(step, max_calls)

    def write(self, step: int, **fields: Any) -> None:
        assert self._files.write([line("trainer", step, "request", **fields)]) == []
        self.num_lines += 1

    def rotate(self, step: int, max_calls: int = 10_000) -> None:
        for _ in range(max_calls):
            if not self._rotation.work(step):
                return

    def size(self) -> int:
        return sum(step_sizes(self.run_dir).values())

    def num_found(self) -> int:
        """Return the number of events in files and in sums."""
        summary = read_event_summary(self.run_dir)
        folded = summary.events["request"].count if summary is not None else 0
        files = [*event_files(self.run_dir), *unfolded_files(self.run_dir, summary)]
        return folded + sum(len(file.read_bytes().splitlines()) for file in files)


def test_events_stay_below_the_size_after_training_goes_back(tmp_path: Path) -> None:
    """Steps 21 to 30 have been folded when they are repeated, and steps 31 to 70 have events of the first time."""
    run = LongRun(tmp_path, 40_000)
    for first in (1, 21, 21, 21):
        for step in range(first, 71):
            run.train(range(step, step + 1))
            assert run.size() <= 40_000
    assert set(step_sizes(tmp_path)) >= set(range(71 - NEWEST_STEPS, 71))
    assert run.num_found() == run.num_lines


def test_the_steps_around_the_current_one_are_kept_after_training_goes_back(tmp_path: Path) -> None:
    LongRun(tmp_path, 10**9).train(range(1, 81))
    run = LongRun(tmp_path, 1)  # a launch that resumes at step 40
    run.train(range(41, 42))
    around = range(42 - NEWEST_STEPS, 42 + NEWEST_STEPS)
    assert list(step_sizes(tmp_path)) == list(around)
    run.train(range(42, 43))
    assert list(step_sizes(tmp_path)) == list(around)[1:]


def test_abandoned_steps_are_replaced_before_those_that_training_continues_from(tmp_path: Path) -> None:
    run = LongRun(tmp_path, 60_000)
    run.train(range(1, 61))
    run.train(range(21, 31))
    replaced = set(range(1, 61)) - set(step_sizes(tmp_path))
    assert replaced and replaced <= set(range(38, 48))


def test_a_part_that_rarely_writes_loses_no_events_of_a_step_that_is_repeated(tmp_path: Path) -> None:
    """The driver still has its file of step 40 open when training is there again."""
    run, driver = LongRun(tmp_path, 1), EventFiles(tmp_path / "events")
    run.train(range(21, 41))
    for _ in range(2):
        assert driver.write([line("driver", 40, "request")]) == []
        run.num_lines += 1
        run.train(range(41, 61))
        run.train(range(21, 41))
    assert run.num_found() == run.num_lines


@settings(max_examples=20)
@given(
    data=st.data(),
    keep_bytes=st.integers(1, 50_000),
    launches=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_events_are_bounded_and_complete_wherever_training_goes_back(
    data: st.DataObject, keep_bytes: int, launches: list[list[int]]
) -> None:
    """Training goes back within a launch and between launches, while folds are under way."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE_BYTES", 500)
        run_dir, step, num_lines = Path(directory), 0, 0
        for legs in launches:
            run = LongRun(run_dir, keep_bytes)
            run.num_lines = num_lines
            for num_steps in legs:
                first = data.draw(st.integers(0, step)) + 1
                step = first + num_steps - 1
                run.train(range(first, step + 1), data.draw(st.integers(1, 3)))
                assert run.num_found() == run.num_lines
            num_lines = run.num_lines
            run.rotate(step)
            assert run.num_found() == num_lines
            around = range(step + 1 - NEWEST_STEPS, step + 1 + NEWEST_STEPS)
            assert run.size() <= keep_bytes or set(step_sizes(run_dir)) <= set(around)


def test_a_killed_process_folds_each_step_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed after each step of the work: each piece, the summary, and the deletion."""
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    monkeypatch.setattr(module, "MAX_STEPS", 2)
    write_steps(tmp_path, range(1, NEWEST_STEPS + 4))

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    for calls in range(1, 40):
        rotation = EventRotation(tmp_path / "events", 1)
        with monkeypatch.context() as patched:
            if calls % 3 == 0:
                patched.setattr(module.shutil, "rmtree", killed)
            try:
                for _ in range(calls % 7):
                    rotation.work()
            except KeyboardInterrupt:
                assert list((tmp_path / "events").glob("folding_*"))
    fold_all(EventRotation(tmp_path / "events", 1))
    summary = read_event_summary(tmp_path)
    assert summary is not None
    assert summary.events["request"].count == 9
    assert sum(span.samples for span in summary.spans) == 6


def test_a_run_that_ends_while_it_folds_loses_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment, the sums and the files that are not part of them have each event once."""
    monkeypatch.setattr(module, "PIECE_BYTES", 300)
    write_steps(tmp_path, range(1, NEWEST_STEPS + 4))
    total = sum(len(file.read_bytes().splitlines()) for file in event_files(tmp_path))
    rotation = EventRotation(tmp_path / "events", 1)
    partly = 0
    while rotation.work():
        summary = read_event_summary(tmp_path)
        unfolded = sum(len(file.read_bytes().splitlines()) for file in unfolded_files(tmp_path, summary))
        rest = sum(len(file.read_bytes().splitlines()) for file in event_files(tmp_path))
        folded = sum(each.count for each in summary.events.values()) if summary is not None else 0
        assert folded + unfolded + rest == total
        partly += unfolded > 0
    assert partly > 2 and not list(unfolded_files(tmp_path, read_event_summary(tmp_path)))


def test_pipes_and_other_names_are_not_read(tmp_path: Path) -> None:
    """To open a pipe would block forever, and an unexpected name must not end the thread that writes events."""
    write_steps(tmp_path, range(1, NEWEST_STEPS + 3))
    os.mkfifo(tmp_path / "events" / "step_000001" / "rollouter.jsonl.jsonl")
    os.mkfifo(tmp_path / "events" / "summary.json")
    (tmp_path / "events" / "folding_1" / "notes").mkdir(parents=True)
    (tmp_path / "events" / "folding_x").touch()
    assert all(file.is_file() for file in event_files(tmp_path))
    fold_all(EventRotation(tmp_path / "events", 1))
    summary = read_event_summary(tmp_path)
    assert summary is not None and summary.events["request"].count == 6


def test_the_summary_has_a_bounded_size() -> None:
    summary = EventSummary()
    for step in range(1, 10 * MAX_SPANS):
        summary.add_span(StepSpan(step, step, START + step, START + step + 1, steps=1, samples=2))
        assert len(summary.spans) <= MAX_SPANS
    assert sum(span.steps for span in summary.spans) == 10 * MAX_SPANS - 1
    places = [(span.first_step, span.last_step) for span in summary.spans]
    assert places[0][0] == 1 and places[-1][1] == 10 * MAX_SPANS - 1
    assert all(before[1] + 1 == after[0] for before, after in pairwise(places))


def test_damaged_lines_and_a_damaged_summary_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(tmp_path, range(1, NEWEST_STEPS + 2))
    with (tmp_path / "events" / "step_000001" / "trainer.jsonl").open("a") as file:
        file.write('{"timestamp": "x"}\n\xff\n[1]\n{"timestamp": 1790000000, "event": "new", "duration_s": 1}\n')
    sums = '{"schema": 1, "folds": 3, "spans": [], "events": {"step": {"count": "x", "duration_s": 1, "max_s": 1}}}'
    (tmp_path / "events" / "summary.json").write_text(sums)
    fold_all(EventRotation(tmp_path / "events", 1))
    summary = read_event_summary(tmp_path)
    assert summary is not None and "sums over deleted events are lost" in caplog.text
    assert {name: each.count for name, each in summary.events.items()} == {
        "step": 1, "sample.trained": 2, "request": 3, "sample.dropped": 1, "unknown": 1,
    }  # fmt: skip


def test_a_long_line_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, range(1, NEWEST_STEPS + 2))
    with (tmp_path / "events" / "step_000001" / "trainer.jsonl").open("a") as file:
        file.write("x" * 10_000 + "\n")
    monkeypatch.setattr("asyncrl.storage.run_dir.MAX_LINE_BYTES", 1_000)
    lengths: list[int] = []
    monkeypatch.setattr(module, "parse_event", lambda line: lengths.append(len(line)) or parse_event(line))
    fold_all(EventRotation(tmp_path / "events", 1))
    summary = read_event_summary(tmp_path)
    assert summary is not None and summary.events["step"].count == 1
    assert max(lengths) == 1_000


def test_a_failing_disk_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_steps(tmp_path, range(1, NEWEST_STEPS + 2))
    now = 0.0
    rotation = EventRotation(tmp_path / "events", 1, lambda: now)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "replace_file", full)
        for _ in range(3):
            fold_all(rotation)
            now += 60
    assert caplog.text.count("No space left on device") == 1
    fold_all(rotation)
    summary = read_event_summary(tmp_path)
    assert summary is not None and summary.events["request"].count == 3


def test_the_process_that_rotates_deletes_old_events_while_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 0.01)
    monkeypatch.setattr("asyncrl.profiling.profiler.ROTATE_EVERY_S", 0.0)
    write_steps(tmp_path, range(1, 40))
    profiler = Profiler()
    profiler.configure("driver", ProfilerSettings("summary", tmp_path / "events", keep_bytes=1))
    profiler.set_position(step=40)
    profiler.note("part.restarted", part="rollouter", cause="killed")
    deadline = module.time.monotonic() + 30
    while len(list((tmp_path / "events").glob("step_*"))) > NEWEST_STEPS and module.time.monotonic() < deadline:
        profiler.flush()
    profiler.close()
    assert list(step_sizes(tmp_path)) == list(range(41 - NEWEST_STEPS, 41))
    [last] = (tmp_path / "events" / "step_000040" / "driver.jsonl").read_text().splitlines()
    assert json.loads(last)["event"] == "part.restarted"


def test_the_process_that_rotates_follows_training_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 0.01)
    monkeypatch.setattr("asyncrl.profiling.profiler.ROTATE_EVERY_S", 0.0)
    monkeypatch.setattr(module, "SCAN_EVERY_S", 0.0)
    write_steps(tmp_path, range(1, 101))
    keep = sum(step_sizes(tmp_path).values())
    profiler = Profiler()
    profiler.configure("driver", ProfilerSettings("summary", tmp_path / "events", keep_bytes=keep))
    profiler.set_position(step=101)
    profiler.flush()
    profiler.set_position(step=41)
    write_steps(tmp_path, range(41, 42))
    deadline = module.time.monotonic() + 30
    while (tmp_path / "events" / "step_000058").exists() and module.time.monotonic() < deadline:
        module.time.sleep(0.01)
    profiler.close()
    assert step_sizes(tmp_path).keys() == set(range(1, 101)) - {58}
