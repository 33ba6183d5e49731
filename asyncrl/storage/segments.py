"""Writes, reads, lists and deletes segments, the payload files in `samples/` of a run directory. Blocking.

A segment has its final name from the start. Its name is announced only once it is complete and on disk, and a torn
one is recognized by its lengths and checksums (`asyncrl.storage.array_bytes`).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.text import shown
from asyncrl.storage.array_bytes import DamageError
from asyncrl.storage.run_dir import SAMPLES, sync

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([1-9]\d*)-([1-9]\d*)\.safetensors")
MAX_READ_BYTES = 4 << 30
"""Size above which a segment is not read. One has 32 MiB, or a single sample that is larger."""
_MAX_BUFFERS = 1024
"""IOV_MAX of Linux."""


def segment_name(incarnation: int, number: int) -> str:
    return f"{incarnation}-{number}.safetensors"


def segment_incarnation(name: str) -> int | None:
    """Return the incarnation of the Rollouter that wrote it; None: it is not the name of a segment."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checked_segment(name: object) -> str:
    """Return `name`, which was read from a file, if it is the name of a segment. Raises `ValueError` otherwise."""
    if not isinstance(name, str) or segment_incarnation(name) is None:
        raise ValueError(f"{shown(name)} is not the name of a payload file")
    return name


def segment_sizes(run_dir: Path) -> dict[str, int]:
    """Return the size in bytes of every segment, complete or not."""
    sizes: dict[str, int] = {}
    with suppress(FileNotFoundError), os.scandir(run_dir / SAMPLES) as entries:
        for entry in entries:
            # Another process may delete segments meanwhile.
            with suppress(FileNotFoundError):
                if segment_incarnation(entry.name) is not None:
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def remove_segments(run_dir: Path, names: Iterable[str]) -> None:
    """Delete the segments. A missing one is ignored; one that cannot be deleted is logged and stays."""
    for name in names:
        path = run_dir / SAMPLES / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s. It takes up space and is not needed any more", path, error.strerror)


def write_segment(path: Path, buffers: Sequence[memoryview]) -> None:
    """Create the file and wait until its content and name are on disk. After an error, the file is gone.

    Raises:
        FileExistsError: another process wrote it.
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def read_segment(path: Path, *, directory: int | None = None) -> NDArray[np.uint8]:
    """Read the file into memory. Unlike a memory map, this cannot kill the process when the disk fails.

    `directory`: descriptor of the directory that a relative path starts from.

    Raises:
        DamageError: it is not a regular file, is too large, or changed while it was read.
        OSError: it cannot be read.
    """
    # Opening a FIFO without O_NONBLOCK would wait forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamageError("it is not a regular file")
        if status.st_size > MAX_READ_BYTES:
            raise DamageError(f"it has {status.st_size} bytes, and no run writes more than {MAX_READ_BYTES}")
        data = np.empty(status.st_size, dtype=np.uint8)
        rest = data.data
        while rest:
            num_bytes = file.readinto(rest)
            if not num_bytes:
                raise DamageError(f"it ended {len(rest)} bytes early")
            rest = rest[num_bytes:]
    return data


def write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write all `buffers` one after another, without copying.

    Raises:
        OSError: some of the bytes could not be written.
    """
    views = list(buffers)
    while views:
        written = os.writev(descriptor, views[:_MAX_BUFFERS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def make_directory(path: Path) -> None:
    """Create the directory if necessary, and write its name to disk."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
