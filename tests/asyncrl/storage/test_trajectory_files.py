"""Trajectory files: restarts, shared directories, and damage."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.ports import Score
from asyncrl.core.types import FinishReason, SampleId, Span
from asyncrl.storage.trajectory_files import (
    DumpedTrajectory,
    VersionedText,
    append,
    as_json,
    file_name,
    find,
    mask_runs,
    parse,
    plain,
    to_line,
)
from tests.fakes.dumped import SCORES, calculation, group

RUN = "/runs/one"


def dumped(number: int = 0, index: int = 42, *, run: str = RUN, at: float = 1.0, of: int = 2) -> DumpedTrajectory:
    return DumpedTrajectory(SampleId(0, index), number, of, run, at, group()[number], SCORES[number])


def whole(**changes: Any) -> list[DumpedTrajectory]:
    return [dumped(number, **changes) for number in (0, 1)]


def write(directory: Path, *lines: DumpedTrajectory) -> Path:
    anyio.run(append, directory, lines[0].sample_id.index, b"".join(map(to_line, lines)))
    return directory / file_name(lines[0].sample_id.index)


# ------------------------------------------------------------------------------------------------ a line


def test_a_parsed_line_is_unchanged() -> None:
    one = replace(
        dumped(),
        texts=((VersionedText(3, "call"), VersionedText(4, "(6*7)\n\u2028\udc80")), (VersionedText(4, "It is 42."),)),
        ground_truth={"answer": [42, None]},
        baseline_reward=0.5,
        replayed_from=3,
        substituted=True,
        recorded_spans=((Span(0, 1),),),
    )
    line = to_line(one)
    assert line.count(b"\n") == 1
    back = parse(line)
    assert as_json(back) == as_json(one)
    for name in ("sample_id", "number", "run", "at", "score", "texts", "ground_truth", "baseline_reward"):
        assert getattr(back, name) == getattr(one, name), name
    assert (back.replayed_from, back.substituted, back.recorded_spans) == (3, True, ((Span(0, 1),),))
    assert back.trajectory.turns == one.trajectory.turns
    assert back.trajectory.finish_reason is FinishReason.STOP
    (row,), (expected,) = back.trajectory.rows, one.trajectory.rows
    assert (row.spans, str(row.response_ids.dtype), str(row.response_mask.dtype)) == (expected.spans, "int32", "bool")
    for name in ("prompt_ids", "response_ids", "response_mask"):
        np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
    np.testing.assert_allclose(row.rollout_log_probs, expected.rollout_log_probs, atol=5e-6)


def test_numbers_that_are_not_finite_are_null_in_json_and_nan_after_parsing() -> None:
    trajectory = calculation()
    row = replace(trajectory.rows[0], rollout_log_probs=np.full(33, -np.inf, np.float32))
    one = replace(dumped(), trajectory=replace(trajectory, rows=(row,)), score=Score(math.inf, {"part": math.nan}))
    raw = json.loads(to_line(one), parse_constant=lambda name: pytest.fail(name))
    assert (raw["reward"], raw["reward_extra"]["part"], raw["rows"][0]["rollout_log_probs"][0]) == (None, None, None)
    assert math.isnan(parse(to_line(one)).score.reward)


@given(st.lists(st.booleans(), max_size=12))
def test_run_lengths_describe_the_mask(values: list[bool]) -> None:
    runs = mask_runs(np.array(values, np.bool_))
    assert [value for value, count in runs for _ in range(count)] == values
    assert all(one[0] != other[0] for one, other in itertools.pairwise(runs))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_json_values_are_unchanged(value: Any) -> None:
    converted = plain(value)
    assert json.loads(json.dumps(converted, allow_nan=False)) == converted
    assert plain(converted) == converted


def damages() -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
    return [
        ("no sample id", lambda raw: raw.update(sample_id="sample_1")),
        ("no turns", lambda raw: raw.update(turns=[])),
        ("an unknown finish reason", lambda raw: raw.update(finish_reason="tired")),
        ("a row that lacks a token", lambda raw: raw["rows"][0]["response_ids"].pop()),
        ("a mask of another length", lambda raw: raw["rows"][0]["response_mask"].pop()),
        ("a mask with a negative count", lambda raw: raw["rows"][0].update(response_mask=[[1, -3]])),
        ("tokens without a version", lambda raw: raw["rows"][0].update(spans=[])),
        ("a span without a version", lambda raw: raw["rows"][0].update(spans=[[0]])),
        ("a token that is a text", lambda raw: raw["rows"][0]["response_ids"].__setitem__(0, "x")),
        ("a turn beyond its row", lambda raw: raw["turns"][0].update(num_tokens=99)),
        ("a turn of a missing row", lambda raw: raw["turns"][0].update(row=1)),
        ("a call with an unknown field", lambda raw: raw["turns"][0]["calls"][0].update(extra=1)),
        ("a message that is a text", lambda raw: raw.update(messages=["hello"])),
        ("a reward that is a text", lambda raw: raw.update(reward="much")),
        ("rows that are a number", lambda raw: raw.update(rows=3)),
    ]


@pytest.mark.parametrize(("what", "damage"), damages())
def test_an_invalid_line_is_refused(what: str, damage: Callable[[dict[str, Any]], Any]) -> None:
    raw = as_json(dumped())
    damage(raw)
    with pytest.raises(ValueError):
        parse(json.dumps(raw).encode())


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"null", b'{"sample_id": "sample_0_42"}', b"\xff", b"[" * 100_000])
def test_a_line_without_an_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse(line)


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("index", "name"), [(1, "1-1000"), (1000, "1-1000"), (1001, "1001-2000"), (123_456, "123001-124000")]
)
def test_a_sample_is_in_one_file(index: int, name: str) -> None:
    assert file_name(index) == f"trajectories-{name}.jsonl"


def test_a_sample_is_found_among_others(tmp_path: Path) -> None:
    for index in (4, 42, 420, 142):
        write(tmp_path / "a" / "b", *whole(index=index))
    found = find(tmp_path / "a" / "b", 42, Path(RUN))
    assert [(str(one.sample_id), one.number) for one in found.trajectories] == [("sample_0_42", 0), ("sample_0_42", 1)]
    assert found.notes == ()
    assert find(tmp_path / "a" / "b", 43, Path(RUN)) == ((), ())
    with pytest.raises(FileNotFoundError):
        find(tmp_path / "a" / "b", 1001, Path(RUN))


def test_the_last_dump_of_a_sample_is_found(tmp_path: Path) -> None:
    write(tmp_path, *whole(at=1.0))
    write(tmp_path, *whole(index=43))
    write(tmp_path, replace(dumped(at=2.0, of=1), score=Score(7.0)))
    found = find(tmp_path, 42, Path(RUN))
    assert ([one.score.reward for one in found.trajectories], found.notes) == ([7.0], ())


def test_runs_may_share_a_directory(tmp_path: Path) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    for run in (mine, others):
        run.mkdir()
    write(tmp_path, *whole(run=str(mine)))
    write(tmp_path, *(replace(one, score=Score(9.0)) for one in whole(run=str(others), at=5.0)))
    assert find(tmp_path, 42, mine).trajectories[0].score.reward == 1.25
    (tmp_path / "link").symlink_to(mine)
    assert find(tmp_path, 42, tmp_path / "link").trajectories[0].score.reward == 1.25
    nothing, notes = find(tmp_path, 42, tmp_path / "third")
    assert nothing == ()
    assert notes == (f"{tmp_path / file_name(42)} has this sample of another run only: {mine}, {others}",)


def test_a_run_that_was_moved_keeps_its_dump(tmp_path: Path) -> None:
    write(tmp_path, *whole(run=str(tmp_path / "before")))
    found = find(tmp_path, 42, tmp_path / "after")
    assert len(found.trajectories) == 2
    assert "which no longer exists; that is assumed to be this run" in found.notes[0]
    (tmp_path / "before").mkdir()
    assert find(tmp_path, 42, tmp_path / "after").trajectories == ()


def test_torn_and_damaged_lines_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path, *whole())
    begin, rest = to_line(dumped()).split(b'"data_source"')
    path.write_bytes(path.read_bytes() + begin + b"\n" + begin + b'"data"' + rest + b"not a line\n\n" + begin)
    found = find(tmp_path, 42, Path(RUN))
    assert len(found.trajectories) == 2
    assert found.notes == (
        f"line 3 of {path} was cut off",
        f"line 4 of {path} is damaged: KeyError: 'data_source'",
        f"line 7 of {path} was cut off",
    )


def test_the_complete_lines_of_a_torn_write_are_read(tmp_path: Path) -> None:
    write(tmp_path, *whole(at=1.0))
    path = write(tmp_path, *whole(at=2.0))
    path.write_bytes(path.read_bytes()[:-100])
    found = find(tmp_path, 42, Path(RUN))
    assert [(one.number, one.at) for one in found.trajectories] == [(0, 2.0)]
    assert found.notes == (f"line 4 of {path} was cut off", "1 of the sample's 2 trajectories could be read")


def test_a_sample_is_appended_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may write less than was asked for; then the rest follows."""
    writes: list[int] = []

    class Short(io.FileIO):
        def write(self, data: Any) -> int:
            writes.append(len(data))
            return super().write(data[:limit])

    limit = None
    monkeypatch.setattr(
        "aiofiles.threadpool.sync_open", lambda path, mode, *_, opener, **__: Short(path, mode, opener=opener)
    )
    path = write(tmp_path, *whole())
    first = path.read_bytes()
    write(tmp_path, *whole(at=2.0))
    assert writes == [len(first), len(first)]
    assert path.read_bytes().startswith(first)
    assert path.read_bytes().count(b"\n") == 4
    limit = 100
    write(tmp_path, *whole(at=3.0))
    assert path.read_bytes().count(b"\n") == 6
    assert [one.at for one in find(tmp_path, 42, Path(RUN)).trajectories] == [3.0, 3.0]
