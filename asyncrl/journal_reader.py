"""What others may know of a journal: of a run that has ended, or of a live one. Blocking; nothing is changed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.failures import BugError, ConfigError
from asyncrl.journal_file import (
    Damage,
    damage_named,
    examine,
    open_to_read,
    read_meta,
    read_snapshot,
    rebuild,
    transitions_behind,
)
from asyncrl.lineage import Line
from asyncrl.lives import Lives, SampleRecord
from asyncrl.ports import Books
from asyncrl.run_dir import JOURNAL, SAMPLES
from asyncrl.segments import segment_incarnation
from asyncrl.transitions import Reading
from asyncrl.turn_files import log_incarnation


@dataclass(frozen=True, slots=True)
class JournalHead:
    """What a run that has ended says of how to go on."""

    seq: int
    line: Line
    identity: Mapping[str, Any]
    num_prompts: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    """Why it cannot be used, in words; the rest is then what could be found out."""


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
        whole = examine(path)
    except Damage as error:
        return JournalHead(0, Line(), {}, 0, {"rollouter": incarnation_of_files(run_dir)}, damage=str(error))
    state = whole.state
    incarnations = {"rollouter": incarnation_of_files(run_dir), **state.incarnations}
    return JournalHead(whole.seq, state.line, whole.identity, state.ledger.prompts_per_epoch, incarnations)


def incarnation_of_files(run_dir: Path) -> int:
    """The last incarnation of the Rollouter that wrote into `samples/`, 0 if none did: whoever comes next needs file
    names of its own, even if the journal knows nothing of it."""
    directory = run_dir / SAMPLES
    names = os.listdir(directory) if directory.is_dir() else []
    return max((segment_incarnation(name) or log_incarnation(name) or 0 for name in names), default=0)


def read_books(run_dir: Path) -> Books:
    """The books as they are on disk, of a live or a dead run. Blocking; changes nothing.

    Raises:
        ConfigError: there is no journal, it is damaged, or another asyncrl wrote it.
    """
    with _reading(run_dir) as connection:
        return rebuild(connection, read_meta(connection)).state.books()


def read_samples(run_dir: Path) -> Iterator[SampleRecord]:
    """Every sample that the journal knows of, by index, with its last times. Blocking; changes nothing.

    All of the journal is read, and every checksum compared.

    Raises:
        ConfigError: there is no journal, it is damaged, or another asyncrl wrote it.
    """
    with _reading(run_dir) as connection:
        meta = read_meta(connection)
        read = Reading(meta.num_prompts)
        seq, crc, state = read_snapshot(connection, "ASC", read)
        lives = Lives(state)
        for at, _, transition in transitions_behind(connection, seq, crc, read):
            try:
                lives.see(at, transition)
            except BugError as error:
                raise Damage(error.message) from None
    yield from lives.records()


@contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One consistent look, also at a journal that is being written to."""
    path = run_dir / JOURNAL
    if not path.exists():
        raise ConfigError(
            f"there is no {path}: the run keeps no journal (journal=off), or is not there. Check the path."
        )
    try:
        with damage_named(path), closing(open_to_read(path)) as connection:
            connection.execute("BEGIN")
            yield connection
    except Damage as error:
        raise ConfigError(f"{path} is damaged: {error}. Launch with resume={run_dir} to recover the run.") from None
