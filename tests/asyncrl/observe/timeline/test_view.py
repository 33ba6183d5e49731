"""`asyncrl timeline` without a browser: what a window shows, the trace, the command."""

from __future__ import annotations

import errno
import gzip
import json
import os
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
import yaml
from starlette.testclient import TestClient

from asyncrl.cli.main import main
from asyncrl.cli.timeline import conversation_of, standing
from asyncrl.timeline.details import Conversation
from asyncrl.timeline.index import Index
from asyncrl.timeline.reading import EventReader
from asyncrl.timeline.server import Timeline, app
from asyncrl.timeline.view import Window, look, view
from tests.asyncrl.timeline.fake_run import FakeRun
from tests.asyncrl.timeline.looks import DONE, WHOLE, Opened, read, shown


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "runs" / "fake" / "20260101-000000")


# ------------------------------------------------------------------------------------------------ what is shown


def test_a_view_opens_each_file_once_and_lets_the_reader_go_on(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(2)
    timeline, opened = read(run), Opened(monkeypatch)
    read_lines, free = EventReader.read_lines, []

    def beside(reader: EventReader, places: Any) -> Any:
        with ThreadPoolExecutor() as elsewhere:
            free.append(elsewhere.submit(timeline.status, DONE).result(10)["events"])
        return read_lines(reader, places)

    monkeypatch.setattr(EventReader, "read_lines", beside)
    answer = shown(timeline)
    assert free == [answer["events"]]
    assert len(answer["bars"]["title"]) >= answer["events"]
    assert sorted(opened.files) == sorted(set(opened.files))
    assert len(opened.files) == len(list((run.path / "events").glob("*/*.jsonl")))
    opened.files.clear()
    timeline.details(DONE, answer["bars"]["event"][0], lambda *_: Conversation())
    assert len(opened.files) <= 1 + len(list((run.path / "events").glob("*/*.jsonl")))


def test_bars_whose_file_is_gone_are_shown_without_what_they_say(run: FakeRun) -> None:
    run.write(1)
    timeline = read(run)
    (run.path / "events/step_000001/trainer.jsonl").unlink()
    answer = shown(timeline)
    gone = [place for place, title in enumerate(answer["bars"]["title"]) if title.startswith("?")]
    assert gone
    number = answer["bars"]["event"][gone[0]]
    assert "changed or is gone" in timeline.details(DONE, number, lambda *_: Conversation())


def test_the_status_says_when_the_first_sample_was_admitted(run: FakeRun) -> None:
    run.add("trainer", "loop.stall", 0, 1)
    run.flush()
    timeline = read(run)
    assert timeline.status(DONE)["admitted_ms"] is None
    run.write(1, at=90.0)
    timeline.read()
    assert timeline.status(DONE)["admitted_ms"] == 90_000.0
    assert timeline.status(DONE)["oldest_ms"] == 0.0


def test_every_event_is_there_at_full_zoom_and_no_bars_of_a_lane_overlap(run: FakeRun) -> None:
    run.write(2)
    answer = shown(read(run), WHOLE._replace(start=-100, end=20_000))
    bars = answer["bars"]
    assert answer["merged"] == 0
    assert set(bars["event"]) == set(range(answer["events"]))
    lanes = defaultdict(list)
    for top, left, right in zip(bars["top"], bars["left"], bars["right"], strict=True):
        lanes[top].append((left, right))
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    expected = {
        "gate",
        "queued",
        "prefill",
        "decode",
        "paused",
        "tool",
        "user",
        "reward",
        "wait",
        "experience",
        "update",
    }
    assert expected <= set(bars["state"])


def test_a_window_that_few_lanes_are_used_in_shows_their_bars(tmp_path: Path) -> None:
    """400 requests at once in a burst, and three at a time later: their bars are drawn one by one, whatever the burst
    has made of the lanes."""
    run = FakeRun(tmp_path)
    for number, (begun, took) in enumerate([(10.0, 1.0)] * 400 + [(100.0, 8.0), (101.0, 8.0), (102.0, 8.0)]):
        told = {"request": f"sample_0_1/{number}-1", "sample": "sample_0_1", "trajectory": number, "decode_s": took}
        run.add("replica-a", "request", begun, took, step=1, replica="a", **told)
    run.flush()
    timeline = read(run)
    burst = shown(timeline, Window(9_000, 12_000, 1000, 700))
    later = shown(timeline, Window(99_000, 110_000, 1000, 700))
    assert burst["crowded"] == 1 and later["crowded"] == 0
    (row,) = (row for row in later["groups"] if row["name"] == "requests")
    places = sorted(set(zip(later["bars"]["top"], later["bars"]["bottom"], strict=True)))
    assert len(places) == 3 and row["top"] <= places[0][0] and places[-1][1] <= row["bottom"]
    assert all(above[1] <= below[0] for above, below in pairwise(places))


def test_a_long_window_has_few_bars_and_crowded_lanes_are_drawn_as_how_many(tmp_path: Path) -> None:
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
    tall = shown(timeline, Window(0, end, 200, pixels_high=60, top=0, bottom=2))
    assert tall["crowded"] == 0
    assert set(tall["bars"]["top"]) <= {top for top in low["bars"]["top"] if top <= 2}


def test_versions_are_lines_and_their_numbers_do_not_lie_upon_each_other(run: FakeRun) -> None:
    run.write(5)
    lines = shown(read(run), WHOLE._replace(start=0, end=30_000))["versions"]
    assert lines["label"] == ["v0", "v1", "v2", "v3", "v4"]
    assert lines["x"][0] == pytest.approx((0.45 + 0.17) * 6000)
    crowded = shown(read(run), WHOLE._replace(start=0, end=30_000, pixels=100))["versions"]
    assert crowded["label"] == ["", "v1", "", "", "v4"] or crowded["label"][-1] == "v4"
    assert crowded["label"].count("") >= 2


def test_where_no_version_was_applied_the_published_ones_are_shown(run: FakeRun) -> None:
    run.add("trainer", "trainer.publish", 1.0, 0.5, step=1, version=1)
    run.flush()
    assert shown(read(run))["versions"] == {"x": [1500.0], "label": ["v1"]}


def test_moments_and_a_run_of_the_summary_level_are_shown(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "r", level="summary")
    run.write(1)
    answer = shown(read(run), WHOLE._replace(start=-1, end=10_000))
    bars = answer["bars"]
    assert "calls" not in [row["name"] for row in answer["groups"] if row["top"] > 5][:1]
    moments = [place for place, title in enumerate(bars["title"]) if title.startswith("sample.ready")]
    assert len(moments) == run.samples
    assert all(bars["left"][place] == bars["right"][place] for place in moments)


def test_events_of_a_lineage_that_was_left_and_of_the_next_one_share_lanes(run: FakeRun) -> None:
    run.write(3)
    lanes = len(set(shown(read(run), WHOLE._replace(start=0, end=18_000))["bars"]["top"]))
    run.write(2, first=2, at=18.0)  # it went back to the end of step 1
    again = shown(read(run), WHOLE._replace(start=0, end=30_000))
    assert again["merged"] == 0
    assert len(set(again["bars"]["top"])) <= lanes + 8
    assert again["versions"]["label"] == ["v0", "v1", "v2", "v1", "v2"]


def test_text_of_the_run_is_escaped(run: FakeRun) -> None:
    run.add(
        "rollouter",
        "tool.execute",
        0,
        1,
        step=1,
        tool="<img src=x onerror=alert(1)>",
        sample="sample_0_1",
        trajectory=0,
    )
    run.flush()
    timeline = read(run)
    said = Conversation(notes=["<script>"])
    for text in (str(shown(timeline)["bars"]["told"]), timeline.details(DONE, 0, lambda *_: said)):
        assert "<img" not in text
        assert "<script" not in text
        assert "&lt;" in text


def test_details_list_what_belongs_to_the_trajectory(run: FakeRun) -> None:
    run.write(1)
    timeline = read(run)
    bars = shown(timeline, WHOLE._replace(start=-1, end=10_000))["bars"]
    number = next(
        event
        for event, told, title in zip(bars["event"], bars["told"], bars["title"], strict=True)
        if title.startswith("request") and "sample_0_3/1<" in f"{told}<"
    )
    asked = []
    page = timeline.details(DONE, number, lambda *of: asked.append(of) or Conversation())
    assert asked == [("sample_0_3", 1)]
    events = re.findall(r'<td class="n">[^<]*</td><td>([^<]+)</td>', page)
    counted = Counter(events[1:])
    assert counted["request"] == run.turns
    assert counted["sample.ready"] == counted["sample.trained"] == counted["trajectory"] == 1
    assert 'class="phases"' in page


def test_an_index_of_nothing_has_a_view() -> None:
    answer = view(look(Index(), 0, Window(0, 1, 10)), {})
    assert answer["bars"]["left"] == []


# ------------------------------------------------------------------------------------------------ over HTTP


def test_only_this_machines_own_names_are_answered(run: FakeRun) -> None:
    run.write(1)
    served = app("fake", Timeline(run.path), lambda: DONE, lambda *_: Conversation())
    for host, code in (
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:1", 200),
        ("evil.example", 400),
        ("10.0.0.1", 400),
    ):
        assert TestClient(served).get("/api/status", headers={"host": host}).status_code == code


def test_the_page_asks_nothing_of_others_and_bad_questions_are_refused(run: FakeRun) -> None:
    run.write(1)
    served = app("<fake>", read(run), lambda: DONE, lambda *_: Conversation())
    client = TestClient(served, base_url="http://localhost")
    page = client.get("/")
    assert "&lt;fake&gt;" in page.text
    own = re.sub(r"<script[^>]*>.*?</script>", "", page.text, flags=re.DOTALL)
    assert not re.search(r"https?:|//", own)
    assert not re.search(r"<script[^>]+src=", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for query in (
        "",
        "start=1&end=0",
        "start=nan&end=1",
        "start=x&end=1",
        "start=0&end=1&pixels=a",
        "start=0&end=1e300",
    ):
        assert client.get(f"/api/view?{query}").status_code == 400
    assert client.get("/api/view?start=0&end=1000&hide=trainer&hide=nothing").status_code == 200
    assert client.get("/details/999999").status_code == 404
    assert client.get("/api/status").json()["events"] > 0


# ------------------------------------------------------------------------------------------------ the trace


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
    assert {each["ph"] for each in events} == {"X", "M", "i", "s", "f"}
    bars = [each for each in events if each["ph"] == "X"]
    assert all(isinstance(each["dur"], int) and each["dur"] >= 0 for each in bars)
    threads = defaultdict(list)
    for bar in bars:
        threads[bar["pid"], bar["tid"]].append((bar["ts"], bar["ts"] + bar["dur"]))
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_until: list[int] = []
        for start, end in spans:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert {"trainer", "rollouter", "replica-r0", "replica-r1", "rank-actor-0"} <= set(named.values())
    assert {bar["pid"] for bar in bars} <= set(named)
    assert sorted(each["name"] for each in events if each["ph"] == "i") == [
        "version 0",
        "version 1",
        "version 1",
        "version 2",
    ]
    assert {each["id"] for each in events if each["ph"] == "s"} == {each["id"] for each in events if each["ph"] == "f"}
    assert Counter(bar["name"] for bar in bars if bar["cat"] == "phase")["decode"] >= 4 * run.samples * run.trajectories
    assert "events, written in" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_a_trace_that_cannot_be_written_names_the_file(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write(1)
    assert main(["timeline", str(run.path), "--trace", str(run.path / "nowhere" / "t.json")]) == 2
    assert "nowhere/t.json cannot be written" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("level", "told"), [("off", "profiler.level=off"), ("summary", "its profiler.level is summary")]
)
def test_a_run_without_events(run: FakeRun, level: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "config.yaml").write_text(f"profiler:\n  level: {level}\n")
    assert main(["timeline", str(run.path)]) == 2
    message = capsys.readouterr().err
    assert told in message
    assert "profiler.level=summary" in message


def test_a_trace_and_a_port_exclude_each_other(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write(1)
    assert main(["timeline", str(run.path), "--trace", str(run.path / "t.json"), "--port", "99"]) == 2
    assert "--port=99 would be of no effect" in capsys.readouterr().err
    assert main(["timeline", str(run.path), "--trace", str(run.path / "t.json"), "--open"]) == 2
    assert "no page that --open could open" in capsys.readouterr().err
    assert not (run.path / "t.json").exists()


def test_a_trace_says_what_it_lacks(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(1)
    with (run.path / "events/step_000001/rollouter.jsonl").open("a") as file:
        file.write("{}\n")
    Opened(monkeypatch).error = PermissionError(errno.EACCES, "Permission denied")
    assert main(["timeline", str(run.path), "--trace", str(run.path / "t.json")]) == 0
    told = capsys.readouterr().err
    assert "1 damaged lines" in told
    assert "trainer.jsonl: Permission denied" in told


def test_no_such_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", "nothing"]) == 2
    assert "there is no run 'nothing'" in capsys.readouterr().err


def test_a_port_in_use_is_named(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write(1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["timeline", str(run.path), "--port", str(port), "--no-open"]) == 2
    assert f"--port={port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_interrupted(run: FakeRun, sent: signal.Signals) -> None:
    run.write(1)
    command = [sys.executable, "-m", "asyncrl", "timeline", str(run.path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert select.select([process.stdout], [], [], 60)[0]
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert found is not None
        with socket.create_connection(("127.0.0.1", int(found[1])), 10) as client:
            client.sendall(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(sent)
            assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_how_a_run_stands(run: FakeRun) -> None:
    assert standing(run.path).phase == "state not known"
    run.state("running", 3)
    assert standing(run.path)[:4] == ("running", True, 3, 8)
    state = json.loads((run.path / "state.json").read_text())
    for pid, host, phase, live in (
        (state["pid"], state["host"], "running", True), (2**22 + 1, state["host"], "died", False),
        (os.getpid(), "elsewhere", "running", True),
    ):  # fmt: skip
        (run.path / "state.json").write_text(json.dumps({**state, "pid": pid, "host": host}))
        assert standing(run.path)[:2] == (phase, live)
    (run.path / "summary.json").write_text('{"status": "stopped"}')
    assert standing(run.path)[:2] == ("stopped", False)
    (run.path / "summary.json").unlink()
    run.state("failed")
    assert standing(run.path)[:2] == ("failed", False)


def test_without_a_dump_it_is_told_how_conversations_are_kept(run: FakeRun) -> None:
    (run.path / "config.yaml").write_text(yaml.safe_dump({"rollout": {"dump_dir": None}}))
    said = conversation_of(run.path, "sample_0_1", 0)
    assert not said.lines
    assert "rollout.dump_dir=DIR" in said.notes[0]
    assert "trained on" in conversation_of(run.path, "validation 3", 0).notes[0]
