"""Tests of records: their bytes, their files, concurrent writers, and damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.text import MAX_FILE_DEPTH
from asyncrl.storage.array_bytes import DamageError
from skip import store as store_module
from skip.fingerprint import SHORT, differing, field
from skip.record import MANIFEST, TENSORS, Content, Origin, Record, from_files, to_files
from skip.store import ABANDONED_S, NOTE, RecordFiles, parse_note, record_name, step_of

ORIGIN = Origin(1000.0, "host", 3, 4, "0.1")


def make(step: int = 12, *, tag: str = "a", size: int = 5) -> Record:
    content = Content(
        {
            "ids": np.arange(size, dtype=np.int32),
            "log_probs": np.linspace(-1, 0, size, dtype=np.float32),
            "mask": np.ones(size, dtype=np.bool_),
        },
        {"text": f"grüße {tag}", "list": [1, 2.5, None]},
    )
    return Record("role", step, {"prompt": tag}, ORIGIN, content)


def same(one: Record, other: Record) -> bool:
    arrays, others = one.content.arrays, other.content.arrays
    return (
        (one.role, one.step, one.fingerprint, one.origin) == (other.role, other.step, other.fingerprint, other.origin)
        and one.content.data == other.content.data
        and arrays.keys() == others.keys()
        and all(np.array_equal(arrays[name], others[name]) for name in arrays)
        and all(arrays[name].dtype == others[name].dtype for name in arrays)
    )


def as_bytes(record: Record) -> tuple[bytes, np.ndarray]:
    manifest, buffers = to_files(record)
    return manifest, np.frombuffer(b"".join(buffers), dtype=np.uint8)


# ------------------------------------------------------------------------------------------------ fingerprints


def test_only_equal_values_have_equal_fields() -> None:
    assert field({"b": 1, "a": [np.int64(2)]}) == field({"a": [2], "b": 1})
    assert field(np.array([1, 2], dtype=np.int32)) != field(np.array([1, 2], dtype=np.int64))
    assert field("x" * SHORT) == "x" * SHORT
    texts = ("1", "-1.5", "null", "true", "NaN", "[1]", '{"a": 1}', '"a"')
    assert all(field(text) != field(value) for text in texts for value in (1, -1.5, None, True, [1], {"a": 1}, "a"))
    assert field("x" * (SHORT + 1)).startswith("sha256:")
    with pytest.raises(TypeError, match="a fingerprint cannot contain object"):
        field({"a": object()})


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), st.dictionaries(st.text(max_size=3), st.text()))
def test_differing_fields_are_named(one: dict[str, str], other: dict[str, str]) -> None:
    found = differing(one, other)
    assert (found == ()) == (one == other)
    assert all(one.get(name) != other.get(name) for name in found) and list(found) == sorted(found)


# ------------------------------------------------------------------------------------------------ bytes


def test_a_record_is_read_back_unchanged() -> None:
    for record in (make(), Record("r", 0, {}, ORIGIN, Content())):
        assert same(from_files(*as_bytes(record)), record)


@given(data=st.data())
def test_all_damage_to_a_record_is_detected(data: st.DataObject) -> None:
    """The damage is a cut or a flipped byte at any position."""
    manifest, tensors = as_bytes(make())
    files: list[Any] = [bytearray(manifest), bytearray(tensors.tobytes())]
    number = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(files[number]) - 1))
    if data.draw(st.booleans()):
        del files[number][at:]
    else:
        files[number][at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamageError):
        from_files(bytes(files[0]), np.frombuffer(bytes(files[1]), dtype=np.uint8))


def test_a_record_with_files_of_two_records_is_damaged() -> None:
    (manifest, _), (_, tensors) = as_bytes(make(tag="a")), as_bytes(make(size=6))
    with pytest.raises(DamageError, match="is not the file that"):
        from_files(manifest, tensors)


def test_a_manifest_that_is_nested_too_deeply_is_damaged() -> None:
    _, tensors = as_bytes(make())
    body = b"[" * 100_000
    with pytest.raises(DamageError, match="cannot be interpreted"):
        from_files(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode(), tensors)
    with pytest.raises(ValueError, match="nested"):
        parse_note(body)


@pytest.mark.parametrize(
    "content",
    [
        Content({"x": np.zeros((2, 2), dtype=np.int32)}),
        Content({"x": np.zeros(2, dtype=np.float64)}),
        Content({}, {"x": float("nan")}),
        Content({}, {"x": object()}),
    ],
)
def test_contents_that_cannot_be_recorded_are_refused(content: Content) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        to_files(Record("r", 1, {}, ORIGIN, content))


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["0", "12", "12-0123abcd", "7-" + "f" * 32])
def test_names_of_records_are_parsed(name: str) -> None:
    step, _, call = name.partition("-")
    assert record_name(int(step), call) == name and step_of(name) == int(step)


@pytest.mark.parametrize("name", ["", "-1", "012", "1-x", "a", ".1.tmp", "1-0123abc", "1-0123ABCD"])
def test_malformed_names_are_refused(name: str) -> None:
    assert step_of(name) is None
    with pytest.raises(ValueError, match="not the name of a record"):
        record_name(3, "nothex!!")


def test_a_record_is_written_read_listed_and_removed(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path / "a" / "role")
    assert files.names() == files.entries() == []
    files.remove("12")
    with pytest.raises(FileNotFoundError):
        files.read("12")
    size = files.write("12", make())
    files.write("3-0123abcd", make(3))
    assert same(files.read("12"), make())
    assert [(entry.name, entry.step) for entry in files.entries()] == [("3-0123abcd", 3), ("12", 12)]
    assert files.entries()[1].num_bytes == size == sum(file.stat().st_size for file in (files.root / "12").iterdir())
    files.write("12", make(tag="b"))
    assert files.read("12").fingerprint == {"prompt": "b"}
    files.remove("12")
    assert files.names() == ["3-0123abcd"]
    assert {path.name for path in files.root.iterdir()} == {"3-0123abcd"}


def test_a_link_is_a_damaged_record_and_its_target_stays(tmp_path: Path) -> None:
    files, elsewhere = RecordFiles(tmp_path / "role"), RecordFiles(tmp_path / "elsewhere")
    for step in (1, 2):
        elsewhere.write(str(step), make(step))
    files.write("3", make(3))
    for step in (1, 2):
        (files.root / str(step)).symlink_to(elsewhere.root / str(step))
    assert [(entry.name, entry.num_bytes > 0, entry.damage()) for entry in files.entries()] == [
        ("1", False, "it is no directory"),
        ("2", False, "it is no directory"),
        ("3", True, ""),
    ]
    with pytest.raises(DamageError, match="it is no directory"):
        files.note("1", {"rewards": [1.0]})
    files.remove("1")
    files.write("2", make(2, tag="b"))
    assert same(files.read("2"), make(2, tag="b"))
    assert {path.name for path in files.root.iterdir()} == {"2", "3"}
    assert all(same(elsewhere.read(str(step)), make(step)) for step in (1, 2))


@pytest.mark.parametrize(
    "note", [b"NaN", b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 100_000, b"[]", b"\xff"]
)
def test_a_note_that_is_no_json_is_not_shown(tmp_path: Path, note: bytes) -> None:
    files = RecordFiles(tmp_path)
    files.write("1", make(1))
    (tmp_path / "1" / NOTE).write_bytes(note)
    assert files.read_note("1") == {}


def test_content_that_could_not_be_read_again_is_not_recorded() -> None:
    deep: Any = "x"
    for _ in range(MAX_FILE_DEPTH - 2):
        deep = [deep]
    assert same(from_files(*as_bytes(record := Record("role", 1, {}, ORIGIN, Content({}, {"a": deep})))), record)
    for data in ({"a": [deep]}, {"a": "\ud800"}, {"a": float("inf")}):
        with pytest.raises(ValueError, match=r"deep|surrogates|JSON compliant"):
            to_files(Record("role", 1, {}, ORIGIN, Content({}, data)))


@pytest.mark.usefixtures("can_exchange")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / TENSORS).unlink(), "it has no tensors"),
        (lambda path: (path / MANIFEST).unlink(), "it has no manifest"),
        (lambda path: (path / TENSORS).write_bytes(b""), "torn"),
        (lambda path: (path / MANIFEST).write_text("{}"), "torn or damaged"),
        (lambda path: path.rename(path.with_name("13")) and shutil.copytree(path.with_name("13"), path), None),
        (lambda path: shutil.rmtree(path) or path.write_text("x"), "it is no directory"),
        (lambda path: (path / TENSORS).unlink() or os.mkfifo(path / TENSORS), "not a regular file"),
    ],
)
def test_incomplete_records_are_damaged(tmp_path: Path, spoil: Any, message: str | None) -> None:
    files = RecordFiles(tmp_path)
    files.write("12", make())
    spoil(tmp_path / "12")
    if message is None:
        with pytest.raises(DamageError, match="it is a record of step 12"):
            files.read("13")
        return
    with pytest.raises(DamageError, match=message):
        files.read("12")
    files.write("12", make(tag="again"))
    assert files.read("12").fingerprint == {"prompt": "again"}
    assert [path.name for path in tmp_path.iterdir()] == ["12"]


def test_a_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RecordFiles(tmp_path)
    write = store_module._write

    def fails(path: Path, buffers: Any) -> None:
        write(path, buffers)
        if path.name == MANIFEST:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_write", fails)
    with pytest.raises(OSError, match="No space left"):
        files.write("12", make())
    assert list(tmp_path.iterdir()) == []


def test_readers_see_whole_records_while_others_write(tmp_path: Path) -> None:
    """While two writers and a remover use one name, readers find a whole record or none."""
    files, until = RecordFiles(tmp_path), time.monotonic() + 1.0
    seen: set[str] = set()

    def read() -> None:
        with suppress(FileNotFoundError):
            record = files.read("12")
            assert same(record, make(tag=record.fingerprint["prompt"], size=len(record.content.arrays["ids"])))
            seen.add(record.fingerprint["prompt"])

    def repeat(do: Callable[[], Any]) -> None:
        while time.monotonic() < until:
            do()

    jobs: list[Callable[[], Any]] = [
        lambda: files.write("12", make(tag="a", size=2000)),
        lambda: files.write("12", make(tag="b", size=3000)),
        lambda: files.remove("12"),
        read,
        read,
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(repeat, jobs))
    assert seen == {"a", "b"}
    assert {path.name for path in tmp_path.iterdir()} <= {"12"}


def test_killed_writers_leave_a_whole_record_or_none(tmp_path: Path) -> None:
    """The test kills two processes at random moments while they replace one record continuously."""
    program = (
        "import sys; from pathlib import Path\n"
        "from skip.store import RecordFiles; from tests.skip.test_records import make\n"
        "files, n = RecordFiles(Path(sys.argv[1])), 0\n"
        "while True:\n"
        "    files.write('12', make(tag=str(n), size=200_000)); n += 1; print(n, flush=True)\n"
    )
    files, whole = RecordFiles(tmp_path), 0
    for number in range(6):
        command = [sys.executable, "-c", program, str(tmp_path)]
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer, other:
            assert writer.stdout is not None
            for _ in range(1 + number):
                writer.stdout.readline()
            time.sleep(0.0007 * number)
            writer.kill()
            other.kill()
        with suppress(FileNotFoundError):
            record = files.read("12")
            assert same(record, make(tag=record.fingerprint["prompt"], size=200_000))
            whole += 1
    assert whole
    for path in tmp_path.iterdir():
        if path.name != "12":
            os.utime(path, (1, 1))
    files.sweep()
    assert {path.name for path in tmp_path.iterdir()} <= {"12"}


def test_notes_are_written_and_removed_with_their_record(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.note("12", {"rewards": [1.0]})
    files.write("12", make())
    assert files.read_note("12") == {}
    files.note("12", {"rewards": [1.0]})
    files.note("12", {"rewards": [0.5]})
    assert files.read_note("12") == {"rewards": [0.5]}
    assert same(files.read("12"), make())
    (tmp_path / "12" / NOTE).write_text("{")
    assert files.read_note("12") == {}
    files.write("12", make())
    assert not (tmp_path / "12" / NOTE).exists()


@pytest.fixture(params=[True, False], ids=["exchange", "no exchange"])
def can_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether names can be exchanged atomically. One of the two cases hides the system call for this."""
    if not request.param:
        monkeypatch.setattr(store_module, "_renameat2", lambda: None)
    elif store_module._renameat2() is None:
        pytest.skip("this system cannot exchange names")
    return bool(request.param)


