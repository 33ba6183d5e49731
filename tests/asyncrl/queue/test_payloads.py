"""Payload files: stored samples survive the processes that wrote them, and damaged ones are never returned."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, DataError, DiskFullError, InfraError
from asyncrl.core.types import Sample
from asyncrl.queue.payloads import FilePayloads, RayPayloads, make_payloads
from asyncrl.storage import array_bytes
from asyncrl.storage.sample_bytes import JOIN_BELOW_TOKENS, FileRef
from asyncrl.storage.segments import (
    MAX_READ_BYTES,
    read_segment,
    remove_segments,
    segment_incarnation,
    segment_name,
    segment_sizes,
)
from tests.fakes.samples import assert_same_sample, make_sample


async def put_all(store: FilePayloads, originals: Sequence[Sample]) -> list[FileRef]:
    refs: list[FileRef | None] = [None] * len(originals)

    async def put(number: int) -> None:
        refs[number] = await store.put(originals[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(originals)):
            tasks.start_soon(put, number)
    return [ref for ref in refs if ref is not None]


async def read_all(run_dir: Path, refs: Sequence[FileRef]) -> list[Sample | None]:
    """Read samples as the Trainer does: with a store that did not write them."""
    return await FilePayloads(run_dir, 1).get(refs)


def path_of(run_dir: Path, ref: FileRef) -> Path:
    return run_dir / "samples" / ref.file


async def test_samples_stored_together_share_files_and_keep_their_order(tmp_path: Path) -> None:
    originals = [make_sample(index) for index in range(1, 101)]
    refs = await put_all(FilePayloads(tmp_path, 3), originals)
    assert len(segment_sizes(tmp_path)) <= 10
    assert {segment_incarnation(name) for name in segment_sizes(tmp_path)} == {3}
    order = [*range(50, 100), *range(50), 7, 7]
    for number, sample in zip(order, await read_all(tmp_path, [refs[number] for number in order]), strict=True):
        assert_same_sample(sample, originals[number])


async def test_a_sample_that_fits_in_no_file_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_bytes, "MAX_HEADER_BYTES", 20_000)
    store, refs, refused = FilePayloads(tmp_path, 1), {}, []

    async def put(index: int) -> None:
        sample = make_sample(index)
        if index == 2:
            row = replace(sample.rows[0], reward_extra={"x" * 30_000: 1.0})
            sample = replace(sample, rows=(row, *sample.rows[1:]))
        try:
            refs[index] = await store.put(sample)
        except DataError:
            refused.append(index)

    async with anyio.create_task_group() as tasks:
        for index in (1, 2, 3):
            tasks.start_soon(put, index)
    assert refused == [2]
    for index, sample in zip((1, 3), await read_all(tmp_path, [refs[1], refs[3]]), strict=True):
        assert_same_sample(sample, make_sample(index))


async def test_file_and_name_are_on_disk_before_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced, fsync = FilePayloads(tmp_path, 1), [], os.fsync
    await store.put(make_sample(1))

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, path.stat().st_size if path.is_file() else None))
        fsync(descriptor)

    monkeypatch.setattr("asyncrl.storage.segments.os.fsync", recorded)
    ref = await store.put(make_sample(2))
    assert synced == [(ref.file, path_of(tmp_path, ref).stat().st_size), ("samples", None)]


async def test_a_missing_file_loses_only_its_samples_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = FilePayloads(tmp_path, 1), FilePayloads(tmp_path, 1)
    refs = [await writer.put(make_sample(index)) for index in (1, 2, 3)]
    path_of(tmp_path, refs[1]).unlink()
    for _ in range(2):
        first, second, third = await reader.get([*refs])
        assert second is None
        assert_same_sample(first, make_sample(1))
        assert_same_sample(third, make_sample(3))
    (record,) = caplog.records
    assert str(path_of(tmp_path, refs[1])) in record.getMessage() and "No such file" in record.getMessage()


async def test_a_segment_that_leases_share_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FilePayloads(tmp_path, 1)
    originals = [make_sample(index) for index in range(1, 6)]
    refs = [FileRef(segment_name(1, 1), position) for position in range(5)]
    await anyio.to_thread.run_sync(store._put_blocking, refs[0].file, originals)
    reads = []
    monkeypatch.setattr("asyncrl.queue.payloads.read_segment", lambda path: reads.append(path) or read_segment(path))
    for taken in ([0, 1], [2], [3, 4]):
        for number, sample in zip(taken, await store.get([refs[number] for number in taken]), strict=True):
            assert_same_sample(sample, originals[number])
    assert len(reads) == 1
    assert_same_sample((await store.get([refs[0]]))[0], originals[0])
    assert len(reads) == 2, "a segment whose samples are all read is not cached"


async def test_a_huge_sparse_file_is_damage_and_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ref = await FilePayloads(tmp_path, 1).put(make_sample(1))
    os.truncate(path_of(tmp_path, ref), MAX_READ_BYTES + 1)
    assert await read_all(tmp_path, [ref]) == [None]
    assert f"has {MAX_READ_BYTES + 1} bytes, and no run writes more" in caplog.text


async def test_damage_to_one_array_loses_only_its_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    originals = [make_sample(1), make_sample(2, tokens=JOIN_BELOW_TOKENS), make_sample(3)]
    store = FilePayloads(tmp_path, 1)
    refs = [FileRef(segment_name(1, 1), position) for position in range(3)]
    await anyio.to_thread.run_sync(store._put_blocking, refs[0].file, originals)
    path = path_of(tmp_path, refs[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the response mask of the last long sample
    path.write_bytes(data)
    first, second, third = await read_all(tmp_path, refs)
    assert second is None and "checksum of response_mask.2 differs" in caplog.text
    assert_same_sample(first, originals[0])
    assert_same_sample(third, originals[2])


async def test_a_renamed_file_and_a_path_outside_the_directory_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FilePayloads(tmp_path, 1)
    one, other = await store.put(make_sample(1)), await store.put(make_sample(2))
    os.replace(path_of(tmp_path, one), path_of(tmp_path, other))
    assert await store.get([other]) == [None]
    assert f"written as '{one.file}'" in caplog.text
    (tmp_path / "1-9.safetensors").write_bytes(path_of(tmp_path, other).read_bytes())
    assert await store.get([FileRef("../1-9.safetensors", 0), FileRef("", 0)]) == [None, None]


async def test_a_fifo_a_directory_and_a_link_are_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    refs = [FileRef(segment_name(1, number), 0) for number in (1, 2, 3)]
    os.mkfifo(path_of(tmp_path, refs[0]))
    path_of(tmp_path, refs[1]).mkdir()
    path_of(tmp_path, refs[2]).symlink_to("/etc/passwd")
    assert await read_all(tmp_path, refs) == [None, None, None]


async def test_an_error_of_the_operating_system_does_not_count_as_a_lost_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FilePayloads(tmp_path, 1)
    ref = await store.put(make_sample(1))

    def too_many(*args: object, **options: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncrl.storage.segments.os.open", too_many)
    with pytest.raises(InfraError, match="Too many open files"):
        await store.get([ref])


def half_then(code: int) -> Callable[[int, Sequence[memoryview]], int]:
    def writev(descriptor: int, buffers: Sequence[memoryview]) -> int:
        os.write(descriptor, buffers[0][: len(buffers[0]) // 2])
        raise OSError(code, os.strerror(code))

    return writev


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, InfraError)]
)
async def test_a_failed_put_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[InfraError]
) -> None:
    store = FilePayloads(tmp_path, 1)
    kept = await store.put(make_sample(1))
    with monkeypatch.context() as broken:
        broken.setattr("asyncrl.storage.segments.os.writev", half_then(code))
        with pytest.raises(kind, match=r"1-2\.safetensors"):
            await store.put(make_sample(2))
    with monkeypatch.context() as broken:
        broken.setattr("asyncrl.storage.segments.os.fsync", lambda _: half_then(code)(1, [memoryview(b"")]))
        with pytest.raises(kind):
            await store.put(make_sample(3))
    assert set(segment_sizes(tmp_path)) == {kept.file}
    again = await store.put(make_sample(4))
    for sample, index in zip(await read_all(tmp_path, [kept, again]), (1, 4), strict=True):
        assert_same_sample(sample, make_sample(index))


async def test_two_writers_of_one_incarnation_are_a_bug(tmp_path: Path) -> None:
    await FilePayloads(tmp_path, 1).put(make_sample(1))
    with pytest.raises(BugError, match="two processes write samples as incarnation 1"):
        await FilePayloads(tmp_path, 1).put(make_sample(2))
    await FilePayloads(tmp_path, 2).put(make_sample(2))


async def test_an_unwritable_run_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write"):
        await FilePayloads(tmp_path, 1).put(make_sample(1))


def test_segments_are_listed_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert segment_sizes(tmp_path) == {}
    directory = tmp_path / "samples"
    directory.mkdir()
    for name in ("1-1.safetensors", "12-3.safetensors", "turns-1-1.log", "0-1.safetensors", "1-1.safetensors.tmp"):
        (directory / name).write_bytes(b"abc")
    assert segment_sizes(tmp_path) == {"1-1.safetensors": 3, "12-3.safetensors": 3}
    (directory / "5-5.safetensors").mkdir()
    with caplog.at_level(logging.WARNING):
        remove_segments(tmp_path, ["1-1.safetensors", "gone", "5-5.safetensors", "12-3.safetensors"])
    assert set(segment_sizes(tmp_path)) == {"5-5.safetensors"}
    assert "cannot delete" in caplog.text


def test_the_journal_decides_where_payloads_are_stored(tmp_path: Path) -> None:
    assert isinstance(make_payloads(Config(journal="on"), tmp_path, 1), FilePayloads)
    assert isinstance(make_payloads(Config(journal="off"), tmp_path, 1), RayPayloads)


KILLED_AGAIN_AND_AGAIN = """
import os, signal, sys
from pathlib import Path
import anyio
from asyncrl.queue.payloads import FilePayloads
from tests.fakes.samples import make_sample

