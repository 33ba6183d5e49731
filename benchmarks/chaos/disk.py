"""A disk that can be filled, and damage to files as a machine crash may cause it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_MIB = 768
BALLAST = ".ballast"
WAL_HEADER = 32
FRAME_HEADER = 24


class NothingToDamageError(Exception):
    """There is nothing to damage; the message names the missing file."""


@contextmanager
def small_disk(where: Path, size_mib: int = SIZE_MIB) -> Iterator[bool]:
    """Mount a file system at `where` for the duration of the block. Yield False if this user may not mount one; then
    `where` is a plain directory.
    """
    where.mkdir(parents=True, exist_ok=True)
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(where)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            # Lazily, because a process that is ending may still have a file open.
            subprocess.run(["umount", "--lazy", str(where)], capture_output=True, check=False)


def fill(disk: Path) -> int:
    """Fill the disk, and return the number of bytes written."""
    written = 0
    with (disk / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    written += file.write(b"\0" * size)
            except OSError:
                continue
    return written


def free(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)


def tear_journal(run_dir: Path, rng: random.Random) -> str:
    """Append a partial frame to SQLite's write-ahead log, as an unfinished write does, and return a description.

    Whole frames stay, because they may have been acknowledged: a disk that loses them has not honoured fsync, which
    asyncrl only promises to detect.

    Raises:
        NothingToDamageError: the log is empty or missing.
    """
    log = run_dir / "journal.db-wal"
    content = log.read_bytes() if log.exists() else b""
    frames, size = _frames(content)
    if frames == 0:
        raise NothingToDamageError("the journal has no log")
    end = WAL_HEADER + frames * size
    torn = content[WAL_HEADER + (frames - 1) * size :][:FRAME_HEADER] + rng.randbytes(rng.randrange(1, size))
    log.write_bytes(content[:end] + torn[: size - 1])
    return f"{log.name}: a partial frame after {frames} whole ones"


def _frames(log: bytes) -> tuple[int, int]:
    """Return the number of whole frames since the log was reset, and their size (sqlite.org/fileformat2.html)."""
    if len(log) < WAL_HEADER:
        return 0, 0
    size = FRAME_HEADER + int.from_bytes(log[8:12], "big")
    salt, count = log[16:24], 0
    while log[(at := WAL_HEADER + count * size) + 8 : at + 16] == salt and len(log) >= WAL_HEADER + (count + 1) * size:
        count += 1
    return count, size


def flip_payload(run_dir: Path, rng: random.Random) -> str:
    """Flip a few bits of a payload segment, or cut it short, and return a description.

    Raises:
        NothingToDamageError: there is no segment.
    """
    segments = [path for path in sorted((run_dir / "samples").glob("*.safetensors")) if path.stat().st_size > 0]
    if not segments:
        raise NothingToDamageError("there are no payload files")
    path = rng.choice(segments)
    size = path.stat().st_size
    if rng.random() < 0.3:
        cut = rng.randrange(size)
        os.truncate(path, cut)
        return f"{path.name}: cut from {size} to {cut} bytes"
    places = [rng.randrange(size) for _ in range(8)]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return f"{path.name}: {len(places)} bits flipped in {size} bytes"
