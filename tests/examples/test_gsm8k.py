"""The script in examples/gsm8k writes rows that a run and its tool can read."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.core.types import SampleId
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.dataset import FileRows, parse_row
from rollouter.tools import ToolContext
from rollouter.tools.loading import load_tools
from rollouter.tools.toolbox import Toolbox
from tests.fakes.command_line import CommandLine

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
SAMPLE = EXAMPLE / "sample.jsonl"


prepare = runpy.run_path(str(EXAMPLE / "prepare.py"))["main"]


def run(*arguments: object) -> int:
    return int(prepare([str(argument) for argument in arguments]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(number: int) -> dict[str, str]:
    return {"question": f"What is {number} + 1?", "answer": f"It is one more.\n#### {number + 1}"}


def test_a_row_equals_that_of_verls_script(tmp_path: Path) -> None:
    assert run(SAMPLE, "--out", tmp_path, "--format", "jsonl", "--limit", 1) == 0
    (row,) = lines(tmp_path / "train.jsonl")
    question = json.loads(SAMPLE.read_text().splitlines()[0])
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "13"}
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "calc_gsm8k_reward" in row["prompt"][0]["content"]
    assert row["prompt"][1]["content"].startswith(question["question"] + " ")
    assert row["extra_info"] == {
        "split": "train",
        "index": 0,
        **question,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "13"}}},
    }


async def test_the_rows_are_valid_for_the_data_set_and_the_tool(tmp_path: Path) -> None:
    assert run(SAMPLE, "--out", tmp_path, "--interaction", "retry", "--val-share", 0.3) == 0
    names = ("train.parquet", "val.parquet")
    files, cache = [str(tmp_path / name) for name in names], DataCache(tmp_path / "cache")
    rows = FileRows.open(files, key="data.train_files", cache=cache)
    parsed = [parse_row(rows.row(number), rows.where(number)) for number in range(len(rows))]
    truths = {row.extra_info["index"]: row.ground_truth for row in parsed}
    expected = ["13", "720", "213", "10", "40", "375", "2800", "33", "-2", "0.3", "120", "12"]
    assert [truths[number] for number in range(12)] == expected
    assert {row.extra_info["split"] for row in parsed} == {"train", "val"}
    assert all(row.extra_info["interaction_kwargs"] == {"name": "retry"} for row in parsed)
    async with Toolbox(load_tools([ToolConfig(class_name="gsm8k")])) as toolbox:
        for number, row in enumerate(parsed):
            context = ToolContext(SampleId(0, number + 1), 0, extra_info=row.extra_info)
            async with toolbox.session(context) as session:
                answer = json.dumps({"answer": row.extra_info["answer"]})
                called = await session.call("calc_gsm8k_reward", answer, turn=0)
                assert called.call.result.endswith("reward=1.0")


def test_both_input_formats_give_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(lines(SAMPLE)), tmp_path / "raw.parquet", row_group_size=5)
    assert run(SAMPLE, "--out", tmp_path / "a", "--format", "jsonl") == 0
    assert run(tmp_path / "raw.parquet", "--out", tmp_path / "b", "--format", "jsonl") == 0
    assert (tmp_path / "a" / "train.jsonl").read_text() == (tmp_path / "b" / "train.jsonl").read_text()


def test_many_rows_are_written_in_row_groups(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.jsonl", [problem(number) for number in range(2500)])
    assert run(raw, "--out", tmp_path) == 0
    file = pq.ParquetFile(tmp_path / "train.parquet")
    assert (file.metadata.num_rows, file.num_row_groups) == (2500, 3)
    truths = [row["reward_model"]["ground_truth"] for row in file.read().to_pylist()]
    assert truths == [str(number + 1) for number in range(2500)]


def test_the_split_of_a_question_does_not_depend_on_other_rows(tmp_path: Path) -> None:
    def split(name: str, numbers: list[int], *more: object) -> tuple[set[str], set[str]]:
        raw = write(tmp_path / f"{name}.jsonl", [problem(number) for number in numbers])
        assert run(raw, "--out", tmp_path / name, "--format", "jsonl", "--val-share", 0.2, *more) == 0
        train, val = (lines(tmp_path / name / f"{side}.jsonl") for side in ("train", "val"))
        return tuple({row["extra_info"]["question"] for row in side} for side in (train, val))  # type: ignore[return-value]

    train, val = split("few", list(range(1000)))
    assert 150 < len(val) < 250 and not train & val
    more_train, more_val = split("more", [*range(2000), *range(2000)][::-1])
    assert train < more_train and val < more_val and not more_train & more_val
    assert split("other", list(range(1000)), "--seed", 1)[1] != val


def test_the_validation_rows_may_come_from_a_separate_file(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", [problem(1), problem(2), problem(3)])
    assert run(SAMPLE, "--val", test, "--out", tmp_path / "out", "--format", "jsonl", "--limit", 2) == 0
    assert len(lines(tmp_path / "out" / "train.jsonl")) == 2
    assert [row["extra_info"]["split"] for row in lines(tmp_path / "out" / "val.jsonl")] == ["val", "val"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [problem(1), {"question": "q"}],
            "raw.jsonl, line 2: field 'answer' is missing; expected a text; the row has question",
        ),
        ([{"question": "", "answer": "#### 1"}], "line 1: field 'question' is ''; expected a text"),
        ([{"question": 7, "answer": "#### 1"}], "line 1: field 'question' is 7; expected a text"),
        (
            [{"question": "q", "answer": "it is 1"}],
            "line 1: field 'answer' is 'it is 1'; expected it to end in '#### <number>'",
        ),
        ([{"question": "q", "answer": "1 #### one"}], "expected it to end in '#### <number>'"),
        ([[1]], "line 1: [1] is no object with a question and an answer"),
        ([], "train.parquet would have no rows"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    tmp_path: Path, rows: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write(tmp_path / "raw.jsonl", rows)
    assert run(raw, "--out", tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_failure_leaves_existing_files_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SAMPLE, "--out", tmp_path) == 0
    before = (tmp_path / "train.parquet").read_bytes()
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"question": "q", "answer": "#### 1"}\n\n{"question\xff\n')
    assert run(bad, "--out", tmp_path, "--force") == 1
    assert "bad.jsonl, line 3: not JSON in UTF-8" in capsys.readouterr().err
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "train.parquet"]
    (tmp_path / "bad.parquet").write_text("no parquet")
    assert run(tmp_path / "bad.parquet", "--out", tmp_path, "--force") == 1
    assert "bad.parquet: cannot be read as Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "there is no such file"),
        (["data.csv"], "the suffix is '.csv'; expected .parquet or .jsonl"),
        ([SAMPLE, "--val-share", 1], "--val-share 1: a share is at least 0 and less than 1"),
        ([SAMPLE, "--val", SAMPLE, "--val-share", 0.5], "leave one out"),
        ([SAMPLE, "--limit", 0], "--limit 0: at least one row is needed"),
        ([SAMPLE], "train.parquet already exists; --force overwrites it"),
        (["train.jsonl", "--format", "jsonl", "--force"], "train.jsonl is read as well; write to another directory"),
    ],
)
def test_options_are_checked_before_anything_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("")
    (tmp_path / "train.parquet").write_text("mine")
    write(tmp_path / "train.jsonl", [problem(1)])
    with pytest.raises(SystemExit) as ended:
        run(*arguments, "--out", tmp_path)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "train.parquet").read_text() == "mine"


def test_force_overwrites_existing_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    assert run(SAMPLE, "--out", tmp_path, "--format", "jsonl", "--force") == 0
    assert len(lines(tmp_path / "train.jsonl")) == 12


def test_help_shows_the_launch_command() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "asyncrl launch fully_async examples/gsm8k/config.yaml model.path=PATH" in done.stdout


def test_the_configuration_is_valid_for_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SAMPLE, "--out", tmp_path, "--val-share", 0.3) == 0
    overrides = [
        "model.path=asyncrl://quickstart",
        "rollout.response_length=448",  # the quickstart's model has no room for longer texts
        f"data.train_files=[{tmp_path}/train.parquet]",
        f"data.val_files=[{tmp_path}/val.parquet]",
    ]
    cli = CommandLine(capsys)
    plan = cli("launch", "fully_async", EXAMPLE / "config.yaml", "--dry-run", "--json", *overrides).json
    (tool,) = plan["config"]["rollout"]["multi_turn"]["tools"]
    assert tool["class_name"] == "gsm8k"
