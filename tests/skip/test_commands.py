"""Tests of `asyncrl skip`: showing, verifying, removing and transferring records."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.cli.main import BAD_CONFIG, FAILED, main
from asyncrl.core.trajectory import Generated, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn
from skip.generation import to_content
from skip.record import MANIFEST, TENSORS, Content, Origin, Record
from skip.store import RecordFiles

QUICKSTART = "asyncrl://quickstart"


def generation(step: int) -> Record:
    prompt = Prompt(np.array([3, 4, 5], dtype=np.int32), ({"role": "user", "content": "1+2="},), "sums", "3")
    turn = Turn(np.array([6, 7], dtype=np.int32), np.zeros(2, np.float32), (Span(0, 2),), FinishReason.STOP)
    origin = Origin(1_700_000_000.0, "here", 2, 2, "0.1")
    return Record(
        "async_rollout", step, {"n": "2"}, origin, to_content([Generated(prompt, (single_turn(prompt, turn),) * 2)])
    )


@pytest.fixture
def dump_dir(tmp_path: Path) -> Path:
    experiment = tmp_path / "dump" / "asyncrl" / "quickstart"
    generations, others = RecordFiles(experiment / "async_rollout"), RecordFiles(experiment / "reward")
    for step in (1, 2, 3, 7):
        generations.write(str(step), generation(step))
    others.write("4", Record("reward", 4, {}, Origin(1.0, "here"), Content({}, {"rewards": [1.0, 0.5]})))
    return tmp_path / "dump"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `asyncrl skip` and returns the exit code and both outputs."""

    def command(*arguments: Any) -> tuple[int, str, str]:
        code = main(["skip", *map(str, arguments)])
        return code, *capsys.readouterr()

    return command


def test_ls_lists_each_role(dump_dir: Path, run: Run) -> None:
    code, out, _ = run("ls", dump_dir)
    assert code == 0 and "async_rollout" in out and "1-3,7" in out and "reward" in out
    code, out, _ = run("ls", dump_dir, "--json")
    first, second = json.loads(out)
    assert (first["steps"], first["records"], second["steps"]) == ("1-3,7", 4, "4")
    assert first["bytes"] == sum(file.stat().st_size for file in Path(first["path"]).glob("*/*"))


@pytest.mark.parametrize("below", ["", "asyncrl", "asyncrl/quickstart", "asyncrl/quickstart/async_rollout"])
def test_any_directory_above_a_record_is_accepted(dump_dir: Path, run: Run, below: str) -> None:
    code, out, _ = run("verify", dump_dir / below, "--json")
    assert code == 0 and json.loads(out)["records"] == (4 if "rollout" in below else 5)


def test_show_prints_texts_and_tokens(dump_dir: Path, run: Run) -> None:
    record = dump_dir / "asyncrl/quickstart/async_rollout/2"
    code, out, _ = run("show", record)
    assert code == 0
    for text in ("async_rollout, step 2", "user: 1+2=", "answer: 3", "3 4 5", "response 1 (2 tokens, stop", "6 7"):
        assert text in out
    code, out, _ = run("show", record, "--json", "--tokenizer", QUICKSTART)
    content = json.loads(out)
    assert content["origin"]["host"] == "here" and len(content["samples"][0]["responses"]) == 2
    assert content["samples"][0]["prompt"] != "3 4 5"
    code, out, _ = run("show", dump_dir / "asyncrl/quickstart/reward/4")
    assert code == 0 and "rewards: [1.0, 0.5]" in out


def test_show_requires_one_intact_record(dump_dir: Path, run: Run) -> None:
    code, _, err = run("show", dump_dir)
    assert code == BAD_CONFIG and "it has 5 records; give the directory of one" in err
    record = dump_dir / "asyncrl/quickstart/reward/4"
    (record / TENSORS).unlink()
    code, _, err = run("show", record)
    assert code == BAD_CONFIG and "the record counts as absent: it has no tensors.safetensors" in err
    code, _, err = run("show", record.with_name("2"), "--tokenizer", "/nowhere")
    assert code == BAD_CONFIG


def test_content_of_another_role_is_an_error_without_a_traceback(tmp_path: Path, run: Run) -> None:
    for step, data in enumerate(({}, {"samples": 1}, {"samples": [[]]}, {"samples": [{"prompt_tokens": "x"}]})):
        record = Record("async_rollout", step, {}, Origin(1.0, "here"), Content({}, data))
        RecordFiles(tmp_path / "async_rollout").write(str(step), record)
        code, _, err = run("show", tmp_path / "async_rollout" / str(step))
        assert code == BAD_CONFIG and "does not contain what a record of async_rollout contains" in err


