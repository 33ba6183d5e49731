"""Archives from others: an import refuses whatever `asyncrl skip export` does not write, before it writes anything."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import FAILED, main
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.text import MAX_FILE_DEPTH
from skip import archive as archives
from skip.archive import LAST, export, restore
from skip.record import MANIFEST, MAX_MANIFEST_BYTES, TENSORS, Content, Origin, Record, to_files
from skip.store import MAX_NOTE_BYTES, NOTE, RecordFiles

Member = tuple[tarfile.TarInfo, bytes]


def record(step: int) -> Record:
    return Record("reward", step, {"n": "2"}, Origin(1.0, "here"), Content({}, {"rewards": [1.0, 0.5]}))


def member(name: str, data: bytes = b"", **fields: Any) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def members_of(name: str, step: int) -> list[Member]:
    manifest, buffers = to_files(record(step))
    return [member(f"{name}/{TENSORS}", b"".join(buffers)), member(f"{name}/{MANIFEST}", manifest)]


def last(num_records: int) -> Member:
    return member(LAST, json.dumps({"records": num_records}).encode())


def write_archive(path: Path, members: Sequence[Member]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            if info.isreg() and info.size == len(data):
                tar.addfile(info, io.BytesIO(data))
            else:  # as it is, with a size or a type that does not fit the data
                tar.fileobj.write(info.tobuf(tarfile.GNU_FORMAT))
                tar.offset += tarfile.BLOCKSIZE
    return path


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def assert_refused(tmp_path: Path, members: Sequence[Member], *reasons: str, num_records: int = 1) -> None:
    """Import the members behind an intact record; nothing may be written, and the error names the archive."""
    archive = write_archive(tmp_path / "evil.tar", [*members_of("role/1", 1), *members, last(num_records)])
    there = tmp_path / "a" / "there"
    with pytest.raises(DataError) as raised:
        restore(archive, there)
    for text in (str(archive), "Nothing was imported", "asyncrl skip export", *reasons):
        assert text in raised.value.message
    assert len(raised.value.message) < 1000
    assert files_below(tmp_path) == {"evil.tar"}
    assert not there.exists()


# ------------------------------------------------------------------------------------------------ members


@pytest.mark.parametrize(
    "base", ["../../out/1", "/tmp/out/1", "fine/../../1", "./fine/1", "fi\nne/1", "x" * 300 + "/1"]
)
def test_an_archive_with_a_name_outside_of_the_destination_is_refused(tmp_path: Path, base: str) -> None:
    assert_refused(tmp_path, members_of(base, 1), "is not a path below", repr(base)[1:-1][:19])


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Q"]
)
@pytest.mark.parametrize("name", [f"role/2/{MANIFEST}", "role/2", "other"])
def test_an_archive_with_a_link_or_a_device_is_refused(tmp_path: Path, kind: bytes, name: str) -> None:
    assert_refused(tmp_path, [member(name, type=kind, linkname="/etc/passwd")], f"{name!r} is a link or a device")


class GnuSparse(tarfile.TarInfo):
    """A member of GNU's old sparse format: 5 bytes, and zeros up to 8 GiB."""

    def tobuf(self, *arguments: Any, **options: Any) -> bytes:
        header = bytearray(super().tobuf(tarfile.GNU_FORMAT))
        header[386:410] = b"00000000000\0" + b"00000000005\0"
        header[483:495] = b"77777777777\0"
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        return bytes(header)


def gnu_sparse() -> Member:
    info = GnuSparse(f"role/2/{TENSORS}")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 0
    return info, b""


