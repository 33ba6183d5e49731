"""One part of a run, and the next one in its place when it fails.

    run ─▶ records ─▶ ends by itself
     ▲        │ InfraError, or it does not answer
     │        ▼
     │     budget ─▶ kill ─▶ claim ─▶ start
     └──────────────────────────────────┘

What fails otherwise (the configuration, user code, a bug, a full disk) would fail again: it ends the run. So does what
fails in `claim`, which is not the part's failure. A part that dies once it was asked to stop has stopped, if not in
order. Ray is behind `Part`, so that none of this needs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import anyio

from asyncrl.failures import AsyncRLError, DiskFullError, InfraError
from asyncrl.ports import PartName
from asyncrl.records import RunRecord
from asyncrl.retry import RestartBudget
from asyncrl.run_state import Restart

logger = logging.getLogger(__name__)

Put = Callable[[RunRecord], Awaitable[None]]
Tell = Callable[[Restart], None]


class Part(Protocol):
    """The processes of one part, one after another."""

    name: PartName

    async def kill(self) -> None:
        """End the process, whatever state it is in, with all that it started. Bounded."""

    async def claim(self, incarnation: int) -> str:
        """Put the run into the state in which the next process begins: what the last one held goes back.

        Returns:
            What that was, for people.

        Raises:
            AsyncRLError: the run cannot go on.
        """

    async def start(self, incarnation: int) -> None:
        """Bring up the next process.

        Raises:
            InfraError: this one did not come up; the one after it may.
        """

    def run(self) -> AsyncGenerator[RunRecord, None]:
        """What the process that is up records, until it ends."""

    async def stop(self) -> None:
        """Ask the process that is up for an orderly end."""


class _Stopped(Exception):
    """The run was asked to end while the part was being replaced."""


class Supervisor:
    """Follows a part until it ends by itself, and replaces it when it fails."""

    def __init__(
        self,
        part: Part,
        budget: RestartBudget,
        tell: Tell,
        *,
        incarnation: int = 1,
        lost: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            part: its first process has been started by the time of `follow`.
            budget: of its restarts.
            tell: called when a restart begins, and again when the new process is at work.
            incarnation: of the first process.
            lost: what goes with a process that does not stop in order, for people.
            clock: of the budget.
            wall_clock: of the restarts.
        """
        self.part = part
        self.incarnation = incarnation
        self.replacing_since: float | None = None
        """Wall clock; None: a process is up."""
        self._budget = budget
        self._tell = tell
        self._lost = lost
        self._clock = clock
        self._wall_clock = wall_clock
        self._restart: Restart | None = None
        """One whose process is not at work yet."""
        self._scope: anyio.CancelScope | None = None
        self._hung: InfraError | None = None
        self._stopping = False

    @property
    def is_up(self) -> bool:
        """A process runs, or has ended by itself."""
        return self.replacing_since is None

    async def follow(self, put: Put) -> None:
        """Hand every record to `put`, until a process of the part ends by itself or has been stopped.

        Raises:
            AsyncRLError: the part failed and cannot be replaced; or what `put` raised.
        """
        await self._go_on(await self._run(put), put)

    async def follow_again(self, put: Put) -> None:
        """`follow` once more, with a new process, after one that has ended by itself: there is work for it again."""
        try:
            error = await self._bring_up()
        except _Stopped:
            await self._leave()
            return
        await self._go_on(error or await self._run(put), put)

    async def stop(self) -> None:
        """End in order: ask the process for it, or do not start the next one. `follow` returns by and by; a process
        that does not hear of it is dead, as its stream will tell, or hangs, as its probe will."""
        self._stopping = True
        if self.replacing_since is not None:
            self._cancel()
            return
        try:
            await self.part.stop()
        except InfraError as error:
            logger.warning("the %s could not be asked to stop: %s", self.part.name, error.brief)

    def hung(self, error: InfraError) -> None:
        """The process that is up does not answer any more: replace it."""
        if self.replacing_since is None and self._hung is None:
            self._hung = error
            self._cancel()

    def at_work(self) -> None:
        """The process that is up does what it is there for."""
        if self._restart is not None and self.replacing_since is None:
            self._tell(replace(self._restart, recovered_at=self._wall_clock()))
            self._restart = None

    # ------------------------------------------------------------------------------------------------ inside

    async def _go_on(self, error: InfraError | None, put: Put) -> None:
        """After one process has failed with `error`, or ended by itself."""
        while error is not None:
            if self._stopping:
                self._end_badly(error)
                return
            try:
                error = await self._replace(error) or await self._run(put)
            except _Stopped:
                logger.warning("the %s was being replaced when the run was stopped%s", self.part.name, self._lost)
                await self._leave()
                return

    async def _run(self, put: Put) -> InfraError | None:
        """Follow the process that is up. Returns its failure; None: it ended by itself."""
        async with aclosing(self.part.run()) as records:
            while True:
                with anyio.CancelScope() as self._scope:
                    if self._hung is not None:
                        break
                    try:
                        record = await anext(records)
                    except StopAsyncIteration:
                        return None
                    except InfraError as error:
                        return error
                if self._scope.cancelled_caught:
                    break
                await put(record)
        return self._hung

    async def _replace(self, error: InfraError) -> InfraError | None:
        """A new process in the place of the one that failed with `error`. Returns its failure to come up."""
        failed_at = self._wall_clock()
        self.replacing_since = failed_at
        spent = self._budget.spend(self._clock(), error)
        cause = _one_line(error)
        logger.info("the %s failed and is replaced, restart %d: %s", self.part.name, spent, error)
        self._restart = Restart(self.part.name, self.incarnation + 1, failed_at, cause)
        self._tell(self._restart)
        return await self._bring_up()

    async def _bring_up(self) -> InfraError | None:
        self.incarnation += 1
        self.replacing_since = self._wall_clock()
        self._hung = None
        with anyio.CancelScope() as self._scope:
            if self._stopping:
                raise _Stopped
            await self.part.kill()
            detail = await self.part.claim(self.incarnation)
            if self._restart is not None:
                self._restart = replace(self._restart, detail=detail)
            try:
                await self.part.start(self.incarnation)
            except InfraError as error:
                return error
            if not self._stopping:
                self.replacing_since = None
                return None
            # It was up in the very moment in which the run was asked to end, too late to be cancelled.
        raise _Stopped

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _leave(self) -> None:
        """The run was stopped before the next process was up: there is none, and none is being brought up."""
        await self.part.kill()
        self.replacing_since = self._restart = None

    def _end_badly(self, error: InfraError) -> None:
        """It failed while the run was stopping."""
        if isinstance(error, DiskFullError):  # it could not keep what it had, and will not until there is room
            raise error
        logger.warning("the %s failed while the run was stopping%s: %s", self.part.name, self._lost, error.brief)


def _one_line(error: AsyncRLError) -> str:
    return error.message.splitlines()[0] if error.message else type(error).__name__
