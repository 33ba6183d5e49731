"""The queue's transitions on disk: `journal.db` of a run directory, SQLite in WAL mode, appended to and never changed.

    append ─▶ pending ─▶ one transaction, one fsync, in a thread ─▶ flushed        what comes meanwhile shares the next

    meta         which asyncrl wrote it, for which run
    transitions  seq, at (wall clock), kind, body (a JSON array, see `recovery`), crc: of the row and the crc before it
    snapshots    the state behind transition `seq`: the first one, and the newest, from which the state is rebuilt

What was acknowledged is found by the next process, if the disk honours fsync. What cannot be read is named and set
aside, never guessed at: the run then goes on from a checkpoint's own books.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncrl import __version__
from asyncrl.failures import AsyncRLError, BugError, ConfigError, InfraError
from asyncrl.lives import Lives, SampleRecord
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.recovery import QueueState, trained_since
from asyncrl.run_dir import JOURNAL, SAMPLES, disk_error
from asyncrl.transitions import Reading, Row, Transition, from_row, to_row
from asyncrl.types import SampleId
from asyncrl.wal import survey

SCHEMA_VERSION = 1
SNAPSHOT_EVERY_BYTES = 2 << 20
"""Of transitions: about half a second of rebuilding."""
BYTES_PER_ENTRY = 80
"""Of a snapshot, about; one is due once four times its size was appended."""
LOCK_WAIT_S = 10.0
"""For the process that had the journal before to be gone."""
BUSY_WAIT_S = 10.0

_OF_INCARNATION = re.compile(r"(?:turns-)?([1-9]\d*)-\d+\.")
"""Payload segments and turn logs."""
_NOT_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
_NO_SUCH_ROW = (BugError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading something raises that is not what was written."""


@dataclass(frozen=True, slots=True)
class JournalHead:
    """What a run that has ended says of how to go on."""

    seq: int
    lineage: int
    identity: Mapping[str, Any]
    num_prompts: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    """Why it cannot be used, in words; the rest is then what could be found out."""


class _Damage(Exception):  # it is caught here, and becomes a text
    """What is wrong with the file, in words."""


class _Whole(NamedTuple):
    """A journal that can be used."""

    seq: int
    crc: int
    state: QueueState
    identity: Mapping[str, Any]
    marks: frozenset[int]
    """Transitions at which a checkpoint may go on from here."""
    told: str
    """A torn tail, in words."""


class Journal:
    """`recovery.TransitionLog` in a file, and the state that was rebuilt from it. Make one per event loop.

    The first write error is final: every waiting and later call raises it, and the file ends with what was
    acknowledged.

    Raises, in every call:
        DiskFullError: no space is left.
        InfraError: the disk fails, or somebody else writes to the file.
    """

    def __init__(self, path: Path, lock: int, whole: _Whole, told: tuple[str, ...]) -> None:
        self.state = whole.state
        self.told = told
        """What people should know of how it was found."""
        self._path = path
        self._lock = lock
        self._connection = _open_to_write(path)
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
        lock = _lock(path.with_suffix(".lock"))
        try:
            whole, told = _find(path, num_prompts, restore, continuing)
            if whole is None:
                state = QueueState.begin(num_prompts, restore, keeps_payloads=True, total_samples=total_samples)
                seq = 0 if restore is None else restore.seq
                whole = _Whole(seq, 0, state, identity, frozenset(), "")
                _create(path, whole)
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
        """See `recovery.TransitionLog`. Whoever appends must wait in `flushed` before it answers anybody."""
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

    async def aclose(self) -> None:
        """Write what is pending and let go of the file. It is whole without this, too."""
        try:
            await self.flushed(self._seq)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._connection.close, limiter=self._thread)
            os.close(self._lock)

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
            crc = _row_crc(crc, *row)
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
            connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", _snapshot_row(seq, behind, state))
        connection.execute("COMMIT")
        self._crc = crc

    def _trained_since_blocking(self, step: int) -> tuple[SampleId, ...] | None:
        """Blocking. Out of all rows, unverified: they are the ones that this run was built on."""
        read = Reading(self.state.ledger.prompts_per_epoch)
        kinds = "('mark', 'commit', 'drop')"
        rows = self._connection.execute(f"SELECT kind, body FROM transitions WHERE kind IN {kinds} ORDER BY seq")
        [origin] = self._connection.execute("SELECT min(seq) FROM snapshots").fetchone()
        transitions = (from_row(Row(kind, body), read) for kind, body in rows)
        return trained_since(step, transitions, whole=origin == 0)


