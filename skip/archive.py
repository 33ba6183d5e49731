"""Export and import of records: a tar file of their directories, with `records.json` at its end. Blocking."""

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

from asyncrl.core.failures import ConfigError, DataError
from asyncrl.storage.array_bytes import DamageError
from skip.record import MANIFEST, TENSORS, Record, from_files, to_files
from skip.store import NOTE, RecordFiles, find, is_record, parse_note, step_of

LAST = "records.json"
"""An archive without it is incomplete."""


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
                except (DamageError, OSError) as error:
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
    """Import every record of `archive` below `directory`; other members are ignored.

    Args:
        archive: a file that `export` wrote.
        directory: the destination, which corresponds to the exported directory.
        replace: whether to replace intact records of the same name, too.

    Raises:
        ConfigError: there is no such archive, or `directory` cannot be written.
        DataError: it is not an archive, or it is incomplete.
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
        if not replace and not files.damage(stem):
            kept.append(name)
            continue
        try:
            num_bytes += files.write(stem, record) or 0
            if note:
                files.note(stem, note)
        except OSError as error:
            raise ConfigError(
                f"{directory}: {name} cannot be written: {error.strerror}. Earlier records have been imported"
            ) from error
        num_records += 1
    return Transfer(num_records, num_bytes, tuple(damaged), tuple(kept))


def _read(archive: Path) -> Iterator[tuple[str, Record | str, Mapping[str, Any]]]:
    """Yield the name, the record or a description of its damage, and its note."""
    try:
        with tarfile.open(archive, "r:") as tar:
            parts: dict[str, bytes] = {}
            current = ""
            is_complete = False
            for member in tar:
                is_complete = is_complete or member.name == LAST
                path = PurePosixPath(member.name)
                name, part = str(path.parent), path.name
                is_safe = not path.is_absolute() and ".." not in path.parts
                is_part = part in (NOTE, TENSORS, MANIFEST) and step_of(path.parent.name) is not None
                if not (member.isfile() and is_safe and is_part):
                    continue
                file = tar.extractfile(member)
                data = file.read() if file is not None else b""
                if name != current:
                    parts, current = {}, name
                parts[part] = data
                if part != MANIFEST:  # the manifest is the last part
                    continue
                try:
                    record = from_files(data, np.frombuffer(parts.get(TENSORS, b""), dtype=np.uint8))
                    if record.step != step_of(path.parent.name):
                        raise DamageError(f"it is a record of step {record.step}")
                    yield name, record, parse_note(parts.get(NOTE, b""))
                except DamageError as error:
                    yield name, str(error), {}
        if not is_complete:
            raise tarfile.ReadError(f"it has no {LAST} at its end")
    except FileNotFoundError as error:
        raise ConfigError(f"{archive}: there is no such file") from error
    except tarfile.TarError as error:
        raise DataError(
            f"{archive}: not an archive of records, or an incomplete one: {error}. Records before "
            "this error have been imported"
        ) from error
