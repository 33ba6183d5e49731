"""A disk that can be filled, and files that are torn or damaged as a crash of the machine might."""

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


class NothingThereError(Exception):
    """There is nothing to damage. The message says what is missing."""


@contextmanager
def small_disk(where: Path, size_mib: int = SIZE_MIB) -> Iterator[bool]:
    """A file system of its own at `where`, for the time of the block. Yields False if this user may not mount one; then
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
            # Lazily: a process that is about to go may still have a file open.
            subprocess.run(["umount", "--lazy", str(where)], capture_output=True, check=False)


def fill(disk: Path) -> int:
    """Take every free byte. Returns how many."""
    taken = 0
    with (disk / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    taken += file.write(b"\0" * size)
            except OSError:
                continue
    return taken


def unfill(disk: Path) -> None:
    (disk / BALLAST).unlink(missing_ok=True)


def tear_journal(run_dir: Path, rng: random.Random) -> str:
    """Tear the end of SQLite's write-ahead log, as a write that was never finished leaves it: a part of a frame is
    behind the last whole one. Returns what was done.

    Whole frames stay. They may have been acknowledged, and a disk that takes them back has not honoured fsync: nothing
    is promised then but that it is noticed, and turns of samples that were READY are generated again.

    Raises:
        NothingThereError: the log is empty, or there is none.
    """
    log = run_dir / "journal.db-wal"
    content = log.read_bytes() if log.exists() else b""
    frames, size = _frames(content)
    if frames == 0:
        raise NothingThereError("the journal has no log")
    end = WAL_HEADER + frames * size
    torn = content[WAL_HEADER + (frames - 1) * size :][:FRAME_HEADER] + rng.randbytes(rng.randrange(1, size))
    log.write_bytes(content[:end] + torn[: size - 1])
    return f"{log.name}: half a frame behind {frames} whole ones"


def _frames(log: bytes) -> tuple[int, int]:
    """Whole frames of a write-ahead log since it began anew, and the bytes of each (sqlite.org/fileformat2.html)."""
    if len(log) < WAL_HEADER:
        return 0, 0
    size = FRAME_HEADER + int.from_bytes(log[8:12], "big")
    salt, count = log[16:24], 0
    while log[(at := WAL_HEADER + count * size) + 8 : at + 16] == salt and len(log) >= WAL_HEADER + (count + 1) * size:
        count += 1
    return count, size


def flip_payload(run_dir: Path, rng: random.Random) -> str:
    """Flip a few bits of a payload segment, or cut it short. Returns what was done.

    Raises:
        NothingThereError: there is no segment.
    """
    segments = [path for path in sorted((run_dir / "samples").glob("*.safetensors")) if path.stat().st_size > 0]
    if not segments:
        raise NothingThereError("there are no payload files")
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