# ------------------------------------------------------------------------------------------------ for readers


def read_head(run_dir: Path) -> JournalHead | None:
    """What the journal of a run that has ended says; None: it has none. Blocking; changes nothing.

    Raises:
        ConfigError: another asyncrl wrote it.
        InfraError: somebody has locked it.
    """
    path = run_dir / JOURNAL
    if not path.exists():
        return None
    try:
        whole = _examine(path)
    except _Damage as error:
        return JournalHead(0, 0, {}, 0, {"rollouter": _incarnation_of_files(run_dir)}, damage=str(error))
    state = whole.state
    incarnations = {"rollouter": _incarnation_of_files(run_dir), **state.incarnations}
    return JournalHead(whole.seq, state.lineage, whole.identity, state.ledger.prompts_per_epoch, incarnations)


def read_books(run_dir: Path) -> Books:
    """The books as they are on disk, of a live or a dead run. Blocking; changes nothing.

    Raises:
        ConfigError: there is no journal, it is damaged, or another asyncrl wrote it.
    """
    with _reading(run_dir) as connection:
        return _rebuild(connection, _read_meta(connection)).state.ledger.books()


def read_samples(run_dir: Path) -> Iterator[SampleRecord]:
    """Every sample that the journal knows of, by index, with its last times. Blocking; changes nothing.

    All of the journal is read, and every checksum compared.

    Raises:
        ConfigError: there is no journal, it is damaged, or another asyncrl wrote it.
    """
    with _reading(run_dir) as connection:
        meta = _read_meta(connection)
        read = Reading(meta.num_prompts)
        seq, crc, state = _read_snapshot(connection, "ASC", read)
        lives = Lives(state)
        for at, _, transition in _transitions(connection, seq, crc, read):
            try:
                lives.see(at, transition)
            except BugError as error:
                raise _Damage(error.message) from None
    yield from lives.records()


def _incarnation_of_files(run_dir: Path) -> int:
    """The last incarnation of the Rollouter that wrote into `samples/`, 0 if none did: whoever comes next needs file
    names of its own, even if the journal knows nothing of it."""
    directory = run_dir / SAMPLES
    names = os.listdir(directory) if directory.is_dir() else []
    return max((int(match[1]) for name in names if (match := _OF_INCARNATION.match(name))), default=0)


# ------------------------------------------------------------------------------------------------ opening


def _find(
    path: Path, num_prompts: int, restore: QueueSnapshot | None, continuing: bool
) -> tuple[_Whole | None, tuple[str, ...]]:
    """The journal that is there, if it will do, and what people should know; an unusable one is set aside."""
    if not path.exists():
        if continuing:
            raise InfraError(f"{path} is gone, and with it what the parts of the run hold. {_GO_ON}")
        return None, ()
    try:
        whole = _examine(path)
    except _Damage as error:
        if continuing:
            raise InfraError(f"{path} is damaged while the run is alive: {error}. {_GO_ON}") from None
        aside = _set_aside(path, "damaged")
        return None, (
            f"the journal is damaged: {error}. It was set aside as {aside}; the run goes on from "
            f"{'the beginning' if restore is None else 'the books of its checkpoint'}, and what was generated since is "
            "generated again",
        )
    if whole.state.ledger.prompts_per_epoch != num_prompts:
        raise ConfigError(
            f"{path} is of a run over {whole.state.ledger.prompts_per_epoch} prompts, this one has {num_prompts}: feed "
            "indices would name other prompts. Set the data back, or start anew with another run_dir and resume=none."
        )
    if restore is not None and restore.seq not in whole.marks and not continuing:
        aside = _set_aside(path, "behind")
        return None, (
            f"the journal ends at transition {whole.seq} and does not hold the checkpoint's, "
            f"{restore.seq or 'which was written without a journal'}. It was set aside as {aside}; the run goes on "
            "from the books of the checkpoint, and what was generated since is generated again",
        )
    return whole, (whole.told,) if whole.told else ()


