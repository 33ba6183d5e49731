"""Versions as changes: a replica reads exactly the published weights, whatever its node has and whatever has failed."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import anyio
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import Publication
from asyncrl.weights.deltas import DeltaWriter
from asyncrl.weights.disk import DiskChunk, stored_chunks, write_tensors
from asyncrl.weights.object_store import NUM_KEPT_VERSIONS, ObjectStorePublisher
from benchmarks.running import publish_tensors

SIZE = 3000
MAX_DELTAS = 3
Weights = dict[str, NDArray[Any]]


def some_weights(seed: int) -> Weights:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 2**16, SIZE).astype(np.uint16) for name in ("a", "b", "c")}


def changed(weights: Weights, seed: int, share: float) -> Weights:
    """Return the weights with other bits at about this share of all places."""
    random = np.random.default_rng(seed)
    return {name: np.where(random.random(SIZE) < share, array ^ 1, array) for name, array in weights.items()}


def assert_equal(read: Any, wanted: Weights) -> None:
    assert set(read) == set(wanted)
    assert all(np.array_equal(read[name], wanted[name]) for name in wanted)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which this node has its copies."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"asyncrl-weights-{os.getuid()}"


@pytest.fixture
def directory() -> Iterator[str]:
    directory = f"memory://{uuid.uuid4().hex}"
    yield directory
    MemoryFileSystem().rm(directory, recursive=True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read from the storage."""
    names: list[str] = []

    def cat(self: MemoryFileSystem, path: str, *args: Any, **options: Any) -> Any:
        names.append(path.rpartition("/")[2])
        return cat_file(self, path, *args, **options)

    def get(self: MemoryFileSystem, path: str, *args: Any, **options: Any) -> None:
        names.append(path.rpartition("/")[2])
        get_file(self, path, *args, **options)

    cat_file, get_file = MemoryFileSystem.cat_file, MemoryFileSystem.get_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    monkeypatch.setattr(MemoryFileSystem, "get_file", get)
    return names


def names(*chunks: DiskChunk) -> list[str]:
    return [chunk.name for chunk in chunks]


def test_a_replica_reads_only_what_has_changed_since_its_version(directory: str, node: Path, reads: list[str]) -> None:
    writer, weights = DeltaWriter(directory, MAX_DELTAS), some_weights(0)
    first = writer.put(weights)
    kept = first.get()
    assert reads == names(first.whole) and first.deltas == ()
    chunks = [writer.put(weights := changed(weights, seed, 0.01)) for seed in range(MAX_DELTAS)]
    assert [len(chunk.deltas) for chunk in chunks] == [1, 2, 3]
    assert all(chunk.sent_bytes < 0.05 * first.sent_bytes for chunk in chunks)
    reads.clear()
    read = chunks[1].get()
    assert reads == names(*chunks[1].deltas), "the version between was missed"
    del kept
    reads.clear()
    assert_equal(chunks[2].get(), weights)
    assert reads == names(chunks[2].deltas[-1])
    del read
    assert [path.name for path in node.iterdir()] == ["lock"]
    reads.clear()
    assert_equal(chunks[2].get(), weights)  # a replica on another node joins
    assert reads == names(*chunks[2].files)
    last = writer.put(weights := changed(weights, 9, 0.01))
    assert last.deltas == () and last.sent_bytes == first.sent_bytes, "MAX_DELTAS changes follow the whole version"
    assert_equal(last.get(), weights)


def test_equal_weights_need_no_file_and_other_ones_never_more_than_a_second_whole_version(directory: str) -> None:
    writer, weights = DeltaWriter(directory, 100), some_weights(0)
    first = writer.put(weights)
    assert writer.put(weights) == first._replace(sent_bytes=0)
    for seed in range(20):
        chunk = writer.put(weights := changed(weights, seed, 0.1))
        read = sum(len(MemoryFileSystem().cat_file(file.url)) for file in chunk.files)
        assert read <= 2 * first.sent_bytes + 1000 * len(chunk.files), "and some bytes for each header"
    assert writer.put(some_weights(1)).deltas == (), "changes would be as large as the weights"


