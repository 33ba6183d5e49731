"""The journal's file format and its readers, which resume a run or inspect a live one. Read-only.

meta         the asyncrl version and the run that wrote it
operations   seq, at (wall clock), kind, body (JSON array, see `asyncrl.queue.operation_rows`), crc (of the row and the
             previous crc)
snapshots    the state after operation `seq`: the first one, with which the journal begins, later ones with which it may
             begin one day, and the newest, from which the state is rebuilt

Operations up to the first snapshot are not part of the journal; they are about to be deleted.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from asyncrl import __version__
from asyncrl.core.failures import BugError, ConfigError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.types import DropReason, SampleId
from asyncrl.queue.core import Operation, apply
from asyncrl.queue.operation_rows import JournalRow, from_row, surviving_marks, trained_since
from asyncrl.queue.operations import CloseQueue, CommitSamples, DropSamples, LeaseGranted, OfferSamples, PermitsGranted
from asyncrl.queue.state import QueueState
from asyncrl.queue.turn_log import log_incarnation
from asyncrl.queue.wal_survey import survey
from asyncrl.storage.checkpoint_manifest import LineageHistory
from asyncrl.storage.run_dir import JOURNAL, JOURNAL_FILES, SAMPLES
from asyncrl.storage.segments import segment_incarnation

SCHEMA_VERSION = 5
TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE operations (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, "
    "crc INTEGER NOT NULL)",
    "CREATE TABLE snapshots (seq INTEGER PRIMARY KEY, chain INTEGER NOT NULL, body TEXT NOT NULL, "
    "crc INTEGER NOT NULL)",
)
BUSY_WAIT_S = 10.0
MAX_INSPECTED_BYTES = 1 << 30
"""Largest journal that commands read to inspect a run: that of 6 million samples without a checkpoint, or of any number
with checkpoints. A launch that resumes the run has no such limit."""
MAX_INSPECTED_ROW_BYTES = 64 << 20
"""Largest row that these commands read: a snapshot of 600,000 samples without a checkpoint."""
MAX_LOG_BYTES = 1 << 30
"""Largest write-ahead log, which is read as a whole. SQLite begins to overwrite it after 4 MB, unless something reads
the journal at the same moment."""

_NOT_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
UNREADABLE = (BugError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors raised by parsing damaged bytes."""


class JournalDamage(Exception):  # caught in this package and converted to a message
    """The file is damaged; the message describes how."""


class RebuiltJournal(NamedTuple):
    """A usable journal and the state that was rebuilt from it."""

    seq: int
    crc: int
    state: QueueState
    identity: Mapping[str, Any]
    first: int
    """The last operation before the journal's beginning."""
    marks: Mapping[int, int]
    """By step, the operation at which each checkpoint of the surviving lineages began, if the journal has it."""
    notice: str = ""
    """Message about a torn tail."""
    begin: QueueState | None = None
    """The state at the journal's beginning; None: it cannot be read."""

    def contains(self, checkpoint: QueueSnapshot) -> bool:
        """Whether a run can resume from that checkpoint and this journal together.

        Raises:
            BugError: the checkpoint's counts are inconsistent.
        """
        if checkpoint.seq and checkpoint.seq in self.marks.values():
            return True
        if self.begin is None or not self.begin.is_of_checkpoint or checkpoint.seq != self.first:
            return False
        # A checkpoint that was written without a journal has no operation number, so its counts identify it.
        restored = QueueState.begin(self.state.prompts_per_epoch, checkpoint, keeps_payloads=True)
        return checkpoint.seq > 0 or self.begin.snapshot() == restored.snapshot()


def examine(path: Path) -> RebuiltJournal:
    """Rebuild the state of a run that has ended. Raises `JournalDamage`, `ConfigError`, `InfraError`."""
    try:
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and (size := log.stat().st_size) > MAX_LOG_BYTES:
            raise JournalDamage(f"{log.name} has {size} bytes, and no run writes more than {MAX_LOG_BYTES}")
        wal = survey(log.read_bytes() if log.is_file() else b"")
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise JournalDamage(f"it cannot be read ({error.strerror})") from None
    if empty:
        raise JournalDamage("it is empty")
    if wal.bad_header:
        raise JournalDamage(f"the header of {log.name} is damaged")
    with _sqlite_errors(path), closing(_open_read_only(path)) as connection:
        [checked] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if checked != "ok":
            raise JournalDamage(f"SQLite finds: {checked}")
        rebuilt = _rebuild(connection)
    if wal.lost:
        raise JournalDamage(f"{log.name} has a bad frame, and {wal.lost} acknowledged commits after it")
    if wal.torn_frames or wal.torn_bytes:
        notice = (
            f"the journal has a torn tail of {wal.torn_frames} pages after operation {rebuilt.seq}. If the last write "
            "was cut off by a crash, it had not been acknowledged; if its pages were damaged later, their operations "
            "are lost and are repeated"
        )
        return rebuilt._replace(notice=notice)
    return rebuilt