_GO_ON = "The queue cannot go on; a new launch with resume=auto goes on from the last checkpoint."


def _examine(path: Path) -> _Whole:
    """Rebuild the state, changing nothing on disk. Raises `_Damage`, `ConfigError`, `InfraError`."""
    try:
        log = path.with_name(f"{path.name}-wal")
        found = survey(log.read_bytes() if log.exists() else b"")
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise _Damage(f"it cannot be read ({error.strerror})") from None
    if empty:
        raise _Damage("it is empty")
    if found.bad_header:
        raise _Damage(f"the header of {log.name} is damaged")
    with _damage_named(path), closing(_open_to_read(path)) as connection:
        [checked] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if checked != "ok":
            raise _Damage(f"SQLite finds: {checked}")
        whole = _rebuild(connection, _read_meta(connection))
    if found.lost:
        raise _Damage(f"{log.name} has a bad frame, and {found.lost} commits behind it that had been acknowledged")
    if found.torn_frames or found.torn_bytes:
        told = (
            f"the journal has a torn tail of {found.torn_frames} pages behind transition {whole.seq}: the last write "
            "was cut off. Nobody had been told that it was on disk"
        )
        return whole._replace(told=told)
    return whole


class _Meta(NamedTuple):
    num_prompts: int
    identity: Mapping[str, Any]


def _read_meta(connection: sqlite3.Connection) -> _Meta:
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    try:
        if int(meta.pop("crc")) != _meta_crc(meta):
            raise _Damage("the checksum of its meta table is wrong")
        schema, written_by = int(meta["schema"]), meta["written_by"]
        if schema == SCHEMA_VERSION:
            return _Meta(int(meta["num_prompts"]), json.loads(meta["identity"]))
    except _NO_SUCH_ROW as error:
        raise _Damage(f"its meta table cannot be read ({type(error).__name__}: {error})") from None
    raise ConfigError(
        f"the journal has schema version {schema} and was written by asyncrl {written_by}; this one, {__version__}, "
        f"reads version {SCHEMA_VERSION}: it cannot know what happened to the samples. Use asyncrl {written_by}, or "
        "start anew with another run_dir and resume=none."
    )


def _rebuild(connection: sqlite3.Connection, meta: _Meta) -> _Whole:
    """Newest snapshot and what follows. Raises `_Damage`."""
    read = Reading(meta.num_prompts)
    seq, crc, state = _read_snapshot(connection, "DESC", read)
    number = 0
    for _, number, transition in _transitions(connection, seq, crc, read):
        try:
            state.apply(transition)
        except BugError as error:
            raise _Damage(f"transition {number} cannot have happened: {error.message}") from None
    if number:
        seq, crc = number, connection.execute("SELECT crc FROM transitions WHERE seq = ?", (number,)).fetchone()[0]
    origin = connection.execute("SELECT min(seq) FROM snapshots").fetchone()[0]
    marks = {row[0] for row in connection.execute("SELECT seq FROM transitions WHERE kind = 'mark'")}
    return _Whole(seq, crc, state, meta.identity, frozenset({*marks, origin} - {0}), "")