def test_verify_names_damaged_records(dump_dir: Path, run: Run) -> None:
    tensors = dump_dir / "asyncrl/quickstart/async_rollout/3" / TENSORS
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    code, out, _ = run("verify", dump_dir)
    assert code == FAILED and "async_rollout/3: checksum" in out and "5 records, 1 damaged" in out
    code, out, _ = run("gc", dump_dir, "--damaged")
    assert code == 0 and "1 of 5 records removed" in out
    assert run("verify", dump_dir)[0] == 0


def test_gc_removes_the_selected_records(dump_dir: Path, run: Run) -> None:
    role = dump_dir / "asyncrl/quickstart/async_rollout"
    code, _, err = run("gc", dump_dir)
    assert code == BAD_CONFIG and "nothing is selected for removal" in err
    assert "4 of 5 records would be removed" in run("gc", dump_dir, "--steps", "1-4", "-n")[1]
    assert len(os.listdir(role)) == 4
    long_ago = time.time() - 3 * 86400
    os.utime(role / "1", (long_ago, long_ago))
    code, out, _ = run("gc", dump_dir, "--older-than", "2d", "--json")
    assert code == 0 and json.loads(out)["removed"] == [str(role / "1")]
    for number, name in enumerate(("7", "2", "3")):
        at = time.time() - 100 + number
        os.utime(role / name, (at, at))
    size = sum(file.stat().st_size for file in (role / "2").iterdir())
    run("gc", role, "--max-bytes", str(2 * size + 10))
    assert sorted(os.listdir(role)) == ["2", "3"], "the oldest record is removed"
    run("gc", role, "--steps", "all")
    assert os.listdir(role) == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--older-than", "soon", "not an age; expected a number and s, m, h, d or w"),
        ("--max-bytes", "much", "not a size; expected a number and K, M, G"),
        ("--steps", "x", "'x' is no step"),
    ],
)
def test_gc_refuses_malformed_options(dump_dir: Path, run: Run, option: str, value: str, message: str) -> None:
    code, _, err = run("gc", dump_dir, option, value)
    assert code == BAD_CONFIG and message in err


def test_export_and_import(dump_dir: Path, tmp_path: Path, run: Run) -> None:
    archive, there = tmp_path / "records.tar", tmp_path / "there"
    (dump_dir / "asyncrl/quickstart/reward/4" / MANIFEST).write_text("{}")
    code, out, err = run("export", dump_dir, archive)
    assert code == FAILED and "4 records exported" in out and "left out: " in err and "reward/4" in err
    code, out, _ = run("import", archive, there)
    assert code == 0 and "4 records imported" in out
    assert "0 records imported, 0 B, 4 existed already" in run("import", archive, there)[1]
    assert "4 records imported" in run("import", archive, there, "--replace")[1]
    assert run("verify", there)[0] == 0
    role = RecordFiles(there / "asyncrl/quickstart/async_rollout")
    assert [entry.name for entry in role.entries()] == ["1", "2", "3", "7"]
    assert {path.name for path in tmp_path.iterdir()} == {"dump", "there", "records.tar"}


def test_files_that_are_not_archives_are_refused(dump_dir: Path, tmp_path: Path, run: Run) -> None:
    assert run("import", tmp_path / "none.tar", tmp_path)[0] == BAD_CONFIG
    whole = tmp_path / "whole.tar"
    run("export", dump_dir, whole)
    (tmp_path / "text.tar").write_text("hello")
    (tmp_path / "torn.tar").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2 + 300])
    for name in ("text.tar", "torn.tar"):
        code, _, err = run("import", tmp_path / name, there := tmp_path / name.removesuffix(".tar"))
        assert code == FAILED and "not an archive of records, or an incomplete one" in err
        assert not there.exists(), "nothing is imported from an incomplete archive"
    code, _, err = run("export", tmp_path / "nowhere", tmp_path / "x.tar")
    assert code == BAD_CONFIG and "there is no such directory" in err
    assert not (tmp_path / "x.tar").exists()


# ------------------------------------------------------------------------------------------------ unusual directories