def _read_meta(connection: sqlite3.Connection) -> tuple[int, Mapping[str, Any]]:
    """Return the number of prompts and the identity. Raises `JournalDamage`, and `ConfigError` if the journal
    has another schema version."""
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        if int(meta.pop("crc")) != meta_crc(meta):
            raise JournalDamage("the checksum of its meta table is wrong")
        schema, written_by = int(meta["schema"]), meta["written_by"]
        if schema == SCHEMA_VERSION:
            return int(meta["num_prompts"]), json.loads(meta["identity"])
    except UNREADABLE as error:
        raise JournalDamage(f"its meta table cannot be read ({type(error).__name__}: {error})") from None
    raise ConfigError(
        f"the journal has schema version {schema} and was written by asyncrl {written_by}; this one, {__version__}, "
        f"reads version {SCHEMA_VERSION}: it cannot know what happened to the samples. Use asyncrl {written_by}, or "
        "start anew with another run_dir and resume=none."
    )


def _rebuild(connection: sqlite3.Connection) -> RebuiltJournal:
    """Rebuild the newest state, and read what a run needs to resume from it. Raises as `_read_meta`."""
    num_prompts, identity = _read_meta(connection)
    seq, crc, state = _newest_state(connection, num_prompts)
    [first] = connection.execute("SELECT min(seq) FROM snapshots").fetchone()
    rows = _rows_of(connection, "MarkCheckpoint", "RewindTraining")
    try:
        marks = surviving_marks((number, from_row(row, num_prompts)) for number, row in rows)
    except UNREADABLE as error:
        raise JournalDamage(f"its marks cannot be read ({type(error).__name__}: {error})") from None
    begin = None
    with suppress(JournalDamage):  # a run that continues from its newest state does not need this one
        begin = read_snapshot(connection, "ASC", num_prompts)[2]
    return RebuiltJournal(seq, crc, state, identity, first, marks, begin=begin)


def read_trained_since(path: Path, step: int, num_prompts: int) -> tuple[SampleId, ...] | None:
    """Return `operation_rows.trained_since` over the journal of this process's own run. Blocking.

    This does not verify checksums, because the run's state was built from these operations. Raises `JournalDamage`,
    `InfraError`, or one of `UNREADABLE`.
    """
    with _sqlite_errors(path), closing(_open_read_only(path)) as connection:
        connection.execute("BEGIN")
        rows = _rows_of(connection, "MarkCheckpoint", "RewindTraining", "CommitSamples", "DropSamples")
        operations = (from_row(row, num_prompts) for _, row in rows)
        begin = read_snapshot(connection, "ASC", num_prompts)[2]
        return trained_since(step, operations, from_start=begin.is_new)


def _rows_of(connection: sqlite3.Connection, *kinds: str) -> Iterator[tuple[int, JournalRow]]:
    """Yield the journal's operations of these kinds in order."""
    rows = connection.execute(
        f"SELECT seq, kind, body FROM operations WHERE kind IN ({', '.join('?' * len(kinds))}) "
        "AND seq > (SELECT min(seq) FROM snapshots) ORDER BY seq",
        kinds,
    )
    return ((seq, JournalRow(kind, body)) for seq, kind, body in rows)


def _impossible(number: int, error: Exception) -> JournalDamage:
    return JournalDamage(f"operation {number} cannot have happened: {getattr(error, 'message', repr(error))}")


def _newest_state(connection: sqlite3.Connection, num_prompts: int) -> tuple[int, int, QueueState]:
    """Rebuild the state from the newest snapshot and the operations after it; return the last operation's number and
    checksum, and the state. Raises `JournalDamage`."""
    seq, crc, state = read_snapshot(connection, "DESC", num_prompts)
    number = 0
    for _, number, operation in _operations_after(connection, seq, crc, num_prompts):
        try:
            apply(operation, state)
        except UNREADABLE as error:
            raise _impossible(number, error) from None
    if number:
        seq, crc = number, connection.execute("SELECT crc FROM operations WHERE seq = ?", (number,)).fetchone()[0]
    return seq, crc, state