def _read_snapshot(connection: sqlite3.Connection, order: str, read: Reading) -> tuple[int, int, QueueState]:
    """The first (`ASC`) or the newest one (`DESC`): its transition, the checksum there, and the state."""
    row = connection.execute(f"SELECT seq, chain, body, crc FROM snapshots ORDER BY seq {order} LIMIT 1").fetchone()
    try:
        seq, chain, body, crc = row
        if crc != zlib.crc32(f"{seq}\n{chain}\n{body}".encode()):
            raise _Damage(f"the checksum of the snapshot at transition {seq} is wrong")
        return seq, chain, QueueState.load(json.loads(body), read, keeps_payloads=True)
    except _NO_SUCH_ROW as error:
        raise _Damage(f"its snapshot cannot be read ({type(error).__name__}: {error})") from None


def _transitions(
    connection: sqlite3.Connection, seq: int, crc: int, read: Reading
) -> Iterator[tuple[float, int, Transition]]:
    """Those behind `seq`, where the checksum was `crc`: time, number, value. Raises `_Damage`."""
    rows = connection.execute("SELECT seq, at, kind, body, crc FROM transitions WHERE seq > ? ORDER BY seq", (seq,))
    for number, at, kind, body, written in rows:
        seq += 1
        if number != seq:
            raise _Damage(f"transition {seq} is missing")
        try:
            crc = _row_crc(crc, number, at, kind, body)
            if crc != written:
                raise _Damage(f"the checksum of transition {seq} is wrong")
            transition = from_row(Row(kind, body), read)
        except _NO_SUCH_ROW as error:
            raise _Damage(f"transition {seq} cannot be read ({type(error).__name__}: {error})") from None
        yield at, seq, transition


@contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One consistent look, also at a journal that is being written to."""
    path = run_dir / JOURNAL
    if not path.exists():
        raise ConfigError(
            f"there is no {path}: the run keeps no journal (journal=off), or is not there. Check the path."
        )
    try:
        with _damage_named(path), closing(_open_to_read(path)) as connection:
            connection.execute("BEGIN")
            yield connection
    except _Damage as error:
        raise ConfigError(f"{path} is damaged: {error}. Launch with resume={run_dir} to recover the run.") from None


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """What SQLite says of a file that it cannot read."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _NOT_DAMAGE:
            raise InfraError.wrap(f"cannot read {path}: {error}", error) from error
        raise _Damage(f"SQLite says: {error}") from None


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
    _sync_directory(path.parent)
    return aside


def _create(path: Path, whole: _Whole) -> None:
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
    with closing(_open_to_write(new)) as connection:
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
        connection.executemany("INSERT INTO meta VALUES (?, ?)", [*meta.items(), ("crc", str(_meta_crc(meta)))])
        row = _snapshot_row(whole.seq, whole.crc, whole.state.dump())
        connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)
        connection.execute("COMMIT")
    # Leftovers of a journal that somebody deleted: SQLite would take them for this one's.
    for leftover in (Path(f"{path}-wal"), Path(f"{path}-shm")):
        leftover.unlink(missing_ok=True)
    os.rename(new, path)
    _sync_directory(path.parent)


def _open_to_write(path: Path) -> sqlite3.Connection:
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


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, so that a damaged file stays as it was found."""
    uri = f"file:{quote(str(path))}?mode=ro"
    return sqlite3.connect(uri, timeout=BUSY_WAIT_S, isolation_level=None, uri=True)


def _lock(path: Path) -> int:
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
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            raise disk_error(path, error) from error
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor


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


def _row_crc(before: int, seq: int, at: float, kind: str, body: str) -> int:
    return zlib.crc32(f"{seq}\n{at!r}\n{kind}\n{body}".encode(), before)


def _snapshot_row(seq: int, chain: int, state: Mapping[str, Any]) -> tuple[int, int, str, int]:
    body = json.dumps(state, separators=(",", ":"))
    return seq, chain, body, zlib.crc32(f"{seq}\n{chain}\n{body}".encode())


def _meta_crc(meta: Mapping[str, str]) -> int:
    return zlib.crc32("\n".join(f"{key}={meta[key]}" for key in sorted(meta)).encode())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
