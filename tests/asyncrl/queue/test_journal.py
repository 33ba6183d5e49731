"""The journal on real files: acknowledged operations survive kills; torn, damaged and full files are reported."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import AsyncRLError, BugError, ConfigError, DiskFullError, InfraError
from asyncrl.core.ports import QueuedSample, QueueSnapshot, SampleCounts
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import DropReason, SampleId
from asyncrl.queue import journal_reader
from asyncrl.queue.core import Operation, apply
from asyncrl.queue.journal import Journal
from asyncrl.queue.journal_reader import (
    MAX_INSPECTED_BYTES,
    MAX_LOG_BYTES,
    JournalHead,
    meta_crc,
    read_counts,
    read_head,
    read_operations,
    read_queue_state,
    read_samples,
)
from asyncrl.queue.operations import (
    AttachPart,
    CommitSamples,
    LeaseGranted,
    MarkCheckpoint,
    OfferSamples,
    PermitsGranted,
    ReleaseLease,
    RewindTraining,
)
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.queue.state import QueueState
from asyncrl.storage.checkpoint_manifest import LineageHistory
from asyncrl.storage.sample_bytes import FileRef
from asyncrl.storage.segments import remove_segments
from tests.fakes.queues import end, fill, meta, payload, replay, train

PROMPTS = 7
OPTIONS = QueueOptions(PROMPTS, Pacing(samples_per_version=1000, staleness_threshold=0))


def open_journal(path: Path, restore: QueueSnapshot | None = None, *, continuing: bool = False) -> Journal:
    return Journal.open(path, num_prompts=PROMPTS, identity={"seed": 1}, restore=restore, continuing=continuing)


def operations_of(number: int) -> list[Operation]:
    """Return the operations of one sample in a batch of size 1."""
    sample_id = SampleId((number - 1) // PROMPTS, number)
    queued = QueuedSample(meta(sample_id), FileRef("1-1.safetensors", number))
    ids = (sample_id,)
    return [
        PermitsGranted(f"ask {number}", ids),
        OfferSamples((queued,)),
        LeaseGranted("", number, ids, False),
        CommitSamples(number, ids),
        MarkCheckpoint(number),
    ]


HISTORY = [step for number in range(1, 41) for step in operations_of(number)]


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a process that died after its last acknowledged commit, with rows in the database and in its log."""
    root = tmp_path_factory.mktemp("journal")

    async def die() -> None:
        journal = open_journal(root / "journal.db")
        for number, step in enumerate(HISTORY, 1):
            await journal.flushed(journal.append(step))
            if number == 100:
                journal._connection.execute("PRAGMA wal_checkpoint(RESTART)")
        copy = root / "crashed"
        copy.mkdir()
        for name in ("journal.db", "journal.db-wal"):
            shutil.copy(root / name, copy / name)
        await end(journal)

    asyncio.run(die())
    return root / "crashed"


@pytest.fixture
def broken(crashed: Path, tmp_path: Path) -> Path:
    """A copy of `crashed` that a test may damage."""
    for path in crashed.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def fresh() -> QueueState:
    return QueueState.begin(PROMPTS, keeps_payloads=True)


@pytest.fixture(scope="module")
def prefixes() -> dict[str, int]:
    """Return every state of the history with its number of operations."""
    state = fresh()
    found = {json.dumps(state.dump()): 0}
    for number, step in enumerate(HISTORY, 1):
        apply(step, state)
        found[json.dumps(state.dump())] = number
    return found


def reopen(path: Path, restore: QueueSnapshot | None = None) -> tuple[QueueState, int, tuple[str, ...]]:
    journal = open_journal(path, restore)
    found = journal.state, journal.durable, journal.notices
    asyncio.run(end(journal))
    return found


def head_of(run_dir: Path) -> JournalHead:
    head = read_head(run_dir)
    assert head is not None
    return head


def test_a_reopened_journal_has_the_whole_state(crashed: Path, broken: Path) -> None:
    state, seq, notices = reopen(broken / "journal.db")
    assert (seq, notices) == (200, ())
    assert state.dump() == replay(fresh(), HISTORY).dump()
    assert state.counts() == SampleCounts(40, trained=40, dropped=dict.fromkeys(map(str, DropReason), 0))