@pytest.mark.parametrize(
    "make",
    [
        gnu_sparse,
        lambda: member(
            f"role/2/{TENSORS}", b"abcde", pax_headers={"GNU.sparse.map": "0,5", "GNU.sparse.size": "9" * 12}
        ),
        lambda: member(f"role/2/{TENSORS}", b"abcde", pax_headers={"GNU.sparse.size": "9" * 12}),
        lambda: member(f"role/2/{TENSORS}", b"abcde", pax_headers={"GNU.sparse.realsize": "9" * 12}),
        lambda: member(
            f"role/2/{TENSORS}",
            b"1\n0\n5\n".ljust(512, b"\0") + b"abcde",
            pax_headers={
                "GNU.sparse.major": "1",
                "GNU.sparse.minor": "0",
                "GNU.sparse.name": f"role/2/{TENSORS}",
                "GNU.sparse.realsize": "9" * 12,
            },
        ),
    ],
    ids=["gnu", "pax 0.1", "pax 0.0", "size alone", "pax 1.0"],
)
def test_an_archive_with_a_sparse_member_is_refused(tmp_path: Path, make: Callable[[], Member]) -> None:
    assert_refused(tmp_path, [make()], "is a sparse file, which can be larger than the disk")


@pytest.mark.parametrize("name", [f"role/1/{MANIFEST}", f"role/1/{TENSORS}", LAST])
def test_an_archive_with_a_member_twice_is_refused(tmp_path: Path, name: str) -> None:
    assert_refused(tmp_path, [member(name, b"{}"), member(name, b"{}")], f"{name!r} is in the archive twice")


@pytest.mark.parametrize(
    ("name", "size"), [(MANIFEST, MAX_MANIFEST_BYTES + 1), (NOTE, MAX_NOTE_BYTES + 1), (TENSORS, 1 << 40), ("x", -1024)]
)
def test_a_member_with_an_impossible_size_is_refused_before_it_is_read(tmp_path: Path, name: str, size: int) -> None:
    assert_refused(tmp_path, [member(f"role/2/{name}", size=size)], f"has {size} bytes")


def test_a_member_that_is_larger_than_the_archive_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, [member(f"role/2/{TENSORS}", size=1 << 30)], "unexpected end of data")


