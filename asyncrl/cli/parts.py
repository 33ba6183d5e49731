"""Rollouter and Trainer as the supervisor replaces them: the Ray side of `supervise.Part`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from anyio import to_thread

from asyncrl.cli.remote import ask, kill, stream
from asyncrl.config.plan import total_samples
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError
from asyncrl.lineage import NO_REWINDS
from asyncrl.manifest import Progress
from asyncrl.ports import PartName
from asyncrl.queue_actor import QueueClient
from asyncrl.records import RunRecord
from asyncrl.resume import Resume, resume_in_run
from asyncrl.run_dir import RunDir
from asyncrl.run_state import ProcessInfo
from asyncrl.telemetry.summary import Resumed, happened_in
from rollouter.actor import start_rollouter
from rollouter.coverage import ToCome
from rollouter.rollouter import RolloutStart
from trainer.actor import start_trainer

Status = Mapping[str, Any]


class _ActorPart:
    """One actor after another, and what its processes last told of themselves."""

    name: PartName

    def __init__(self, config: Config) -> None:
        self._config = config
        self._actor: Any = None
        self._processes: tuple[ProcessInfo, ...] = ()
        self._heard_at = 0.0

    async def status(self, limit_s: float) -> Status | None:
        """The actor's `status`; None: there is none, or it was replaced meanwhile.

        Raises:
            DeadlineError: it did not answer within `limit_s`. InfraError: it is gone.
        """
        actor = self._actor
        if actor is None:
            return None
        try:
            status: Status = await ask(self.name, actor.status.remote(), limit_s, doing="telling its status")
        except DeadlineError:
            if actor is not self._actor:  # its successor has nothing to do with that
                return None
            raise
        if actor is not self._actor:
            return None
        if status:
            self._processes, self._heard_at = tuple(self._listed(status)), time.time()
        return status

    @property
    def processes(self) -> tuple[ProcessInfo, ...]:
        return self._processes

    def _listed(self, status: Status) -> list[ProcessInfo]:
        return [ProcessInfo(self.name, self.name, status["pid"], status["node_id"])]

    async def kill(self) -> None:
        """See `supervise.Part`."""
        actor, known, self._actor, self._processes = self._actor, self._processes, None, ()
        if actor is not None:
            await kill(actor, known, self._heard_at)

    async def stop(self) -> None:
        """See `supervise.Part`."""
        if self._actor is not None:
            await ask(self.name, self._actor.stop.remote(), self._config.timeouts.call_s, doing="stopping")


class RolloutPart(_ActorPart):
    """`supervise.Part` of the Rollouter."""

    name: PartName = "rollouter"

    def __init__(self, config: Config, run_dir: RunDir, begin: Callable[[], RolloutStart]) -> None:
        """`begin`: what the process that runs next is to validate first."""
        super().__init__(config)
        self._run_dir = run_dir
        self._begin = begin
        self.queue: QueueClient
        self.queue_handle: Any
        self.store_handle: Any
        self.prepared: Mapping[str, int] = {}

    async def claim(self, incarnation: int) -> str:
        """What ran is fed again, and without a journal what was READY, too."""
        with happened_in("queue"):
            before = (await self.queue.status()).books.fed
            await self.queue.attach("rollouter", incarnation)
            again = before - (await self.queue.status()).books.fed
        return f"{again} samples are fed again"

    async def start(self, incarnation: int) -> None:
        """Load the data. Raises also what is wrong with it, see `RolloutActor.prepare`."""
        self._actor = start_rollouter(self._config, incarnation=incarnation)
        answer = self._actor.prepare.remote(str(self._run_dir.path))
        self.prepared = await ask(self.name, answer, self._config.timeouts.start_s, doing="reading the data")

    async def first_uncovered(self, to_come: ToCome) -> str:
        """Which of the samples is not recorded, and why; empty: none. Raises also what `rollouter.coverage` raises."""
        limit_s = self._config.timeouts.start_s
        answer = self._actor.first_uncovered.remote(to_come)
        try:
            told: str = await ask(self.name, answer, limit_s, doing="looking through the records")
        except DeadlineError:
            return f"the records could not be looked through in timeouts.start_s={limit_s:g}"
        return told

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        answers = self._actor.run.options(num_returns="streaming")
        async for record in stream(self.name, answers.remote(self.queue_handle, self.store_handle, self._begin())):
            yield record


class TrainPart(_ActorPart):
    """`supervise.Part` of the Trainer, its ranks with it."""

    name: PartName = "trainer"

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        resume: Resume | None,
        rewound: Callable[[Resumed], Awaitable[None]],
        validated_step: Callable[[], int | None],
    ) -> None:
        """
        Args:
            config: of the run.
            run_dir: where its checkpoints are.
            resume: what the first process goes on from.
            rewound: awaited when training has gone back, with where it is now.
            validated_step: see `Trainer.start`.
        """
        super().__init__(config)
        self._run_dir = run_dir
        self._resume = resume
        self._rewound = rewound
        self._validated_step = validated_step
        self._line = resume.line if resume is not None else NO_REWINDS
        self._loaded = False
        """The process that is up has a model."""
        self.total_steps = 0
        self.num_prompts = 0
        """Of an epoch."""
        self.queue: QueueClient
        self.queue_handle: Any
        self.store_handle: Any

    @property
    def total_samples(self) -> int:
        """What the run trains on in all."""
        at = self._progress
        return total_samples(
            self._config, self.total_steps, self.num_prompts, step=at.step, trained_samples=at.trained_samples
        )

    async def claim(self, incarnation: int) -> str:
        """Back to the newest checkpoint: what was trained since is to be trained again."""
        with happened_in("queue"):
            await self.queue.attach("trainer", incarnation)
        # Behind that: no process before this one can make or delete a checkpoint any more.
        self._resume = await to_thread.run_sync(resume_in_run, self._run_dir.path, self._line)
        self._line = self._line.rewound(self._progress.step)
        with happened_in("queue"):
            before = (await self.queue.status()).books.trained
            await self.rewind()
            again = before - (await self.queue.status()).books.trained
        progress = self._progress
        where = str(self._resume.checkpoint) if self._resume is not None else ""
        await self._rewound(Resumed(progress.step, progress.version, where, self._line.lineage))
        return f"back to step {progress.step} (version {progress.version}); {again} samples are trained again"

    async def rewind(self) -> None:
        """Take the queue back to what the Trainer goes on from."""
        progress = self._progress
        await self.queue.rewind(
            progress.step, version=progress.version, lineage=self._line.lineage, total_samples=self.total_samples
        )

    async def start(self, incarnation: int) -> None:
        """Load the models. Raises also what is wrong with them, see `Trainer.start`."""
        self._loaded = False
        self._actor = start_trainer(self._config, incarnation=incarnation)
        checkpoint = self._resume if self._resume is not None and self._resume.checkpoint is not None else None
        answer = self._actor.start.remote(
            self._run_dir, checkpoint, self.store_handle, self._line, self._validated_step()
        )
        await ask(self.name, answer, self._config.timeouts.start_s, doing="loading the model")
        self._loaded = True

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        answers = self._actor.run.options(num_returns="streaming")
        async for record in stream(self.name, answers.remote(self.queue_handle, self.total_steps)):
            yield record

    async def republish(self) -> None:
        """Offer its newest version again, to a weight store that has lost its memory; nothing before it has a model."""
        if self._loaded and self._actor is not None:
            limit_s = self._config.timeouts.train_s
            await ask(self.name, self._actor.republish.remote(), limit_s, doing="publishing its version again")

    async def served(self) -> None:
        """The last version is applied and validated: the process that is up may end.

        Raises:
            InfraError: it did not hear of it.
        """
        if self._actor is not None:
            await ask(self.name, self._actor.served.remote(), self._config.timeouts.call_s, doing="ending")

    def _listed(self, status: Status) -> list[ProcessInfo]:
        ranks = [
            ProcessInfo("rank", f"rank {rank['group']}/{rank['rank']}", rank["pid"], rank["node_id"])
            for rank in status["ranks"]
        ]
        return [*super()._listed(status), *ranks]

    @property
    def _progress(self) -> Progress:
        return self._resume.manifest.progress if self._resume is not None else Progress()
