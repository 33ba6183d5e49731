"""The records of one role on disk. Blocking; `skip.flow` keeps it off event loops.

    {dump_dir}/{project}/{experiment}/{role}/
        12/manifest.json, tensors.safetensors     the record of step 12
        12/note.json                              what was learned of it later, for people (the rewards)
        .12.<host>-<pid>-<number>.new/            one that is being written: renamed when it is whole
        .12.<host>-<pid>-<number>.old/            one that was removed, or replaced where names cannot be exchanged

A reader opens the directory of a step once and reads both files in that one, so it sees a whole record whoever replaces
it meanwhile. Nothing is synced: what a power cut tears is seen by its checksums and counts as absent.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from asyncrl.blobs import DamageError
from asyncrl.segments import read_segment, write_all
from skip.record import MANIFEST, TENSORS, Record, describe, from_files, to_files

ABANDONED_S = 3600.0
"""A record that is being written for so long is not: whoever began it is gone."""
_NAME = re.compile(r"(0|[1-9]\d*)(-[0-9a-f]{8,32})?")
_TEMPORARY = re.compile(r"\..*\.(new|old)")
NOTE = "note.json"
"""Beside a record, for people: nobody replays it."""


class Entry(NamedTuple):
    """A directory that has the name of a record."""

    name: str
    step: int
    num_bytes: int
    modified_at: float
    """Unix seconds."""


def record_name(step: int, call: str = "") -> str:
    """Of the record of a step; `call`, hexadecimal, tells apart the calls of a role that makes several in a step."""
    name = f"{step}-{call}" if call else str(step)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no record's name; expected a step from 0 on, and 8 to 32 hexadecimal digits")
    return name


def step_of(name: str) -> int | None:
    """Which step it is a record of; None: it is no record's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_record(path: Path) -> bool:
    """A directory with the name of a record, whole or not. Projects and experiments may have such names too; they have
    directories in them, which no record has."""
    if step_of(path.name) is None or not path.is_dir():
        return False
    try:
        with os.scandir(path) as inside:
            return not any(entry.is_dir(follow_symlinks=False) for entry in inside)
    except PermissionError:
        return False


def is_temporary(name: str) -> bool:
    """Of a record that is being written or deleted, or was when its writer died."""
    return _TEMPORARY.fullmatch(name) is not None


