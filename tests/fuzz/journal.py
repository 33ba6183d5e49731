"""A journal in memory that behaves like one on disk: a crash loses the rows that are not committed yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from asyncrl.core.failures import InfraError
from asyncrl.core.types import SampleId
from asyncrl.queue.core import Operation
from asyncrl.queue.operation_rows import JournalRow, from_row, surviving_marks, to_row, trained_since


class Disk:
    """The committed rows, which survive every process."""

    def __init__(self, num_prompts: int) -> None:
        self.rows: list[JournalRow] = []
        self.num_forgotten = 0
        """Rows that only the checks of the run use."""
        self._num_prompts = num_prompts

    def operations(self, pending: Sequence[JournalRow] = ()) -> list[Operation]:
        return [from_row(row, self._num_prompts) for row in (*self.rows, *pending)]


class FuzzJournal:
    """The `asyncrl.queue.core.QueueLog` of one process of the queue."""

    def __init__(
        self, disk: Disk, rng: random.Random, see: Callable[[Operation], None], committed: Callable[[], None]
    ) -> None:
        """
        Args:
            see: A callback for every operation when it is appended.
            committed: A callback when operations are durable, before their callers continue.
        """
        self._disk = disk
        self._rng = rng
        self._see = see
        self._on_commit = committed
        self._pending: list[JournalRow] = []
        self._num_committing = 0
        self._committed = anyio.Event()
        self._dead = False

    @property
    def durable(self) -> int:
        return len(self._disk.rows)

    def append(self, operation: Operation) -> int:
        self._check()
        self._see(operation)
        self._pending.append(to_row(operation))
        return self.durable + len(self._pending)

    def snapshot_if_due(self, size: int, dump: Callable[[], Mapping[str, Any]]) -> None:
        pass

    async def flushed(self, seq: int) -> None:
        while self.durable < seq:
            self._check()
            if self._num_committing == 0:
                self._num_committing = len(self._pending)
                asyncio.get_running_loop().call_later(self._rng.random() * 0.003, self._commit)
            await self._committed.wait()
        self._check()

    def forget_before(self, step: int) -> None:
        mark = surviving_marks(enumerate(self._disk.operations(self._pending))).get(step, 0)
        self._disk.num_forgotten = max(self._disk.num_forgotten, min(mark, self.durable))

    async def trained_since(self, step: int) -> tuple[SampleId, ...] | None:
        known = self._disk.operations(self._pending)[self._disk.num_forgotten :]
        return trained_since(step, known, from_start=self._disk.num_forgotten == 0)

    def die(self) -> None:
        """Kill the process. A commit in progress is written completely or not at all."""
        if self._num_committing and self._rng.random() < 0.5:
            self._disk.rows += self._pending[: self._num_committing]
        self._dead = True

    def _commit(self) -> None:
        if self._dead:
            return
        number, self._num_committing = self._num_committing, 0
        self._disk.rows += self._pending[:number]
        del self._pending[:number]
        self._on_commit()
        self._committed.set()
        self._committed = anyio.Event()

    def _check(self) -> None:
        if self._dead:
            raise InfraError("the queue's process was killed")
