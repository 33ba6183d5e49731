"""Events: recording, fields, forwarding, files and losses."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import profile as own
from asyncrl.core.failures import BugError
from asyncrl.profiling import Profiler, ProfilerSettings, profile
from asyncrl.profiling import catalog as registry
from asyncrl.profiling.files import MAX_TEXT, EventFiles, EventLine, event_files
from asyncrl.profiling.profiler import MAX_DRAINED, MAX_SENDERS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[Profiler]:
    """A profiler that writes files; a test may configure it again."""
    profiler = Profiler()
    profiler.configure("rollouter", ProfilerSettings("full", tmp_path / "events"))
    yield profiler
    profiler.close()


def written(profiler: Profiler, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the events of all files in order, each with the name of its file as `file`."""
    profiler.flush()
    return [
        {**json.loads(line), "file": f"{path.parent.name}/{path.stem}"}
        for path in event_files(tmp_path)
        for line in path.read_text().splitlines()
    ]


# ------------------------------------------------------------------------------------------------ recording


def test_a_span_records_time_duration_and_fields(profiler: Profiler, tmp_path: Path) -> None:
    before = time.time()
    profiler.set_position(step=12, version=3)
    with profiler.span("tool.execute", sample="sample_0_42", trajectory=1, turn=2, tool="search") as span:
        time.sleep(0.02)
        span.add(status="ok")
    (event,) = written(profiler, tmp_path)
    assert before <= event.pop("timestamp") <= time.time() - 0.02
    assert 0.02 <= event.pop("duration_s") < 5
    assert event == {
        "event": "tool.execute",
        "step": 12,
        "version": 3,
        "sample": "sample_0_42",
        "trajectory": 1,
        "turn": 2,
        "tool": "search",
        "status": "ok",
        "file": "step_000012/rollouter",
    }