def test_a_tensor_that_was_sent_whole_can_have_further_changes(directory: str, node: Path) -> None:
    writer, weights = DeltaWriter(directory, MAX_DELTAS), some_weights(0)
    writer.put(weights)
    weights = weights | {"a": weights["a"] ^ 1}
    writer.put(weights)
    chunk = writer.put(weights := changed(weights, 1, 0.01))
    assert len(chunk.deltas) == 2
    assert_equal(chunk.get(), weights)  # a replica that has no earlier version


def test_other_tensors_are_whole(directory: str) -> None:
    writer, weights = DeltaWriter(directory, 100), some_weights(0)
    writer.put(weights)
    for other in ({"a": weights["a"]}, weights | {"a": weights["a"][1:]}, weights | {"a": weights["a"].view(np.int16)}):
        assert writer.put(other).deltas == ()


def test_later_versions_do_not_depend_on_weights_that_change_in_place(directory: str, node: Path) -> None:
    writer, weights = DeltaWriter(directory, MAX_DELTAS), some_weights(0)
    writer.put(weights)
    weights["a"][5] ^= 1
    chunk = writer.put(weights)
    assert len(chunk.deltas) == 1
    assert_equal(chunk.get(), weights)


@pytest.mark.parametrize("damage", ["truncated", "other bits", "other tensors"])
def test_a_damaged_copy_of_a_node_is_not_used(directory: str, node: Path, damage: str) -> None:
    writer, weights = DeltaWriter(directory, MAX_DELTAS), some_weights(0)
    first = writer.put(weights)
    kept = first.get()
    copy, damaged = node / first.whole.name, node / "damaged"
    if damage == "truncated":
        damaged.write_bytes(copy.read_bytes()[:100])
    else:
        write_tensors(damaged, changed(weights, 1, 1e-3) if damage == "other bits" else {"x": weights["a"]})
    copy.write_bytes(damaged.read_bytes())
    assert_equal(writer.put(weights := changed(weights, 2, 0.01)).get(), weights)
    del kept


def test_a_damaged_file_of_changes_is_named(directory: str, node: Path) -> None:
    writer, weights = DeltaWriter(directory, MAX_DELTAS), some_weights(0)
    writer.put(weights)
    chunk = writer.put(changed(weights, 1, 0.01))
    files, path = MemoryFileSystem(), chunk.deltas[0].url.removeprefix("memory:/")
    content = bytearray(files.cat_file(path))
    content[-1] ^= 1
    files.pipe_file(path, bytes(content))
    with pytest.raises(ValueError, match=rf"{chunk.deltas[0].name}: the changes do not result in the weights"):
        chunk.get()
    files.pipe_file(path, bytes(content[:40]))
    with pytest.raises(ValueError, match=f"{chunk.deltas[0].name} is damaged"):
        chunk.get()


class Store:
    """The handles of the last publications, of which a replica may still read any."""

    def __init__(self) -> None:
        self.versions: list[list[Any]] = []
        self.publish = SimpleNamespace(remote=self._publish)

    async def _publish(self, publication: Publication, refs: list[Any], again: bool) -> None:
        self.versions = [*self.versions, refs][-NUM_KEPT_VERSIONS - 2 :]


def publisher_of(store: Any, directory: str) -> ObjectStorePublisher:
    return ObjectStorePublisher(
        store, call_s=60, backend="disk", directory=directory, bucket_bytes=4 * SIZE, max_deltas=MAX_DELTAS
    )


async def test_what_a_kept_version_needs_is_not_deleted(directory: str, node: Path) -> None:
    store, weights = Store(), some_weights(0)
    publisher = publisher_of(store, directory)
    for version in range(1, 4 * MAX_DELTAS):
        published = await publish_tensors(publisher, version, version, weights)
        whole = version % (MAX_DELTAS + 1) == 1
        assert published.num_bytes == 6 * SIZE and (published.sent_bytes == published.num_bytes) is whole
        needed = {file.url for refs in store.versions for chunk in refs for file in chunk.files}
        assert {chunk.url for chunk in stored_chunks(directory)} == needed
        weights = changed(weights, version, 0.01)


class Replica(NamedTuple):
    """An engine. It keeps the version that it serves mapped, as vLLM's workers do."""

    node: str
    served: list[Any]


