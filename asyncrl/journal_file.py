"""What a journal's file says: its format, its checksums, the state that is rebuilt from it. Nothing changes on disk.

meta         which asyncrl wrote it, for which run
transitions  seq, at (wall clock), kind, body (JSON array, see `transitions`), crc: of the row and the crc before it
snapshots    the state behind transition `seq`: the first one, and the newest, from which the state is rebuilt
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from asyncrl import __version__
from asyncrl.failures import BugError, ConfigError, InfraError
from asyncrl.history import surviving_marks
from asyncrl.ledger import Ledger
from asyncrl.ports import QueueSnapshot
from asyncrl.recovery import QueueState
from asyncrl.transitions import Reading, Row, Transition, from_row
from asyncrl.wal import survey

SCHEMA_VERSION = 3
BUSY_WAIT_S = 10.0

_NOT_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
NO_SUCH_ROW = (BugError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading something raises that is not what was written."""


class Damage(Exception):  # it is caught here, and becomes a text
    """What is wrong with the file, in words."""


class Whole(NamedTuple):
    """A journal that can be used."""

    seq: int
    crc: int
    state: QueueState
    identity: Mapping[str, Any]
    marks: frozenset[int]
    """Transitions at which a checkpoint may go on from here: those of checkpoints of the surviving line."""
    told: str
    """A torn tail, in words."""
    began_with: QueueSnapshot | None = None
    """The books of a checkpoint that was written without a journal: what this one began with, if it did."""

    def holds(self, checkpoint: QueueSnapshot) -> bool:
        """A run can go on from that checkpoint and this journal together.

        Raises:
            BugError: the checkpoint's books do not balance.
        """
        if checkpoint.seq:
            return checkpoint.seq in self.marks
        # No number tells such checkpoints apart, but what they hold does.
        restored = Ledger.restore(checkpoint, self.state.ledger.prompts_per_epoch)
        return self.began_with == restored.snapshot(checkpoint.version)


class Meta(NamedTuple):
    num_prompts: int
    identity: Mapping[str, Any]


def examine(path: Path) -> Whole:
    """Rebuild the state, changing nothing on disk. Raises `Damage`, `ConfigError`, `InfraError`."""
    try:
        log = path.with_name(f"{path.name}-wal")
        found = survey(log.read_bytes() if log.exists() else b"")
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise Damage(f"it cannot be read ({error.strerror})") from None
    if empty:
        raise Damage("it is empty")
    if found.bad_header:
        raise Damage(f"the header of {log.name} is damaged")
    with damage_named(path), closing(open_to_read(path)) as connection:
        [checked] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if checked != "ok":
            raise Damage(f"SQLite finds: {checked}")
        whole = rebuild(connection, read_meta(connection))
    if found.lost:
        raise Damage(f"{log.name} has a bad frame, and {found.lost} commits behind it that had been acknowledged")
    if found.torn_frames or found.torn_bytes:
        told = (
            f"the journal has a torn tail of {found.torn_frames} pages behind transition {whole.seq}. If the last "
            "write was cut off by a crash, nobody had been told that it was on disk; if its pages have gone bad since, "
            "what it said is lost, and is done again"
        )
        return whole._replace(told=told)
    return whole


