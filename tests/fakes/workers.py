"""Workers in this process, whose commands and reports are pickled like those of Ray actors, and that can die."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import EngineFleet, RewardScorer
from asyncrl.core.tasks import task_group
from rollouter.agent.conversation import ConversationAgent
from rollouter.group_workers.pool import WorkerPool
from rollouter.group_workers.worker import Command, GroupWorker, WorkerReport


def travelled(value: Any) -> Any:
    """Return the value as it arrives in another process."""
    return pickle.loads(pickle.dumps(value))


class LocalLink:
    """A `WorkerLink` to a worker in this process."""

    def __init__(self, worker: GroupWorker, pause: Callable[[], Any] = anyio.lowlevel.checkpoint) -> None:
        self.worker = worker
        self.commands: list[Command] = []
        self._pause = pause
        self._scope = anyio.CancelScope()
        self._ready = anyio.Event()
        self.dead = anyio.Event()

    async def run(self) -> None:
        with self._scope:
            await self.worker.run(self._ready.set)
        self.dead.set()

    def die(self) -> None:
        self.dead.set()
        self._scope.cancel()

    async def post(self, commands: Sequence[Command]) -> None:
        await self._ready.wait()
        await self._pause()
        self._check()
        self.commands += commands
        self.worker.post(travelled(commands))

    async def take(self) -> WorkerReport:
        self._check()
        taken: list[WorkerReport] = []

        async def take(scope: anyio.CancelScope) -> None:
            taken.append(travelled(await self.worker.take()))
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, tasks.cancel_scope)
            await self.dead.wait()
            tasks.cancel_scope.cancel()
        await self._pause()
        self._check()
        return taken[0]

    async def kill(self) -> None:
        self.die()

    def _check(self) -> None:
        if self.dead.is_set():
            raise InfraError("the process of the worker died")


class LocalWorkers:
    """A `WorkerPool` of workers in this process."""

    def __init__(
        self,
        num_workers: int,
        fleet: EngineFleet,
        scorer: Callable[[], RewardScorer],
        agent: Callable[[], ConversationAgent | None] = lambda: None,
        *,
        pause: Callable[[], Any] = anyio.lowlevel.checkpoint,
        limit_s: float = 60.0,
    ) -> None:
        self.links: list[LocalLink] = []
        """All workers so far."""
        self.can_start = anyio.Event()
        """Replacements start once it is set."""
        self.can_start.set()

        def new() -> LocalLink:
            self.links.append(LocalLink(GroupWorker(fleet, scorer(), agent()), pause))
            return self.links[-1]

        async def start(place: int) -> LocalLink:
            await self.can_start.wait()
            link = new()
            self._tasks.start_soon(link.run)
            return link

        self.pool = WorkerPool([new() for _ in range(num_workers)], start, limit_s=limit_s)

    @asynccontextmanager
    async def processes(self) -> AsyncIterator[None]:
        """Run the workers without the pool, which a Rollouter runs itself."""
        async with task_group() as self._tasks:
            for link in self.links:
                self._tasks.start_soon(link.run)
            yield
            self._tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.processes(), self.pool.running():
            yield