def read_snapshot(connection: sqlite3.Connection, order: str, num_prompts: int) -> tuple[int, int, QueueState]:
    """Read the first (`ASC`) or the newest snapshot (`DESC`): its operation, the checksum there, and the state.

    Raises:
        JournalDamage: it cannot be read.
    """
    row = connection.execute(f"SELECT seq, chain, body, crc FROM snapshots ORDER BY seq {order} LIMIT 1").fetchone()
    try:
        seq, chain, body, crc = row
        if crc != zlib.crc32(f"{seq}\n{chain}\n{body}".encode()):
            raise JournalDamage(f"the checksum of the snapshot at operation {seq} is wrong")
        return seq, chain, QueueState.load(json.loads(body), num_prompts, keeps_payloads=True)
    except UNREADABLE as error:
        raise JournalDamage(f"its snapshot cannot be read ({type(error).__name__}: {error})") from None


def _operations_after(
    connection: sqlite3.Connection, seq: int, crc: int, num_prompts: int
) -> Iterator[tuple[float, int, Operation]]:
    """Yield the operations after `seq`, where the checksum was `crc`: time, number, value. Raises `JournalDamage`."""
    rows = connection.execute("SELECT seq, at, kind, body, crc FROM operations WHERE seq > ? ORDER BY seq", (seq,))
    for number, at, kind, body, written in rows:
        seq += 1
        if number != seq:
            raise JournalDamage(f"operation {seq} is missing")
        try:
            crc = row_crc(crc, number, at, kind, body)
            if crc != written:
                raise JournalDamage(f"the checksum of operation {seq} is wrong")
            at, operation = float(at), from_row(JournalRow(kind, body), num_prompts)
        except UNREADABLE as error:
            raise JournalDamage(f"operation {seq} cannot be read ({type(error).__name__}: {error})") from None
        yield at, seq, operation


@contextmanager
def _sqlite_errors(path: Path, max_row_bytes: int | None = None) -> Iterator[None]:
    """Convert SQLite's errors about an unreadable file to `JournalDamage` or `InfraError`, and about a row above the
    limit of an inspection, `max_row_bytes`, to `ConfigError`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _NOT_DAMAGE:
            raise InfraError.wrap(f"cannot read {path}: {error}", error) from error
        if code == sqlite3.SQLITE_TOOBIG and max_row_bytes is not None:
            raise _too_large(path, f"a row of more than {max_row_bytes} bytes, and no larger one is read") from None
        raise JournalDamage(f"SQLite says: {error}") from None


def _open_read_only(path: Path, max_row_bytes: int | None = None) -> sqlite3.Connection:
    """Open the file read-only, so that a damaged one stays unchanged.

    Args:
        max_row_bytes: size of a row from which on SQLite refuses it; None: SQLite's own limit, 10^9 bytes.

    Raises:
        JournalDamage: a rollback journal lies beside it. In WAL mode there is none, and SQLite would apply it and then
            delete the file that it names. Or one of its files is not a regular one. Or it has something else than
            `TABLES`: a query of a view may never end, and a trigger would run with each commit.
    """
    for file in JOURNAL_FILES:
        if (there := path.with_name(file)).exists() and not there.is_file():  # to open a pipe could block forever
            raise JournalDamage(f"{file} is not a regular file")
    if os.path.lexists(rollback := f"{path}-journal"):
        raise JournalDamage(f"{rollback} is not a file of asyncrl, and SQLite would change {path.name} by it")
    uri = f"file:{quote(str(path))}?mode=ro"
    connection = sqlite3.connect(uri, timeout=BUSY_WAIT_S, isolation_level=None, uri=True)
    if max_row_bytes is not None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max_row_bytes)
    try:
        declared = [sql for [sql] in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
        if sorted(declared) != sorted(TABLES):
            raise JournalDamage("it does not have the tables of a journal, or has more than these")
    except BaseException:
        connection.close()
        raise
    return connection


def row_crc(before: int, seq: int, at: float, kind: str, body: str) -> int:
    """Return the checksum of a row; `before` is that of the previous row."""
    return zlib.crc32(f"{seq}\n{at!r}\n{kind}\n{body}".encode(), before)


def snapshot_row(seq: int, chain: int, state: Mapping[str, Any]) -> tuple[int, int, str, int]:
    """Return the row of a snapshot after operation `seq`, whose row has the checksum `chain`."""
    body = json.dumps(state, separators=(",", ":"))
    return seq, chain, body, zlib.crc32(f"{seq}\n{chain}\n{body}".encode())


def meta_crc(meta: Mapping[str, str]) -> int:
    """Return the checksum of the table's other entries."""
    return zlib.crc32("\n".join(f"{key}={meta[key]}" for key in sorted(meta)).encode())


