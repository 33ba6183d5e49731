"""How a process comes to have a journal: the lock, the one that is there or a new one, and one set aside."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from asyncrl import __version__
from asyncrl.failures import ConfigError, InfraError
from asyncrl.journal_file import BUSY_WAIT_S, SCHEMA_VERSION, Damage, Whole, examine, meta_crc, snapshot_row
from asyncrl.ports import QueueSnapshot
from asyncrl.run_dir import disk_error, sync

LOCK_WAIT_S = 10.0
"""For the process that had the journal before to be gone."""
GO_ON = "The queue cannot go on; a new launch with resume=auto goes on from the last checkpoint."
_FORGOTTEN = ": what was generated since is generated again, and so is what was dropped since, for whatever reason"


def find_journal(
    path: Path, num_prompts: int, restore: QueueSnapshot | None, continuing: bool
) -> tuple[Whole | None, tuple[str, ...]]:
    """The journal that is there, if it will do, and what people should know; an unusable one is set aside."""
    if not path.exists():
        if continuing:
            raise InfraError(f"{path} is gone, and with it what the parts of the run hold. {GO_ON}")
        if restore is not None and restore.seq:
            return None, (
                f"the journal is gone: there is no {path}, in which the checkpoint is at transition {restore.seq}. The "
                f"run goes on from the books of the checkpoint{_FORGOTTEN}",
            )
        return None, ()
    try:
        whole = examine(path)
    except Damage as error:
        if continuing:
            raise InfraError(f"{path} is damaged while the run is alive: {error}. {GO_ON}") from None
        aside = _set_aside(path, "damaged")
        return None, (
            f"the journal is damaged: {error}. It was set aside as {aside}; the run goes on from "
            f"{'the beginning' if restore is None else 'the books of its checkpoint'}{_FORGOTTEN}",
        )
    if whole.state.ledger.prompts_per_epoch != num_prompts:
        raise ConfigError(
            f"{path} is of a run over {whole.state.ledger.prompts_per_epoch} prompts, this one has {num_prompts}: feed "
            "indices would name other prompts. Set the data back, or start anew with another run_dir and resume=none."
        )
    if restore is not None and not continuing and not whole.holds(restore):
        aside = _set_aside(path, "behind")
        return None, (
            f"the journal ends at transition {whole.seq} and does not hold the checkpoint's, "
            f"{restore.seq or 'which was written without a journal'}. It was set aside as {aside}; the run goes on "
            f"from the books of the checkpoint{_FORGOTTEN}",
        )
    return whole, (whole.told,) if whole.told else ()


def _set_aside(path: Path, why: str) -> Path:
    """Rename the journal and its log; returns the new name."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = 0
    while True:
        aside = path.with_name(f"{path.stem}-{why}-{stamp}{f'-{number}' if number else ''}{path.suffix}")
        if not aside.exists():
            break
        number += 1
    # The log last: without it, the file would look like a whole journal that ended earlier.
    os.rename(path, aside)
    with suppress(FileNotFoundError):
        os.rename(f"{path}-wal", f"{aside}-wal")
    Path(f"{path}-shm").unlink(missing_ok=True)
    sync(path.parent)
    return aside


def create_journal(path: Path, whole: Whole) -> None:
    """A journal that holds nothing but `whole` as its first snapshot; it has its name once it is complete."""
    new = path.with_suffix(".new")
    for leftover in (new, Path(f"{new}-wal"), Path(f"{new}-shm")):
        leftover.unlink(missing_ok=True)
    meta = {
        "schema": str(SCHEMA_VERSION),
        "written_by": __version__,
        "num_prompts": str(whole.state.ledger.prompts_per_epoch),
        "identity": json.dumps(whole.identity),
    }
    with closing(open_to_write(new)) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        connection.execute(
            "CREATE TABLE transitions (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, "
            "body TEXT NOT NULL, crc INTEGER NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, chain INTEGER NOT NULL, body TEXT NOT NULL, "
            "crc INTEGER NOT NULL)"
        )
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [*meta.items(), ("crc", str(meta_crc(meta)))])
        row = snapshot_row(whole.seq, whole.crc, whole.state.dump())
        connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)
        connection.execute("COMMIT")
    # Leftovers of a journal that somebody deleted: SQLite would take them for this one's.
    for leftover in (Path(f"{path}-wal"), Path(f"{path}-shm")):
        leftover.unlink(missing_ok=True)
    os.rename(new, path)
    sync(path.parent)


def open_to_write(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # A torn tail ends here: what is written from now on is a generation of its own.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except BaseException:
        connection.close()
        raise
    return connection


def take_lock(path: Path) -> int:
    """One process at a time has a journal; the kernel takes the lock back when it dies.

    Raises:
        InfraError: another one keeps it.
        ConfigError, DiskFullError: the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(path, error) from error
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise InfraError(
                    f"process {owner or '?'} has the journal of {path.parent} open: two would write different books. "
                    "End that run first."
                ) from None
            # Blocking: nothing can be answered before, and flock knows no deadline. It is free once the process that
            # had the journal is gone, which is at once as a rule.
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            raise disk_error(path, error) from error
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
