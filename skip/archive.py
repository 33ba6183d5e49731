"""Export and import of records: a tar file of their directories, with `records.json` at its end. Blocking.

Anybody may have written an archive, so an import checks every member before it writes the first record. It writes only
the files of records, with names that it has checked and with its own permissions and owner.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.text import checked_path, parse_file, shown
from asyncrl.storage.array_bytes import DamageError
from skip.record import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_TENSORS_BYTES,
    TENSORS,
    MalformedRecordError,
    Record,
    from_files,
    to_files,
)
from skip.store import MAX_NOTE_BYTES, NOTE, RecordFiles, find, is_record, parse_note, step_of

LAST = "records.json"
"""Contains the number of records. An archive without it is incomplete."""
_MAX_BYTES = {NOTE: MAX_NOTE_BYTES, TENSORS: MAX_TENSORS_BYTES, MANIFEST: MAX_MANIFEST_BYTES, LAST: 4096}
_MAX_HEADER_BYTES = 8192
"""Limit for all headers of a member, such as that of a long name; Linux's paths have 4,096 bytes."""
_MALFORMED = (tarfile.TarError, ArithmeticError, LookupError, MemoryError, RecursionError, ValueError)
"""Errors that tarfile raises for malformed headers."""

_Members = Mapping[str, Mapping[str, tarfile.TarInfo]]
"""By record, the members with its files."""


class _Member(tarfile.TarInfo):
    """A member with at most `_MAX_HEADER_BYTES` of headers, each of which tarfile reads as a whole.

    tarfile calls `_proc_member`, which subclasses may override, for each header that it has found.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type == tarfile.XGLTYPE:
            raise MalformedRecordError("it has a header for all later members, and each of them would copy it")
        assert tar.fileobj is not None
        num_bytes = tar.fileobj.tell() - tar.offset  # `offset` is where the first header of the member begins
        num_bytes += 0 if self.isfile() or self.isdir() else self.size
        if num_bytes > _MAX_HEADER_BYTES:
            raise MalformedRecordError(
                f"a member has at least {num_bytes} bytes of headers; {_MAX_HEADER_BYTES} are allowed"
            )
        return super()._proc_member(tar)  # type: ignore[misc]  # typeshed does not have it


class Transfer(NamedTuple):
    """The result of an export or import."""

    num_records: int
    num_bytes: int
    damaged: tuple[str, ...]
    """Records that were left out, each with the reason."""
    kept: tuple[str, ...] = ()
    """Records that were not imported, because they exist already."""


def export(directory: Path, archive: Path) -> Transfer:
    """Write every intact record at or below `directory` into `archive`, which appears when it is complete.

    Raises:
        ConfigError: there are no records, or `archive` cannot be written.
    """
    records = find(directory)
    if not records:
        raise ConfigError(f"{directory}: there are no records to export")
    num_records = num_bytes = 0
    damaged: list[str] = []
    base = directory.parent if is_record(directory) else directory
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.new")
    try:
        with temporary.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for stored in records:
                try:
                    manifest, buffers = to_files(stored.read())
                except (DamageError, OSError, ValueError) as error:
                    damaged.append(f"{stored.path}: {error}")
                    continue
                name = stored.path.relative_to(base).as_posix()
                parts = {TENSORS: b"".join(buffers), MANIFEST: manifest}
                if note := stored.files.read_note(stored.name):
                    parts = {NOTE: json.dumps(note, ensure_ascii=False).encode(), **parts}
                for part, data in parts.items():
                    _add(tar, f"{name}/{part}", data, stored.modified_at)
                    num_bytes += len(data)
                num_records += 1
            _add(tar, LAST, json.dumps({"records": num_records}).encode())
        os.replace(temporary, archive)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{archive}: it cannot be written: {error.strerror}") from error
        raise
    return Transfer(num_records, num_bytes, tuple(damaged))


def _add(tar: tarfile.TarFile, name: str, data: bytes, modified_at: float = 0.0) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(modified_at)
    tar.addfile(info, io.BytesIO(data))


def restore(archive: Path, directory: Path, *, replace: bool = False) -> Transfer:
    """Import every intact record of `archive` below `directory`; other files in it are ignored.

    Args:
        archive: a file that `export` wrote.
        directory: the destination, which corresponds to the exported directory.
        replace: whether to replace intact records of the same name, too.

    Raises:
        ConfigError: there is no such archive, or `directory` cannot be written, has too little space, or a link leads
            out of it.
        DataError: it is not an archive that `export` wrote, or it is incomplete. Nothing was written.
    """
    with ExitStack() as stack:
        with _refusing(archive):
            tar = stack.enter_context(tarfile.open(archive, "r:", tarinfo=_Member))
            members = _members(tar)
            damaged = dict(_damaged(tar, members))
        try:
            _check_links(directory, members)
            intact = [name for name in members if name not in damaged]
            kept = () if replace else tuple(name for name in intact if not _files(directory, name).damage(_stem(name)))
            wanted = {name: members[name] for name in intact if name not in set(kept)}
            _check_space(directory, sum(part.size for parts in wanted.values() for part in parts.values()))
        except OSError as error:
            raise ConfigError(f"{directory}: it cannot be read: {error.strerror}") from error
        num_bytes = 0
        for name, parts in wanted.items():
            try:
                record, note = _read(tar, name, parts)
                num_bytes += _files(directory, name).write(_stem(name), record) or 0
                if note:
                    _files(directory, name).note(_stem(name), note)
            except (OSError, DamageError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(
                    f"{directory}: {name} cannot be written: {reason}. Earlier records have been imported"
                ) from error
    return Transfer(len(wanted), num_bytes, tuple(f"{name}: {reason}" for name, reason in damaged.items()), kept)


def _files(directory: Path, name: str) -> RecordFiles:
    return RecordFiles(directory / PurePosixPath(name).parent)


def _stem(name: str) -> str:
    return PurePosixPath(name).name


@contextmanager
def _refusing(archive: Path) -> Iterator[None]:
    """Convert errors about an archive and its content. Raises as `restore` does."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{archive}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{archive}: it cannot be read: {error.strerror}") from error
    except (MalformedRecordError, *_MALFORMED) as error:
        raise DataError(
            f"{archive}: not an archive of records, or an incomplete one: {error}. Nothing was imported. Export the "
            "records again with asyncrl skip export, and import only archives that you trust"
        ) from error