@pytest.mark.parametrize("below", [".", "2024", "2024/1"])
def test_projects_and_experiments_may_have_names_like_those_of_records(tmp_path: Path, run: Run, below: str) -> None:
    role = RecordFiles(tmp_path / "2024" / "1" / "async_rollout")
    role.write("3", generation(3))
    code, out, _ = run("ls", tmp_path / below, "--json")
    assert (code, [(one["path"], one["steps"]) for one in json.loads(out)]) == (0, [(str(role.root), "3")])
    code, out, _ = run("gc", tmp_path / below, "--damaged", "--json")
    assert (code, json.loads(out)["removed"]) == (0, [])
    run("gc", tmp_path / below, "--steps", "1,2024")
    assert role.read("3").step == 3


def test_gc_removes_abandoned_files_without_a_record(tmp_path: Path, run: Run) -> None:
    left = tmp_path / "asyncrl" / "quickstart" / "reward" / ".1.host-1-0.new"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    assert run("gc", tmp_path, "--damaged")[0] == 0
    assert not left.exists()


def test_unwritable_archives_are_errors(dump_dir: Path, tmp_path: Path, run: Run) -> None:
    archive = tmp_path / "records.tar"
    assert run("export", dump_dir, archive)[0] == 0
    assert archive.stat().st_mode & 0o044, "the umask lets others read the archive"
    (tmp_path / "file").write_text("")
    code, _, err = run("import", archive, tmp_path / "file" / "below")
    assert (code, "Not a directory" in err) == (BAD_CONFIG, True)
    code, _, err = run("export", dump_dir, tmp_path / "nowhere" / "records.tar")
    assert (code, "it cannot be written: No such file" in err) == (BAD_CONFIG, True)


def test_notes_are_exported(dump_dir: Path, tmp_path: Path, run: Run) -> None:
    RecordFiles(dump_dir / "asyncrl" / "quickstart" / "async_rollout").note("3", {"rewards": [1.0, 0.0]})
    run("export", dump_dir, tmp_path / "records.tar")
    run("import", tmp_path / "records.tar", tmp_path / "other")
    shown = run("show", tmp_path / "other" / "asyncrl" / "quickstart" / "async_rollout" / "3")[1]
    assert "rewards: [1.0, 0.0]" in shown


def test_a_recorded_tokenizer_that_cannot_be_loaded_gives_token_ids(tmp_path: Path, run: Run) -> None:
    (tmp_path / "model").mkdir()
    record = generation(3)
    content = Content(record.content.arrays, {**record.content.data, "tokenizer": str(tmp_path / "model")})
    RecordFiles(tmp_path / "async_rollout").write("3", replace(record, content=content))
    code, out, _ = run("show", tmp_path / "async_rollout" / "3")
    assert (code, "): 6 7" in out) == (0, True)
    content = Content(record.content.arrays, {**record.content.data, "tokenizer": QUICKSTART})
    RecordFiles(tmp_path / "async_rollout").write("3", replace(record, content=content))
    assert "): 6 7" not in run("show", tmp_path / "async_rollout" / "3")[1]


def test_a_record_whose_name_has_another_step_is_not_imported(tmp_path: Path, run: Run) -> None:
    RecordFiles(tmp_path / "role").write("3", generation(3))
    run("export", tmp_path, tmp_path / "records.tar")
    with tarfile.open(tmp_path / "records.tar") as old, tarfile.open(tmp_path / "odd.tar", "w") as odd:
        for member in old.getmembers():
            file = old.extractfile(member)
            member.name = member.name.replace("/3/", "/4/")
            odd.addfile(member, file)
    code, _, err = run("import", tmp_path / "odd.tar", tmp_path / "other")
    assert (code, "it is a record of step 3" in err) == (FAILED, True)


def test_a_record_can_be_shown_from_within_its_directory(
    dump_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dump_dir / "asyncrl" / "quickstart" / "async_rollout" / "3")
    assert run("show", ".")[1].startswith("async_rollout, step 3")


def test_unreadable_directories_are_ignored(dump_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = dump_dir / "closed"
    closed.mkdir()
    iterdir = Path.iterdir

    def refuses(path: Path) -> Any:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuses)
    code, out, _ = run("ls", dump_dir, "--json")
    assert (code, len(json.loads(out))) == (0, 2)


def test_an_empty_directory_argument_is_refused(dump_dir: Path, run: Run) -> None:
    code, _, err = run("gc", "", "--steps", "all")
    assert (code, "DIR is empty" in err) == (BAD_CONFIG, True)


def test_long_lists_of_steps_are_abbreviated(tmp_path: Path, run: Run) -> None:
    files = RecordFiles(tmp_path / "role")
    for step in range(1, 200, 7):
        files.write(str(step), generation(step))
    assert "1 … 197" in run("ls", tmp_path)[1]