@pytest.mark.parametrize(
    "header",
    [
        b"".join(member("x", type=tarfile.GNUTYPE_LONGNAME)[0].tobuf(tarfile.GNU_FORMAT) for _ in range(3000)),
        member("x", type=tarfile.XHDTYPE, size=512)[0].tobuf(tarfile.GNU_FORMAT)
        + b"30 GNU.sparse.size=not a number\n".ljust(512, b"\0")
        + member("y")[0].tobuf(tarfile.GNU_FORMAT),
    ],
    ids=["nested headers", "a number that is none"],
)
def test_headers_that_tarfile_cannot_read_are_an_error_about_the_archive(tmp_path: Path, header: bytes) -> None:
    archive = write_archive(tmp_path / "evil.tar", [*members_of("role/1", 1)])
    with archive.open("r+b") as file:
        file.seek(sum(512 + -(-info.size // 512) * 512 for info, _ in members_of("role/1", 1)))
        file.write(header + bytes(1024))
        file.truncate()
    with pytest.raises(DataError, match="not an archive of records"):
        restore(archive, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def header(kind: bytes, body: bytes) -> bytes:
    """Return a header of an extension of tar: a pax header, or a long name."""
    data = body.ljust(-(-len(body) // 512) * 512, b"\0")
    return member("x", type=kind, size=len(body))[0].tobuf(tarfile.GNU_FORMAT) + data


LONG = b"13 path=nice\n" * 400
"""Of 5,200 bytes."""


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        *((header(kind, LONG * 2), "at least 10912 bytes of headers; 8192 are allowed") for kind in (b"x", b"X", b"L")),
        (header(tarfile.XHDTYPE, LONG) * 2, "at least 11856 bytes of headers"),
        (header(tarfile.GNUTYPE_LONGNAME, b"") * 17, "at least 8704 bytes of headers"),
        (header(tarfile.XGLTYPE, LONG), "it has a header for all later members"),
    ],
    ids=["pax", "Solaris", "long name", "several", "empty", "of all members"],
)
def test_headers_are_refused_before_they_fill_the_memory(tmp_path: Path, headers: bytes, reason: str) -> None:
    """The limit relies on what tarfile does not document: it calls `TarInfo._proc_member` for each header before it
    reads more, and `TarFile.offset` is where the member begins (Python 3.11 to 3.15)."""
    archive = write_archive(tmp_path / "evil.tar", [*members_of("role/1", 1), last(1)])
    data = archive.read_bytes()
    archive.write_bytes(headers + data)
    with pytest.raises(DataError, match=reason):
        restore(archive, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_name_is_imported(tmp_path: Path, format: int) -> None:
    role = "/".join(["x" * 200] * 15)
    with tarfile.open(tmp_path / "records.tar", "w", format=format) as tar:
        for info, data in [*members_of(f"{role}/1", 1), last(1)]:
            tar.addfile(info, io.BytesIO(data))
    assert restore(tmp_path / "records.tar", tmp_path / "there").num_records == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"records": 2}', b'{"records": NaN}', b"[" * 500, b"9" * 5000])
def test_an_archive_without_the_number_of_its_records_is_incomplete(tmp_path: Path, content: bytes) -> None:
    archive = write_archive(tmp_path / "evil.tar", [*members_of("role/1", 1), member(LAST, content)])
    with pytest.raises(DataError, match=rf"{LAST}.*Nothing was imported"):
        restore(archive, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_other_files_of_an_archive_are_not_imported(tmp_path: Path) -> None:
    members = [
        member("role", type=tarfile.DIRTYPE),
        *members_of("role/1", 1),
        member("role/1/run.sh", b"true"),
        last(1),
    ]
    assert restore(write_archive(tmp_path / "records.tar", members), tmp_path / "there").num_records == 1
    assert files_below(tmp_path / "there") == {f"role/1/{MANIFEST}", f"role/1/{TENSORS}"}


# ------------------------------------------------------------------------------------------------ JSON

DEEP = "[" * (MAX_FILE_DEPTH + 1) + "]" * (MAX_FILE_DEPTH + 1)
BAD_VALUES = [
    ("NaN", "it contains the number NaN"),
    ("-Infinity", "it contains the number -Infinity"),
    ("1e999", "it contains the number 1e999"),
    (DEEP, f"more than {MAX_FILE_DEPTH} levels deep"),
    ("[" * 100_000 + "]" * 100_000, f"more than {MAX_FILE_DEPTH} levels deep"),
    (r'"\ud800"', "half of a character"),
    ("9" * 5000, "an integer of 5000 digits"),
    ('"', "Unterminated string"),
]


@pytest.mark.parametrize(("value", "reason"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_a_note_that_is_no_strict_json_is_refused(tmp_path: Path, value: str, reason: str) -> None:
    note = member(f"role/1/{NOTE}", f'{{"rewards": {value}}}'.encode())
    assert_refused(tmp_path, [note], f"the member role/1/{NOTE} cannot be interpreted", reason)


@pytest.mark.parametrize("note", [b"[1]", b"1", b"", b'{"a": "\xed\xa0\x80"}', '{"a": 1}'.encode("utf-16")])
def test_a_note_that_is_no_object_in_utf8_is_refused(tmp_path: Path, note: bytes) -> None:
    assert_refused(tmp_path, [member(f"role/1/{NOTE}", note)], f"the member role/1/{NOTE} cannot be interpreted")


def sealed(**changes: Any) -> bytes:
    """Return a manifest with a correct checksum. `changes` are JSON texts by key."""
    parsed = json.loads(to_files(record(2))[0])
    del parsed["crc32"]
    texts = {**{key: json.dumps(value) for key, value in parsed.items()}, **changes}
    body = ("{\n" + ",\n".join(f' "{key}": {text}' for key, text in texts.items())).encode()
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


ORIGIN = {"recorded_at": 1.0, "host": "here", "oldest_version": None, "newest_version": None, "code": ""}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        *(("content", f'{{"x": {value}}}', reason) for value, reason in BAD_VALUES[:-1]),
        ("content", "[]", "has another type"),
        ("role", "7", "has another type"),
        ("step", '"2"', "has another type"),
        ("origin", json.dumps({**ORIGIN, "recorded_at": "now"}), "has another type"),
        ("origin", json.dumps({**ORIGIN, "recorded_at": 1e300}), "has another type"),
        ("origin", json.dumps({**ORIGIN, "newest_version": [1]}), "has another type"),
        ("origin", json.dumps({**ORIGIN, "more": 1}), "has another type"),
        ("origin", "{}", "has another type"),
    ],
)
def test_a_manifest_with_wrong_values_is_refused(tmp_path: Path, key: str, value: str, reason: str) -> None:
    parts = [members_of("role/2", 2)[0], member(f"role/2/{MANIFEST}", sealed(**{key: value}))]
    assert_refused(tmp_path, parts, f"the member role/2/{MANIFEST}", reason, num_records=2)


def test_an_intact_manifest_is_not_refused(tmp_path: Path) -> None:
    parts = [members_of("role/2", 2)[0], member(f"role/2/{MANIFEST}", sealed())]
    assert restore(write_archive(tmp_path / "fine.tar", [*parts, last(1)]), tmp_path / "there").num_records == 1


def test_the_command_reports_a_refused_archive_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = write_archive(tmp_path / "evil.tar", [member("../\x1b[31mred/1/note.json", b"{}"), last(0)])
    assert main(["skip", "import", str(archive), str(tmp_path / "there")]) == FAILED
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    [line] = [line for line in err.splitlines() if "evil.tar" in line]
    assert r"'../\x1b[31mred/1/note.json' is not a path below the archive's directory" in line


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    [tensors, (info, manifest)] = members_of("role/2", 2)
    flipped = (info, manifest.replace(b"0.5", b"0.7"))
    archive = write_archive(tmp_path / "records.tar", [*members_of("role/1", 1), tensors, flipped, last(2)])
    done = restore(archive, tmp_path / "there")
    assert (done.num_records, done.damaged) == (1, (f"role/2: {MANIFEST} is torn or damaged",))
    archive = write_archive(tmp_path / "records.tar", [*members_of("role/1", 1), tensors, last(2)])
    assert restore(archive, tmp_path / "other").damaged == (f"role/2: it has no {MANIFEST}",)


# ------------------------------------------------------------------------------------------------ destination


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    RecordFiles(tmp_path / "dump" / "role").write("1", record(1))
    export(tmp_path / "dump", path := tmp_path / "records.tar")
    yield path


@pytest.mark.parametrize("link", ["", "role", "role/1"])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_imported_through_a_link(tmp_path: Path, archive: Path, link: str, exists: bool) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    if exists:
        elsewhere.mkdir()
        (elsewhere / MANIFEST).write_text("theirs")
    (there / link).parent.mkdir(parents=True, exist_ok=True)
    (there / link).symlink_to(elsewhere)
    for replace in (False, True):
        with pytest.raises(ConfigError, match=rf"is a link to {elsewhere}.*Nothing was imported.*Remove the link"):
            restore(archive, there, replace=replace)
    assert (there / link).is_symlink()
    assert elsewhere.exists() == exists
    assert files_below(elsewhere) == ({MANIFEST} if exists else set())
    assert not exists or (elsewhere / MANIFEST).read_text() == "theirs"


def test_an_export_replaces_a_link_and_not_its_target(tmp_path: Path, archive: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link.tar"
    victim.write_text("theirs")
    link.symlink_to(victim)
    export(tmp_path / "dump", link)
    assert not link.is_symlink() and link.read_bytes() == archive.read_bytes()
    assert victim.read_text() == "theirs"


def test_modes_and_owners_of_an_archive_are_ignored(tmp_path: Path) -> None:
    members = [*members_of("role/1", 1), member(f"role/1/{NOTE}", b'{"a": 1}'), last(1)]
    for info, _ in members:
        info.mode, info.uid, info.gid = 0o6777, 0, 0
    restore(write_archive(tmp_path / "records.tar", members), tmp_path / "there")
    for path in (tmp_path / "there").rglob("*"):
        status = path.stat()
        assert not status.st_mode & 0o7022, f"{path} has mode {status.st_mode:o}"
        assert (status.st_uid, path.is_dir() or not status.st_mode & 0o111) == (os.getuid(), True)


def test_an_archive_for_which_the_disk_is_too_small_is_refused(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ConfigError, match=r"need .* bytes, and the disk has 10\. Nothing was imported\. Free some"):
        restore(archive, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_an_archive_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}: it cannot be read: Is a directory"):
        restore(tmp_path, tmp_path / "there")
