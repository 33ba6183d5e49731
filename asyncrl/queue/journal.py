"""The queue's operations on disk: `journal.db` of a run directory, SQLite in WAL mode.

    append ─▶ pending ─▶ one transaction, one fsync, in a thread ─▶ flushed        later rows share the next one

The next process finds every acknowledged operation, if the disk honours fsync. An unreadable journal is reported and
set aside; the run then resumes from a checkpoint's own sample counts.

Once a checkpoint is on disk, operations before the mark of the oldest kept one are not needed any more. The journal
then begins at a later snapshot of the state, which contains their sample counts:

    snapshot ─ operations ─ snapshot ─ operations ─ mark of the oldest kept checkpoint ─ operations ─ …
    └────────── deleted ───┘ └ the beginning now

The transaction of a commit also moves the beginning, and deletes about `FORGET_ROWS` of the older operations. So every
commit takes about the same time, and the journal is complete at any moment.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncrl import __version__
from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError
from asyncrl.core.ports import QueueSnapshot
from asyncrl.core.types import SampleId
from asyncrl.profiling import profile
from asyncrl.queue.core import Operation
from asyncrl.queue.journal_reader import (
    BUSY_WAIT_S,
    SCHEMA_VERSION,
    TABLES,
    UNREADABLE,
    JournalDamage,
    RebuiltJournal,
    examine,
    meta_crc,
    read_trained_since,
    row_crc,
    snapshot_row,
)
from asyncrl.queue.operation_rows import to_row, update_marks
from asyncrl.queue.state import QueueState
from asyncrl.storage.run_dir import disk_error, sync

SNAPSHOT_EVERY_BYTES = 2 << 20
"""Bytes of operations between snapshots; rebuilding that many takes about half a second."""
FORGET_ROWS = 256
"""Operations that a commit deletes at most, and two more for each that it writes, so that deleting keeps pace."""
LOCK_WAIT_S = 10.0
"""Time limit within which the previous queue process must end and release the journal."""
BYTES_PER_ENTRY = 80
"""Approximate size of an entry in a snapshot. A snapshot is due once four times its size has been appended."""
_GO_ON = "The queue cannot continue; a new launch with resume=auto continues from the last checkpoint."
_FORGOTTEN = ": samples generated or dropped since then are generated again"


class Journal:
    """A `QueueLog` in a file, and the state that was rebuilt from it. Create one per event loop.

    The first write error is final: every waiting and later call raises it, and the file ends with what was
    acknowledged.

    Raises, in every call:
        DiskFullError: no space is left.
        InfraError: the disk fails, or another process writes to the file.
    """

    def __init__(self, path: Path, lock: int, rebuilt: RebuiltJournal, notices: tuple[str, ...]) -> None:
        self.state = rebuilt.state
        self.notices = notices
        """Messages for users: a torn tail, damage, and the consequences."""
        self._path = path
        self._lock = lock
        """Held until this process ends, as is the connection; the file is consistent at any moment."""
        self._connection = _open_to_write(path)
        self._seq = self._durable = rebuilt.seq
        self._crc = rebuilt.crc
        self._first = rebuilt.first
        """The last operation before the journal's beginning."""
        self._marks = dict(rebuilt.marks)
        self._needed_from = 0
        """The mark of the oldest kept checkpoint; earlier operations are not needed."""
        self._pending: list[tuple[int, float, str, str]] = []
        self._snapshot: tuple[int, Mapping[str, Any]] | None = None
        self._bytes_since_snapshot = 0
        self._committing: anyio.Event | None = None
        self._error: AsyncRLError | None = None
        self._thread = anyio.CapacityLimiter(1)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        num_prompts: int,
        identity: Mapping[str, Any],
        restore: QueueSnapshot | None = None,
        total_samples: int | None = None,
        continuing: bool = False,
    ) -> Journal:
        """Rebuild the state from the journal, or begin a new one. Blocking.

        Args:
            restore: counts of the checkpoint that the run resumes from. If the journal is damaged or lacks this
                checkpoint, it is set aside, and a new journal begins with these counts.
            continuing: the run is alive, and only the queue's process was replaced. A checkpoint is no substitute
                for the journal then, because the other parts hold samples that the queue granted.

        Raises:
            ConfigError: another version of asyncrl wrote the journal, or it belongs to other data.
            DiskFullError: no space is left.
            InfraError: the disk fails, or another process has the journal open; with `continuing` also if the journal
                is missing or damaged.
        """
        lock = _take_lock(path.with_suffix(".lock"))
        try:
            rebuilt, notices = _find_journal(path, num_prompts, restore, continuing)
            if rebuilt is None:
                state = QueueState.begin(num_prompts, restore, keeps_payloads=True, total_samples=total_samples)
                seq = 0 if restore is None else restore.seq
                rebuilt = RebuiltJournal(seq, 0, state, identity, seq, {})
                _create_journal(path, rebuilt)
            return cls(path, lock, rebuilt, notices)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, OSError | sqlite3.Error):
                raise _write_error(path, 0, error) from error
            raise

    # -------------------------------------------------------------------------------------------- writing

    @property
    def durable(self) -> int:
        return self._durable

    def append(self, operation: Operation) -> int:
        """See `QueueLog`. The caller must wait in `flushed` before it answers anything."""
        self._check()
        kind, body = to_row(operation)
        self._seq += 1
        update_marks(self._marks, self._seq, operation)
        self._pending.append((self._seq, time.time(), kind, body))
        self._bytes_since_snapshot += len(body)
        return self._seq

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        if self._bytes_since_snapshot > max(SNAPSHOT_EVERY_BYTES, 4 * BYTES_PER_ENTRY * size):
            self._snapshot = (self._seq, dump())
            self._bytes_since_snapshot = 0

    def forget_before(self, step: int) -> None:
        """See `QueueLog`. Later commits delete the operations."""
        self._needed_from = max(self._needed_from, self._marks.get(step, 0))
        self._marks = {step: mark for step, mark in self._marks.items() if mark >= self._needed_from}

    async def flushed(self, seq: int) -> None:
        while True:
            self._check()
            if self._durable >= seq:
                return
            if self._committing is None:
                await self._commit_pending()
            else:
                await self._committing.wait()

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        """See `QueueLog`. Commits continue meanwhile, because this reads through a connection of its own."""
        await self.flushed(self._seq)
        try:
            return await anyio.to_thread.run_sync(read_trained_since, self._path, step, self.state.prompts_per_epoch)
        except (JournalDamage, *UNREADABLE) as error:
            raise InfraError(f"{self._path} is damaged while the run is alive: {error}. {_GO_ON}") from None

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, self._error.cause)

    async def _commit_pending(self) -> None:
        """Commit everything pending in one transaction."""
        self._committing = done = anyio.Event()
        try:
            # Shielded: the rows belong to all waiting callers, not only to the one that commits them.
            with anyio.CancelScope(shield=True):
                # Rows that other tasks append during this iteration of the event loop are committed, too.
                await anyio.lowlevel.checkpoint()
                rows, self._pending = self._pending, []
                snapshot, self._snapshot = self._snapshot, None
                with profile.span("queue.commit", transitions=len(rows)):
                    await anyio.to_thread.run_sync(self._commit, rows, snapshot, limiter=self._thread)
                self._durable = rows[-1][0]
        except (sqlite3.Error, OSError) as error:
            self._error = _write_error(self._path, self._durable, error)
        except BaseException as error:
            # These rows are not on disk, so no later row may count as durable.
            self._error = InfraError.wrap(
                f"{self._path} was not written to: {error!r}. The sample counts are complete up to operation "
                f"{self._durable}; no later one was acknowledged. Continue with resume=auto.",
                error,
            )
            raise
        finally:
            self._committing = None
            done.set()

    def _commit(self, rows: list[tuple[int, float, str, str]], snapshot: tuple[int, Mapping[str, Any]] | None) -> None:
        crc, written, behind = self._crc, [], 0
        for row in rows:
            crc = row_crc(crc, *row)
            written.append((*row, crc))
            if snapshot is not None and row[0] == snapshot[0]:
                behind = crc
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO operations VALUES (?, ?, ?, ?, ?)", written)
        if snapshot is not None:
            seq, state = snapshot
            connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", snapshot_row(seq, behind, state))
        self._forget(FORGET_ROWS + 2 * len(rows))
        connection.execute("COMMIT")
        self._crc = crc

    def _forget(self, num_rows: int) -> None:
        """Let the journal begin at the last snapshot before `_needed_from`, and delete some operations before it."""
        connection = self._connection
        if self._needed_from > self._first:
            query = "SELECT max(seq) FROM snapshots WHERE seq < ?"
            [self._first] = connection.execute(query, (self._needed_from,)).fetchone()
            connection.execute("DELETE FROM snapshots WHERE seq < ?", (self._first,))
        [oldest] = connection.execute("SELECT min(seq) FROM operations").fetchone()
        if oldest <= self._first:
            end = min(self._first, oldest + num_rows - 1)
            connection.execute("DELETE FROM operations WHERE seq <= ?", (end,))


