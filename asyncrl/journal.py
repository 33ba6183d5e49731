"""The queue's transitions on disk: `journal.db` of a run directory, SQLite in WAL mode, appended to and never changed.

    append ─▶ pending ─▶ one transaction, one fsync, in a thread ─▶ flushed        what comes meanwhile shares the next

What was acknowledged is found by the next process, if the disk honours fsync. What cannot be read is named and set
aside, never guessed at: the run then goes on from a checkpoint's own books.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncrl.failures import AsyncRLError, InfraError
from asyncrl.history import trained_since
from asyncrl.journal_file import NO_SUCH_ROW, Damage, Whole, read_snapshot, row_crc, snapshot_row
from asyncrl.journal_opening import GO_ON, create_journal, find_journal, open_to_write, take_lock
from asyncrl.ports import QueueSnapshot
from asyncrl.profiling import profile
from asyncrl.recovery import QueueState
from asyncrl.run_dir import disk_error
from asyncrl.transitions import Reading, Row, Transition, from_row, to_row
from asyncrl.types import SampleId

SNAPSHOT_EVERY_BYTES = 2 << 20
"""Of transitions: about half a second of rebuilding."""
BYTES_PER_ENTRY = 80
"""Of a snapshot, about; one is due once four times its size was appended."""


class Journal:
    """`history.TransitionLog` in a file, and the state that was rebuilt from it. Make one per event loop.

    The first write error is final: every waiting and later call raises it, and the file ends with what was
    acknowledged.

    Raises, in every call:
        DiskFullError: no space is left.
        InfraError: the disk fails, or somebody else writes to the file.
    """

    def __init__(self, path: Path, lock: int, whole: Whole, told: tuple[str, ...]) -> None:
        self.state = whole.state
        self.told = told
        """What people should know of how it was found."""
        self._path = path
        self._lock = lock
        """Held until this process ends, as the connection is: the file is whole at any moment."""
        self._connection = open_to_write(path)
        self._seq = self._durable = whole.seq
        self._crc = whole.crc
        self._pending: list[tuple[int, float, str, str]] = []
        self._snapshot: tuple[int, Mapping[str, Any]] | None = None
        self._bytes_since_snapshot = 0
        self._trip: anyio.Event | None = None
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
            restore: books of the checkpoint that the run goes on from. If the journal is damaged or does not reach it,
                they are what a new one begins with, and the old one is set aside.
            continuing: the run is alive, and only the queue's process was replaced. Then nothing but the journal itself
                will do, because the other parts hold what it gave them.

        Raises:
            ConfigError: another asyncrl wrote it, or it is of other data.
            DiskFullError, InfraError: see above; somebody else has it open; `continuing`, and it is missing or damaged.
        """
        lock = take_lock(path.with_suffix(".lock"))
        try:
            whole, told = find_journal(path, num_prompts, restore, continuing)
            if whole is None:
                state = QueueState.begin(num_prompts, restore, keeps_payloads=True, total_samples=total_samples)
                seq = 0 if restore is None else restore.seq
                whole = Whole(seq, 0, state, identity, frozenset(), "")
                create_journal(path, whole)
            return cls(path, lock, whole, told)
        except OSError as error:
            os.close(lock)
            raise disk_error(path, error) from error
        except sqlite3.Error as error:
            os.close(lock)
            raise _write_error(path, 0, error) from error
        except BaseException:
            os.close(lock)
            raise

    # -------------------------------------------------------------------------------------------- writing

    @property
    def durable(self) -> int:
        return self._durable

    def append(self, transition: Transition) -> int:
        """See `history.TransitionLog`. Whoever appends must wait in `flushed` before it answers anybody."""
        self._check()
        kind, body = to_row(transition)
        self._seq += 1
        self._pending.append((self._seq, time.time(), kind, body))
        self._bytes_since_snapshot += len(body)
        return self._seq

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        if self._bytes_since_snapshot > max(SNAPSHOT_EVERY_BYTES, 4 * BYTES_PER_ENTRY * size):
            self._snapshot = (self._seq, dump())
            self._bytes_since_snapshot = 0

    async def flushed(self, seq: int) -> None:
        while True:
            self._check()
            if self._durable >= seq:
                return
            if self._trip is None:
                await self._carry()
            else:
                await self._trip.wait()

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        await self.flushed(self._seq)
        return await anyio.to_thread.run_sync(self._trained_since_blocking, step, limiter=self._thread)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, self._error.cause)

    async def _carry(self) -> None:
        """One transaction with everything pending."""
        self._trip = trip = anyio.Event()
        try:
            # Shielded: the rows belong to everybody who waits, not only to the caller who happens to carry them.
            with anyio.CancelScope(shield=True):
                # What other tasks append during this turn of the loop still comes along.
                await anyio.lowlevel.checkpoint()
                rows, self._pending = self._pending, []
                snapshot, self._snapshot = self._snapshot, None
                with profile.span("queue.commit", transitions=len(rows)):
                    await anyio.to_thread.run_sync(self._commit, rows, snapshot, limiter=self._thread)
                self._durable = rows[-1][0]
        except (sqlite3.Error, OSError) as error:
            self._error = _write_error(self._path, self._durable, error)
        except BaseException as error:
            # These rows are not on disk, and none behind them may be taken for it.
            self._error = InfraError.wrap(
                f"{self._path} was not written to: {error!r}. The run's books are whole up to transition "
                f"{self._durable}; nothing since was acknowledged. Go on with resume=auto.",
                error,
            )
            raise
        finally:
            self._trip = None
            trip.set()

    def _commit(self, rows: list[tuple[int, float, str, str]], snapshot: tuple[int, Mapping[str, Any]] | None) -> None:
        crc, written, behind = self._crc, [], 0
        for row in rows:
            crc = row_crc(crc, *row)
            written.append((*row, crc))
            if snapshot is not None and row[0] == snapshot[0]:
                behind = crc
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?, ?)", written)
        if snapshot is not None:
            seq, state = snapshot
            origin = "(SELECT min(seq) FROM snapshots)"
            connection.execute(f"DELETE FROM snapshots WHERE seq > {origin}")
            connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", snapshot_row(seq, behind, state))
        connection.execute("COMMIT")
        self._crc = crc

    def _trained_since_blocking(self, step: int) -> tuple[SampleId, ...] | None:
        """Blocking. Out of all rows, unverified: they are the ones that this run was built on."""
        read = Reading(self.state.ledger.prompts_per_epoch)
        kinds = "('mark', 'rewind', 'commit', 'drop')"
        rows = self._connection.execute(f"SELECT kind, body FROM transitions WHERE kind IN {kinds} ORDER BY seq")
        transitions = (from_row(Row(kind, body), read) for kind, body in rows)
        try:
            _, _, begin = read_snapshot(self._connection, "ASC", read)
            return trained_since(step, transitions, from_start=begin.is_new)
        except (Damage, *NO_SUCH_ROW) as error:
            raise InfraError(f"{self._path} is damaged while the run is alive: {error}. {GO_ON}") from None


def _write_error(path: Path, durable: int, error: sqlite3.Error | OSError) -> AsyncRLError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return disk_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if isinstance(error, OSError):
        return disk_error(path, error)
    return InfraError.wrap(
        f"cannot write {path}: {error}. The run's books are whole up to transition {durable}; nothing since was "
        "acknowledged. See to the disk, then go on with resume=auto.",
        error,
    )
