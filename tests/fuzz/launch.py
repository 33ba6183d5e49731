"""One launch of a run, in which this module does the work of `asyncrl.driver.run`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
from anyio.abc import TaskGroup
from ray.exceptions import ActorUnavailableError

from asyncrl.config.resources.plan import total_samples, validation_due
from asyncrl.core.failures import AsyncRLError, DeadlineError, InfraError, first_failure
from asyncrl.core.ports import WeightsVersion
from asyncrl.core.records import RunRecord, StepRecord, ValidationRecord
from asyncrl.core.staleness import Pacing
from asyncrl.driver.supervision import RestartBudget, Supervisor
from asyncrl.queue.actor import QueueActor, QueueClient
from asyncrl.queue.core import Operation, QueueOptions
from asyncrl.queue.operations import OfferSamples, ReadStatus
from asyncrl.queue.sample_queue import QueueCaller
from asyncrl.queue.state import QueueState
from asyncrl.storage.checkpoint_manifest import Progress
from rollouter.weight_updates import RolloutStart
from tests.fakes.queues import rebuilt, replay
from tests.fuzz.files import Checkpoint
from tests.fuzz.fleet import Engines
from tests.fuzz.journal import FuzzJournal
from tests.fuzz.parts import FuzzPart, RolloutPart, TrainPart, prompts
from tests.fuzz.records import spoil
from tests.fuzz.remote import ActorHost, Gate
from tests.fuzz.setup import WATCHDOG_S, Fault
from tests.fuzz.store import FuzzStore
from tests.fuzz.watch import DriverWatch
from tests.fuzz.world import FuzzWorld

MAX_LAUNCHES = 12
DRIVER_CALL_S = 20.0
"""Longer than the driver needs to notice that the queue hangs and to restart it."""


async def play(world: FuzzWorld) -> None:
    """Launch the run again and again until a launch completes."""
    async with anyio.create_task_group() as servers:
        engines = None
        if world.setup.attaches:
            engines = Engines(world, "servers")
            engines.start(servers)
        while world.launches < MAX_LAUNCHES:
            world.launches += 1
            if await LaunchOfRun(world, engines).run():
                servers.cancel_scope.cancel()
                return
            if engines is not None:
                engines.detach()
                await anyio.sleep(world.some(0.5))
    raise AssertionError(f"none of {MAX_LAUNCHES} launches completed")


class FuzzQueueActor(QueueActor):
    """The real actor on a journal in memory."""

    def __init__(self, launch: LaunchOfRun, options: QueueOptions, number: int) -> None:
        """Create the `number`th process of the queue."""
        self._notices = ()
        self._parked = {}
        self._broken = None
        self._health = None
        self._number = number
        self._world = launch.world
        self._files = launch.files
        disk = launch.files.journal
        self._log = FuzzJournal(disk, launch.rng, launch.world.see, launch.committed)
        self._ready_queue = rebuilt(options, disk.operations(), self._log)
        launch.world.log(f"queue rebuilt: {self._ready_queue.state.counts()}")

    def die(self) -> None:
        self._log.die()

    async def call(self, caller: QueueCaller, operation: Operation, timeout_s: float | None = None) -> Any:
        if isinstance(operation, OfferSamples):
            # The Rollouter treats an offer to a queue that was just closed as accepted.
            state = self._ready_queue.state
            offered = [sample.meta.sample_id for sample in operation.samples]
            self._world.late_samples.update(sample_id for sample_id in offered if state.is_late(sample_id))
        answer = await super().call(caller, operation, timeout_s)
        return replace(answer, pid=self._number) if isinstance(operation, ReadStatus) else answer

    async def _segments(self) -> list[str]:
        return list(self._files.payloads)

    async def _remove(self, files: Any) -> None:
        for file in files:
            self._files.payloads.pop(file, None)
            self._files.not_needed.add(file)

    async def _forget_turns(self, incarnation: int) -> None:
        pass


class LaunchOfRun:
    def __init__(self, world: FuzzWorld, servers: Engines | None = None) -> None:
        """`servers`: the replicas to which the launch attaches; None: it starts its own."""
        self.world = world
        self.setup, self.files, self.rng = world.setup, world.files, world.rng
        self.config = self.setup.config
        state = self._rebuilt_state()
        self.resumes = bool(self.files.journal.rows)
        self.lineage = state.lineage + 1 if self.resumes else 0
        self.total_steps = self.config.trainer.total_training_steps or 0
        self.newest = self.newest_checkpoint()
        self.queue_host = self._make_queue()
        self.store_host = self._make_store()
        self.gate = Gate()
        self.queue = QueueClient(self.queue_host.handle(self.gate), DRIVER_CALL_S)
        self.engines = servers or Engines(world, f"{self.setup.seed}-{world.launches}", self.store_host)
        self.prompts = prompts(world)
        self.rollout, self.train = RolloutPart(self), TrainPart(self)
        self.rollouter, self.trainer = (self._make_supervisor(part, state) for part in (self.rollout, self.train))
        self.watch = DriverWatch(self)
        self.processes: TaskGroup
        self.commits_left = 0
        """Number of commits after which the queue dies before it answers; 0 if it does not die."""
        self.died = self.stopped = False
        self.trainer_ended = False
        self.trainer_moved = anyio.Event()
        self.validated: WeightsVersion | None = None
        """The newest weights version whose validation this launch has recorded."""

    def _make_queue(self) -> ActorHost:
        drift = self.config.async_training
        over = self.config.rollout.over_sample.samples
        pacing = Pacing(self.config.samples_per_version, drift.staleness_threshold, self.total_samples, over)
        options = QueueOptions(
            self.setup.num_prompts,
            pacing,
            drift.max_staleness,
            drift.stale_action,
            in_feed_order=drift.deterministic,
        )
        return self._host(lambda number: FuzzQueueActor(self, options, number))

    def _make_store(self) -> ActorHost:
        return self._host(FuzzStore)

    def _host(self, make: Any) -> ActorHost:
        return ActorHost(make, lambda: ActorUnavailableError("restarting", None), self.rng)

    def _make_supervisor(self, part: FuzzPart, state: QueueState) -> Supervisor:
        return Supervisor(
            part,
            RestartBudget(part.name, 1000, 1e9),
            lambda restart: self.world.log(str(restart)),
            incarnation=state.incarnations.get(part.name, 0) + 1,
            clock=anyio.current_time,
            wall_clock=anyio.current_time,
        )

    def _rebuilt_state(self) -> QueueState:
        return replay(QueueState.begin(self.setup.num_prompts, keeps_payloads=True), self.files.journal.operations())

    def newest_checkpoint(self) -> Checkpoint | None:
        return self.files.checkpoints[max(self.files.checkpoints)] if self.files.checkpoints else None

    @property
    def progress(self) -> Progress:
        """The point from which training continues."""
        return self.newest.progress if self.newest is not None else Progress()

    @property
    def total_samples(self) -> int:
        at = self.progress
        return total_samples(
            self.config, self.total_steps, self.setup.num_prompts, step=at.step, trained_samples=at.trained_samples
        )

    @property
    def validated_step(self) -> int | None:
        """See `Recorder.validated_step`."""
        return max((record.step for record in self.files.validations), default=None)

    def owes_validation(self) -> bool:
        """See `Trainer._validation_is_owed`."""
        training, step = self.config.trainer, self.validated_step
        if not self.config.has_validation:
            return False
        if step is None and training.val_before_train:
            return True
        return validation_due(training.test_freq, validated_step=step or 0, step=self.progress.step)

    def rollout_start(self) -> RolloutStart:
        step = self.validated_step
        first = self.config.trainer.val_before_train and self.validated is None and step is None
        return RolloutStart(first, self.validated, step or 0)

    # ------------------------------------------------------------------------------------------------ the run

    async def run(self) -> bool:
        """Run the launch to its end, and return whether the run is complete."""
        self.world.log(f"launch {self.world.launches}, lineage {self.lineage}, from step {self.progress.step}")
        # A driver that was killed while it was stopped lacks records of the last steps, but the checkpoint has them.
        self.world.completed_step = self.progress.step
        self._forget_validations()
        async with anyio.create_task_group() as self.processes:
            if not self.setup.attaches:
                self.engines.start(self.processes)
            try:
                await self._run()
            except (AsyncRLError, ExceptionGroup) as failure:
                self._ended_by(first_failure(failure))
            finally:
                for part in (self.rollout, self.train):
                    if part.process is not None:
                        part.process.kill()
                self.gate.kill()
                self.queue_host.end()
                self.store_host.end()
                self.processes.cancel_scope.cancel()
        return not self.died and not self.stopped

    def _ended_by(self, error: BaseException) -> None:
        """End the launch as the driver's death does. Raises `error` if it must not end a launch."""
        # A queue that hangs after the driver's last probe ends the launch.
        lost_queue = isinstance(error, DeadlineError) and "sample queue" in str(error)
        if not (self.stopped and isinstance(error, InfraError)) and not lost_queue:
            raise error
        self.world.log(f"the launch ends: {error}")
        self.died = True

    async def _run(self) -> None:
        async with anyio.create_task_group() as group:
            self.scope = group.cancel_scope
            for supervisor in (self.rollouter, self.trainer):
                await supervisor.part.start(supervisor.incarnation)
            if self.setup.attaches:
                await self.engines.attach(self.store_host)
            await self.queue.attach("rollouter", self.rollouter.incarnation)
            await self.queue.attach("trainer", self.trainer.incarnation)
            if self.resumes:
                await self.train.rewind()
            self.watch.start(group)
            group.start_soon(self._deal)
            async with anyio.create_task_group() as streams:
                streams.start_soon(self._generate)
                streams.start_soon(self._train)
            await self.watch.awake()
            group.cancel_scope.cancel()
        if not self.died:
            await self.queue.close()

    async def _train(self) -> None:
        await self.trainer.follow(self._put)
        self.trainer_ended = True
        self.trainer_moved.set()

    async def _generate(self) -> None:
        await self.rollouter.follow(self._put)
        while await self._is_needed_again():
            await self.rollouter.follow_again(self._put)

    async def _is_needed_again(self) -> bool:
        while not self.trainer_ended and not self.stopped:
            moved = self.trainer_moved
            if not (await self.queue.status()).closed:
                return True
            self.train.is_served.set()
            await moved.wait()
        return False

    def after_rewind(self) -> None:
        self._forget_validations()
        self.trainer_moved.set()
        self.trainer_moved = anyio.Event()

    def _forget_validations(self) -> None:
        at = self.progress
        kept = [one for one in self.files.validations if one.step <= at.step and one.version <= at.version]
        self.files.validations[:] = kept

    async def _put(self, record: RunRecord) -> None:
        await self.watch.awake()
        if isinstance(record, StepRecord):
            self.world.staleness += [(record.lineage, age) for age in record.staleness]
            self.world.completed_step = record.step
        elif isinstance(record, ValidationRecord):
            weights_version = WeightsVersion(record.lineage, record.version)
            self.validated = max(weights_version, self.validated or weights_version)
            self.files.validations.append(record)
            self.world.validations.append(record)

    # ------------------------------------------------------------------------------------------------ faults

    async def _deal(self) -> None:
        while self.world.faults:
            fault = self.world.faults[0]
            await anyio.sleep(max(0.0, fault.at_s - anyio.current_time()))
            self.world.faults.pop(0)
            await self._strike(fault)

    async def _strike(self, fault: Fault) -> None:
        self.world.struck += 1
        self.world.log(f"FAULT {fault.kind}")
        match fault.kind:
            case "engine" | "hang engine" as kind:
                # The fault affects only replicas that are up; Serve replaces a replica that hangs while it starts.
                if up := self.engines.up():
                    replica = self.rng.choice(up)
                    (self.engines.crash if kind == "engine" else self.engines.hang)(replica)
            case "join" | "leave" | "drain" as kind:
                self.engines.change(kind)
            case "rollouter" | "trainer" as name:
                self._part(name).kill_now()
            case "hang rollouter" | "hang trainer":
                if (process := self._part(fault.kind.removeprefix("hang ")).process) is not None:
                    process.gate.freeze()
            case "queue":
                self.queue_host.kill(self.rng.uniform(0.3, 1.0))
            case "hang queue":
                # If the process hung before its first answer to the driver, the launch would end.
                if self.watch.queue_number == self.queue_host.number:
                    self.queue_host.hang()
            case "answer":
                self.commits_left = self.rng.randint(1, 4)
            case "store":
                self.store_host.kill(self.rng.uniform(0.3, 1.0))
            case "apply":
                self.engines.fail_next_apply = True
            case "payload":
                if self.files.payloads:
                    del self.files.payloads[self.rng.choice(list(self.files.payloads))]
            case "record" if self.world.records is not None:
                spoil(self.world.records, self.rng)
            case "driver":
                self.died = True
                self.scope.cancel()
            case "driver stops":
                # A stop about as long as the second try of a probe would not count as a suspension of the driver, so
                # a healthy part could be killed.
                await self.watch.stand_still(self.rng.choice([1.0, 20.0, 2 * WATCHDOG_S]))
            case "stop":
                self.stopped = True
                self.trainer_moved.set()
                await self.trainer.stop()
                await self.rollouter.stop()

    def committed(self) -> None:
        if self.commits_left > 0:
            self.commits_left -= 1
            if self.commits_left == 0:
                self.world.log("the queue dies before it answers")
                self.queue_host.kill(self.rng.uniform(0.3, 1.0))

    def _part(self, name: str) -> FuzzPart:
        return self.rollout if name == "rollouter" else self.train