def _write_error(path: Path, durable: int, error: sqlite3.Error | OSError) -> AsyncRLError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return disk_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if isinstance(error, OSError):
        return disk_error(path, error)
    return InfraError.wrap(
        f"cannot write {path}: {error}. The sample counts are complete up to operation {durable}; no later one was "
        "acknowledged. Repair the disk, then continue with resume=auto.",
        error,
    )


# ------------------------------------------------------------------------------------------------ opening


def _find_journal(
    path: Path, num_prompts: int, restore: QueueSnapshot | None, continuing: bool
) -> tuple[RebuiltJournal | None, tuple[str, ...]]:
    """Return the existing journal if it is usable, and notices for users; set an unusable one aside."""
    if not path.exists():
        if continuing:
            raise InfraError(
                f"{path} is gone, and with it the record of the samples that the parts of the run hold. {_GO_ON}"
            )
        if restore is not None and restore.seq:
            return None, (
                f"the journal is gone: there is no {path}, which should contain the checkpoint at operation "
                f"{restore.seq}. "
                f"The run continues from the sample counts of the checkpoint{_FORGOTTEN}",
            )
        return None, ()
    try:
        rebuilt = examine(path)
    except JournalDamage as error:
        if continuing:
            raise InfraError(f"{path} is damaged while the run is alive: {error}. {_GO_ON}") from None
        aside = _set_aside(path, "damaged")
        return None, (
            f"the journal is damaged: {error}. It was set aside as {aside}; the run continues from "
            f"{'the beginning' if restore is None else 'the sample counts of its checkpoint'}{_FORGOTTEN}",
        )
    if rebuilt.state.prompts_per_epoch != num_prompts:
        raise ConfigError(
            f"{path} belongs to a run over {rebuilt.state.prompts_per_epoch} prompts; this run has {num_prompts}, so "
            "feed indices would name other prompts. Restore the data, or start anew with another run_dir and "
            "resume=none."
        )
    if restore is not None and not continuing and not rebuilt.contains(restore):
        aside = _set_aside(path, "behind")
        reach = f"ends at operation {rebuilt.seq}"
        if 0 < restore.seq <= rebuilt.first:
            reach = (
                f"has forgotten everything up to operation {rebuilt.first}, because only later checkpoints were kept,"
            )
        return None, (
            f"the journal {reach} and does not contain the checkpoint, which was written "
            f"{f'at operation {restore.seq}' if restore.seq else 'without a journal'}. It was set aside as {aside}; "
            f"the run continues from the sample counts of the checkpoint{_FORGOTTEN}",
        )
    return rebuilt, (rebuilt.notice,) if rebuilt.notice else ()


