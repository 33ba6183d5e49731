"""The files of payloads in `samples/` of a run directory: written, read, listed, deleted. Blocking.

A segment has its final name from the start: nobody is told of it before it is whole and on disk, and one that was torn
is recognised by its lengths and checksums (`asyncrl.blobs`).
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

from asyncrl.blobs import DamageError
from asyncrl.run_dir import SAMPLES, sync

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([1-9]\d*)-([1-9]\d*)\.safetensors")
_MAX_BUFFERS = 1024
"""IOV_MAX of Linux."""


def segment_name(incarnation: int, number: int) -> str:
    return f"{incarnation}-{number}.safetensors"


def segment_incarnation(name: str) -> int | None:
    """Which incarnation of the Rollouter wrote it; None: it is no segment's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def segment_sizes(run_dir: Path) -> dict[str, int]:
    """Every segment there is, whole or not, and its bytes."""
    sizes: dict[str, int] = {}
    with suppress(FileNotFoundError), os.scandir(run_dir / SAMPLES) as entries:
        for entry in entries:
            # Whoever deletes segments does so while this looks.
            with suppress(FileNotFoundError):
                if segment_incarnation(entry.name) is not None:
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def remove_segments(run_dir: Path, names: Iterable[str]) -> None:
    """Delete them. One that is not there is fine; one that cannot be deleted is logged and stays."""
    for name in names:
        path = run_dir / SAMPLES / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s. It takes up space and is not needed any more", path, error.strerror)


def write_segment(path: Path, buffers: Sequence[memoryview]) -> None:
    """Make the file and wait until the disk has it and its name. After an error nothing of it is there.

    Raises:
        FileExistsError: somebody else wrote it.
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
    """The bytes of the file, read once into memory of its own: a map of it would end the process where the disk fails.

    `directory` is the descriptor of the one that a relative path begins in.

    Raises:
        DamageError: it is no plain file, or changed while it was read.
        OSError: it cannot be read.
    """
    # Not to wait for ever on what is no file.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamageError("it is no plain file")
        data = np.empty(status.st_size, dtype=np.uint8)
        rest = data.data
        while rest:
            num_bytes = file.readinto(rest)
            if not num_bytes:
                raise DamageError(f"it ended {len(rest)} bytes early")
            rest = rest[num_bytes:]
    return data


def write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """All bytes of `buffers`, one after another, uncopied.

    Raises:
        OSError: not all of them could be written; some may have been.
    """
    views = list(buffers)
    while views:
        written = os.writev(descriptor, views[:_MAX_BUFFERS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def make_directory(path: Path) -> None:
    """The directory is there, and on disk."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