def test_a_replaced_record_exists_at_every_moment_if_names_can_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    files = RecordFiles(tmp_path)
    files.write("12", make(tag="a"))
    seen: list[bool] = []

    def looking(function: Any) -> Any:
        return lambda *args, **kwargs: seen.append((tmp_path / "12").exists()) or function(*args, **kwargs)

    monkeypatch.setattr(store_module.os, "rename", looking(os.rename))
    monkeypatch.setattr(store_module.shutil, "rmtree", looking(shutil.rmtree))
    files.write("12", make(tag="b"))
    assert files.read("12").fingerprint == {"prompt": "b"}
    assert all(seen) is can_exchange
    assert [path.name for path in tmp_path.iterdir()] == ["12"]


def test_abandoned_files_are_removed(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path)
    files.write("12", make())
    for name in (".12.host-1-0.new", ".12.host-1-1.old"):
        (tmp_path / name).mkdir()
        long_ago = time.time() - ABANDONED_S - 1
        os.utime(tmp_path / name, (long_ago, long_ago))
    (tmp_path / ".13.host-2-0.new").mkdir()  # another process is writing this record
    files.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"12", ".13.host-2-0.new"}
    assert files.names() == ["12"]


def test_directories_of_records_are_private_unless_the_configuration_allows_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        RecordFiles(tmp_path / "dump" / "project" / "role").write("12", make())
        RecordFiles(tmp_path / "dump" / "open" / "role", mode=0o750).write("12", make())
    finally:
        os.umask(before)
    modes = {
        name: f"{(tmp_path / name).stat().st_mode & 0o777:o}" for name in ("dump", "dump/project", "dump/project/role")
    }
    assert set(modes.values()) == {"700"}
    assert f"{(tmp_path / 'dump' / 'open' / 'role').stat().st_mode & 0o777:o}" == "750"
