"""Rollouter and Trainer as `supervision.SupervisedPart`, which the Supervisor starts and replaces."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from asyncrl.core.failures import DeadlineError, UserCodeError
from asyncrl.core.ports import PartName
from asyncrl.core.records import RunRecord
from asyncrl.core.types import Prompt
from asyncrl.core.waits import Wait, WaitBoard
from asyncrl.queue.actor import QueueClient
from asyncrl.weights.object_store import ObjectStoreFeed
from rollouter.loading import RolloutTask
from rollouter.rollouter import Rollouter
from skip import SkipManager
from tests.fakes.parts import FakeScorer, ListPrompts, make_prompt
from tests.fakes.workers import LocalWorkers
from tests.fuzz.files import MemoryFiles, MemoryTrainedSteps
from tests.fuzz.fleet import FuzzFleet
from tests.fuzz.process import Process
from tests.fuzz.records import FuzzRecords
from tests.fuzz.remote import Gated
from tests.fuzz.setup import PROBE_S, START_S
from tests.fuzz.store import Publisher
from tests.fuzz.talk import FuzzConversationAgent
from tests.fuzz.training import Checkpoints, FuzzRanks, PlainExperience
from tests.fuzz.world import POISON, VALIDATES, FuzzWorld
from trainer.batches import BatchSource, RowRules
from trainer.loop import TrainLoop
from trainer.schedule import LoopSettings

if TYPE_CHECKING:
    from tests.fuzz.launch import LaunchOfRun


WORKER_DEATHS = 0.002
"""Probability that a worker dies, for each message between it and the Rollouter."""


class FuzzPart:
    name: PartName

    def __init__(self, launch: LaunchOfRun) -> None:
        self.launch = launch
        self.world = launch.world
        self.process: Process | None = None
        self.board: WaitBoard | None = None
        """The waits of the running process."""

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None
        await self.world.pause()

    def kill_now(self) -> None:
        if self.process is not None:
            self.process.kill()

    async def start(self, incarnation: int) -> None:
        self.process = process = Process.make()
        self.launch.processes.start_soon(process.run, lambda of: self.main(of, incarnation), name=self.name)
        with anyio.move_on_after(START_S) as deadline:
            await process.ready.wait()
        if deadline.cancelled_caught:
            raise DeadlineError("it did not start")
        if process.error is not None:
            raise process.error

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        process = self.process
        assert process is not None
        process.go.set()
        async for record in process.records:
            yield record
        if process.error is not None:
            await anyio.sleep(self.world.rng.random())
            raise process.error

    async def stop(self) -> None:
        if (process := self.process) is not None:
            with anyio.move_on_after(PROBE_S) as deadline:
                await process.gate.passing()
            if deadline.cancelled_caught:
                raise DeadlineError(f"the {self.name} did not finish stopping")
            process.stop()

    async def main(self, process: Process, incarnation: int) -> None:
        raise NotImplementedError

    def waits(self) -> tuple[Wait, ...]:
        return tuple(self.board.snapshot()) if self.board is not None else ()

    def client(self, process: Process, incarnation: int) -> Any:
        handle, call_s = self.launch.queue_host.handle(process.gate), self.world.setup.call_s
        client = QueueClient(handle, call_s, part=self.name, incarnation=incarnation)
        return Gated(client, process.gate, anyio.lowlevel.checkpoint)


class RolloutPart(FuzzPart):
    name: PartName = "rollouter"

    async def release_samples(self, incarnation: int) -> str:
        await self.launch.queue.attach("rollouter", incarnation)
        return ""

    async def main(self, process: Process, incarnation: int) -> None:
        launch, world, files = self.launch, self.world, self.launch.files
        await anyio.sleep(world.rng.random() * 0.5)
        process.ready.set()
        await process.go.wait()

        def gated(port: Any) -> Any:
            return Gated(port, process.gate, world.pause)

        validation = ListPrompts([make_prompt(VALIDATES, 4, number) for number in range(2)])
        setup = world.setup
        agent = None
        if setup.max_turns > 1:
            agent = FuzzConversationAgent(setup.max_turns, launch.config.rollout.response_length, forks=setup.forks)
        val_prompts = validation if launch.config.has_validation else None
        task = RolloutTask(launch.prompts, val_prompts, ShakyScorer(world), lambda ids: "", agent)
        world.watched.append([])
        if world.records is not None:
            SkipManager.skip_instances = {"async_rollout": FuzzRecords(world, world.records, process.gate)}
        feed = ObjectStoreFeed(launch.store_host.handle(process.gate), call_s=world.setup.call_s)
        fleet = gated(FuzzFleet(launch.config, launch.engines, feed, world.watched[-1]))
        workers = None
        if num_workers := launch.config.rollout.num_workers:

            async def pause() -> None:
                await process.gate.passing()
                await world.pause()
                if workers is not None and world.rng.random() < WORKER_DEATHS:
                    world.log("a worker dies")
                    world.rng.choice(workers.links[-num_workers:]).die()

            workers = LocalWorkers(num_workers, fleet, lambda: task.scorer, lambda: agent, pause=pause, limit_s=PROBE_S)
        rollouter = Rollouter(
            launch.config,
            task,
            queue=self.client(process, incarnation),
            payloads=gated(MemoryFiles(files, world.pause)),
            turns=gated(files.turns),
            feed=feed,
            fleet=fleet,
            workers=workers.pool if workers is not None else None,
            sink=process,
            start=launch.rollout_start(),
            clock=anyio.current_time,
            wall_clock=anyio.current_time,
        )
        self.board = rollouter.waits
        process.stops_by(rollouter.stop)
        async with workers.processes() if workers is not None else nullcontext():
            await rollouter.run()


class TrainPart(FuzzPart):
    name: PartName = "trainer"

    def __init__(self, launch: LaunchOfRun) -> None:
        super().__init__(launch)
        self.lineage = launch.lineage
        self.anew = not launch.resumes
        self.ranks: FuzzRanks | None = None
        self.loop: TrainLoop | None = None
        self.is_served = anyio.Event()

    async def release_samples(self, incarnation: int) -> str:
        launch = self.launch
        self.lineage += 1
        self.anew = False
        launch.newest = launch.newest_checkpoint()
        await launch.queue.attach("trainer", incarnation)
        await self.rewind()
        launch.after_rewind()
        return f"back to step {launch.progress.step}"

    async def rewind(self) -> None:
        launch = self.launch
        await launch.queue.rewind(
            launch.progress.step,
            version=launch.progress.version,
            lineage=self.lineage,
            total_samples=launch.total_samples,
            trained_tokens=launch.progress.trained_tokens,
        )

    async def republish(self) -> None:
        # The ranks hold their published weights until after the last step.
        if self.ranks is not None and self.process is not None and self.process.error is None:
            await self.ranks.republish()

    async def main(self, process: Process, incarnation: int) -> None:
        launch, world, files = self.launch, self.world, self.launch.files
        await anyio.sleep(world.rng.random() * 0.5)
        newest = launch.newest
        store, owners = launch.store_host.handle(process.gate), launch.engines.owners
        publisher = Publisher(store, process.gate, owners, call_s=world.setup.call_s, lineage=self.lineage)
        self.ranks = ranks = FuzzRanks(world, publisher, process.gate, newest.model if newest else ())
        progress = replace(launch.progress)
        record = MemoryTrainedSteps(files, self.lineage)
        if not self.anew:
            await Gated(record, process.gate, world.pause).append_rewind(progress.step)
            for step in [step for step in files.checkpoints if step > progress.step]:
                del files.checkpoints[step]
        if self.lineage > 0 or progress.version > 0 or launch.setup.attaches:
            await ranks.publish(progress.version, progress.step, validate=launch.owes_validation())
        process.ready.set()
        await process.go.wait()
        queue = self.client(process, incarnation)
        self.board = waits = WaitBoard(anyio.current_time)
        drift = launch.config.async_training
        rules = RowRules(
            mask_beyond=drift.max_staleness if drift.stale_action == "mask" else None,
            group_filter=None,
            vocab_size=None,
            rewound=self.lineage > 0,
        )
        batch_source = BatchSource(
            queue,
            Gated(MemoryFiles(files, world.pause), process.gate, world.pause),
            rules,
            max_consecutive_filtered=None,
            max_consecutive_unusable=8,
            call_s=world.setup.call_s,
        )
        settings = LoopSettings.from_config(launch.config, total_steps=launch.total_steps, lineage=self.lineage)
        checkpoints = Checkpoints(
            world,
            process.gate,
            ranks,
            queue,
            step=progress.step,
            save_freq=launch.config.trainer.save_freq,
            call_limit_s=settings.call_limit_s,
            waits=waits,
        )
        self.loop = loop = TrainLoop(
            settings,
            queue=queue,
            batch_source=batch_source,
            actor=ranks,  # type: ignore[arg-type]
            critic=None,
            experience=PlainExperience(),
            checkpoints=checkpoints,
            trained_steps=Gated(record, process.gate, world.pause),
            progress=progress,
            validated_step=launch.validated_step or 0,
            waits=waits,
            clock=anyio.current_time,
        )
        served = self.is_served = anyio.Event()

        def stop() -> None:
            loop.stop()
            served.set()

        process.stops_by(stop)
        await loop.run(process)
        if not process.stopped:
            await self.until_served(served, waits)

    async def until_served(self, served: anyio.Event, waits: WaitBoard) -> None:
        with waits.waiting("served"):
            await served.wait()


class ShakyScorer(FakeScorer):
    def __init__(self, world: FuzzWorld) -> None:
        async def gate(prompt: Prompt) -> None:
            await anyio.sleep(world.some(0.02))
            validates = prompt.prompt_ids[0] == VALIDATES
            if not validates and world.reward_fails():
                raise UserCodeError("the reward function raised")

        super().__init__(gate=gate)


def prompts(world: FuzzWorld) -> ListPrompts:
    """Return the data set. A poisonous prompt begins with `POISON`."""
    return ListPrompts(
        [
            make_prompt(POISON if number == world.setup.poison else 1, 2, number + 3)
            for number in range(world.setup.num_prompts)
        ]
    )
