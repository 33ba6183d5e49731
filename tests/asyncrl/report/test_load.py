"""Reading events: whole files, torn ones, odd ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.profiling.files import DIRECTORY, EventFiles, Line, step_dir
from asyncrl.report import load as loading
from asyncrl.report.load import load, read_json
from asyncrl.timeline.reading import EventReader
from benchmarks.profiling.synthetic import START


def put(run_dir: Path, part: str, *lines: str | dict[str, Any], step: int = 1) -> None:
    directory = step_dir(run_dir / DIRECTORY, step)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{part}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"timestamp": START + at, "event": name, "duration_s": 0.5, "step": 1, **fields}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / DIRECTORY)
    files.write(
        [
            Line("rollouter", event("tool.execute", 3.0, sample="sample_2_7", trajectory=1, turn=0, tool="search")),
            Line("rollouter", event("tool.execute", 2.0, sample="val_0_1", trajectory=0, turn=2, tool="python")),
            Line("trainer", {"timestamp": START + 1, "event": "step", "duration_s": 4.0, "step": 1, "lineage": 0}),
        ]
    )
    files.close()
    events = load(tmp_path)
    tools = events.of("tool.execute")
    assert (events.num_events, events.num_torn, events.num_files) == (3, 0, 2)
    assert tools["timestamp"].tolist() == [START + 2, START + 3]
    assert tools["index"].tolist() == [0, 7]
    assert tools["tool"].tolist() == ["python", "search"]
    assert tools["trajectory"].tolist() == [0, 1]
    assert events.of("step")["end"].tolist() == [START + 5]
    assert events.window() == (START + 1, START + 5)


def test_events_that_never_happened_have_the_right_columns(tmp_path: Path) -> None:
    frame = load(tmp_path).of("tool.execute")
    assert len(frame) == 0
    assert {"timestamp", "end", "index", "trajectory", "turn", "tool", "wait_s", "replica"} <= set(frame.columns)


@pytest.mark.parametrize("torn", ['{"timestamp": 1.0, "eve', "", "[1, 2]", '{"event": "step"}', '{"timestamp": "x", '])
def test_damaged_lines_are_counted_and_left_out(tmp_path: Path, torn: str) -> None:
    put(tmp_path, "trainer", event("step", 1.0, samples=8), torn, event("step", 2.0, samples=9))
    events = load(tmp_path)
    assert events.of("step")["samples"].tolist() == [8.0, 9.0]
    assert events.num_torn == (1 if torn else 0)


DAMAGED = [
    "[" * 100_000,
    '{"timestamp":1e999,"event":"step","duration_s":1}',
    '{"timestamp":12,"event":"step","duration_s":1}',
    '{"timestamp":1790000000,"event":"step","duration_s":1e300}',
    '{"timestamp":1790000000,"event":"step"}',
    '{"timestamp":1790000000,"event":7,"duration_s":1}',
    '{"timestamp":1790000000,"event":"step","duration_s":1,"step":1e400}',
    '{"timestamp":1790000000,"event":"step","duration_s":1,"step":9e300}',
    '{"timestamp":1790000000,"event":"step","duration_s":1,"turn":0.5}',
    '{"timestamp":1790000000,"event":"step","duration_s":1,"trajectory":1.5}',
    '{"timestamp":1790000000,"event":"step","duration_s":1}{"timestamp":1790000000,"event":"step","duration_s":1}',
    b'{"timestamp":1790000000,"event":"step","duration_s":1,"error":"\xff"}',
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_report_and_timeline_leave_out_the_same_lines(tmp_path: Path, line: str | bytes) -> None:
    put(tmp_path, "trainer", event("step", 1.0))
    path = step_dir(tmp_path / DIRECTORY, 1) / "trainer.jsonl"
    path.write_bytes(path.read_bytes() + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    events, reader = load(tmp_path), EventReader(tmp_path)
    shown = [each for chunk in reader.new() for each in chunk.events]
    assert (len(events.of("step")), events.num_events, events.num_torn) == (1, 1, 1)
    assert (len(shown), reader.damaged) == (1, 1)


@pytest.mark.parametrize("odd", ["1e400", "NaN", "Infinity", "1e300", '"many"', "1" + "0" * 400])
def test_a_number_that_nobody_can_have_measured_is_not_known(tmp_path: Path, odd: str) -> None:
    line = json.dumps(event("step", 1.0, samples=8, tokens=-1)).replace("-1", odd)
    put(tmp_path, "trainer", line)
    steps = load(tmp_path).of("step")
    assert steps["samples"].tolist() == [8]
    assert steps["tokens"].isna().all()


@pytest.mark.parametrize(
    "raw", ["sample_0_1/1.1e400-1", "sample_0_99999999999999999999/inf-1", "x/1.99999999999999999999"]
)
def test_numbers_in_names_may_be_too_large(tmp_path: Path, raw: str) -> None:
    put(tmp_path, "replica-a", event("request", 1.0, request=raw))
    requests = load(tmp_path).of("request")
    assert requests["index"].tolist() == [int(raw.startswith("sample_0_1/"))]
    assert requests["turn"].tolist() == [0]


def test_halves_of_surrogate_pairs_can_be_written(tmp_path: Path) -> None:
    """A model may write anything as the name of a tool."""
    put(tmp_path, "rollouter", event("tool.execute", 1.0, tool="a\ud800", status="\U0001f600"))
    tools = load(tmp_path).of("tool.execute")
    assert (tools["tool"].tolist(), tools["status"].tolist()) == (["a?"], ["\U0001f600"])


def test_a_line_cut_short_at_the_end_of_a_file_does_not_join_the_next_file(tmp_path: Path) -> None:
    put(tmp_path, "trainer", event("step", 1.0), step=1)
    path = step_dir(tmp_path / DIRECTORY, 1) / "trainer.jsonl"
    path.write_text(path.read_text() + '{"timestamp": 2.0, "event": "st')
    put(tmp_path, "trainer", event("step", 3.0), step=2)
    events = load(tmp_path)
    assert events.of("step")["timestamp"].tolist() == [START + 1, START + 3]
    assert events.num_torn == 1


def test_bytes_that_are_no_text_are_no_event(tmp_path: Path) -> None:
    put(tmp_path, "trainer", event("step", 1.0))
    path = step_dir(tmp_path / DIRECTORY, 1) / "trainer.jsonl"
    path.write_bytes(b"\xff\xfe\x00 broken\n" + path.read_bytes())
    events = load(tmp_path)
    assert len(events.of("step")) == 1
    assert events.num_torn == 1


def test_names_nobody_knows_and_new_fields_do_no_harm(tmp_path: Path) -> None:
    put(tmp_path, "trainer", event("step", 1.0, colour="green", nested={"a": [1]}), event("step.of.tomorrow", 2.0))
    events = load(tmp_path)
    assert len(events.of("step")) == 1
    assert events.num_unknown == 1


def test_replicas_and_trajectories_may_be_numbers_or_names(tmp_path: Path) -> None:
    put(tmp_path, "replica-0", event("request", 1.0, replica=0, sample="sample_0_1", trajectory=3))
    put(tmp_path, "replica-b", event("request", 2.0, sample="sample_0_1", trajectory="baseline"))
    requests = load(tmp_path).of("request")
    assert requests["replica"].tolist() == ["0", "b"]
    assert requests["trajectory"].tolist() == [3, -1]


def test_a_request_says_by_its_id_what_its_event_leaves_out(tmp_path: Path) -> None:
    put(
        tmp_path,
        "replica-a",
        event("request", 1.0, request="sample_0_12/3.2-1"),
        event("request", 2.0, request="sample_0_13/1-2"),
        event("request", 3.0, request="val_4_2/0-1"),
    )
    requests = load(tmp_path).of("request")
    assert requests["index"].tolist() == [12, 13, 0]
    assert requests["trajectory"].tolist() == [3, 1, 0]
    assert requests["turn"].tolist() == [2, 0, 0]


def test_batches_do_not_change_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 30):
        put(tmp_path, "trainer", event("step", float(step), samples=step), step=step)
    whole = load(tmp_path).of("step")
    monkeypatch.setattr(loading, "BATCH_BYTES", 200)
    told: list[tuple[int, int]] = []
    assert load(tmp_path, lambda done, total: told.append((done, total))).of("step").equals(whole)
    assert told[-1][0] == told[-1][1] > 0
    assert len(told) > 5


def test_json_that_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "summary.json") == {}
    (tmp_path / "summary.json").write_text('{"status": "comp')
    assert read_json(tmp_path / "summary.json") == {}
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert read_json(tmp_path / "summary.json") == {"status": "completed"}
