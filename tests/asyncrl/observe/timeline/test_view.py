"""`asyncrl timeline` without a browser: the view of a window, the server, the trace, and the command."""

from __future__ import annotations

import errno
import gzip
import json
import re
import select
import signal
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asyncrl.cli.main import main
from asyncrl.observe.status.run_files import read_liveness
from asyncrl.observe.timeline.details import Conversation, conversation_of
from asyncrl.observe.timeline.index import Index
from asyncrl.observe.timeline.reader import EventReader
from asyncrl.observe.timeline.server import Timeline, create_app
from asyncrl.observe.timeline.view import Window, select_bars, view
from tests.fakes.timeline_run import EVERYTHING, FakeRun, FileAccess, read, shown, timeline_of


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "runs" / "fake" / "20260101-000000")


def no_conversation(*_: Any) -> Conversation:
    return Conversation()


# ------------------------------------------------------------------------------------------------ windows


def test_a_view_opens_each_file_once_and_does_not_block_the_reader(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(2)
    timeline, access = read(run), FileAccess(monkeypatch)
    read_lines, statuses = EventReader.read_lines, []

    def read_while_asking(reader: EventReader, positions: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            statuses.append(pool.submit(timeline.status).result(10)["events"])
        return read_lines(reader, positions)

    monkeypatch.setattr(EventReader, "read_lines", read_while_asking)
    answer = shown(timeline)
    assert statuses == [answer["events"]]
    assert len(answer["bars"]["title"]) >= answer["events"]
    num_files = len(list((run.path / "events").glob("*/*.jsonl")))
    assert len(access.files) == len(set(access.files)) == num_files
    access.files.clear()
    timeline.details(answer["bars"]["event"][0], no_conversation)
    assert len(access.files) <= 1 + num_files


def test_events_of_a_deleted_file_are_shown_without_their_fields(run: FakeRun) -> None:
    run.write(1)
    timeline = read(run)
    (run.path / "events/step_000001/trainer.jsonl").unlink()
    bars = shown(timeline)["bars"]
    number = next(event for event, title in zip(bars["event"], bars["title"], strict=True) if title.startswith("?"))
    assert "changed or no longer exists" in timeline.details(number, no_conversation)


def test_the_status_has_the_time_at_which_the_first_sample_was_admitted(run: FakeRun) -> None:
    run.add("trainer", "loop.stall", 0, 1)
    run.flush()
    timeline = read(run)
    assert timeline.status()["admitted_ms"] is None
    run.write(1, at=90.0)
    timeline.read()
    status = timeline.status()
    assert (status["admitted_ms"], status["oldest_ms"], status["read"]) == (90_000.0, 0.0, 1.0)


def test_full_zoom_shows_every_event_and_bars_of_a_track_do_not_overlap(run: FakeRun) -> None:
    run.write(2)
    answer = shown(read(run), EVERYTHING._replace(start=-100, end=20_000))
    bars = answer["bars"]
    assert answer["merged"] == 0
    assert set(bars["event"]) == set(range(answer["events"]))
    tracks = defaultdict(list)
    for top, left, right in zip(bars["top"], bars["left"], bars["right"], strict=True):
        tracks[top].append((left, right))
    for spans in tracks.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    phases = {"gate", "queued", "prefill", "decode", "paused"}
    assert phases | {"tool", "user", "reward", "wait", "experience", "update"} <= set(bars["state"])
    moments = [place for place, title in enumerate(bars["title"]) if title.startswith("sample.ready")]
    assert len(moments) == 2 * run.samples
    assert all(bars["left"][place] == bars["right"][place] for place in moments)


def test_a_window_with_few_used_tracks_shows_their_bars(tmp_path: Path) -> None:
    """400 concurrent requests make the tracks thin; three later requests still have one bar each."""
    run = FakeRun(tmp_path)
    for number, (begin, took) in enumerate([(10.0, 1.0)] * 400 + [(100.0, 8.0), (101.0, 8.0), (102.0, 8.0)]):
        fields = {"request": f"sample_0_1/{number}-1", "sample": "sample_0_1", "trajectory": number, "decode_s": took}
        run.add("replica-a", "request", begin, took, step=1, replica="a", **fields)
    run.flush()
    timeline = read(run)
    burst, later = (shown(timeline, Window(*window, 1000, 700)) for window in ((9_000, 12_000), (99_000, 110_000)))
    assert (burst["crowded"], later["crowded"]) == (1, 0)
    (row,) = (row for row in later["groups"] if row["name"] == "requests")
    places = sorted(set(zip(later["bars"]["top"], later["bars"]["bottom"], strict=True)))
    assert len(places) == 3 and row["top"] <= places[0][0] and places[-1][1] <= row["bottom"]
    assert all(above[1] <= below[0] for above, below in pairwise(places))


def test_a_long_window_merges_bars_and_shows_the_occupancy_of_crowded_tracks(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "r", samples=40, trajectories=4, level="summary")
    end = run.write(6) * 1000
    timeline = read(run)
    answer = shown(timeline, Window(0, end, 200))
    assert 0 < len(answer["bars"]["left"]) <= 5000
    assert answer["merged"] > 0
    low = shown(timeline, Window(0, end, 200, pixels_high=60))
    assert low["crowded"] > 0
    assert any("at a time" in title for title in low["bars"]["title"])
    assert len({len(column) for column in low["bars"].values()}) == 1
    zoomed = shown(timeline, Window(0, end, 200, pixels_high=60, top=0, bottom=2))
    assert zoomed["crowded"] == 0
    assert set(zoomed["bars"]["top"]) <= {top for top in low["bars"]["top"] if top <= 2}


def test_version_labels_do_not_overlap(run: FakeRun) -> None:
    run.write(5)
    timeline, window = read(run), EVERYTHING._replace(start=0, end=30_000)
    lines = shown(timeline, window)["versions"]
    assert lines["label"] == ["v0", "v1", "v2", "v3", "v4"]
    assert lines["x"][0] == pytest.approx((0.45 + 0.17) * 6000)
    narrow = shown(timeline, window._replace(pixels=100))["versions"]["label"]
    assert narrow[-1] == "v4" and narrow.count("") >= 2


def test_published_versions_are_shown_where_none_was_applied(run: FakeRun) -> None:
    run.add("trainer", "trainer.publish", 1.0, 0.5, step=1, version=1)
    run.flush()
    assert shown(read(run))["versions"] == {"x": [1500.0], "label": ["v1"]}


def test_a_repeated_step_shares_tracks_with_the_abandoned_one(run: FakeRun) -> None:
    run.write(3)
    tracks = len(set(shown(read(run), EVERYTHING._replace(start=0, end=18_000))["bars"]["top"]))
    run.write(2, first=2, at=18.0)  # training goes back to the end of step 1
    again = shown(read(run), EVERYTHING._replace(start=0, end=30_000))
    assert again["merged"] == 0
    assert len(set(again["bars"]["top"])) <= tracks + 8
    assert again["versions"]["label"] == ["v0", "v1", "v2", "v1", "v2"]


def test_text_of_the_run_is_escaped(run: FakeRun) -> None:
    fields = {"tool": "<img src=x onerror=alert(1)>", "sample": "sample_0_1", "trajectory": 0}
    run.add("rollouter", "tool.execute", 0, 1, step=1, **fields)
    run.flush()
    timeline = read(run)
    details = timeline.details(0, lambda *_: Conversation(notes=["<script>"]))
    for text in (str(shown(timeline)["bars"]["description"]), details):
        assert "<img" not in text and "<script" not in text and "&lt;" in text


def test_details_list_the_events_of_the_trajectory(run: FakeRun) -> None:
    run.write(1)
    timeline = read(run)
    bars = shown(timeline, EVERYTHING._replace(start=-1, end=10_000))["bars"]
    number = next(
        event
        for event, description, title in zip(bars["event"], bars["description"], bars["title"], strict=True)
        if title.startswith("request") and "sample_0_3/1<" in f"{description}<"
    )
    requested = []
    page = timeline.details(number, lambda *trajectory: requested.append(trajectory) or Conversation())
    assert requested == [("sample_0_3", 1)]
    counts = Counter(re.findall(r'<td class="n">[^<]*</td><td>([^<]+)</td>', page)[1:])
    assert counts["request"] == run.turns
    assert counts["sample.ready"] == counts["sample.trained"] == counts["trajectory"] == 1
    assert 'class="phases"' in page


def test_an_empty_index_has_a_view() -> None:
    assert view(select_bars(Index(), 0, Window(0, 1, 10)), {})["bars"]["left"] == []


# ------------------------------------------------------------------------------------------------ HTTP


@pytest.mark.parametrize(
    ("host", "code"),
    [("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:1", 200), ("evil.example", 400), ("10.0.0.1", 400)],
)
def test_only_requests_to_this_machine_are_answered(run: FakeRun, host: str, code: int) -> None:
    client = TestClient(create_app("fake", timeline_of(run), no_conversation))
    assert client.get("/api/status", headers={"host": host}).status_code == code


def test_the_page_needs_no_other_server_and_invalid_requests_are_refused(run: FakeRun) -> None:
    run.write(1)
    client = TestClient(create_app("<fake>", read(run), no_conversation), base_url="http://localhost")
    page = client.get("/")
    assert "&lt;fake&gt;" in page.text
    own = re.sub(r"<script[^>]*>.*?</script>", "", page.text, flags=re.DOTALL)
    assert not re.search(r"https?:|//", own)
    assert not re.search(r"<script[^>]+src=", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    invalid = ("", "start=1&end=0", "start=nan&end=1", "start=x&end=1", "start=0&end=1&pixels=a", "start=0&end=1e300")
    for query in invalid:
        assert client.get(f"/api/view?{query}").status_code == 400
    assert client.get("/api/view?start=0&end=1000&hide=trainer&hide=nothing").status_code == 200
    assert client.get("/details/999999").status_code == 404
    assert client.get("/api/status").json()["events"] > 0


# ------------------------------------------------------------------------------------------------ traces


@pytest.mark.parametrize("name", ["trace.json.gz", "trace.json"])
def test_the_trace_is_valid_and_nested(
    run: FakeRun, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(3)
    run.write(1, first=2, at=20.0)
    assert main(["timeline", str(run.path), "--trace", str(tmp_path / name)]) == 0
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert all({"ph", "ts", "pid", "tid"} <= each.keys() for each in events)
    by_phase = defaultdict(list)
    for each in events:
        by_phase[each["ph"]].append(each)
    assert set(by_phase) == {"X", "M", "i", "s", "f"}
    bars = by_phase["X"]
    assert all(isinstance(each["dur"], int) and each["dur"] >= 0 for each in bars)
    threads = defaultdict(list)
    for bar in bars:
        threads[bar["pid"], bar["tid"]].append((bar["ts"], bar["ts"] + bar["dur"]))
    for spans in threads.values():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    processes = {each["pid"]: each["args"]["name"] for each in by_phase["M"] if each["name"] == "process_name"}
    assert {"trainer", "rollouter", "replica-r0", "replica-r1", "rank-actor-0"} <= set(processes.values())
    assert {bar["pid"] for bar in bars} <= set(processes)
    assert sorted(each["name"] for each in by_phase["i"]) == [f"version {version}" for version in (0, 1, 1, 2)]
    assert {each["id"] for each in by_phase["s"]} == {each["id"] for each in by_phase["f"]}
    assert Counter(bar["name"] for bar in bars if bar["cat"] == "phase")["decode"] >= 4 * run.samples * run.trajectories
    assert "events, written in" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_steps_can_be_selected(run: FakeRun, tmp_path: Path) -> None:
    run.write(4)
    assert main(["timeline", str(run.path), "--steps", "2-3", "--trace", str(tmp_path / "t.json")]) == 0
    bars = [each for each in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert {bar["args"]["step"] for bar in bars if bar["cat"] == "step"} == {2, 3}


def test_the_page_of_a_long_run_says_where_it_begins(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(3)
    assert read(run).status()["left_out_before"] is None
    monkeypatch.setattr("asyncrl.observe.timeline.server.MAX_BYTES", 1)
    assert read(run).status()["left_out_before"] == 3


def test_a_trace_reports_missing_events(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(1)
    with (run.path / "events/step_000001/rollouter.jsonl").open("a") as file:
        file.write("{}\n")
    FileAccess(monkeypatch).error = PermissionError(errno.EACCES, "Permission denied")
    assert main(["timeline", str(run.path), "--trace", str(run.path / "t.json")]) == 0
    printed = capsys.readouterr().err
    assert "1 damaged lines" in printed
    assert "trainer.jsonl: Permission denied" in printed


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("level", "reason"), [("off", "profiler.level was off"), ("summary", "it has no events/ directory")]
)
def test_a_run_without_events_is_refused(
    run: FakeRun, level: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "config.yaml").write_text(f"profiler:\n  level: {level}\n")
    assert main(["timeline", str(run.path)]) == 2
    printed = capsys.readouterr().err
    assert reason in printed and "profiler.level=summary" in printed


def test_bad_arguments_are_refused(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(1)
    monkeypatch.chdir(run.path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for arguments, message in (
            (["nothing"], "there is no run 'nothing'"),
            ([str(run.path), "--trace", "t.json", "--port", "99"], "--port=99 would have no effect"),
            ([str(run.path), "--trace", "t.json", "--open"], "no page that could be opened"),
            ([str(run.path), "--trace", "nowhere/t.json"], "nowhere/t.json cannot be written"),
            ([str(run.path), "--steps", "7-3"], "'7-3' is no range of steps"),
            ([str(run.path), "--steps", "all"], "give e.g. 100-200, or one step"),
            ([str(run.path), "--port", str(port), "--no-open"], f"--port={port} is in use"),
        ):
            assert main(["timeline", *arguments]) == 2
            assert message in capsys.readouterr().err
    assert not (run.path / "t.json").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(run: FakeRun, sent: signal.Signals) -> None:
    run.write(1)
    command = [sys.executable, "-m", "asyncrl", "timeline", str(run.path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert select.select([process.stdout], [], [], 60)[0]
        url = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert url is not None
        with socket.create_connection(("127.0.0.1", int(url[1])), 10) as client:
            client.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(sent)
            assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_the_page_has_the_status_of_the_run(run: FakeRun) -> None:
    names = ("phase", "live", "step", "total_steps", "version")
    timeline = Timeline(run.path, lambda: read_liveness(run.path))
    assert timeline.status()["phase"] == "state not known"
    run.state("running", 3)
    assert [timeline.status()[name] for name in names] == ["running", True, 3, 8, 3]
    (run.path / "summary.json").write_text('{"status": "failed"}')
    assert [timeline.status()[name] for name in names] == ["failed", False, 3, 8, 3]


def test_without_a_conversation_the_details_explain_why(run: FakeRun) -> None:
    conversation = conversation_of(run.path, "sample_0_1", 0)
    assert not conversation.lines
    assert "rollout.dump_dir=DIR" in conversation.notes[0]
    assert "training samples only" in conversation_of(run.path, "validation 3", 0).notes[0]
