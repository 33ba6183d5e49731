"""A directory of results that several launches share: downloads, converted files, tokenized prompts. Blocking.

    <root>/<kind>/<key>/             a complete entry; its key determines its content
    <root>/.<random>.tmp/            an entry that is being built, locked by its process

An entry is built under a temporary name, synced to disk and renamed, so every named entry is complete, whenever a
launch is killed. Two launches may build the same entry; the first one that is complete stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.core.failures import AsyncRLError, ConfigError, DiskFullError, InfraError
from asyncrl.storage.run_dir import sync

KEEP_S = 30 * 86_400.0
"""Entries that no launch has used for this long are deleted."""


class DataCache:
    """The entries below one directory (`data.cache_dir`).

    Raises ConfigError if the directory cannot be written, and DiskFullError if the disk is full; both name it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, kind: str, key: str) -> Path | None:
        """Return a complete entry, and note that it was used; None: there is none."""
        path = self.root / kind / key
        with suppress(OSError):
            os.utime(path)
            return path
        return None

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Create an empty directory for a new entry. It is deleted at the end of the block, unless it was committed."""
        with self._errors():
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            begun = self.root / f".{secrets.token_hex(8)}.tmp"
            begun.mkdir()
            descriptor = os.open(begun, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._errors():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield begun
        finally:
            shutil.rmtree(begun, ignore_errors=True)
            os.close(descriptor)

    def commit(self, begun: Path, kind: str, key: str) -> Path:
        """Give a directory of `building` its name, and return it. If the entry exists meanwhile, that one is kept."""
        target = self.root / kind / key
        with self._errors():
            for path in begun.iterdir():
                sync(path)
            sync(begun)
            target.parent.mkdir(0o700, exist_ok=True)
            try:
                begun.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            sync(target.parent)
        return target

    def discard(self, path: Path) -> None:
        """Delete an entry that turned out to be damaged."""
        shutil.rmtree(path, ignore_errors=True)

    def sweep(self, *, now: float | None = None, keep_s: float = KEEP_S) -> None:
        """Delete entries that were not used for `keep_s`, and what killed launches left. Processes that have files of a
        deleted entry open keep them."""
        now = time.time() if now is None else now
        for path in self.root.glob("*/*"):
            with suppress(OSError):
                if now - path.stat().st_mtime > keep_s:
                    shutil.rmtree(path)
        for begun in self.root.glob(".*.tmp"):
            if not _is_locked(begun, now):
                shutil.rmtree(begun, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except AsyncRLError:
            raise
        except OSError as error:
            if error.filename is not None and not Path(str(error.filename)).is_relative_to(self.root):
                raise
            where = f"data.cache_dir={self.root}: cannot write {error.filename or self.root}: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError.wrap(f"{where}. Free some space, or give another directory", error) from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                raise ConfigError(f"{where}. Give a directory that you may write to") from None
            raise InfraError.wrap(f"{where}. Give another directory if this goes on", error) from error


def _is_locked(begun: Path, now: float) -> bool:
    """Return whether the process that builds an entry is alive. In its first minute, it may not be locked yet."""
    try:
        if now - begun.stat().st_mtime < 60:
            return True
        descriptor = os.open(begun, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