def _members(tar: tarfile.TarFile) -> _Members:
    """Return the members of all records.

    Raises:
        MalformedRecordError: `export` does not write such a member; the message names it.
        tarfile.ReadError: the archive is incomplete.
    """
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    names: set[str] = set()
    last: tarfile.TarInfo | None = None
    for member in tar:
        path = PurePosixPath(member.name)
        if problem := _problem(member, path.name, names):
            raise MalformedRecordError(f"the member {shown(member.name)} {problem}")
        member.pax_headers = {}  # tarfile keeps every member, and these need many times their bytes
        names.add(member.name)
        if member.name == LAST:
            last = member
        elif member.isfile() and path.name in (NOTE, TENSORS, MANIFEST) and step_of(path.parent.name) is not None:
            found.setdefault(str(path.parent), {})[path.name] = member
    if last is None:
        raise tarfile.ReadError(f"it has no {LAST} at its end")
    try:
        content = parse_file(_bytes(tar, last))
    except ValueError as error:
        raise MalformedRecordError(f"the member {LAST} cannot be interpreted: {error}") from error
    if content != {"records": len(found)}:
        raise tarfile.ReadError(f"{LAST} says {shown(content)}, and there are {len(found)} records")
    return found


def _problem(member: tarfile.TarInfo, part: str, names: set[str]) -> str:
    """Return why the member is refused; empty: it is a file or a directory with a safe and new name.

    `names`: the names of earlier members.
    """
    try:
        checked_path(member.name)
    except ValueError:
        return "is not a path below the archive's directory"
    if member.issparse() or any(key.startswith("GNU.sparse") for key in member.pax_headers):
        return "is a sparse file, which can be larger than the disk"
    if not (member.isfile() or member.isdir()):
        return "is a link or a device"
    if not 0 <= member.size <= _MAX_BYTES.get(part, member.size):
        return f"has {member.size} bytes; {_MAX_BYTES.get(part, 0)} are allowed"
    return "is in the archive twice" if member.name in names else ""


def _damaged(tar: tarfile.TarFile, members: _Members) -> Iterator[tuple[str, str]]:
    """Yield the records whose checksums are wrong or whose files are missing, with the reason. Raises
    `MalformedRecordError`."""
    for name, parts in members.items():
        try:
            _read(tar, name, parts)
        except MalformedRecordError:
            raise
        except DamageError as error:
            yield name, str(error)


def _read(tar: tarfile.TarFile, name: str, parts: Mapping[str, tarfile.TarInfo]) -> tuple[Record, Mapping[str, Any]]:
    """Return a record and its note. Raises `DamageError`, or `MalformedRecordError`, which names the member."""
    data = {part: _bytes(tar, member) for part, member in parts.items()}
    if missing := [part for part in (MANIFEST, TENSORS) if part not in data]:
        raise DamageError(f"it has no {missing[0]}")
    try:
        note = parse_note(data.get(NOTE, b"{}"))
    except ValueError as error:
        raise MalformedRecordError(f"the member {name}/{NOTE} cannot be interpreted: {error}") from error
    try:
        record = from_files(data[MANIFEST], np.frombuffer(data[TENSORS], dtype=np.uint8))
    except MalformedRecordError as error:
        raise MalformedRecordError(f"the member {name}/{error}") from error
    if record.step != step_of(_stem(name)):
        raise DamageError(f"it is a record of step {record.step}")
    return record, note


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # only files are read
    return file.read()


def _check_links(directory: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` if the destination of a record is a link, or a link leads there."""
    below = {place for name in names for place in (PurePosixPath(name), *PurePosixPath(name).parents)}
    for place in sorted({directory, *(directory / each for each in below)}):
        if place.is_symlink():
            raise ConfigError(
                f"{place} is a link to {os.path.realpath(place)}: an import writes nothing through links, because "
                "others may have made them. Nothing was imported. Remove the link, or import into the directory to "
                "which it leads"
            )


def _check_space(directory: Path, num_bytes: int) -> None:
    """Raise `ConfigError` if the disk has less space than `num_bytes`."""
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    if num_bytes > (free := shutil.disk_usage(existing).free):
        raise ConfigError(
            f"{directory}: the records need {num_bytes} bytes, and the disk has {free}. Nothing was imported. "
            "Free some space, or name a directory on another disk"
        )