class RecordFiles:
    """The directory of one role. Any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> Record:
        """
        Raises:
            FileNotFoundError: there is none.
            DamageError: there is something, and it is no whole record of this name.
            OSError: it cannot be read.
        """
        return self._look(name, lambda directory: from_files(_manifest(directory), _read(directory, TENSORS)))

    def describe(self, name: str) -> Record:
        """The record without its arrays; raises as `read`."""
        return self._look(name, lambda directory: describe(_manifest(directory)))

    def write(self, name: str, record: Record, allows: Callable[[int], bool] = lambda num_bytes: True) -> int | None:
        """Put the record in its place, whatever is there. After an error nothing of it is there.

        Args:
            allows: asked before, with its bytes; False: nothing is written.

        Returns:
            Its bytes; None: it was not allowed.

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
            self.root.mkdir(parents=True, exist_ok=True)
            new.mkdir()
        try:
            _write(new / TENSORS, buffers)
            _write(new / MANIFEST, [memoryview(manifest)])
            self._put(new, name)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return num_bytes

    def note(self, name: str, told: Mapping[str, Any]) -> None:
        """Put `told` (JSON types) into the directory of the record, whole or not at all; it is no part of the record.

        Raises:
            OSError: there is no record, or it cannot be written. TypeError, ValueError: it is no JSON.
        """
        data = json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
        temporary = f".{NOTE}.{token_hex(4)}"
        with _opened(self.root / name) as directory:
            _write(Path(temporary), [memoryview(data)], directory=directory)
            os.rename(temporary, NOTE, src_dir_fd=directory, dst_dir_fd=directory)

    def read_note(self, name: str) -> Mapping[str, Any]:
        """What `note` was given last; empty: there is none that can be read."""
        try:
            with _opened(self.root / name) as directory:
                told = json.loads(_read(directory, NOTE).tobytes())
        except (OSError, DamageError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def size(self, name: str) -> int:
        """Bytes of what is there under that name; 0: nothing."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / name) as inside:
            return sum(file.stat(follow_symlinks=False).st_size for file in inside)
        return 0

    def remove(self, name: str) -> None:
        """It is fine if it is not there. Raises `OSError`."""
        if (old := self._set_aside(name)) is not None:
            shutil.rmtree(old)

    def entries(self) -> list[Entry]:
        """Everything that has a record's name, whole or not, by step and name."""
        return sorted(self._scan(), key=lambda entry: (entry.step, entry.name))

    def names(self) -> list[str]:
        """Of all entries; cheaper than `entries`."""
        with suppress(FileNotFoundError), os.scandir(self.root) as found:
            return [entry.name for entry in found if step_of(entry.name) is not None]
        return []

    def sweep(self) -> None:
        """Delete what a process left that died over a record."""
        with suppress(FileNotFoundError), os.scandir(self.root) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if _TEMPORARY.fullmatch(entry.name) and age > ABANDONED_S:
                        _delete(Path(entry.path))

    # ------------------------------------------------------------------------------------------------ inside

    def _look(self, name: str, look: Callable[[int], Record]) -> Record:
        while True:
            with _opened(self.root / name) as directory:
                seen = os.fstat(directory)
                try:
                    record = look(directory)
                except DamageError:
                    # It may have been replaced, and then deleted, while this read it.
                    if os.path.samestat(seen, os.stat(self.root / name)):
                        raise
                else:
                    if record.step != step_of(name):
                        raise DamageError(f"it is a record of step {record.step}")
                    return record

    def _temporary(self, name: str, kind: str) -> Path:
        return self.root / f".{name}.{socket.gethostname()}-{os.getpid()}-{token_hex(4)}.{kind}"

    def _put(self, new: Path, name: str) -> None:
        """Rename `new` to `name`. Somebody else may do the same: then the last one stays."""
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
        """Rename what is there; None: there is nothing."""
        old = self._temporary(name, "old")
        try:
            os.rename(self.root / name, old)
        except FileNotFoundError:
            return None
        return old

    def _scan(self) -> Iterator[Entry]:
        with suppress(FileNotFoundError), os.scandir(self.root) as found:
            for entry in found:
                if (step := step_of(entry.name)) is not None:
                    # Whoever removes records does so while this looks.
                    with suppress(FileNotFoundError, NotADirectoryError):
                        with os.scandir(entry.path) as opened:
                            inside = list(opened)
                        if any(file.is_dir(follow_symlinks=False) for file in inside):
                            continue  # see `is_record`
                        num_bytes = sum(file.stat(follow_symlinks=False).st_size for file in inside)
                        yield Entry(entry.name, step, num_bytes, entry.stat(follow_symlinks=False).st_mtime)


def exchange(one: Path, other: Path) -> bool:
    """Both names change places at once, so that neither is ever gone; False: this system or file system cannot, or one
    of them is not there."""
    rename = _renameat2()
    return rename is not None and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


_AT_FDCWD = -100
_EXCHANGE = 2


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    """Linux has it, Python has not."""
    try:
        function = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return cast("Callable[..., int]", function)


def _delete(path: Path) -> None:
    """As far as that is possible: what is left is swept one day. Whoever put a file where a record belongs loses it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class _opened:
    """A directory, open: names below it go on meaning the files in it, wherever it is renamed to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise DamageError("it is no directory") from error
            raise
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def _manifest(directory: int) -> bytes:
    return _read(directory, MANIFEST).tobytes()


def _read(directory: int, name: str) -> NDArray[np.uint8]:
    """The bytes of a file. Raises `DamageError` if it is none, or is not there; `OSError`."""
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