async def write(incarnation, pipe):
    store = FilePayloads(Path(sys.argv[1]), incarnation)
    async def keep_putting(first):
        for index in range(first, first + 100_000):
            ref = await store.put(make_sample(index, tokens=2000))
            os.write(pipe, f"{index} {ref.file} {ref.position}\\n".encode())
    async with anyio.create_task_group() as tasks:
        for writer in range(8):
            tasks.start_soon(keep_putting, 1 + writer * 100_000)

for incarnation in range(1, int(sys.argv[2]) + 1):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        anyio.run(write, incarnation, writing)
    os.close(writing)
    with open(reading) as lines:
        for line in [lines.readline() for _ in range(5 * incarnation)]:
            print(line, end="")
        os.kill(child, signal.SIGKILL)
        print(lines.read(), end="")
    os.waitpid(child, 0)
"""


async def test_stored_samples_survive_kills_of_their_writers(tmp_path: Path) -> None:
    done = await anyio.run_process(
        [sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, str(tmp_path), "8"], stderr=subprocess.STDOUT
    )
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert len(lines) >= 5 * sum(range(1, 9))
    refs = [FileRef(file, int(position)) for _, file, position in lines]
    assert {segment_incarnation(ref.file) for ref in refs} == set(range(1, 9))
    for sample, (index, _, _) in zip(await read_all(tmp_path, refs), lines, strict=True):
        assert_same_sample(sample, make_sample(int(index), tokens=2000))