# ------------------------------------------------------------------------------------------------ resume


@dataclass(frozen=True, slots=True)
class JournalHead:
    """The information in the journal of an ended run that is needed to resume the run."""

    seq: int
    history: LineageHistory
    identity: Mapping[str, Any]
    num_prompts: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    """The reason why the journal cannot be used; the other fields are then incomplete."""
    from_start: bool = True
    """Whether training can go back to the initial model, because the journal has all operations of the run."""


def read_head(run_dir: Path) -> JournalHead | None:
    """Read the journal of a run that has ended; None: it has none. Blocking.

    Raises:
        ConfigError: it has another schema version.
        InfraError: another process has locked it.
    """
    path = run_dir / JOURNAL
    if not path.exists():
        return None
    incarnations = {"rollouter": incarnation_of_files(run_dir)}
    try:
        rebuilt = examine(path)
    except JournalDamage as error:
        return JournalHead(0, LineageHistory(), {}, 0, incarnations, damage=str(error))
    state = rebuilt.state
    incarnations |= state.incarnations
    from_start = rebuilt.begin is not None and rebuilt.begin.is_new
    return JournalHead(
        rebuilt.seq, state.history, rebuilt.identity, state.prompts_per_epoch, incarnations, from_start=from_start
    )


def incarnation_of_files(run_dir: Path) -> int:
    """Return the last incarnation of the Rollouter that wrote into `samples/`; 0: none did.

    The next incarnation needs new file names, even if the journal has no record of the last one."""
    directory = run_dir / SAMPLES
    names = os.listdir(directory) if directory.is_dir() else []
    return max((segment_incarnation(name) or log_incarnation(name) or 0 for name in names), default=0)


# ------------------------------------------------------------------------------------------------ inspection


class SampleRecord(NamedTuple):
    """One sample's history so far. Times are wall clock (`time.time`) of the last event of each kind; 0: there was
    none."""

    sample_id: SampleId
    state: str
    """`running`, `ready`, `leased`, `trained`, `dropped`, `outstanding`: waits to be fed again."""
    reason: str = ""
    """Reason of a drop; otherwise empty."""
    fed_at: float = 0.0
    ready_at: float = 0.0
    leased_at: float = 0.0
    ended_at: float = 0.0


class SampleHistories:
    """Collects every sample's record from all operations of a run in order. `begin` is the state before the first."""

    def __init__(self, begin: QueueState) -> None:
        self._state = begin
        self._events: dict[SampleId, dict[str, Any]] = {}
        """Fields of the records."""

    def add(self, at: float, operation: Operation) -> None:
        """Add the next operation. Raises `BugError` if it is illegal in the current state."""
        ending = self._state.live() if isinstance(operation, CloseQueue) else []
        apply(operation, self._state)
        match operation:
            case PermitsGranted(sample_ids=sample_ids):
                self._note(sample_ids, fed_at=at)
            case OfferSamples(samples=samples):
                self._note([sample.meta.sample_id for sample in samples], ready_at=at)
            case LeaseGranted(sample_ids=sample_ids):
                self._note(sample_ids, leased_at=at)
            case CommitSamples(sample_ids=sample_ids):
                self._note(sample_ids, ended_at=at, reason="")
            case DropSamples(sample_ids=sample_ids, reason=reason):
                self._note(sample_ids, ended_at=at, reason=str(reason))
            case CloseQueue():
                self._note(ending, ended_at=at, reason=str(DropReason.SHUTDOWN))

    def _note(self, sample_ids: Iterable[SampleId], **events: Any) -> None:
        for sample_id in sample_ids:
            self._events.setdefault(sample_id, {}).update(events)

    def records(self) -> Iterator[SampleRecord]:
        """Yield, by index, the records of samples that these operations fed or that were outstanding at `begin`."""
        state = self._state
        known = self._events.keys() | set(state.snapshot().outstanding)
        for sample_id in sorted(known, key=lambda one: one.index):
            events = self._events.get(sample_id, {})
            name = state.name_of_state(sample_id).partition(" ")[0].lower()
            if name == "waiting":
                name = "outstanding"
            elif not state.is_live(sample_id):
                yield SampleRecord(sample_id, "dropped" if events.get("reason") else "trained", **events)
                continue
            yield SampleRecord(sample_id, name, **events)._replace(reason="", ended_at=0.0)


