"""Records on disk: the files of one role, and a catalog of everything below a directory. Blocking.

    {dump_dir}/{project}/{experiment}/{role}/
        12/manifest.json, tensors.safetensors     the record of step 12
        12/note.json                              later information for users (the rewards)
        .12.<host>-<pid>-<number>.new/            being written; renamed when it is complete
        .12.<host>-<pid>-<number>.old/            being deleted: removed, or replaced where names cannot be exchanged

A reader opens the directory of a step once and reads both files in it, so it sees a complete record even if another
process replaces it meanwhile. Nothing is synced: a record that a power cut tears fails its checksums and counts as
absent.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.sections.skip import StepSet
from asyncrl.core.failures import ConfigError
from asyncrl.core.text import parse_file
from asyncrl.storage.array_bytes import DamageError
from asyncrl.storage.segments import read_segment, write_all
from skip.record import MANIFEST, TENSORS, Record, from_files, to_files

ABANDONED_S = 3600.0
"""The writer of a temporary directory that is older than this counts as dead."""
_NAME = re.compile(r"(0|[1-9]\d*)(-[0-9a-f]{8,32})?")
_TEMPORARY = re.compile(r"\..*\.(new|old)")
NOTE = "note.json"
"""File in a record's directory, for users; it is never replayed."""
MAX_NOTE_BYTES = 16 << 20
DEPTH = 4
"""Depth of a record below `dump_dir`: project, experiment, role, step."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A directory with the name of a record, intact or not."""

    files: RecordFiles
    """Directory of its role."""
    name: str
    step: int
    num_bytes: int
    modified_at: float
    """Unix seconds."""

    @property
    def path(self) -> Path:
        return self.files.root / self.name

    def read(self) -> Record:
        """See `RecordFiles.read`."""
        return self.files.read(self.name)

    def damage(self) -> str:
        """Return why the record cannot be read; empty: it is intact."""
        return self.files.damage(self.name)


def record_name(step: int, call: str = "") -> str:
    """Return the name of a step's record. `call`, hexadecimal, distinguishes several calls in a step."""
    name = f"{step}-{call}" if call else str(step)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of a record; expected a step from 0 on, and 8 to 32 hexadecimal digits"
        )
    return name


