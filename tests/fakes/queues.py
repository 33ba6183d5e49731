"""Helpers for tests of the queue: samples, logs, callers, rebuilding a queue, and closing a journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncrl.core.types import SampleId, SampleMeta
from asyncrl.queue.core import Operation, QueueLog, QueueOptions, apply
from asyncrl.queue.journal import Journal
from asyncrl.queue.operation_rows import surviving_marks, trained_since
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueCaller, SampleQueue
from asyncrl.queue.state import QueueState
from asyncrl.storage.sample_bytes import FileRef


def meta(sample_id: SampleId, version: int = 0) -> SampleMeta:
    return SampleMeta(sample_id, version, version, 1, 1, 100)


def payload(sample_id: SampleId) -> FileRef:
    return FileRef(f"1-{sample_id.index % 3 + 1}.safetensors", sample_id.index)


async def admit(queue: SampleQueue, count: int) -> tuple[SampleId, ...]:
    ids = (await queue.admit(count, timeout_s=0)).sample_ids
    assert len(ids) == count
    return ids


async def fill(queue: SampleQueue, count: int, version: int = 0) -> tuple[SampleId, ...]:
    """Admit and offer samples."""
    ids = await admit(queue, count)
    for sample_id in ids:
        await queue.offer(meta(sample_id, version), payload(sample_id))
    return ids


async def train(queue: SampleQueue, count: int, version: int = 0) -> list[int]:
    """Lease and commit samples, and return their indices."""
    lease = await queue.lease(count, trainer_version=version, timeout_s=0)
    await queue.commit(lease.lease_id, [queued.meta.sample_id for queued in lease.samples])
    return [queued.meta.sample_id.index for queued in lease.samples]


class MemoryLog:
    """A `QueueLog` that keeps the operations in memory, and no longer uses those that it may forget."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.num_forgotten = 0

    @property
    def durable(self) -> int:
        return len(self.operations)

    def append(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations)

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def forget_before(self, step: int) -> None:
        mark = surviving_marks(enumerate(self.operations)).get(step, 0)
        self.num_forgotten = max(self.num_forgotten, mark)

    async def flushed(self, seq: int) -> None:
        pass

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        known = self.operations[self.num_forgotten :]
        return trained_since(step, known, from_start=self.num_forgotten == 0)


class CalledBy(SampleQueue):
    """The queue as one part of the run calls it."""

    def __init__(self, queue: LocalSampleQueue, part: str, incarnation: int = 1, *, retried: bool = False) -> None:
        self._queue = queue
        self._caller = QueueCaller(part, incarnation, retried)

    async def call(self, operation: Operation, *, timeout_s: float | None = None) -> Any:
        return await self._queue.call(operation, timeout_s=timeout_s, caller=self._caller)


def replay(state: QueueState, operations: Iterable[Operation]) -> QueueState:
    """Apply the operations to the state, in place. Raises `BugError` if one is illegal there."""
    for operation in operations:
        apply(operation, state)
    return state


def rebuilt(options: QueueOptions, operations: Iterable[Operation], journal: QueueLog) -> LocalSampleQueue:
    """Return the queue that another process rebuilds from these operations."""
    begin = QueueState.begin(options.prompts_per_epoch, keeps_payloads=True, total_samples=options.pacing.total_samples)
    return LocalSampleQueue(options, journal=journal, state=replay(begin, operations))


async def end(journal: Journal) -> None:
    """Write pending operations, and close the journal as the end of its process does."""
    try:
        await journal.flushed(journal._seq)
    finally:
        journal._connection.close()
        os.close(journal._lock)