def test_a_failing_span_records_the_error_and_raises(profiler: Profiler, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profiler.span("tool.execute"):
        1 / 0  # noqa: B018
    assert written(profiler, tmp_path)[0]["error"] == "ZeroDivisionError"


async def test_a_span_is_an_async_context_manager(profiler: Profiler, tmp_path: Path) -> None:
    async with profiler.span("user.step", interaction="tutor") as span:
        await anyio.lowlevel.checkpoint()
        span.add(turn=1)
    event = written(profiler, tmp_path)[0]
    assert (event["event"], event["interaction"], event["turn"]) == ("user.step", "tutor", 1)


def test_events_without_duration_and_events_timed_by_the_caller_are_recorded(
    profiler: Profiler, tmp_path: Path
) -> None:
    profiler.note("sample.ready", sample="sample_0_1", reward=np.float32(0.5), tokens=np.int64(3), versions=None)
    profiler.record("sync.load", 1000.25, 2.5, version=7)
    profiler.record_ended("sample.generate", 4.0)
    ready, load, generate = sorted(written(profiler, tmp_path), key=lambda event: event["duration_s"])
    assert ready["duration_s"] == 0 and (ready["reward"], ready["tokens"]) == (0.5, 3) and "versions" not in ready
    assert (load["timestamp"], load["duration_s"], load["version"]) == (1000.25, 2.5, 7)
    assert abs(generate["timestamp"] + 4.0 - time.time()) < 5


async def test_contexts_reach_child_tasks_and_no_other_tasks(profiler: Profiler, tmp_path: Path) -> None:
    started = anyio.Event()

    async def tool(number: int) -> None:
        await started.wait()
        profiler.note("tool.execute", tool=str(number))

    async def sample(number: int) -> None:
        with profiler.context(sample=f"sample_0_{number}", trajectory=0):
            async with anyio.create_task_group() as group:
                for trajectory in range(2):
                    with profiler.context(trajectory=trajectory):
                        group.start_soon(tool, number)

    async with anyio.create_task_group() as group:
        for number in range(1, 20):
            group.start_soon(sample, number)
        await anyio.wait_all_tasks_blocked()
        started.set()
    profiler.note("sample.ready")
    *events, last = written(profiler, tmp_path)
    assert "sample" not in last
    assert all(event["sample"] == f"sample_0_{event['tool']}" for event in events)
    assert Counter(event["trajectory"] for event in events) == {0: 19, 1: 19}


def test_fields_of_an_event_override_the_context(profiler: Profiler, tmp_path: Path) -> None:
    with profiler.context(sample="sample_0_1", version=1):
        profiler.note("sample.ready", sample="sample_0_2")
    event = written(profiler, tmp_path)[0]
    assert (event["sample"], event["version"]) == ("sample_0_2", 1)


@pytest.mark.parametrize("level", registry.LEVELS)
def test_a_level_records_its_events(profiler: Profiler, level: registry.EventLevel, tmp_path: Path) -> None:
    profiler.configure("x", ProfilerSettings(level, tmp_path / "events"))
    for name in registry.EVENTS:
        with profiler.span(name) as span:
            span.add(tokens=1)
        profiler.note(name)
        profiler.record_ended(name, 0.0)
        profiler.record(name, 0.0, 0.0)
        with profiler.context(sample="x"):
            assert profiler.records(name) == (name in registry.enabled(level))
    counts = Counter(event["event"] for event in written(profiler, tmp_path))
    assert counts == dict.fromkeys(registry.enabled(level), 4)
    assert profiler.enabled == (level != "off")
    profiler.close()
    assert not profiler.enabled


@pytest.mark.parametrize("level", registry.LEVELS)
def test_an_unregistered_name_is_refused(profiler: Profiler, level: registry.EventLevel, tmp_path: Path) -> None:
    profiler.configure("x", ProfilerSettings(level, tmp_path))
    for record in (
        profiler.span,
        profiler.note,
        lambda name: profiler.record_ended(name, 0.0),
        lambda name: profiler.record(name, 0.0, 0.0),
    ):
        with pytest.raises(BugError, match=r"'tool\.exec' is not registered.*'tool\.execute'.*events\.toml"):
            record("tool.exec")


def test_the_users_code_records_under_names_of_its_own(tmp_path: Path) -> None:
    profile.configure("x", ProfilerSettings("summary", tmp_path))
    try:
        with profile.context(sample="sample_0_1"), own.span("my.lookup", table="prices") as span:
            span.add(rows=12)
        own.note("my.miss")
        with pytest.raises(KeyError), own.span("mine"):
            raise KeyError
    finally:
        profile.close()
    lines = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert [(line["event"], line.get("error")) for line in lines] == [
        ("my.lookup", None),
        ("my.miss", None),
        ("mine", "KeyError"),
    ]
    assert (lines[0]["table"], lines[0]["rows"], lines[0]["sample"]) == ("prices", 12, "sample_0_1")
    assert lines[1]["duration_s"] < 0.1


def test_the_example_of_the_page_records_its_events(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "profiling.md", "exec"), names)
    profile.configure("rollouter", ProfilerSettings("summary", tmp_path))
    try:
        anyio.run(names["search"], "two words")
    finally:
        profile.close()
    lines = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert [(line["event"], line.get("words"), line.get("hits")) for line in lines] == [
        ("index.lookup", 2, 3),
        ("index.done", None, None),
    ]


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("tool.execute", {}, "names that begin with 'tool' are asyncrl's; call it 'my.tool.execute'"),
        ("request", {}, "names that begin with 'request'"),
        ("sample.mine", {}, "names that begin with 'sample'"),
        ("my step", {}, "use at most 100 letters"),
        ("my.step", {"event": "x"}, "every event has a field 'event' already"),
    ],
)
@pytest.mark.parametrize("record", [own.span, own.note])
def test_a_users_event_cannot_collide_with_ours(
    record: Callable[..., object], name: str, fields: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        record(name, **fields)


def test_the_project_records_only_registered_events() -> None:
    """A misspelt name would also raise a BugError, but only where its line runs."""
    names: list[tuple[Path, str]] = []
    for package in ("asyncrl", "rollouter", "trainer", "skip"):
        for file in (ROOT / package).rglob("*.py"):
            code = file.read_text(encoding="utf-8")
            if file != Path(own.__file__):
                names += [(file, name) for name in re.findall(r"profile\.(?:span|note|record\w*)\(\s*\"([^\"]+)", code)]
                assert "from asyncrl import profile" not in code, f"{file}: it is for the user's code"
    assert len(names) > 30
    assert [(file, name) for file, name in names if name not in registry.EVENTS] == []


def test_the_page_of_events_is_current_and_complete() -> None:
    page = ROOT / "docs" / "events.md"
    assert page.read_text(encoding="utf-8") == registry.markdown(), "docs/events.md is stale: make docs"
    infos = [info for section in registry.SECTIONS.values() for info in section]
    assert len(infos) == len(registry.EVENTS)
    assert all(info.meaning and all(info.extras.values()) for info in infos)
    assert not any(extra in registry.FIELDS for info in infos for extra in info.extras)


# ------------------------------------------------------------------------------------------------ forwarding


def test_forwarded_events_are_written_by_the_receiver(profiler: Profiler, tmp_path: Path) -> None:
    sender = Profiler()
    sender.configure("replica-a", ProfilerSettings("summary"))
    with sender.span("request", request="sample_0_1/0-1", version=2):
        pass
    sender.note("turn.parse")
    sent = json.loads(json.dumps(sender.drain()))
    assert len(sent) == 1 and sender.drain() == []
    profiler.set_position(step=4, version=9)
    profiler.ingest("replica-a", sent)
    event = written(profiler, tmp_path)[0]
    assert (event["file"], event["step"], event["version"]) == ("step_000004/replica-a", 4, 2)
    assert profiler.drain() == []
    sender.close()


def test_events_are_ignored_when_profiling_is_off(profiler: Profiler, tmp_path: Path) -> None:
    profiler.configure("rollouter", ProfilerSettings("off", tmp_path / "events"))
    profiler.ingest("replica-a", [{"event": "request", "timestamp": 0, "duration_s": 0}])
    profiler.flush()
    assert not (tmp_path / "events").exists()


@given(st.lists(st.integers(min_value=0, max_value=30), max_size=20), st.integers(min_value=1, max_value=20))
def test_dropped_events_are_counted_and_reported(bursts: list[int], most: int) -> None:
    """A process buffers at most `most` events, and either sends an event or reports it as dropped, exactly once."""
    profiler = Profiler()
    profiler.configure("replica-a", ProfilerSettings("summary", None, most))
    recorded = sent = reported = 0
    for burst in [*bursts, 0, 0]:
        for _ in range(burst):
            profiler.note("request")
        recorded += burst
        for event in profiler.drain():
            if event["event"] == "request":
                sent += 1
            else:
                reported += event["events"]
    assert sent + reported == recorded
    assert profiler.status() == {"events": sent, "dropped": reported, "own_dropped": reported, "unsent": 0}


def test_an_answer_carries_a_limited_number_of_events(profiler: Profiler) -> None:
    profiler.configure("replica-a", ProfilerSettings("summary"))
    for _ in range(MAX_DRAINED + 7):
        profiler.note("request")
    assert [len(profiler.drain()) for _ in range(3)] == [MAX_DRAINED, 7, 0]


def dropped(count: int) -> dict[str, Any]:
    return {"event": "profiler.dropped", "timestamp": 0.0, "duration_s": 0.0, "events": count}


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        ([(2, 2), (3, 5), (1, 6)], 0),
        ([(2, 2), (1, 6), (1, 7), (1, 8)], 3),
        ([(2, 2), (1, 6), (3, 5), (1, 7)], 0),  # the second answer arrived after the third one
        ([(2, 2), (1, 6), (1, 7), (3, 5), (1, 11), (1, 12)], 3),  # an answer arrives after its loss was reported
        ([(2, 502), (1, 503), (1, 504)], 0),  # a previous receiver got the earlier events
        ([(2, 2), (4, None), (1, 7), (1, 8)], 0),
        ([(2, 2), (2, None), (1, 7), (1, 8)], 2),
    ],
)
def test_sent_events_that_do_not_arrive_are_lost(
    profiler: Profiler, tmp_path: Path, answers: list[tuple[int, int | None]], lost: int
) -> None:
    profiler.configure("rollouter", ProfilerSettings("full", tmp_path / "events"))
    request = {"event": "request", "timestamp": 0.0, "duration_s": 0.0}
    for count, sent in answers:
        profiler.ingest("replica-a", [request] * count, sent=sent)
        profiler.ingest("replica-b", [request] * 2)
    events = written(profiler, tmp_path)
    assert profiler.status()["dropped"] == lost and profiler.status()["own_dropped"] == 0
    reported = [(event["file"], event["events"]) for event in events if event["event"] == "profiler.dropped"]
    assert reported == ([("step_000000/rollouter", lost)] if lost else [])


