"""Tests of the skip benchmark at small sizes: complete tables, equal samples, refused options."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.core.ports import GenerateRequest, GenerationEvent, TurnFinished
from asyncrl.core.trajectory import SampleRequest
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, Turn
from benchmarks.skip import __main__ as benchmark
from benchmarks.skip.replay import LONG_TOKENS, EngineStage, ReplayCase, replay_case, same
from benchmarks.skip.samples import SampleSize, array_bytes, make_generated, recording
from skip import SkipManager
from skip.generation import from_content, to_content

TINY = (
    SampleSize("short", n=2, tokens=(1, 4), records=4, loop_s=0.3),
    SampleSize("long", 2, (50, 50), records=3, loop_s=0.3),
)
AT_ZERO = {("nothing", "records/s"), ("nothing", "p99 added ms")}
"""These figures are 0 by definition. The time that recording adds may be negative in such a short run."""


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}


def test_the_result_contains_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(benchmark, "SIZES", TINY)
    monkeypatch.setattr(benchmark, "FILE_ROUNDS", 1)
    monkeypatch.setattr(benchmark, "CALLS", 10)
    target = tmp_path / "deeper" / "skip.json"
    benchmark.main(["--no-engine", "--rounds", "1", "--json", str(target), "--dir", str(tmp_path)])
    result = json.loads(target.read_text())
    assert (result["name"], result["rounds"], result["aims"], result["directory"]) == (
        "skip",
        1,
        benchmark.AIMS,
        str(tmp_path),
    )
    assert result["file_system"] and result["empty_file_us"] > 0 and result["machine"]["cores"] > 0
    assert [(row["sample"], row["by"], row["what"], row["format"]) for row in result["files"]] == [
        (size.name, by, what, format_name)
        for size in TINY
        for by in ("caller", "file thread")
        for what in ("write", "read")
        for format_name in ("skip", "torch arrays", "torch samples")
    ]
    assert [(row["sample"], row["what"], row["by"]) for row in result["waits"]] == [
        (size.name, what, by)
        for size in TINY
        for what in ("record write", "record read", "turns", "dump")
        for by in ("thread", "aiofiles")
    ]
    assert [(row["sample"], row["beside"]) for row in result["loop"]] == [
        (size.name, beside) for size in TINY for beside in ("nothing", "recording")
    ]
    assert [row["function"] for row in result["disabled"]] == ["def", "async def"]
    for row in [*result["files"], *result["waits"], *result["loop"], *result["disabled"]]:
        for name, value in figures(row).items():
            if (row.get("beside"), name) in AT_ZERO:
                assert value == 0
            elif "added" in name:
                assert math.isfinite(value)
            else:
                assert value > 0, (row, name)
    assert list(tmp_path.iterdir()) == [target.parent], "the benchmark deletes all other files"
    out, err = capsys.readouterr()
    assert all(f"skip, {name}" in out for name in ("files", "waits", "loop", "disabled")) and "files, short" in err


class Fleet:
    """A fleet that answers at once. Each further response is one token longer, up to `max_tokens`."""

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        for number, request in enumerate(requests):
            yield TurnFinished(number, make_turn(number + 1, request))


def make_turn(length: int, request: GenerateRequest) -> Turn:
    ids = np.arange(min(length, request.sampling["max_tokens"]), dtype=np.int32)
    return Turn(ids, -ids.astype(np.float32), (Span(0, 0),), FinishReason.STOP)


def make_case(directory: Path) -> ReplayCase:
    def asked(index: int) -> SampleRequest:
        prompt = Prompt(np.array([index], dtype=np.int32))
        return SampleRequest(SampleId(0, index), prompt, {"max_tokens": LONG_TOKENS}, 2)

    return ReplayCase("tiny", recording(directory), asked, 2, generated=3, copies=1, passes=2, rounds=2)


async def test_replayed_samples_were_generated_in_the_same_round(tmp_path: Path) -> None:
    case, fleet = make_case(tmp_path), Fleet()
    with SkipManager.session(case.config):
        rows = await replay_case(case, EngineStage(fleet))  # type: ignore[arg-type]
        assert SkipManager.status()["async_rollout"] == {"recorded": 6, "replayed": 12}
    assert [(row["from"], row["samples"], row["n"], row["tokens"]) for row in rows] == [
        ("engines", 6, 2, 1.5),
        ("records", 12, 2, 1.5),
    ]
    assert all(value > 0 for row in rows for value in figures(row).values())


async def test_slow_generation_is_measured_on_shorter_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tmp_path)._replace(generated=1, copies=3, lengths=(1, 2))
    for limit_s, tokens in ((60.0, 1.5), (0.0, 1.0)):
        monkeypatch.setattr("benchmarks.skip.replay.LIMIT_S", limit_s)
        with SkipManager.session(recording(tmp_path / str(tokens))):
            engines, records = await replay_case(case, EngineStage(Fleet()))  # type: ignore[arg-type]
        assert (engines["tokens"], records["tokens"]) == (tokens, LONG_TOKENS)
        assert (engines["samples"], records["samples"]) == (2, 12)


async def test_generating_again_is_not_counted_as_replay(tmp_path: Path) -> None:
    case = make_case(tmp_path)
    with SkipManager.session(case.config), pytest.raises(SystemExit, match="generated again"):
        SkipManager.reset()
        await replay_case(case, EngineStage(Fleet()))  # type: ignore[arg-type]


def test_the_samples_differ_and_are_read_back_unchanged() -> None:
    one, other = (make_generated(TINY[0], seed) for seed in (1, 2))
    (back,) = from_content(to_content([one]))
    assert same(one, back) and not same(one, other) and not same(one, replace(one, trajectories=one.trajectories[:1]))
    assert array_bytes(one) == sum(array.nbytes for array in to_content([one]).arrays.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds: '0' is not a number of 1 or more"),
        (["--rounds", "few"], "--rounds: 'few' is not a number of 1 or more"),
        (["--json", "{}"], "--json: "),
        (["--dir", "{}/nowhere"], "--dir: "),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, capsys: Any, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--no-engine", *(option.format(tmp_path) for option in options)])
    assert message in capsys.readouterr().err