def _set_aside(path: Path, why: str) -> Path:
    """Rename the journal and its write-ahead log; return the journal's new path."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    names = (f"{path.stem}-{why}-{stamp}{f'-{number}' if number else ''}{path.suffix}" for number in itertools.count())
    aside = next(found for found in map(path.with_name, names) if not found.exists())
    # The log is renamed last: without it, the file would look like a complete journal that ended earlier.
    os.rename(path, aside)
    with suppress(FileNotFoundError):
        os.rename(f"{path}-wal", f"{aside}-wal")
    with suppress(FileNotFoundError):
        os.rename(f"{path}-journal", f"{aside}-rollback")  # a name under which SQLite does not find it
    Path(f"{path}-shm").unlink(missing_ok=True)
    sync(path.parent)
    return aside


def _create_journal(path: Path, rebuilt: RebuiltJournal) -> None:
    """Write a journal with `rebuilt` as its first snapshot; rename it into place once it is complete."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    _remove_leftovers(new)
    meta = {
        "schema": str(SCHEMA_VERSION),
        "written_by": __version__,
        "num_prompts": str(rebuilt.state.prompts_per_epoch),
        "identity": json.dumps(rebuilt.identity),
    }
    with closing(_open_to_write(new)) as connection:
        connection.execute("BEGIN")
        for table in TABLES:
            connection.execute(table)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [*meta.items(), ("crc", str(meta_crc(meta)))])
        row = snapshot_row(rebuilt.seq, rebuilt.crc, rebuilt.state.dump())
        connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)
        connection.execute("COMMIT")
    _remove_leftovers(path)
    os.rename(new, path)
    sync(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Remove the files beside a deleted journal, which SQLite would apply to the next one of that name."""
    for suffix in ("-journal", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _open_to_write(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -512")  # KiB; the default of 2 MB fills over half an hour
        # This discards a torn tail: later writes begin a new generation of the log.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except BaseException:
        connection.close()
        raise
    return connection


def _take_lock(path: Path) -> int:
    """Lock the journal for this process; the kernel releases the lock when the process dies.

    Raises:
        InfraError: another process holds the lock.
        ConfigError, DiskFullError: the file cannot be created.
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
                    f"process {owner or '?'} has the journal of {path.parent} open: two would write "
                    "different sample counts. End that run first."
                ) from None
            # Blocking, because the actor cannot answer anything before this, and flock has no deadline. The previous
            # process usually ends at once.
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            raise disk_error(path, error) from error
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