def test_replicas_that_have_ended_are_forgotten_and_losses_of_others_still_count(
    profiler: Profiler, tmp_path: Path
) -> None:
    profiler.configure("rollouter", ProfilerSettings("full", tmp_path / "events"))
    request = {"event": "request", "timestamp": 0.0, "duration_s": 0.0}
    for number in range(2 * MAX_SENDERS):
        profiler.ingest(f"replica-{number}", [request], sent=1)
        profiler.ingest("replica-a", [request], sent=1 + 2 * number)
    # One event is missing in each answer but the first; a loss counts when it is still missing in the next answer.
    assert profiler.status()["dropped"] == 2 * MAX_SENDERS - 2
    assert len(profiler._buffer._senders) == MAX_SENDERS


def test_dropped_events_are_reported_even_if_their_report_is_lost(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 1000.0)
    profiler.configure("rollouter", ProfilerSettings("full", tmp_path / "events", 1))
    profiler.ingest("replica-a", [{"event": "request", "timestamp": 0.0, "duration_s": 0.0}, dropped(5)])
    assert written(profiler, tmp_path)[-1]["events"] == 6
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full_disk)
        profiler.ingest("replica-a", [dropped(7)])
        profiler.flush()
    reported = sum(event.get("events", 0) for event in written(profiler, tmp_path))
    assert reported == profiler.status()["dropped"] == 6 + 8