async def test_a_queue_and_its_journal_agree(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    ids = (await queue.admit(10, timeout_s=0)).sample_ids
    for sample_id in ids[:8]:
        await queue.offer(meta(sample_id), payload(sample_id))
    lease = await queue.lease(4, trainer_version=0, timeout_s=0)
    await queue.commit(lease.lease_id, ids[:2])
    await queue.drop(ids[9], DropReason.OVERLONG)
    snapshot = await queue.mark(1)
    counts = (await queue.status()).counts
    # Other processes read the journal while it is being written.
    assert snapshot.seq == 13
    assert (await anyio.to_thread.run_sync(read_counts, tmp_path)).samples == counts
    head = await anyio.to_thread.run_sync(head_of, tmp_path)
    assert head == JournalHead(13, LineageHistory(), {"seed": 1}, PROMPTS, {"rollouter": 0})
    records = await anyio.to_thread.run_sync(lambda: list(read_samples(tmp_path)))
    assert [record.state for record in records] == [
        "trained", "trained", "leased", "leased", "ready", "ready", "ready", "ready", "running", "dropped",
    ]  # fmt: skip
    assert [record.reason for record in records] == [""] * 9 + ["overlong"]
    first = records[0]
    assert 0 < first.fed_at <= first.ready_at <= first.leased_at <= first.ended_at
    await end(journal)


async def test_commits_are_shared_and_acknowledged_in_order(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    done: list[int] = []

    async def one(step: Operation) -> None:
        seq = journal.append(step)
        await journal.flushed(seq)
        assert journal.durable >= seq
        done.append(seq)

    async with anyio.create_task_group() as tasks:
        for step in HISTORY:
            tasks.start_soon(one, step)
    assert sorted(done) == list(range(1, 201))
    num_frames = (tmp_path / "journal.db-wal").stat().st_size // 4120
    assert num_frames < 40, "two hundred calls share a few transactions"
    await end(journal)


async def test_rebuilding_begins_at_the_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.queue.journal.SNAPSHOT_EVERY_BYTES", 500)
    monkeypatch.setattr("asyncrl.queue.journal.BYTES_PER_ENTRY", 0)
    path = tmp_path / "journal.db"
    journal = open_journal(path)
    for step in HISTORY:
        apply(step, journal.state)
        seq = journal.append(step)
        journal.snapshot_if_due(len(journal.state.entries), journal.state.dump)
        await journal.flushed(seq)
    kept = [row[0] for row in journal._connection.execute("SELECT seq FROM snapshots ORDER BY seq")]
    assert kept[0] == 0
    assert kept[-1] > 150
    # Rows before the snapshot are not needed to continue.
    journal._connection.execute("UPDATE operations SET body = '?' WHERE seq = 3")
    before = journal.state.dump()
    await end(journal)
    again = open_journal(path)
    assert again.state.dump() == before
    assert again.durable == 200
    await end(again)
    with pytest.raises(ConfigError, match="the checksum of operation 3 is wrong"):
        await anyio.to_thread.run_sync(lambda: list(read_samples(tmp_path)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM operations WHERE seq <= ?", (kept[1],))
    counts = await anyio.to_thread.run_sync(read_counts, tmp_path)
    assert (counts.seq, counts.samples) == (200, again.state.counts()), "counts need no row before it, not even marks"


# ------------------------------------------------------------------------------------------------ long runs


@pytest.fixture
def frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.queue.journal.SNAPSHOT_EVERY_BYTES", 500)
    monkeypatch.setattr("asyncrl.queue.journal.BYTES_PER_ENTRY", 0)
    monkeypatch.setattr("asyncrl.queue.journal.FORGET_ROWS", 4)


async def train_steps(queue: LocalSampleQueue, steps: range, keep: int = 2) -> None:
    """Train on two samples per step, drop a third one, and write a checkpoint of every fifth step."""
    for step in steps:
        ids = await fill(queue, 3)
        await queue.drop(ids[1], DropReason.FILTERED)
        await train(queue, 2)
        if step % 5 == 0:
            await queue.mark(step)
            await queue.cover(step, max(5, step - 5 * (keep - 1)))


@pytest.mark.usefixtures("frequent_snapshots")
async def test_a_journal_forgets_what_no_kept_checkpoint_needs(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = open_journal(path)
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    sizes = []
    for begin in range(1, 301, 100):
        await train_steps(queue, range(begin, begin + 100))
        [rows] = journal._connection.execute("SELECT count(*) FROM operations").fetchone()
        sizes.append((path.stat().st_size, rows))
    assert sizes[2][0] == sizes[1][0], "the file does not grow"
    assert max(rows for _, rows in sizes) < 160, "of about 2,400 operations"
    counts = queue.state.counts()
    assert (counts.trained, counts.dropped["filtered"]) == (600, 300)
    before = journal.state.dump()
    await end(journal)

    assert (await anyio.to_thread.run_sync(read_counts, tmp_path)).samples == counts
    records = await anyio.to_thread.run_sync(lambda: list(read_samples(tmp_path)))
    assert 0 < len(records) < 100 and records[-1].sample_id.index == 900
    assert {record.state for record in records} == {"trained", "dropped"}
    journal = open_journal(path)
    assert journal.state.dump() == before
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    with pytest.raises(BugError, match="older than those of every checkpoint that was kept"):
        await queue.rewind(290, version=0, lineage=1, total_samples=None)
    await queue.rewind(295, version=0, lineage=1, total_samples=None)
    assert queue.state.counts().trained == 590
    assert len(queue.state.returned) == 10, "the samples of the last five steps are fed again"
    await end(journal)


@pytest.mark.usefixtures("frequent_snapshots")
async def test_a_run_killed_while_its_journal_forgets_has_the_same_state(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    forgotten = set()
    for step in range(1, 61):
        await train_steps(queue, range(step, step + 1), keep=1)
        copy = tmp_path / str(step)
        copy.mkdir()
        for name in ("journal.db", "journal.db-wal"):
            shutil.copy(tmp_path / name, copy / name)
        again = open_journal(copy / "journal.db")
        assert (again.durable, again.state.dump()) == (journal.durable, journal.state.dump())
        query = "SELECT min(seq) <= (SELECT min(seq) FROM snapshots) FROM operations"
        forgotten.add(again._connection.execute(query).fetchone()[0])
        last = step // 5 * 5
        assert len(await again.trained_since(last) or ()) == 2 * (step - last), "the newest checkpoint is reachable"
        await end(again)
    assert forgotten == {0, 1}, "some copies have operations that are about to be deleted"
    await end(journal)


async def test_commits_do_not_wait_for_a_scan_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanning, may_end = threading.Event(), threading.Event()

    def scan(path: Path, step: int, num_prompts: int) -> None:
        scanning.set()
        assert may_end.wait(30)

    monkeypatch.setattr("asyncrl.queue.journal.read_trained_since", scan)
    journal = open_journal(tmp_path / "journal.db")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.trained_since, 0)
        await anyio.to_thread.run_sync(scanning.wait)
        with anyio.fail_after(20):
            await journal.flushed(journal.append(HISTORY[0]))
        may_end.set()
    await end(journal)


@pytest.mark.usefixtures("frequent_snapshots")
async def test_a_checkpoint_that_was_not_kept_is_not_in_the_journal(tmp_path: Path) -> None:
    """A copy of such a checkpoint may have been restored by hand."""
    journal = open_journal(tmp_path / "journal.db")
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    await train_steps(queue, range(1, 6))
    restored = await queue.mark(6)
    await train_steps(queue, range(6, 61))
    head = await anyio.to_thread.run_sync(head_of, tmp_path)
    assert not head.from_start
    await end(journal)
    state, _, [notice] = await anyio.to_thread.run_sync(reopen, tmp_path / "journal.db", restored)
    assert "has forgotten everything up to operation" in notice and "because only later checkpoints were kept" in notice
    assert state.counts().trained == restored.counts.trained


# ------------------------------------------------------------------------------------------------ torn and damaged


def test_a_torn_tail_is_reported_and_loses_only_the_last_write(broken: Path, prefixes: dict[str, int]) -> None:
    log = broken / "journal.db-wal"
    whole = log.read_bytes()
    # Remove a part of the last commit, as a power cut does. Frames of this generation have the salts of the header.
    end = max(at + 4120 for at in range(32, len(whole), 4120) if whole[at + 8 : at + 16] == whole[16:24])
    log.write_bytes(whole[: end - 1000])
    head = head_of(broken)
    assert head.damage == ""
    state, seq, [notice] = reopen(broken / "journal.db")
    assert seq == prefixes[json.dumps(state.dump())] == 199
    assert "torn tail" in notice
    assert "after operation 199" in notice
    assert "If the last write was cut off" in notice and "if its pages were damaged later" in notice
    assert reopen(broken / "journal.db")[1:] == (199, ()), "the torn tail is reported only once"


def test_acknowledged_commits_after_a_bad_page_are_damage(broken: Path) -> None:
    log = broken / "journal.db-wal"
    flip(log, log.stat().st_size // 2)
    head = head_of(broken)
    assert "acknowledged commits after it" in head.damage
    with pytest.raises(InfraError, match="damaged while the run is alive"):
        open_journal(broken / "journal.db", continuing=True)
    state, seq, [notice] = reopen(broken / "journal.db", SNAPSHOT)
    assert (seq, state.version, state.counts().trained) == (77, 3, 2)
    assert "the journal is damaged: journal.db-wal has a bad frame" in notice
    [aside] = broken.glob("journal-damaged-*.db")
    assert str(aside) in notice
    assert "samples generated or dropped since then are generated again" in notice
    assert (broken / f"{aside.name}-wal").exists()
    assert reopen(broken / "journal.db", SNAPSHOT)[1:] == (77, ())


SNAPSHOT = QueueSnapshot(
    6, (SampleId(0, 3), SampleId(0, 5)), SampleCounts(5, trained=2, dropped={"failed": 1}), 3, seq=77
)


def flip(path: Path, offset: int, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
@pytest.mark.parametrize("how", ["flip", "cut", "zero"])
def test_random_damage_is_reported_or_harmless(
    crashed: Path, tmp_path: Path, prefixes: dict[str, int], name: str, how: str
) -> None:
    """The journal has the whole history, or a shorter one with a notice, or is reported as damaged."""
    rng = random.Random(f"{name} {how}")
    outcomes = set()
    for number in range(12):
        root = tmp_path / str(number)
        shutil.copytree(crashed, root)
        path = root / name
        size = path.stat().st_size
        offset = rng.randrange(size)
        if how == "flip":
            flip(path, offset, rng.randrange(8))
        elif how == "cut":
            os.truncate(path, offset)
        else:
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes(min(512, size - offset)))
        head = head_of(root)
        journal = open_journal(root / "journal.db")
        seq, notice = journal.durable, " ".join(journal.notices)
        assert bool(head.damage) == ("the journal is damaged" in notice)
        if head.damage:
            assert seq == 0
            assert head.damage in notice
            outcomes.add("damaged")
        else:
            assert prefixes[json.dumps(journal.state.dump())] == head.seq == seq
            cut_clean = how == "cut" and name == "journal.db-wal"
            assert seq == 200 or "torn tail" in notice or (cut_clean and is_clean_cut(offset))
            outcomes.add("whole" if seq == 200 else "torn")
        asyncio.run(end(journal))
    assert outcomes & {"damaged", "torn"}


def is_clean_cut(size: int) -> bool:
    """Return whether the cut is between pages, so that the file does not show that pages are missing."""
    return size <= 32 or (size - 32) % 4120 == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.write_bytes(b"no database" * 1000), "SQLite says: file is not a database"),
        (lambda path: alter(path, "UPDATE operations SET body = '[]' WHERE seq = 9"), "checksum of operation 9 is"),
        (lambda path: alter(path, "DELETE FROM operations WHERE seq = 7"), "operation 7 is missing"),
        (lambda path: alter(path, "UPDATE snapshots SET body = '{}'"), "checksum of the snapshot at operation 0"),
        (lambda path: alter(path, "UPDATE meta SET value = '8' WHERE key = 'num_prompts'"), "checksum of its meta"),
        (lambda path: alter(path, "DROP TABLE snapshots"), "does not have the tables of a journal"),
        (lambda path: (path.unlink(), path.mkdir()), "it cannot be read"),
    ],
)  # fmt: skip
def test_each_kind_of_damage_has_its_message(broken: Path, spoil: Callable[[Path], object], message: str) -> None:
    path = broken / "journal.db"
    (broken / "journal.db-wal").unlink()
    spoil(path)
    head = head_of(broken)
    assert message in head.damage
    state, seq, [notice] = reopen(path, SNAPSHOT)
    assert message in notice
    assert "the sample counts of its checkpoint" in notice
    assert (seq, state.next_ids(3)) == (77, (SampleId(0, 3), SampleId(0, 5), SampleId(0, 6)))
    assert len(list(broken.glob("journal-damaged-*.db"))) == 1


def alter(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_a_journal_of_another_version_is_refused_with_its_name(broken: Path) -> None:
    path = broken / "journal.db"
    alter(path, "UPDATE meta SET value = '99' WHERE key = 'schema'")
    alter(path, "UPDATE meta SET value = '9.9.9' WHERE key = 'written_by'")
    with closing(sqlite3.connect(path)) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta WHERE key <> 'crc'"))
    alter(path, f"UPDATE meta SET value = '{meta_crc(meta)}' WHERE key = 'crc'")
    for read in (read_head, read_counts, lambda root: open_journal(root / "journal.db")):
        with pytest.raises(ConfigError, match=r"schema version 99 and was written by asyncrl 9\.9\.9"):
            read(broken)
    assert path.exists()


# ------------------------------------------------------------------------------------------------ hostile


HOSTILE_NAMES = [
    "../../victim", "../victim", "/etc/hostname", "", ".", "..", "1-1.safetensors/../../victim", "../1-1.safetensors",
    "1-1.safetensors\0", "1-1.safetensors\n", "turns-1-1.log", "0-1.safetensors", "9" * 5000 + "-1.safetensors", 7,
    True,
]  # fmt: skip


@pytest.mark.parametrize("through_snapshot", [False, True])
@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
async def test_a_payload_outside_of_the_payload_directory_is_damage_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: object, through_snapshot: bool
) -> None:
    """The run feeds a sample, its payload is offered under a hostile name, and training no longer needs it."""
    run_dir = tmp_path / "runs" / "run"
    (run_dir / "samples").mkdir(parents=True)
    victims = [tmp_path / "runs" / "victim", run_dir / "victim", run_dir / "1-1.safetensors"]
    for victim in victims:
        victim.write_text("theirs")
    if through_snapshot:
        monkeypatch.setattr("asyncrl.queue.journal.SNAPSHOT_EVERY_BYTES", 0)
        monkeypatch.setattr("asyncrl.queue.journal.BYTES_PER_ENTRY", 0)
    journal = open_journal(run_dir / "journal.db")
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    [sample_id] = (await queue.admit(1, timeout_s=0)).sample_ids
    await queue.offer(meta(sample_id), FileRef(name, 0))  # type: ignore[arg-type]
    await end(journal)

    for read in (read_queue_state, lambda path: list(read_samples(path)), lambda path: list(read_operations(path))):
        if not (through_snapshot and read is read_queue_state):
            with pytest.raises(
                ConfigError, match=r"journal\.db is damaged: operation 2 .*Launch with resume="
            ) as raised:
                await anyio.to_thread.run_sync(read, run_dir)
            assert "is not the name of a payload file" in raised.value.message or "digits" in raised.value.message
    journal = open_journal(run_dir / "journal.db")
    [notice] = journal.notices
    assert "the journal is damaged" in notice and "journal-damaged-" in notice and len(notice) < 1000
    remove_segments(run_dir, journal.state.take_idle_files())
    assert not journal.state.entries
    await end(journal)
    assert all(victim.read_text() == "theirs" for victim in victims)


@pytest.mark.parametrize("operation", [AttachPart("rollouter", "../9"), RewindTraining(0, 0, "../9", None)])  # type: ignore[arg-type]
async def test_a_number_in_the_name_of_a_file_cannot_be_a_path(tmp_path: Path, operation: Operation) -> None:
    journal = open_journal(tmp_path / "journal.db")
    await journal.flushed(journal.append(operation))
    await end(journal)
    with pytest.raises(ConfigError, match="operation 1 cannot be read"):
        read_queue_state(tmp_path)


@pytest.mark.parametrize("change", [{"incarnations": {"rollouter": "../9"}}, {"history": [["../9", 1]]}])
def test_a_number_of_a_snapshot_cannot_be_a_path(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        QueueState.load(fresh().dump() | change, PROMPTS, keeps_payloads=True)


@pytest.mark.parametrize("operation", [CommitSamples(1, (SampleId(0, 3),)), ReleaseLease("x")])  # type: ignore[arg-type]
async def test_an_operation_that_cannot_have_happened_is_damage(tmp_path: Path, operation: Operation) -> None:
    journal = open_journal(tmp_path / "journal.db")
    await journal.flushed(journal.append(operation))
    await end(journal)
    for read in (read_queue_state, lambda run_dir: list(read_samples(run_dir))):
        with pytest.raises(ConfigError, match=r"journal\.db is damaged: operation 1 cannot have happened"):
            read(tmp_path)


def hot_rollback_journal(victim: Path, pages: int) -> bytes:
    """A rollback journal of SQLite that ends a transaction over several databases: SQLite then deletes `victim`."""
    magic, name = bytes.fromhex("d9d505f920a163d7"), str(victim).encode()
    header = magic + struct.pack(">5I", 0, 0, pages, 512, 4096)
    page_of_lock_byte = (1 << 30) // 4096 + 1
    end = struct.pack(">I", page_of_lock_byte) + name + struct.pack(">2I", len(name), sum(name)) + magic
    return header.ljust(512, b"\0") + end


def test_a_rollback_journal_that_names_another_file_is_not_applied(tmp_path: Path) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    run_dir.mkdir()
    path = run_dir / "journal.db"
    victim.write_text("theirs")
    reopen(path)
    rollback = hot_rollback_journal(victim, path.stat().st_size // 4096)
    (run_dir / "journal.db-journal").write_bytes(rollback)
    assert "journal.db-journal is not a file of asyncrl" in head_of(run_dir).damage
    with pytest.raises(ConfigError, match=r"journal\.db-journal is not a file of asyncrl"):
        read_counts(run_dir)
    [notice] = reopen(path)[2]
    assert "journal.db-journal is not a file of asyncrl" in notice
    assert reopen(path)[1:] == (0, ())
    path.unlink()
    (run_dir / "journal.db-journal").write_bytes(rollback)
    assert reopen(path)[1:] == (0, ()), "there was no journal"
    assert victim.read_text() == "theirs"


ENDLESS = "WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number)"


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE meta", f"CREATE VIEW meta AS {ENDLESS} SELECT n AS key, 'x' AS value FROM number"),
        ("DROP TABLE operations",
         f"CREATE VIEW operations AS {ENDLESS} SELECT n AS seq, 0 AS at, 0 AS kind, 0 AS body, 0 AS crc FROM number"),
        (f"CREATE TRIGGER t AFTER INSERT ON operations BEGIN DELETE FROM meta WHERE key IN ({ENDLESS} SELECT n FROM "
         "number); END",),
        ("CREATE TABLE more (x CHECK (length(hex(zeroblob(400000000)))))",),
    ],
    ids=["view of meta", "view of operations", "trigger", "check"],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_journal_with_queries_of_its_own_is_damage_and_runs_none(tmp_path: Path, statements: tuple[str, ...]) -> None:
    path = tmp_path / "journal.db"
    reopen(path)
    for statement in statements:
        alter(path, statement)
    with pytest.raises(ConfigError, match="does not have the tables of a journal, or has more than these"):
        read_counts(tmp_path)
    assert "does not have the tables of a journal" in head_of(tmp_path).damage
    [notice] = reopen(path)[2]
    assert "was set aside as" in notice
    assert reopen(path)[1:] == (0, ())


def test_inspecting_a_huge_journal_is_refused_with_its_size(broken: Path) -> None:
    """Sparse files take no room on disk, and the memory of whoever reads them."""
    os.truncate(broken / "journal.db", MAX_INSPECTED_BYTES + 4096)
    with pytest.raises(ConfigError, match=r"has 10\d{8} bytes with its log, and at most 1073741824 are read.*resume="):
        read_counts(broken)


def test_inspecting_a_huge_row_is_refused_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_reader, "MAX_INSPECTED_ROW_BYTES", 1 << 20)
    path = tmp_path / "journal.db"
    reopen(path)
    alter(path, "UPDATE snapshots SET body = '[' || hex(zeroblob(1 << 20))")
    with pytest.raises(ConfigError, match=r"has a row of more than 1048576 bytes, .*resume=") as refused:
        read_counts(tmp_path)
    assert "damaged" not in refused.value.message
    assert "checksum of the snapshot" in head_of(tmp_path).damage, "a launch reads it"


def test_a_huge_write_ahead_log_is_damage(broken: Path) -> None:
    os.truncate(broken / "journal.db-wal", MAX_LOG_BYTES + 1)
    tracemalloc.start()
    assert "journal.db-wal has 1073741825 bytes, and no run writes more" in head_of(broken).damage
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_a_journal_that_does_not_reach_the_checkpoint_is_set_aside(broken: Path) -> None:
    path = broken / "journal.db"
    at_mark = QueueSnapshot(41, (), SampleCounts(40, trained=40), 3, seq=200)
    assert reopen(path, at_mark)[1:] == (200, ())
    behind = QueueSnapshot(61, (), SampleCounts(60, trained=60), 3, seq=300)
    state, seq, [notice] = reopen(path, behind)
    assert (seq, state.counts().trained) == (300, 60)
    assert "ends at operation 200 and does not contain the checkpoint, which was written at operation 300" in notice
    assert "samples generated or dropped since then are generated again" in notice
    assert len(list(broken.glob("journal-behind-*.db"))) == 1
    # The new journal begins at the checkpoint, so the checkpoint is in the journal.
    assert reopen(path, behind)[1:] == (300, ())
    without = QueueSnapshot(61, (), SampleCounts(60, trained=60), 3)
    assert "written without a journal" in reopen(path, without)[2][0]


def test_a_missing_journal_is_reported(tmp_path: Path) -> None:
    at_mark = QueueSnapshot(41, (), SampleCounts(40, trained=40), 3, seq=200)
    state, seq, [notice] = reopen(tmp_path / "journal.db", at_mark)
    assert (seq, state.counts().trained) == (200, 40)
    assert (
        f"the journal is gone: there is no {tmp_path / 'journal.db'}, which should contain the checkpoint at "
        "operation 200" in notice
    )
    assert (
        "continues from the sample counts of the checkpoint: samples generated or dropped since then are "
        "generated again" in notice
    )
    assert reopen(tmp_path / "journal.db", at_mark)[1:] == (200, ()), "the journal exists again"
    for restore in (None, QueueSnapshot(41, (), SampleCounts(40, trained=40), 3)):
        assert reopen(tmp_path / f"{restore is None}.db", restore)[1:] == (0, ()), "the run never had a journal"


async def test_a_journal_that_begins_at_a_checkpoint_written_without_a_journal_is_continued(tmp_path: Path) -> None:
    """A checkpoint that was written without a journal has no operation number."""
    path = tmp_path / "journal.db"
    counts = SampleCounts(4, running=1, trained=2, dropped={"failed": 1})
    ten = QueueSnapshot(5, (SampleId(0, 2),), counts, 3)
    journal = open_journal(path, ten)
    assert journal.notices == ()
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    await queue.rewind(10, version=3, lineage=1, total_samples=None)
    poison, fine = (await queue.admit(2, timeout_s=0)).sample_ids
    await queue.drop(poison, DropReason.FAILED)
    await queue.offer(meta(fine), payload(fine))
    await end(journal)

    journal = open_journal(path, ten)
    assert journal.notices == () and journal.state.counts().dropped["failed"] == 2
    assert fine in journal.state.ready
    await end(journal)

    five = QueueSnapshot(4, (SampleId(0, 3),), SampleCounts(3, ready=1, trained=1, dropped={"failed": 1}), 1)
    for other in (five, replace(ten, version=2)):
        journal = open_journal(path, other)
        assert "does not contain the checkpoint, which was written without a journal" in journal.notices[0]
        await end(journal)
    aside = [name for name in os.listdir(tmp_path) if name.startswith("journal-behind-") and name.endswith(".db")]
    assert len(aside) == 2


@pytest.mark.parametrize("seq", [0, 300])
async def test_a_run_can_rewind_to_the_checkpoint_at_which_its_journal_begins(tmp_path: Path, seq: int) -> None:
    """A later checkpoint covers the samples that were trained since, so the mark of the first checkpoint is no longer
    in the journal."""
    ten = QueueSnapshot(3, (), SampleCounts(2, trained=2), 3, seq)
    journal = open_journal(tmp_path / "journal.db", ten)
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    await queue.rewind(10, version=3, lineage=1, total_samples=None)
    ids = await fill(queue, 2)
    await train(queue, 2, version=3)
    await queue.mark(11)
    await queue.cover(11, 10)
    await end(journal)

    journal = open_journal(tmp_path / "journal.db", ten)
    assert journal.notices == ()
    queue = LocalSampleQueue(OPTIONS, journal=journal, state=journal.state)
    await queue.rewind(10, version=3, lineage=2, total_samples=None)
    assert (await queue.status()).counts.trained == 2
    assert (await queue.admit(2, timeout_s=0)).sample_ids == ids
    await end(journal)


def test_a_journal_of_other_data_is_refused(broken: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to a run over 7 prompts; this run has 8"):
        Journal.open(broken / "journal.db", num_prompts=8, identity={})


def test_the_last_incarnation_is_read_from_file_names_if_the_journal_is_damaged(broken: Path) -> None:
    (broken / "samples").mkdir()
    for name in ("2-1.safetensors", "turns-3-1.log", "notes.txt"):
        (broken / "samples" / name).touch()
    head = head_of(broken)
    assert head.incarnations == {"rollouter": 3}
    (broken / "journal.db").write_bytes(b"")
    head = head_of(broken)
    assert (head.damage, head.incarnations) == ("it is empty", {"rollouter": 3})


async def test_nothing_is_acknowledged_after_lost_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path / "journal.db")

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "_commit", no_thread)
        seq = journal.append(operations_of(1)[0])
        with pytest.raises(RuntimeError):
            await journal.flushed(seq)
    with pytest.raises(InfraError, match="was not written to"):
        journal.append(operations_of(1)[1])
    with pytest.raises(InfraError, match="complete up to operation 0"):
        await journal.flushed(seq)


def test_a_missing_journal_has_no_head(tmp_path: Path) -> None:
    assert read_head(tmp_path) is None
    with pytest.raises(ConfigError, match="journal=off"):
        read_counts(tmp_path)


async def test_two_processes_cannot_open_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.queue.journal.LOCK_WAIT_S", 0.0)
    journal = open_journal(tmp_path / "journal.db")
    with pytest.raises(InfraError, match=f"process {os.getpid()} has the journal"):
        open_journal(tmp_path / "journal.db")
    await end(journal)


# ------------------------------------------------------------------------------------------------ errors of the disk


async def test_a_full_disk_fails_every_call_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = open_journal(path)
    [pages] = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    acknowledged = 0
    failures: list[AsyncRLError] = []

    async def one(step: Operation) -> None:
        nonlocal acknowledged
        try:
            seq = journal.append(step)
            await journal.flushed(seq)
            acknowledged = max(acknowledged, seq)
        except DiskFullError as error:
            failures.append(error)

    for start in range(0, 200, 20):
        async with anyio.create_task_group() as tasks:
            for step in HISTORY[start : start + 20]:
                tasks.start_soon(one, step)
    assert failures
    assert f"the disk is full: cannot write {path}" in failures[0].message
    assert "Free some space" in failures[0].message
    with pytest.raises(DiskFullError):
        journal.append(HISTORY[0])
    with pytest.raises(DiskFullError):
        await journal.flushed(0)
    assert 0 < journal.durable == acknowledged < 200
    with pytest.raises(DiskFullError):
        await end(journal)
    again = open_journal(path)
    assert again.durable == acknowledged
    assert again.state.dump() == replay(fresh(), HISTORY[:acknowledged]).dump()
    await end(again)


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.asyncrl.queue import test_journal as t

async def main(path):
    journal = t.open_journal(path)
    number = journal.durable // 5
    while True:
        number += 1
        for step in t.operations_of(number):
            journal.append(step)
            if number % 3:
                await journal.flushed(journal._seq)
                print(journal.durable, flush=True)
asyncio.run(main(Path(sys.argv[1])))
"""


def test_what_was_acknowledged_survives_every_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    rng = random.Random(3)
    acknowledged = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(rng.randrange(5, 60)):
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.wait()
        journal = open_journal(path)
        assert journal.durable >= acknowledged
        assert journal.notices == () or "torn tail" in journal.notices[0]
        history = [step for number in range(1, journal.durable // 5 + 2) for step in operations_of(number)]
        assert journal.state.dump() == replay(fresh(), history[: journal.durable]).dump()
        rest = -journal.durable % 5
        for step in history[journal.durable : journal.durable + rest]:
            journal.append(step)
        asyncio.run(end(journal))