class DeltaVersions(RuleBasedStateMachine):
    """A Trainer that fails, trains and goes back; and replicas on two nodes, which join, miss versions and restart."""

    @initialize(shared=st.booleans())
    def start(self, shared: bool) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.directory = f"{self.root}/shared" if shared else f"memory://{uuid.uuid4().hex}"
        self.store, self.weights, self.version = Store(), some_weights(0), 0
        self.publisher = publisher_of(self.store, self.directory)
        self.published: list[Weights] = []
        self.replicas: list[Replica] = []
        for name in ("one", "two"):
            (self.root / name).mkdir()

    def teardown(self) -> None:
        self.replicas = []
        shutil.rmtree(self.root)
        if self.directory.startswith("memory"):
            files = MemoryFileSystem()
            if files.exists(self.directory):
                files.rm(self.directory, recursive=True)

    @rule(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 1e-3, 0.02, 0.3, 1.0]))
    def train(self, seed: int, share: float) -> None:
        self.weights = changed(self.weights, seed, share)

    @rule()
    def publish(self) -> None:
        self.version += 1
        anyio.run(publish_tensors, self.publisher, self.version, self.version, self.weights)
        self.published = [*self.published, self.weights][-NUM_KEPT_VERSIONS - 2 :]

    @rule(num_buckets=st.integers(0, 1))
    def publish_half(self, num_buckets: int) -> None:
        """The disk is full after some buckets; the publisher goes on, with whatever it has stored."""
        put, num_puts = DiskChunk.put, 0

        def fail(directory: str, chunk: Any) -> DiskChunk:
            nonlocal num_puts
            num_puts += 1
            if num_puts > num_buckets:
                raise OSError("the disk is full")
            return put(directory, chunk)

        with patch.object(DiskChunk, "put", fail):
            try:
                anyio.run(publish_tensors, self.publisher, self.version + 1, self.version, self.weights)
            except InfraError:
                return
        self.version += 1  # nothing had changed, so nothing was written
        self.published = [*self.published, self.weights][-NUM_KEPT_VERSIONS - 2 :]

    @precondition(lambda self: self.published)
    @rule(versions_back=st.integers(0, 3))
    def restart_trainer(self, versions_back: int) -> None:
        """Training goes back to a checkpoint, and publishes it with the number that it had."""
        self.publisher = publisher_of(self.store, self.directory)
        self.weights = self.published[-1 - min(versions_back, len(self.published) - 1)]
        self.version = max(0, self.version - versions_back - 1)
        self.publish()

    @rule(node=st.sampled_from(["one", "two"]))
    def join(self, node: str) -> None:
        if len(self.replicas) < 3:
            self.replicas.append(Replica(node, []))

    @precondition(lambda self: self.replicas and self.published)
    @rule(index=st.integers(0, 2), versions_back=st.sampled_from([0, 0, 0, 1, 3]))
    def update(self, index: int, versions_back: int) -> None:
        """A replica reads the newest version, or one that was replaced while it asked."""
        replica = self.replicas[index % len(self.replicas)]
        back = 1 + min(versions_back, len(self.published) - 1)
        with patch.object(tempfile, "tempdir", str(self.root / replica.node)):
            chunks = [chunk.get() for chunk in self.store.versions[-back]]
        assert_equal({name: array for chunk in chunks for name, array in chunk.items()}, self.published[-back])
        replica.served[:] = chunks

    @precondition(lambda self: self.replicas)
    @rule(index=st.integers(0, 2), killed=st.booleans())
    def stop(self, index: int, killed: bool) -> None:
        """A replica ends; one that is killed leaves its copies, and perhaps an unfinished one."""
        replica = self.replicas.pop(index % len(self.replicas))
        copies = self.root / replica.node / f"asyncrl-weights-{os.getuid()}"
        left = self.root / "left"
        if killed and copies.exists():
            shutil.copytree(copies, left)
        replica.served.clear()
        if left.exists():
            (left / f"asyncrl-{'0' * 32}.safetensors.part").write_bytes(b"unfinished")
            shutil.copytree(left, copies, dirs_exist_ok=True, ignore=lambda _, found: {"lock"} & set(found))
            shutil.rmtree(left)

    @rule(node=st.sampled_from(["one", "two"]))
    def lose_node(self, node: str) -> None:
        """A node loses its temporary directory; its engines keep what they have mapped."""
        shutil.rmtree(self.root / node)
        (self.root / node).mkdir()


DeltaVersions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_a_version_is_read_exactly_in_any_order = DeltaVersions.TestCase
