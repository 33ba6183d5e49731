"""What was sampled for nothing, of whatever kind; and what only looks like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.profiling.files import DIRECTORY, EventFiles, Line
from asyncrl.report.analysis import analyse
from asyncrl.report.load import load
from asyncrl.report.words import figures
from benchmarks.profiling.synthetic import START

SAMPLE = {"step": 1, "sample": "sample_0_1"}
Lines = list[tuple[str, float, float, dict[str, Any]]]


def analysed(run_dir: Path, lines: Lines) -> dict[str, Any]:
    files = EventFiles(run_dir / DIRECTORY)
    files.write(
        [
            Line("all", {"timestamp": START + at, "event": name, "duration_s": took, **fields})
            for name, at, took, fields in lines
        ]
    )
    files.close()
    return analyse(load(run_dir), {"name": "run", "status": "completed"}, {})


def request(
    number: int, at: float, tokens: int, reason: str, **fields: Any
) -> tuple[str, float, float, dict[str, Any]]:
    """One that takes a tenth of a second a token."""
    told = {**SAMPLE, "trajectory": number, "turn": 0, "replica": "a", "prompt_tokens": 10, "decode_s": tokens / 10}
    return "request", at, tokens / 10, {**told, "response_tokens": tokens, "finish_reason": reason, **fields}


def trajectory(
    number: int, at: float, took: float, tokens: int | None, reason: str, **fields: Any
) -> tuple[str, float, float, dict[str, Any]]:
    told = {} if tokens is None else {"tokens": tokens, "sampled_tokens": tokens, "turns": 1, "tool_s": 0.0}
    return "trajectory", at, took, {**SAMPLE, "trajectory": number, "finish_reason": reason, **told, **fields}


TRAINED: Lines = [("sample.ready", 30.0, 0.0, SAMPLE), ("sample.trained", 40.0, 0.0, SAMPLE)]


def test_trajectories_beyond_those_that_were_asked_for(tmp_path: Path) -> None:
    """Two of four are kept; of the others one was whole, and one was cut with half of its tokens."""
    lines: Lines = [("sample.admitted", 0.0, 0.0, SAMPLE), ("sample.generate", 0.0, 10.0, SAMPLE)]
    for number, tokens, reason in ((0, 100, "stop"), (1, 100, "length"), (2, 100, "surplus"), (3, 50, "aborted")):
        error = {"error": "CancelledError"} if reason == "aborted" else {}
        made = None if error else tokens
        lines += [
            request(number, 0.0, tokens, "aborted" if error else "stop"),
            trajectory(number, 0.0, tokens / 10, made, reason, **error),
        ]
    found = analysed(tmp_path, lines + TRAINED)
    waste = found["thrown_away"]
    assert waste["surplus_trajectories"] == {"trajectories": 2, "tokens": 150}
    assert (waste["sampled_tokens"], waste["thrown_away_tokens"]) == (350, 150)
    (told,) = [each for each in found["findings"] if each["kind"] == "thrown_away"]
    assert "150 surplus trajectories" in told["text"]
    (text,) = [each["text"] for each in figures(found) if each["id"] == "thrown_away"]
    assert "43 %) were thrown away (150 surplus trajectories)" in text


def test_trajectories_that_are_under_way_are_none_of_it(tmp_path: Path) -> None:
    """Generation was cut and will be gone on with; nobody knows yet which of them count."""
    lines: Lines = [
        ("sample.admitted", 0.0, 0.0, SAMPLE),
        request(0, 0.0, 100, "aborted"),
        trajectory(0, 0.0, 10.0, None, "aborted", error="CancelledError"),
        ("sample.cut", 10.0, 0.0, {**SAMPLE, "tokens": 100, "kept": 1}),
    ]
    waste = analysed(tmp_path, lines)["thrown_away"]
    assert (waste["sampled_tokens"], waste["thrown_away_tokens"], waste["cut"]["kept_tokens"]) == (100, 0, 100)


@pytest.mark.parametrize(
    ("first", "thrown_away"),
    [
        ([request(0, 0.0, 40, "aborted")], 40),  # begun anew
        ([request(0, 0.0, 40, "stop", turn=0, request="sample_0_1/0-1")], 0),  # in the turn log
    ],
)
def test_what_was_sampled_before_a_crash_counts_if_it_is_in_the_trajectory(
    tmp_path: Path, first: Lines, thrown_away: int
) -> None:
    kept = 40 - thrown_away
    lines: Lines = [
        ("sample.admitted", 0.0, 0.0, SAMPLE),
        *first,
        ("part.restarted", 5.0, 2.0, {"part": "rollouter", "cause": "killed"}),
        ("sample.admitted", 10.0, 0.0, SAMPLE),
        request(0, 10.0, 60, "stop", turn=1 if kept else 0),
        trajectory(0, 10.0, 6.0, 60 + kept, "stop"),
    ]
    waste = analysed(tmp_path, lines + TRAINED)["thrown_away"]
    assert (waste["sampled_tokens"], waste["thrown_away_tokens"]) == (100, thrown_away)
    assert waste["sampled_again"]["tokens"] == thrown_away


def test_of_a_dropped_sample_everything_is_told_once(tmp_path: Path) -> None:
    lines: Lines = [
        ("sample.admitted", 0.0, 0.0, SAMPLE),
        request(0, 0.0, 100, "stop"),
        request(1, 0.0, 50, "aborted"),
        trajectory(0, 0.0, 10.0, 100, "stop"),
        trajectory(1, 0.0, 10.0, None, "aborted", error="CancelledError"),
        ("sample.ready", 12.0, 0.0, SAMPLE),
        ("sample.dropped", 20.0, 0.0, {**SAMPLE, "reason": "stale", "tokens": 100}),
    ]
    waste = analysed(tmp_path, lines)["thrown_away"]
    assert (waste["thrown_away_tokens"], waste["share"]) == (150, 1.0)
    assert waste["dropped"] == [{"reason": "stale", "samples": 1, "tokens": 150}]
    assert waste["surplus_trajectories"]["tokens"] == 0


def test_both_legs_of_a_sample_that_was_cut_and_gone_on_with_are_of_its_life(tmp_path: Path) -> None:
    lines: Lines = [
        ("sample.admitted", 0.0, 0.0, SAMPLE),
        request(0, 0.0, 30, "aborted"),
        trajectory(0, 0.0, 4.0, None, "aborted", error="CancelledError"),
        ("sample.cut", 4.0, 0.0, {**SAMPLE, "tokens": 30, "kept": 1}),
        request(0, 20.0, 50, "stop", prompt_tokens=40),
        trajectory(0, 20.0, 5.0, 80, "stop"),
        ("sample.generate", 20.0, 5.0, SAMPLE),
    ]
    found = analysed(tmp_path, lines + TRAINED)
    seconds = {row["kind"]: row["mean_s"] for row in found["shares"]["table"]}
    assert (seconds["decode"], seconds["handling"]) == (8, 1)
    assert found["thrown_away"]["thrown_away_tokens"] == 0


def test_tools_that_models_make_up_are_one_row(tmp_path: Path) -> None:
    call: dict[str, Any] = {**SAMPLE, "trajectory": 0, "turn": 0, "wait_s": 0.0}
    lines: Lines = [
        ("tool.execute", 1.0, 2.0, {**call, "tool": "search", "status": "ok"}),
        ("tool.execute", 3.0, 0.0, {**call, "tool": "search", "status": "too_many"}),
        ("tool.execute", 3.0, 0.0, {**call, "tool": "recorded", "status": "ok"}),
        ("tool.execute", 3.0, 0.0, {**call, "tool": "misused", "status": "bad_arguments"}),
        ("tool.execute", 3.0, 0.0, {**call, "tool": "", "status": "bad_json"}),
        *(("tool.execute", 4.0, 0.0, {**call, "tool": f"magic_{k}", "status": "unknown_tool"}) for k in range(5)),
    ]
    rows = analysed(tmp_path, lines)["turns"]["tools"]
    assert {row["tool"]: row["count"] for row in rows} == {
        **{"search": 2, "recorded": 1, "misused": 1},
        "(unknown tools)": 6,
    }
