"""Bound the log files of a private Ray cluster, which Ray neither rotates nor deletes while it runs.

A large file is cut in place, which is safe because Ray's processes append to their logs. Ray could rotate the output of
its workers (`RAY_ROTATION_MAX_BYTES`), but then it would pass through a thread of the same process, and the last words
of a process that crashes would be lost.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import anyio
import psutil
from anyio import to_thread

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Size at which a file is cut; the part before the cut is `<name>.1`, which replaces the previous one."""
KEPT_BYTES = 16 << 20
"""Size of the part before the cut."""
CHECK_EVERY_S = 60.0


async def keep_bounded(logs: Path, keep_s: float) -> None:
    """Cut and delete log files about once a minute, until cancelled. A failure is logged once, and never ends a run."""
    warned = False
    while True:
        try:
            await to_thread.run_sync(bound_logs, logs, keep_s)
        except (OSError, psutil.Error) as error:
            if not warned:
                logger.warning("old logs in %s stay on disk: %s", logs, error)
            warned = True
        await anyio.sleep(CHECK_EVERY_S)


def bound_logs(logs: Path, keep_s: float) -> None:
    """Cut the files above `MAX_BYTES`, and delete those of ended processes without a write for `keep_s`. Blocking.

    Args:
        logs: a directory that belongs to the cluster alone: only this process and its descendants write to its files.
    """
    old: list[Path] = []
    oldest = time.time() - keep_s
    for directory, _, names in os.walk(logs.resolve()):
        for path in (Path(directory, name) for name in names):
            if path.is_symlink() or not path.is_file():
                continue
            status = path.stat()
            if status.st_size > MAX_BYTES:
                _cut(path, status.st_size)
            elif status.st_mtime < oldest:
                old.append(path)
    if old:  # looking for the files of all processes takes a moment
        written = _files_written_to()
        for path in old:
            if str(path) not in written:
                path.unlink(missing_ok=True)


def _cut(path: Path, size: int) -> None:
    """Move the end of a file to `<name>.1`. A line that is written at this moment may be lost."""
    before = path.with_name(f"{path.name}.1")
    with path.open("rb+") as file:
        file.seek(max(0, size - KEPT_BYTES))
        before.write_bytes(file.read(KEPT_BYTES))
        file.truncate(0)


def _files_written_to() -> set[str]:
    """Return the files that this process and its descendants have open for writing."""
    me = psutil.Process()
    found: set[str] = set()
    for process in (me, *me.children(recursive=True)):
        try:
            found |= {file.path for file in process.open_files() if getattr(file, "mode", "a") != "r"}
        except psutil.NoSuchProcess:
            continue
    return found
