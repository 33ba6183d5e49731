"""The working directory of a confined process: creation, use of disk, and removal.

Code of a model fills the directory: it may contain any number of files, nested deeper than a path can be long, without
permissions, and links that lead out of it. Code may also keep deleted files open. No function here fails because of
what it finds, and none changes anything outside of the directory.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from rollouter.tools.sandbox.confined.namespaces import MAX_FILES

log = logging.getLogger(__name__)

_BLOCK_BYTES = 512
"""Unit of `st_blocks` on Linux."""


def make() -> str:
    """Create a directory, and return its path without links, as `/proc` shows it."""
    return os.path.realpath(tempfile.mkdtemp(prefix="asyncrl-code-"))


def exceeds(directory: str, pid: int, max_bytes: int, max_file_bytes: int) -> bool:
    """Return whether there are more than `max_bytes` bytes or `MAX_FILES` files.

    Deleted files count while the process `pid` or a descendant has them open or mapped, provided that `/proc` shows
    its descriptors and mappings to this process. A directory that cannot be listed counts as too large: it may hide
    files. For the same reason, a deleted file that is only mapped counts as `max_file_bytes`, the limit of a file.
    """
    used_bytes, files = 0, 0
    try:
        for size in chain(_deleted_files(pid, directory, max_file_bytes), _sizes(directory)):
            used_bytes += size
            files += 1
            if used_bytes > max_bytes or files > MAX_FILES:
                return True
    except OSError:
        return True
    return False


def _sizes(directory: str) -> Iterator[int]:
    """Yield the bytes that each entry below the directory occupies. What is deleted meanwhile is left out.

    Raises:
        OSError: a directory cannot be listed, or its path is too long.
    """
    directories = [directory]
    while directories:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    yield entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES


def _deleted_files(pid: int, directory: str, max_file_bytes: int) -> list[int]:
    """Return the bytes of each deleted file that the process or a descendant has open or mapped."""
    sizes: dict[int, int] = {}  # by inode: the process can write to one file system only
    pids = [pid]
    while pids:
        process = f"/proc/{pids.pop()}"
        with suppress(OSError):  # it has ended, or belongs to another user
            for name in os.listdir(f"{process}/fd"):
                with suppress(OSError):
                    status = os.stat(f"{process}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                        sizes[status.st_ino] = status.st_blocks * _BLOCK_BYTES
            with open(f"{process}/maps", errors="surrogateescape") as maps:
                for line in maps:
                    if line.endswith(" (deleted)\n"):
                        _, _, _, _, inode, path = line.split(maxsplit=5)  # range, rights, offset, device
                        if path.startswith(f"{directory}/"):
                            sizes.setdefault(int(inode), max_file_bytes)
            for thread in os.listdir(f"{process}/task"):
                with open(f"{process}/task/{thread}/children") as children:
                    pids.extend(map(int, children.read().split()))
    return list(sizes.values())


def remove(directory: str) -> None:
    """Remove the directory. The process must be dead."""
    try:
        while inner := [entry.path for entry in os.scandir(directory) if _unlink_unless_directory(entry)]:
            for path in inner:
                _flatten(path, directory)
        os.rmdir(directory)
    except OSError as error:
        log.warning("the working directory of a code process could not be removed: %s: %s", directory, error)


def _unlink_unless_directory(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return True
    os.unlink(entry.path)
    return False


def _flatten(path: str, directory: str) -> None:
    """Remove one directory after moving the directories in it to `directory`, so that no path gets long."""
    os.chmod(path, 0o700)
    for entry in os.scandir(path):
        if _unlink_unless_directory(entry):
            os.chmod(entry.path, 0o700)  # moving a directory changes its entry `..`
            os.rename(entry.path, os.path.join(directory, secrets.token_hex(16)))
    os.rmdir(path)
