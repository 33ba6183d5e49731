"""Weights in files: what is written is read, files appear whole, and those of a dead Trainer are deleted in time."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from asyncrl.core.failures import InfraError
from asyncrl.weights import disk
from asyncrl.weights.disk import DiskChunk, stored_chunks
from asyncrl.weights.object_store import NUM_KEPT_VERSIONS, ObjectStorePublisher
from asyncrl.weights.transport import check_transport
from benchmarks.running import publish_tensors
from tests.fakes.configurations import config_with

BFLOAT16 = torch.tensor([[1.5, -2.0], [3e38, 0.0]], dtype=torch.bfloat16)
CHUNK = {
    "model.layers.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "head": BFLOAT16.view(torch.uint16).numpy(),
    "empty": np.zeros((0, 4), np.float16),
    "scalar": np.array(7, np.int64),
}


@pytest.fixture(params=["path", "file", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"path": f"{tmp_path}/w", "file": f"file://{tmp_path}/w", "memory": f"memory://{uuid.uuid4().hex}/w"}[
        request.param
    ]


def test_what_is_stored_is_read(directory: str) -> None:
    stored = DiskChunk.put(directory, CHUNK)
    read = stored.get()
    assert set(read) == set(CHUNK)
    for name, array in CHUNK.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)
        assert not read[name].flags.writeable
    assert stored_chunks(directory) == [stored]
    stored.drop()
    stored.drop()
    assert stored_chunks(directory) == []
    np.testing.assert_array_equal(read["head"], CHUNK["head"])  # the engine still loads from it
    del read, array
    with pytest.raises(FileNotFoundError):
        stored.get()


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which this node keeps copies of files from other storages."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"asyncrl-weights-{os.getuid()}"


def copied(copies: Path) -> list[str]:
    return sorted(path.name for path in copies.iterdir() if path.name != "lock")


def test_the_processes_of_a_node_fetch_a_file_once(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = DiskChunk.put(f"memory://{uuid.uuid4().hex}/w", CHUNK)
    fetched: list[str] = []
    get_file = MemoryFileSystem.get_file

    def count(self: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        fetched.append(source)
        get_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", count)
    with ThreadPoolExecutor(4) as threads:
        read = list(threads.map(lambda _: stored.get(), range(8)))
    assert len(fetched) == 1
    assert copied(copies) == [Path(stored.url).name]
    # Another process has mapped it, too, and ends its use later.
    script = f"from asyncrl.weights import disk; print(len(disk.node_copy('{stored.name}', None)))"
    environment = os.environ | {"TMPDIR": str(copies.parent)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert copied(copies) == [Path(stored.url).name]
    for one in read:
        np.testing.assert_array_equal(one["head"], CHUNK["head"])
    last = read.pop()
    del read, one
    assert len(copied(copies)) == 1
    del last
    assert copied(copies) == []
    assert set(stored.get()) == set(CHUNK)
    assert len(fetched) == 2


def test_copies_of_processes_that_were_killed_are_deleted(copies: Path) -> None:
    directory = f"memory://{uuid.uuid4().hex}/w"
    first, second = DiskChunk.put(directory, CHUNK), DiskChunk.put(directory, CHUNK)
    read = first.get()
    name = Path(first.url).name
    for left in (name[:8] + "0" * 32 + ".safetensors", name[:8] + "1" * 32 + ".safetensors.part"):
        (copies / left).write_bytes(b"left")
    assert len(copied(copies)) == 3
    other = second.get()
    assert copied(copies) == sorted(Path(one.url).name for one in (first, second))
    del read, other


def test_other_programs_read_bfloat16(tmp_path: Path) -> None:
    url = DiskChunk.put(str(tmp_path), CHUNK).url
    assert torch.equal(load_file(url.removeprefix("file://"))["head"], BFLOAT16)


def test_a_relative_directory_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored = DiskChunk.put("w", CHUNK)
    monkeypatch.chdir("/")
    assert set(stored.get()) == set(CHUNK)


def test_a_file_that_was_not_finished_is_not_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Any) -> None:
        raise OSError("the disk is full")

    stored = DiskChunk.put(str(tmp_path), CHUNK)
    path = Path(stored.url.removeprefix("file://"))
    part = path.rename(f"{path}.part")  # left by a process that was killed
    assert [Path(one.url).name for one in stored_chunks(str(tmp_path))] == [part.name], "it is deleted later"
    monkeypatch.setattr(disk.Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        DiskChunk.put(str(tmp_path), CHUNK)
    assert list(tmp_path.iterdir()) == [part], "nothing is left on a full disk"


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_damaged_file_is_named(tmp_path: Path, keep: int) -> None:
    stored = DiskChunk.put(str(tmp_path), CHUNK)
    path = Path(stored.url.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=path.name):
        stored.get()


class Store:
    """Takes publications, as the store's actor does."""

    def __init__(self) -> None:
        self.refs: list[Any] = []
        self.publish = SimpleNamespace(remote=self._publish)

    async def _publish(self, publication: Any, refs: Any, again: bool) -> None:
        self.refs = list(refs)


async def test_the_last_versions_are_kept_and_older_files_are_deleted(directory: str) -> None:
    left = DiskChunk.put(directory, CHUNK)
    store = Store()
    publisher = ObjectStorePublisher(store, call_s=10, backend="disk", directory=directory, bucket_bytes=12)
    kept = NUM_KEPT_VERSIONS + 2
    for version in range(1, kept + 3):
        values = np.full(3, version, np.float32)
        await publish_tensors(publisher, version, version, {"w": values, "v": -values})
        first, second = store.refs
        assert (first.get()["w"].tolist(), second.get()["v"].tolist()) == ([version] * 3, [-version] * 3)
        urls = {one.url for one in stored_chunks(directory)}
        assert (left.url in urls) is (version < kept), "an engine may still read it"
        assert len(urls) == (2 * version + 1 if version < kept else 2 * kept)


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    assert stored_chunks(str(tmp_path)) == []


async def test_an_old_file_that_cannot_be_deleted_is_an_infra_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chunk: DiskChunk) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(DiskChunk, "drop", fail)
    publisher = ObjectStorePublisher(Store(), call_s=10, backend="disk", directory=str(tmp_path))
    with pytest.raises(InfraError, match="did not free a chunk of an old version: read-only"):
        for version in range(1, NUM_KEPT_VERSIONS + 5):
            await publish_tensors(publisher, version, version, {"w": np.ones(3, np.float32)})


async def test_a_disk_that_fails_is_an_infra_error(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file")
    publisher = ObjectStorePublisher(Store(), call_s=10, backend="disk", directory=f"{tmp_path}/w/x")
    with pytest.raises(InfraError, match=r"weight_sync\.dir"):
        await publish_tensors(publisher, 1, 1, {"w": np.ones(3)})


def test_the_directory_is_tried_before_the_run(tmp_path: Path) -> None:
    def problems(directory: str) -> list[str]:
        config = config_with({"weight_sync.backend": "disk", "weight_sync.dir": directory})
        return [f"{one.key}: {one.consequence}" for one in check_transport(config)]

    assert problems(f"{tmp_path}/new") == []
    assert stored_chunks(f"{tmp_path}/new") == []
    (tmp_path / "file").write_text("")
    (problem,) = problems(f"{tmp_path}/file/w")
    assert problem.startswith("weight_sync.dir: weights cannot be stored there: ")