def read_meta(connection: sqlite3.Connection) -> Meta:
    """Raises `Damage`, and `ConfigError` if another asyncrl wrote it."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    try:
        if int(meta.pop("crc")) != meta_crc(meta):
            raise Damage("the checksum of its meta table is wrong")
        schema, written_by = int(meta["schema"]), meta["written_by"]
        if schema == SCHEMA_VERSION:
            return Meta(int(meta["num_prompts"]), json.loads(meta["identity"]))
    except NO_SUCH_ROW as error:
        raise Damage(f"its meta table cannot be read ({type(error).__name__}: {error})") from None
    raise ConfigError(
        f"the journal has schema version {schema} and was written by asyncrl {written_by}; this one, {__version__}, "
        f"reads version {SCHEMA_VERSION}: it cannot know what happened to the samples. Use asyncrl {written_by}, or "
        "start anew with another run_dir and resume=none."
    )


def rebuild(connection: sqlite3.Connection, meta: Meta) -> Whole:
    """Newest snapshot and what follows. Raises `Damage`."""
    read = Reading(meta.num_prompts)
    seq, crc, state = read_snapshot(connection, "DESC", read)
    number = 0
    for _, number, transition in transitions_behind(connection, seq, crc, read):
        try:
            state.apply(transition)
        except BugError as error:
            raise Damage(f"transition {number} cannot have happened: {error.message}") from None
    if number:
        seq, crc = number, connection.execute("SELECT crc FROM transitions WHERE seq = ?", (number,)).fetchone()[0]
    origin = connection.execute("SELECT min(seq) FROM snapshots").fetchone()[0]
    marks = frozenset({*_read_marks(connection, read), origin})
    return Whole(seq, crc, state, meta.identity, marks, "", _began_with(connection, read))


def _began_with(connection: sqlite3.Connection, read: Reading) -> QueueSnapshot | None:
    """See `Whole.began_with`. None, too, if it is damaged: few runs need it."""
    with suppress(Damage):
        seq, _, begin = read_snapshot(connection, "ASC", read)
        if seq == 0 and not begin.is_new:
            return begin.ledger.snapshot(begin.version)
    return None


def _read_marks(connection: sqlite3.Connection, read: Reading) -> Collection[int]:
    """Numbers of the transitions that mark checkpoints of the surviving line. Raises `Damage`."""
    rows = connection.execute("SELECT seq, kind, body FROM transitions WHERE kind IN ('mark', 'rewind') ORDER BY seq")
    try:
        return surviving_marks([(seq, from_row(Row(kind, body), read)) for seq, kind, body in rows]).values()
    except NO_SUCH_ROW as error:
        raise Damage(f"its marks cannot be read ({type(error).__name__}: {error})") from None


def read_snapshot(connection: sqlite3.Connection, order: str, read: Reading) -> tuple[int, int, QueueState]:
    """The first (`ASC`) or the newest one (`DESC`): its transition, the checksum there, and the state."""
    row = connection.execute(f"SELECT seq, chain, body, crc FROM snapshots ORDER BY seq {order} LIMIT 1").fetchone()
    try:
        seq, chain, body, crc = row
        if crc != zlib.crc32(f"{seq}\n{chain}\n{body}".encode()):
            raise Damage(f"the checksum of the snapshot at transition {seq} is wrong")
        return seq, chain, QueueState.load(json.loads(body), read, keeps_payloads=True)
    except NO_SUCH_ROW as error:
        raise Damage(f"its snapshot cannot be read ({type(error).__name__}: {error})") from None


def transitions_behind(
    connection: sqlite3.Connection, seq: int, crc: int, read: Reading
) -> Iterator[tuple[float, int, Transition]]:
    """Those behind `seq`, where the checksum was `crc`: time, number, value. Raises `Damage`."""
    rows = connection.execute("SELECT seq, at, kind, body, crc FROM transitions WHERE seq > ? ORDER BY seq", (seq,))
    for number, at, kind, body, written in rows:
        seq += 1
        if number != seq:
            raise Damage(f"transition {seq} is missing")
        try:
            crc = row_crc(crc, number, at, kind, body)
            if crc != written:
                raise Damage(f"the checksum of transition {seq} is wrong")
            transition = from_row(Row(kind, body), read)
        except NO_SUCH_ROW as error:
            raise Damage(f"transition {seq} cannot be read ({type(error).__name__}: {error})") from None
        yield at, seq, transition


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """What SQLite says of a file that it cannot read."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _NOT_DAMAGE:
            raise InfraError.wrap(f"cannot read {path}: {error}", error) from error
        raise Damage(f"SQLite says: {error}") from None


def open_to_read(path: Path) -> sqlite3.Connection:
    """Read-only, so that a damaged file stays as it was found."""
    uri = f"file:{quote(str(path))}?mode=ro"
    return sqlite3.connect(uri, timeout=BUSY_WAIT_S, isolation_level=None, uri=True)


def row_crc(before: int, seq: int, at: float, kind: str, body: str) -> int:
    """Of a row, `before` being that of the row before it."""
    return zlib.crc32(f"{seq}\n{at!r}\n{kind}\n{body}".encode(), before)


def snapshot_row(seq: int, chain: int, state: Mapping[str, Any]) -> tuple[int, int, str, int]:
    """`chain`: checksum of the row `seq`."""
    body = json.dumps(state, separators=(",", ":"))
    return seq, chain, body, zlib.crc32(f"{seq}\n{chain}\n{body}".encode())


def meta_crc(meta: Mapping[str, str]) -> int:
    """Of everything in the table but itself."""
    return zlib.crc32("\n".join(f"{key}={meta[key]}" for key in sorted(meta)).encode())