def read_queue_state(run_dir: Path) -> QueueState:
    """Rebuild the state on disk of a live or a dead run. Blocking.

    It costs the newest snapshot and the operations after it, not the whole journal: a time proportional to the samples
    whose end no checkpoint covers yet, plus about half a second. The length of the run does not matter.

    Raises:
        ConfigError: there is no journal, it is damaged, or it has another schema version.
        InfraError: it is locked, or the disk is full.
    """
    return _read_newest_state(run_dir)[1]


class JournalCounts(NamedTuple):
    """The counts of a run after its last operation on disk."""

    seq: int
    """Number of that operation."""
    samples: SampleCounts
    trained_tokens: int
    """Tokens that the steps of the surviving model have trained, counted once per pass."""


def read_counts(run_dir: Path, *, is_own: bool = False) -> JournalCounts:
    """Return the counts of a live or a dead run. Blocking. Costs and raises the same as `read_queue_state`.

    `is_own`: this process's own run has written the journal, which may then have any size.
    """
    seq, state = _read_newest_state(run_dir, is_own=is_own)
    return JournalCounts(seq, state.counts(), state.trained_tokens)


def _read_newest_state(run_dir: Path, *, is_own: bool = False) -> tuple[int, QueueState]:
    with _consistent_view(run_dir, is_own=is_own) as connection:
        num_prompts, _ = _read_meta(connection)
        seq, _, state = _newest_state(connection, num_prompts)
        return seq, state


def read_beginning(run_dir: Path) -> QueueState:
    """Return the state with which the journal begins: that of a new run, or of a checkpoint, or a later one that
    contains everything that the journal has forgotten. Blocking. Raises as `read_queue_state` does."""
    with _consistent_view(run_dir) as connection:
        return _read_history(connection)[0]


def read_operations(run_dir: Path) -> Iterator[tuple[float, Operation]]:
    """Yield every operation in the journal with its time, and verify the checksums. Blocking. Raises as
    `read_queue_state` does."""
    with _consistent_view(run_dir) as connection:
        for at, _, operation in _read_history(connection)[1]:
            yield at, operation


def read_samples(run_dir: Path) -> Iterator[SampleRecord]:
    """Yield every sample in the journal, by index, with its last times. Samples that ended before it begins are left
    out. Blocking.

    This reads the whole journal and verifies every checksum. Raises as `read_queue_state` does.
    """
    with _consistent_view(run_dir) as connection:
        begin, operations = _read_history(connection)
        histories = SampleHistories(begin)
        for at, number, operation in operations:
            try:
                histories.add(at, operation)
            except UNREADABLE as error:
                raise _impossible(number, error) from None
    yield from histories.records()


def _read_history(connection: sqlite3.Connection) -> tuple[QueueState, Iterator[tuple[float, int, Operation]]]:
    """Return the state that the journal began with, and all operations after it."""
    num_prompts, _ = _read_meta(connection)
    seq, crc, begin = read_snapshot(connection, "ASC", num_prompts)
    return begin, _operations_after(connection, seq, crc, num_prompts)


@contextmanager
def _consistent_view(run_dir: Path, *, is_own: bool = False) -> Iterator[sqlite3.Connection]:
    """Open one read transaction, which is consistent even while the journal is being written. The limits of an
    inspection do not apply to the journal of this process's own run."""
    path = run_dir / JOURNAL
    if not path.exists():
        raise ConfigError(
            f"there is no {path}: the run has no journal (journal=off), or does not exist. Check the path."
        )
    size = sum(file.stat().st_size for file in map(path.with_name, JOURNAL_FILES) if file.exists())
    if size > MAX_INSPECTED_BYTES and not is_own:
        raise _too_large(path, f"{size} bytes with its log, and at most {MAX_INSPECTED_BYTES} are read")
    max_row_bytes = None if is_own else MAX_INSPECTED_ROW_BYTES
    try:
        with _sqlite_errors(path, max_row_bytes), closing(_open_read_only(path, max_row_bytes)) as connection:
            connection.execute("BEGIN")
            yield connection
    except JournalDamage as error:
        raise ConfigError(f"{path} is damaged: {error}. Launch with resume={run_dir} to recover the run.") from None


def _too_large(path: Path, size: str) -> ConfigError:
    return ConfigError(
        f"{path} has {size} to inspect a run, so its samples are not shown. A run with checkpoints (trainer.save_freq) "
        f"does not write that much; resume={path.parent} continues it without this limit."
    )