def step_of(name: str) -> int | None:
    """Return the step of the record; None: it is not the name of a record."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_record(path: Path) -> bool:
    """Return whether this is a directory with the name of a record, intact or not."""
    with suppress(PermissionError):
        return step_of(path.name) is not None and _files_in(path) is not None
    return False


def _files_in(path: str | Path) -> list[os.DirEntry[str]] | None:
    """Return the files of a directory; None: it contains directories, or is not a directory.

    Projects and experiments may also have names of records, but they contain directories, which records never do.
    """
    try:
        with os.scandir(path) as inside:
            entries = list(inside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if any(entry.is_dir(follow_symlinks=False) for entry in entries) else entries


def _total_bytes(entries: Iterable[os.DirEntry[str]]) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def is_temporary(name: str) -> bool:
    """Whether a record is, or was, being written or deleted there."""
    return _TEMPORARY.fullmatch(name) is not None


class RecordFiles:
    """The directory of one role, which any number of processes may use at once."""

    def __init__(self, root: Path, *, mode: int = 0o700) -> None:
        """`mode`: mode of `root` and its parents, as far as `write` has to create them."""
        self.root = root
        self._mode = mode

    def read(self, name: str) -> Record:
        """Return a record after verifying all checksums.

        Raises:
            FileNotFoundError: there is no record.
            DamageError: something else has this name, or the record is damaged.
            OSError: it cannot be read.
        """
        while True:
            with _opened(self.root / name) as directory:
                opened = os.fstat(directory)
                try:
                    manifest = _read_bytes(directory, MANIFEST).tobytes()
                    record = from_files(manifest, _read_bytes(directory, TENSORS))
                except DamageError:
                    # It may have been replaced and then deleted meanwhile.
                    if os.path.samestat(opened, os.stat(self.root / name)):
                        raise
                else:
                    if record.step != step_of(name):
                        raise DamageError(f"it is a record of step {record.step}")
                    return record

    def damage(self, name: str) -> str:
        """Return why the record cannot be read; empty: it is intact."""
        try:
            self.read(name)
        except (DamageError, OSError) as error:
            return str(error)
        return ""

    def write(self, name: str, record: Record, allows: Callable[[int], bool] = lambda num_bytes: True) -> int | None:
        """Write the record, replacing an existing one. After an error, no part of it remains.

        Args:
            name: name of the record.
            record: the record to write.
            allows: returns whether that many bytes may be written.

        Returns:
            The number of bytes; None: `allows` refused them.

        Raises:
            TypeError, ValueError: see `to_files`.
            OSError: it cannot be written.
        """
        manifest, buffers = to_files(record)
        num_bytes = len(manifest) + sum(map(len, buffers))
        if not allows(num_bytes):
            return None
        new = self._temporary(name, "new")
        try:
            new.mkdir()
        except FileNotFoundError:
            _make_directories(self.root, self._mode)
            new.mkdir()
        try:
            _write(new / TENSORS, buffers)
            _write(new / MANIFEST, [memoryview(manifest)])
            self._put(new, name)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return num_bytes

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Write `values` (JSON types) atomically as the note of the record; the record itself does not change.

        Raises:
            OSError: there is no record, or the note cannot be written.
            TypeError, ValueError: the values are not JSON, or too many.
        """
        data = json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        if len(data) > MAX_NOTE_BYTES:
            raise ValueError(f"a note of {len(data)} bytes; {MAX_NOTE_BYTES} are allowed")
        temporary = f".{NOTE}.{token_hex(4)}"
        with _opened(self.root / name) as directory:
            _write(Path(temporary), [memoryview(data)], directory=directory)
            os.rename(temporary, NOTE, src_dir_fd=directory, dst_dir_fd=directory)

    def read_note(self, name: str) -> Mapping[str, Any]:
        """Return the last note; empty: there is no readable one."""
        try:
            with _opened(self.root / name) as directory:
                return parse_note(_read_bytes(directory, NOTE).tobytes())
        except (OSError, DamageError, ValueError):
            return {}

    def size(self, name: str) -> int:
        """Return the size in bytes of the entry with that name."""
        with suppress(FileNotFoundError):
            return _total_bytes(_files_in(self.root / name) or ())
        return 0

    def remove(self, name: str) -> None:
        """Remove a record if it is there. Raises `OSError`."""
        if (old := self._set_aside(name)) is not None:
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old)

    def entries(self) -> list[StoredRecord]:
        """Return everything with the name of a record, intact or not, by step and name. A link is a damaged record
        without files."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self.root) as inside:
            for entry in inside:
                files = [] if entry.is_symlink() else _files_in(entry.path)
                if (step := step_of(entry.name)) is not None and files is not None:
                    with suppress(FileNotFoundError):  # another process removes it meanwhile
                        modified_at = entry.stat(follow_symlinks=False).st_mtime
                        found.append(StoredRecord(self, entry.name, step, _total_bytes(files), modified_at))
        return sorted(found, key=lambda entry: (entry.step, entry.name))

    def names(self) -> list[str]:
        """Return the names of all entries; cheaper than `entries`."""
        with suppress(FileNotFoundError), os.scandir(self.root) as found:
            return [entry.name for entry in found if step_of(entry.name) is not None]
        return []

    def sweep(self) -> None:
        """Delete temporary directories whose writer has died."""
        with suppress(FileNotFoundError), os.scandir(self.root) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if _TEMPORARY.fullmatch(entry.name) and age > ABANDONED_S:
                        _delete(Path(entry.path))

    # ------------------------------------------------------------------------------------------------ inside

    def _temporary(self, name: str, kind: str) -> Path:
        return self.root / f".{name}.{socket.gethostname()}-{os.getpid()}-{token_hex(4)}.{kind}"

    def _put(self, new: Path, name: str) -> None:
        """Rename `new` to `name`. If another process does the same, the last one stays."""
        place = self.root / name
        while True:
            try:
                os.rename(new, place)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if exchange(new, place):
                _delete(new)
                return
            if (old := self._set_aside(name)) is not None:
                _delete(old)

    def _set_aside(self, name: str) -> Path | None:
        """Rename an existing entry out of the way; None: there is none."""
        old = self._temporary(name, "old")
        try:
            os.rename(self.root / name, old)
        except FileNotFoundError:
            return None
        return old


def _make_directories(path: Path, mode: int) -> None:
    """Create the directory and its missing parents, all with `mode` as far as the umask allows."""
    for each in reversed([each for each in (path, *path.parents) if not each.exists()]):
        each.mkdir(mode, exist_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange both names atomically; False: the system or file system cannot, or one of them does not exist."""
    rename = _renameat2()
    return rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


