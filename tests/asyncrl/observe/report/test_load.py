"""Loading events from complete, torn and unusual files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.observe.report import load as loading
from asyncrl.observe.report.analysis import analyse
from asyncrl.observe.report.load import load
from asyncrl.observe.timeline.reader import EventReader
from asyncrl.profiling.files import EVENTS_DIRECTORY, event_files, step_dir
from benchmarks.synthetic_run import START
from tests.fakes.events import write_events


def put(run_dir: Path, part: str, *lines: bytes | str | dict[str, Any], step: int = 1) -> Path:
    """Append lines to a file, and return its path."""
    path = step_dir(run_dir / EVENTS_DIRECTORY, step) / f"{part}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for line in lines:
            text = json.dumps(line) if isinstance(line, dict) else line
            file.write((text.encode() if isinstance(text, str) else text) + b"\n")
    return path


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"timestamp": START + at, "event": name, "duration_s": 0.5, "step": 1, **fields}


def test_written_events_are_loaded_in_order(tmp_path: Path) -> None:
    search = {"sample": "sample_2_7", "trajectory": 1, "turn": 0, "tool": "search", "step": 1}
    python = {"sample": "val_0_1", "trajectory": 0, "turn": 2, "tool": "python", "step": 1}
    write_events(tmp_path, ("tool.execute", 3.0, 0.5, search), ("tool.execute", 2.0, 0.5, python), part="rollouter")
    write_events(tmp_path, ("step", 1.0, 4.0, {"step": 1, "lineage": 0}), part="trainer")
    events = load(tmp_path)
    tools = events["tool.execute"]
    assert (events.num_events, events.num_torn, events.num_files) == (3, 0, 2)
    assert tools["timestamp"].tolist() == [START + 2, START + 3]
    assert tools["index"].tolist() == [0, 7]
    assert tools["tool"].tolist() == ["python", "search"]
    assert tools["trajectory"].tolist() == [0, 1]
    assert events["step"]["end"].tolist() == [START + 5]
    assert events.window() == (START + 1, START + 5)


def test_kinds_without_events_have_an_empty_frame_with_their_columns(tmp_path: Path) -> None:
    frame = load(tmp_path)["tool.execute"]
    assert len(frame) == 0
    assert {"timestamp", "end", "index", "trajectory", "turn", "tool", "wait_s", "replica"} <= set(frame.columns)


STEP = '{"timestamp":1790000000,"event":"step","duration_s":1'
DAMAGED = [
    '{"timestamp": 1.0, "eve', "[1, 2]", '{"event": "step"}', '{"timestamp": "x", ', "[" * 100_000,
    '{"timestamp":1e999,"event":"step","duration_s":1}', '{"timestamp":12,"event":"step","duration_s":1}',
    '{"timestamp":NaN,"event":"step","duration_s":0}', '{"timestamp":1' + "0" * 400 + ',"event":"step","duration_s":0}',
    '{"timestamp":1790000000,"event":"step","duration_s":1e300}',
    '{"timestamp":1790000000,"event":"step","duration_s":-1e400}', '{"timestamp":1790000000,"event":"step"}',
    '{"timestamp":1790000000,"event":7,"duration_s":1}', f'{STEP},"step":1e400}}', f'{STEP},"step":9e300}}',
    f'{STEP},"turn":0.5}}', f'{STEP},"trajectory":1.5}}', f"{STEP}}}{STEP}}}", STEP.encode() + b',"error":"\xff"}',
    b"\xff\xfe\x00 broken", "null", " null",
]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_report_and_timeline_count_and_leave_out_the_same_damaged_lines(tmp_path: Path, line: str | bytes) -> None:
    put(tmp_path, "trainer", event("step", 1.0, samples=8), line, "", event("step", 2.0, samples=9))
    events, reader = load(tmp_path), EventReader(tmp_path)
    shown = [each for chunk in reader.read_new() for each in chunk.events]
    assert events["step"]["samples"].tolist() == [8.0, 9.0]
    assert (events.num_events, events.num_torn) == (2, 1)
    assert (len(shown), reader.num_damaged) == (2, 1)


@pytest.mark.parametrize("content", ["null\n", "\nnull\n", "\r\nnull\n", f"{' ' * (1 << 20)}\rnull\n"])
def test_a_file_that_begins_with_null_has_no_event(tmp_path: Path, content: str) -> None:
    put(tmp_path, "trainer").write_text(content, newline="")
    assert load(tmp_path).num_torn == 1


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = put(tmp_path, "trainer", event("step", 1.0))
    before, line_bytes = path.read_bytes(), 256 << 20
    os.truncate(path, len(before) + line_bytes)
    with path.open("ab") as file:
        file.write(b"\n" + before)
    reader = EventReader(tmp_path)
    for read in (lambda: len(load(tmp_path)["step"]), lambda: sum(len(chunk.events) for chunk in reader.read_new())):
        tracemalloc.start()
        try:
            assert read() == 2
            assert tracemalloc.get_traced_memory()[1] < line_bytes // 2
        finally:
            tracemalloc.stop()
    assert reader.num_damaged == 1


@pytest.mark.parametrize("odd", ["1e400", "NaN", "Infinity", "1e300", '"many"', "1" + "0" * 400])
def test_an_impossible_number_is_read_as_unknown(tmp_path: Path, odd: str) -> None:
    put(tmp_path, "trainer", json.dumps(event("step", 1.0, samples=8, tokens=-1)).replace("-1", odd))
    steps = load(tmp_path)["step"]
    assert steps["samples"].tolist() == [8]
    assert steps["tokens"].isna().all()


def test_unknown_events_and_fields_are_ignored(tmp_path: Path) -> None:
    put(tmp_path, "trainer", event("step", 1.0, colour="green", nested={"a": [1]}), event("step.of.tomorrow", 2.0))
    events = load(tmp_path)
    assert (len(events["step"]), events.num_unknown) == (1, 1)


def test_events_of_the_users_code_are_kept_by_name(tmp_path: Path) -> None:
    put(
        tmp_path,
        "rollouter",
        event("step", 1.0),
        event("my.lookup", 2.0),
        event("my.note", 3.0, duration_s=0.0, table="a"),
    )
    put(tmp_path, "rank-main-0", event("my.lookup", 2.0, duration_s=1.5))
    events = load(tmp_path)
    assert events.num_unknown == 0
    assert {name: sorted(np.concatenate(parts).tolist()) for name, parts in events.own.items()} == {
        "my.lookup": [0.5, 1.5],
        "my.note": [0.0],
    }
    rows = analyse(events, {}, None)["own_events"]
    assert [(row["event"], row["count"], row["sum"], row["max"]) for row in rows] == [
        ("my.lookup", 2, 2.0, 1.5),
        ("my.note", 1, 0.0, 0.0),
    ]


def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    """The name of a tool in a call is whatever the model generates, including invalid text."""
    put(tmp_path, "rollouter", event("tool.execute", 1.0, tool="a\ud800", status="\U0001f600"))
    tools = load(tmp_path)["tool.execute"]
    assert (tools["tool"].tolist(), tools["status"].tolist()) == (["a?"], ["\U0001f600"])


def test_an_incomplete_last_line_does_not_join_the_next_file(tmp_path: Path) -> None:
    path = put(tmp_path, "trainer", event("step", 1.0), '{"timestamp": 2.0, "event": "st')
    path.write_bytes(path.read_bytes()[:-1])
    put(tmp_path, "trainer", event("step", 3.0), step=2)
    events = load(tmp_path)
    assert events["step"]["timestamp"].tolist() == [START + 1, START + 3]
    assert (events.num_torn, events.num_unfinished) == (1, 1)


def test_replicas_and_trajectories_may_be_numbers_or_names(tmp_path: Path) -> None:
    put(tmp_path, "replica-0", event("request", 1.0, replica=0, sample="sample_0_1", trajectory=3))
    put(tmp_path, "replica-b", event("request", 2.0, sample="sample_0_1", trajectory="baseline"))
    requests = load(tmp_path)["request"]
    assert requests["replica"].tolist() == ["0", "b"]
    assert requests["trajectory"].tolist() == [3, -1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sample_0_12/3.2-1", (12, 3, 2)), ("sample_0_13/1-2", (13, 1, 0)), ("val_4_2/0-1", (0, 0, 0)),
        ("sample_0_1/1.1e400-1", (1, 1, 0)), ("sample_0_99999999999999999999/inf-1", (0, -1, 0)),
        ("x/1.99999999999999999999", (0, 1, 0)),
    ],
)  # fmt: skip
def test_fields_missing_in_a_request_event_are_read_from_its_id(
    tmp_path: Path, name: str, expected: tuple[int, int, int]
) -> None:
    put(tmp_path, "replica-a", event("request", 1.0, request=name))
    assert tuple(load(tmp_path)["request"].loc[0, ["index", "trajectory", "turn"]]) == expected


def test_the_batch_size_does_not_change_the_loaded_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 30):
        put(tmp_path, "trainer", event("step", float(step), samples=step), step=step)
    steps = load(tmp_path)["step"]
    monkeypatch.setattr(loading, "BATCH_BYTES", 200)
    progress: list[tuple[int, int]] = []
    assert load(tmp_path, lambda done, size: progress.append((done, size)))["step"].equals(steps)
    assert progress[-1][0] == progress[-1][1] > 0
    assert len(progress) > 5


def test_files_that_a_live_run_deletes_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "trainer", event("step", 1.0))
    put(tmp_path, "rollouter", event("validation", 1.0), step=2)

    def found_before(run_dir: Path) -> list[Path]:
        gone = step_dir(run_dir / EVENTS_DIRECTORY, 0)
        return [gone / "trainer.jsonl", *event_files(run_dir)]

    monkeypatch.setattr(loading, "event_files", found_before)
    assert (load(tmp_path).num_events, load(tmp_path).num_files) == (2, 2)


def test_pipes_are_no_event_files_and_unfinished_sums_are_read(tmp_path: Path) -> None:
    put(tmp_path, "trainer", event("step", 1.0))
    put(tmp_path, "trainer", event("step", 2.0), step=2)
    os.mkfifo(tmp_path / "events" / "step_000002" / "pipe.jsonl")
    (tmp_path / "events" / "folding_1").mkdir()
    (tmp_path / "events" / "step_000001").rename(tmp_path / "events" / "folding_1" / "step_000001")
    assert len(load(tmp_path)["step"]) == 2
