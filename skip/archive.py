"""Records as one file, to be carried elsewhere: a tar of their directories, and `records.json` at its end. Blocking."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from asyncrl.blobs import DamageError
from asyncrl.failures import ConfigError, DataError
from skip.catalog import find
from skip.files import NOTE, RecordFiles, is_record, step_of
from skip.record import MANIFEST, TENSORS, Record, from_files, to_files

LAST = "records.json"
"""Without it an archive was cut short."""


class Moved(NamedTuple):
    """What has been exported or imported."""

    num_records: int
    num_bytes: int
    damaged: tuple[str, ...]
    """Left out, each with the reason."""
    kept: tuple[str, ...] = ()
    """Not imported, because there is one already."""


def export(directory: Path, archive: Path) -> Moved:
    """Write every whole record at or below `directory` into `archive`, which appears when it is complete.

    Raises:
        ConfigError: there are no records, or `archive` cannot be written.
    """
    found = find(directory)
    if not found:
        raise ConfigError(f"{directory}: there are no records to export")
    num_records = num_bytes = 0
    damaged: list[str] = []
    base = directory.parent if is_record(directory) else directory
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.new")
    try:
        with temporary.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for one in found:
                try:
                    manifest, buffers = to_files(one.read())
                except (DamageError, OSError) as error:
                    damaged.append(f"{one.path}: {error}")
                    continue
                name = one.path.relative_to(base).as_posix()
                parts = {TENSORS: b"".join(buffers), MANIFEST: manifest}
                if note := one.files.read_note(one.entry.name):
                    parts = {NOTE: json.dumps(note, ensure_ascii=False).encode(), **parts}
                for part, data in parts.items():
                    info = tarfile.TarInfo(f"{name}/{part}")
                    info.size, info.mtime = len(data), int(one.entry.modified_at)
                    tar.addfile(info, io.BytesIO(data))
                    num_bytes += len(data)
                num_records += 1
            last = json.dumps({"records": num_records}).encode()
            info = tarfile.TarInfo(LAST)
            info.size = len(last)
            tar.addfile(info, io.BytesIO(last))
        os.replace(temporary, archive)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{archive}: it cannot be written: {error.strerror}") from error
        raise
    return Moved(num_records, num_bytes, tuple(damaged))


def restore(archive: Path, directory: Path, *, replace: bool = False) -> Moved:
    """Put every record of `archive` below `directory`; nothing else in it is looked at.

    Args:
        replace: also where there is a whole record of the same name.

    Raises:
        ConfigError: there is no such archive, or `directory` cannot be written.
        DataError: it is no archive, or it ends early.
    """
    num_records = num_bytes = 0
    damaged: list[str] = []
    kept: list[str] = []
    for name, record, note in _read(archive):
        if isinstance(record, str):
            damaged.append(f"{name}: {record}")
            continue
        files = RecordFiles(directory / PurePosixPath(name).parent)
        stem = PurePosixPath(name).name
        if not replace and _is_whole(files, stem):
            kept.append(name)
            continue
        try:
            num_bytes += files.write(stem, record) or 0
            if note:
                files.note(stem, note)
        except OSError as error:
            raise ConfigError(
                f"{directory}: {name} cannot be written: {error.strerror}. Records before it are imported"
            ) from error
        num_records += 1
    return Moved(num_records, num_bytes, tuple(damaged), tuple(kept))


def _read(archive: Path) -> Iterator[tuple[str, Record | str, Mapping[str, Any]]]:
    """Name and record, or what is wrong with it, and the note beside it."""
    try:
        with tarfile.open(archive, "r:") as tar:
            parts: dict[str, bytes] = {}
            of = ""
            is_whole = False
            for member in tar:
                is_whole = is_whole or member.name == LAST
                path = PurePosixPath(member.name)
                record, part = str(path.parent), path.name
                inside = not path.is_absolute() and ".." not in path.parts and step_of(path.parent.name) is not None
                if not member.isfile() or not inside or part not in (NOTE, TENSORS, MANIFEST):
                    continue
                file = tar.extractfile(member)
                data = file.read() if file is not None else b""
                if record != of:
                    parts, of = {}, record
                parts[part] = data
                if part != MANIFEST:  # which comes last
                    continue
                try:
                    arrays = np.frombuffer(parts.get(TENSORS, b""), dtype=np.uint8)
                    whole = from_files(data, arrays)
                    if whole.step != step_of(path.parent.name):
                        raise DamageError(f"it is a record of step {whole.step}")
                    yield record, whole, _note(parts.get(NOTE, b""))
                except DamageError as error:
                    yield record, str(error), {}
        if not is_whole:
            raise tarfile.ReadError(f"it has no {LAST} at its end")
    except FileNotFoundError as error:
        raise ConfigError(f"{archive}: there is no such file") from error
    except tarfile.TarError as error:
        raise DataError(
            f"{archive}: it is no archive of records, or it was cut short: {error}. Records before that are imported"
        ) from error


def _note(data: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(data or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _is_whole(files: RecordFiles, name: str) -> bool:
    try:
        files.read(name)
    except (DamageError, OSError):
        return False
    return True