_AT_FDCWD = -100
_EXCHANGE = 2


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Return Linux's `renameat2`, which Python does not offer."""
    try:
        function = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return cast("Callable[..., int]", function)


def _delete(path: Path) -> None:
    """Delete a directory, or a file in the place of a record, as far as possible; `sweep` deletes the rest later."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a directory: file names relative to it keep their meaning, even if it is renamed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise DamageError("it is no directory") from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_bytes(directory: int, name: str) -> NDArray[np.uint8]:
    """Return the bytes of a file. Raises `DamageError` if it is not there or not a file; `OSError`."""
    try:
        return read_segment(Path(name), directory=directory)
    except FileNotFoundError as error:
        raise DamageError(f"it has no {name}") from error


def _write(path: Path, buffers: Sequence[memoryview], *, directory: int | None = None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644, dir_fd=directory)
    try:
        write_all(descriptor, buffers)
    finally:
        os.close(descriptor)


def parse_note(data: bytes) -> Mapping[str, Any]:
    """Return the values of a note. Raises `ValueError`: it is not one, see `parse_file`."""
    if not isinstance(values := parse_file(data), dict):
        raise ValueError("it is not a JSON object")
    return values


# ---------------------------------------------------------------------------------------------- catalog


def find(directory: Path) -> list[StoredRecord]:
    """Return all records at or below `directory`, by role and step.

    Args:
        directory: a dump_dir, a project, an experiment, a role or a record.

    Raises:
        ConfigError: there is no such directory.
    """
    records = [record for files in find_roles(directory) for record in files.entries()]
    return [record for record in records if record.path == directory] if is_record(directory) else records


def find_roles(directory: Path) -> list[RecordFiles]:
    """Return the directories of roles at or below `directory`, including those with only temporary directories.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory; give the dump_dir of a role, or one below")
    if is_record(directory):
        return [RecordFiles(directory.parent)]
    return [RecordFiles(root) for root in _role_directories(directory, DEPTH - 1)]


def _role_directories(directory: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    except PermissionError:
        return
    if any(is_record(path) or is_temporary(path.name) for path in inside):
        yield directory
    elif depth > 0:
        for path in inside:
            if not path.name.startswith("."):
                yield from _role_directories(path, depth - 1)


def select_for_removal(
    records: Sequence[StoredRecord],
    now: float,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    steps: StepSet | None = None,
    damaged: Iterable[StoredRecord] = (),
) -> list[StoredRecord]:
    """Return the records that any of the given criteria selects. Pure.

    Args:
        records: the records to select from.
        now: current time in Unix seconds.
        older_than_s: selects records that were written longer ago.
        max_bytes: selects the oldest records until the others together have at most this many bytes.
        steps: selects the records of these steps.
        damaged: records that are selected in any case.
    """
    damaged_paths = {record.path for record in damaged}
    selected = {
        record.path
        for record in records
        if record.path in damaged_paths
        or (older_than_s is not None and now - record.modified_at > older_than_s)
        or (steps is not None and record.step in steps)
    }
    if max_bytes is not None:
        oldest_first = sorted(
            (record for record in records if record.path not in selected), key=lambda record: record.modified_at
        )
        left = sum(record.num_bytes for record in oldest_first)
        for record in oldest_first:
            if left <= max_bytes:
                break
            selected.add(record.path)
            left -= record.num_bytes
    return [record for record in records if record.path in selected]