# ------------------------------------------------------------------------------------------------ files


def test_each_step_has_its_directory_and_each_part_its_file(profiler: Profiler, tmp_path: Path) -> None:
    profiler.note("sample.ready")
    for step in range(1, 30):
        profiler.set_position(step=step)
        profiler.note("sample.ready")
        profiler.ingest("rank-actor-0", [{"event": "rank.call", "timestamp": 0.0, "duration_s": 0.0}])
    profiler.ingest("rank-actor-0", [{"event": "rank.call", "timestamp": 0.0, "duration_s": 0.0, "step": 3}])
    files = Counter(event["file"] for event in written(profiler, tmp_path))
    assert files["step_000000/rollouter"] == 1 and files["step_000003/rank-actor-0"] == 2
    assert len(files) == 59 and sum(files.values()) == 60


def test_a_thread_writes_periodically(profiler: Profiler, tmp_path: Path) -> None:
    profiler.note("sample.ready")
    until = time.monotonic() + 30
    while not list(event_files(tmp_path)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_torn_line_does_not_damage_the_next(profiler: Profiler, tmp_path: Path) -> None:
    path = tmp_path / "events" / "step_000000" / "x.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"event": "sample.re')
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "events"))
    profiler.note("sample.ready")
    profiler.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"event": "sample.re' and json.loads(whole)["event"] == "sample.ready"


def test_a_full_disk_loses_only_events(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True
    write = os.write

    def limited(descriptor: int, data: Any) -> int:
        if full and threading.current_thread() is threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 1000.0)
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "events"))
    monkeypatch.setattr(os, "write", limited)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            profiler.note("sample.ready")
            profiler.note("sample.ready")
            profiler.flush()
    assert len(caplog.records) == 1 and "events cannot be written" in caplog.text
    full = False
    profiler.note("sample.ready")
    ready, marker = written(profiler, tmp_path)
    assert ready["event"] == "sample.ready"
    assert (marker["event"], marker["events"]) == ("profiler.dropped", 6)
    assert profiler.status() == {"events": 7, "dropped": 6, "own_dropped": 6, "unsent": 0}


