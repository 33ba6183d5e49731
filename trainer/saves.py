"""The loop's checkpoints: begun between turns, written while the next ones train, then told to the queue.

    begin ─ queue.mark ─▶ roles copy their state ─┬─▶ the next turn
                                                  └─▶ finish ─▶ queue.covered ─▶ written

One at a time: the next one begins when the last one is written, or has failed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from asyncrl.manifest import Progress
from asyncrl.ports import QueueSnapshot, SampleQueue
from asyncrl.profiling import profile
from asyncrl.waits import WaitBoard

logger = logging.getLogger(__name__)

CALLS = 6
"""To the ranks, at most, of two roles: begun, written, finished."""


class Checkpoints(Protocol):
    """One at a time: `finish` before the next `begin`."""

    async def begin(self, progress: Progress, queue: QueueSnapshot) -> None:
        """Copy every role's state, so that training may go on, and start to write it."""

    async def finish(self) -> Path:
        """Wait until it is written, and give it its name.

        Raises:
            InfraError: it could not be written.
        """


class Saves:
    """Which steps are saved, and how far the last save is."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        queue: SampleQueue,
        *,
        step: int,
        save_freq: int,
        call_limit_s: float,
        waits: WaitBoard,
    ) -> None:
        """
        Args:
            step: that the loop begins with, whose checkpoint there is.
            save_freq: `trainer.save_freq`.
            call_limit_s: deadline of one call to the ranks.
        """
        self._checkpoints = checkpoints
        self._queue = queue
        self._save_freq = save_freq
        self._call_limit_s = call_limit_s
        self._waits = waits
        self.step = step
        """The newest step whose checkpoint was begun."""
        self.failed = False
        """One could not be written."""
        self._written = anyio.Event()
        """The last checkpoint begun is written, or has failed."""
        self._written.set()

    def is_due(self, step: int) -> bool:
        """A multiple of `save_freq` lies behind the last checkpoint and not behind `step`."""
        return self._save_freq > 0 and step // self._save_freq > self.step // self._save_freq

    async def begin(self, progress: Progress, tasks: TaskGroup) -> None:
        """Between turns: nothing is leased, so the mark counts every sample as trained, dropped or outstanding.

        What goes wrong while it is written fails `tasks`, and with it the turn that is under way.
        """
        limit_s = CALLS * self._call_limit_s
        with self._waits.waiting("checkpoint", limit_s=limit_s), profile.span("trainer.checkpoint"):
            await self._written.wait()
            await self._checkpoints.begin(replace(progress), await self._queue.mark(progress.step))
        self.step, self._written = progress.step, anyio.Event()
        tasks.start_soon(self._write, progress.step, self._written)

    async def until_written(self) -> None:
        """Until the last checkpoint is written, or has failed."""
        with self._waits.waiting("checkpoint", limit_s=CALLS * self._call_limit_s):
            await self._written.wait()

    async def keep(self) -> None:
        """After a failure: until the checkpoint that is being written is whole, or has failed too: of ranks that are
        gone it hears at once."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._call_limit_s):
            await self._written.wait()

    async def _write(self, step: int, written: anyio.Event) -> None:
        try:
            path = await self._checkpoints.finish()
            # Only now may payloads go. Should this not come about, they are kept until the next checkpoint.
            await self._queue.covered(step)
            logger.info("checkpoint %s", path)
        except BaseException:
            self.failed = True
            raise
        finally:
            written.set()