def full_disk(descriptor: int, data: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_after_a_torn_line_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = tmp_path / "step_000000" / "x.jsonl"
    torn.parent.mkdir()
    torn.write_text('{"event": "sample.re')
    files = EventFiles(tmp_path)
    monkeypatch.setattr(os, "write", full_disk)
    line = EventLine("x", {"event": "sample.ready"})
    assert files.write([line]) == [line]
    here = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert torn.resolve() not in here


def test_events_are_not_appended_through_a_link(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "step_000000" / "x.jsonl"
    theirs.write_text("theirs\n")
    link.parent.mkdir()
    link.symlink_to(theirs)
    line = EventLine("x", {"event": "sample.ready"})
    assert EventFiles(tmp_path).write([line]) == [line]
    assert theirs.read_text() == "theirs\n"


def test_a_partial_write_leaves_complete_lines(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 1000.0)
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "events"))
    profiler.note("sample.ready", tokens=1)
    profiler.flush()
    write, room = os.write, 40

    def some(descriptor: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data)[:room]
        room -= len(part)
        return write(descriptor, part)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", some)
        profiler.note("sample.ready", tokens=2)
        profiler.flush()
    profiler.note("sample.ready", tokens=3)
    reported = [(event["event"], event.get("tokens"), event.get("events")) for event in written(profiler, tmp_path)]
    assert reported == [("sample.ready", 1, None), ("sample.ready", 3, None), ("profiler.dropped", None, 1)]


class BrokenRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.array([1.0, 2.0]), "array([1., 2.])"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (float("nan"), None),
        (np.float32("inf"), None),
        (BrokenRepr(), "BrokenRepr"),
        ("x" * 5000, "x" * MAX_TEXT),
        ([1, 2], [1, 2]),
    ],
)
def test_a_line_is_valid_json_for_any_field_value(profiler: Profiler, tmp_path: Path, value: Any, read: Any) -> None:
    with profiler.span("tool.execute", tool="t") as span:
        span.add(scores=value, turn=1)
    profiler.note("sample.ready", step="seven")
    tool, ready = written(profiler, tmp_path)
    assert (tool["scores"], tool["turn"]) == (read, 1)
    assert ready["step"] == "seven" and ready["file"] == "step_000000/rollouter"
    assert profiler.status()["dropped"] == 0


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a\ud800b", "a?b"),
        ("\udc00\ud83d", "??"),
        ("\U0001f600\u2028é", "\U0001f600\u2028é"),
        ("\\ud800", "\\ud800"),
        (["\ud800", 1], ["?", 1]),
    ],
)
def test_lone_surrogates_are_replaced(profiler: Profiler, tmp_path: Path, text: Any, read: Any) -> None:
    """The name of a tool in a call may be any text, and `json.loads` accepts surrogates."""
    profiler.note("tool.execute", tool=text)
    (event,) = written(profiler, tmp_path)
    assert event["tool"] == read


@pytest.mark.parametrize("writes", [True, False])
def test_long_texts_are_cut_before_they_are_buffered(
    profiler: Profiler, tmp_path: Path, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 1000.0)
    profiler.configure("x", ProfilerSettings("full", tmp_path if writes else None))
    tracemalloc.start()
    for number in range(20):
        with profiler.span("tool.execute", turn=number) as span:
            span.add(tool=str(number) * 1_000_000)
        del span
        profiler.note("part.restarted", part="x", cause="y" * (1_000_000 + number))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    profiler.close()
    assert held < 1_000_000


def test_an_event_that_cannot_be_encoded_is_lost_alone_and_reported_once(
    profiler: Profiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            profiler.note("sample.ready", tokens=1)
            profiler.record("request", started_at=cast(float, None), duration_s=1.0)
            profiler.note("sample.ready", tokens=10**5000)
            profiler.note("sample.ready", tokens=2)
            profiler.ingest("\0", [{"event": "request", "timestamp": 0.0, "duration_s": 0.0}])
            profiler.flush()
    events = written(profiler, tmp_path)
    assert [event["tokens"] for event in events if event["event"] == "sample.ready"] == [1, 2] * 2
    assert sum(event.get("events", 0) for event in events) == profiler.status()["dropped"] == 6
    assert caplog.text.count("cannot be encoded") == caplog.text.count("and similar ones cannot be written") == 1


def test_the_writing_thread_survives_any_error(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = EventFiles.write

    def fail(self: EventFiles, lines: Any) -> Any:
        failed.release()
        raise MemoryError

    failed = threading.Semaphore(0)
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 0.001)
    monkeypatch.setattr(EventFiles, "write", fail)
    profiler.configure("x", ProfilerSettings("full", tmp_path / "events"))
    profiler.note("sample.ready", tokens=1)
    for _ in range(3):
        assert failed.acquire(timeout=30)
    monkeypatch.setattr(EventFiles, "write", write)
    profiler.note("sample.ready", tokens=2)
    profiler.close()
    events = written(profiler, tmp_path)
    assert sorted((event["event"], event.get("tokens"), event.get("events")) for event in events) == [
        ("profiler.dropped", None, 1),
        ("sample.ready", 2, None),
    ]
    assert caplog.text.count("events cannot be written") == 1


def test_a_writer_that_ends_late_does_not_affect_the_next_run(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    in_time: list[bool] = []
    write = EventFiles.write

    def slow(self: EventFiles, lines: Any) -> Any:
        if self._directory == tmp_path / "old" / "events":
            writing.set()
            in_time.append(go_on.wait(2))
        return write(self, lines)

    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 0.001)
    monkeypatch.setattr("asyncrl.profiling.profiler.CLOSE_S", 0.01)
    monkeypatch.setattr(EventFiles, "write", slow)
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "old" / "events"))
    late = profiler._writer._thread if profiler._writer is not None else None
    profiler.note("sample.ready")
    assert writing.wait(30) and late is not None
    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 1000.0)
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "new" / "events"))
    profiler.note("sample.ready", tokens=1)
    profiler.flush()
    profiler.note("sample.ready", tokens=2)
    go_on.set()
    late.join(30)
    assert in_time[0], "the new run does not wait for the writer of the old one"
    assert [event["tokens"] for event in written(profiler, tmp_path / "new")] == [1, 2]
    assert profiler.status() == {"events": 2, "dropped": 0, "own_dropped": 0, "unsent": 0}


def test_events_recorded_during_the_last_write_are_written(
    profiler: Profiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    write = os.write

    def slow(descriptor: int, data: Any) -> int:
        writing.set()
        go_on.wait(30)
        return write(descriptor, data)

    monkeypatch.setattr("asyncrl.profiling.profiler.WRITE_EVERY_S", 0.001)
    profiler.configure("x", ProfilerSettings("summary", tmp_path / "events"))
    monkeypatch.setattr(os, "write", slow)
    profiler.note("sample.ready", tokens=1)
    assert writing.wait(30)
    profiler.note("sample.ready", tokens=2)
    threading.Timer(0.05, go_on.set).start()
    profiler.close()
    assert [event["tokens"] for event in written(profiler, tmp_path)] == [1, 2]


def test_many_threads_record_at_once(profiler: Profiler, tmp_path: Path) -> None:
    def work(number: int) -> None:
        with profiler.context(sample=f"sample_0_{number}"):
            for turn in range(500):
                with profiler.span("tool.execute", turn=turn):
                    pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Counter((event["sample"], event["turn"]) for event in written(profiler, tmp_path))
    assert len(found) == 4000 and set(found.values()) == {1}


def test_only_spans_with_sync_wait_for_the_gpu(profiler: Profiler) -> None:
    calls: list[int] = []
    profiler.synchronize = lambda: calls.append(1)
    with profiler.span("rank.forward"):
        pass
    assert calls == []
    with profiler.span("rank.forward", sync=True):
        assert len(calls) == 1
    assert len(calls) == 2
