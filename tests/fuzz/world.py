"""One run in one event loop: the real core between fake engines, fake ranks and a disk in memory.

    real   Rollouter (pump, versions, probation), TrainLoop and Intake, QueueClient, QueueActor over LocalSampleQueue
           and QueueState, transitions as rows, the Supervisors
    fake   engines, weight store, ranks, checkpoints, payload and turn files, processes and the network between them

What is on disk (journal rows, checkpoints, payloads, turns, the Trainer's record) outlives whatever is killed.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import torch
from anyio.abc import TaskGroup
from ray.exceptions import ActorUnavailableError

from asyncrl.cli.supervise import Supervisor
from asyncrl.config.plan import total_samples
from asyncrl.failures import AsyncRLError, DeadlineError, InfraError, UserCodeError, first_failure
from asyncrl.manifest import Progress
from asyncrl.payloads import FileRef
from asyncrl.ports import Metrics, PartName, Publication, QueueSnapshot, RunRecord, StepRecord
from asyncrl.queue_actor import QueueActor, QueueClient
from asyncrl.recovery import QueueState
from asyncrl.retry import RestartBudget
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.transitions import Transition
from asyncrl.types import Prompt, Sample, SampleId, Turn
from asyncrl.waits import WaitBoard
from rollouter.rollouter import Rollouter, RolloutStart, Task
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeFeed, FakeScorer, ListPrompts, MemoryTurns, make_prompt
from tests.fuzz.journal import CrashLog, Disk
from tests.fuzz.remote import ActorHost, Gate, Gated
from tests.fuzz.setup import CALL_S, Fault, Setup
from trainer.experience import Experience
from trainer.intake import Intake
from trainer.loop import TrainLoop
from trainer.loop_settings import LoopSettings
from trainer.rows import RowRules, TrainSample

PROBE_S = 3.0
START_S = 10.0
MAX_LAUNCHES = 12


class Checkpoint(NamedTuple):
    progress: Progress
    queue: QueueSnapshot
    model: tuple[SampleId, ...]
    """What has been trained on."""


class Files:
    """Everything on disk, and what is counted over the whole run."""

    def __init__(self, setup: Setup) -> None:
        self.journal = Disk(setup.num_prompts)
        self.checkpoints: dict[int, Checkpoint] = {}
        self.payloads: dict[str, Sample] = {}
        self.not_needed: set[str] = set()
        """Payload files that the queue has deleted."""
        self.turns = CountedTurns()
        self.trained: list[Mapping[str, Any]] = []
        self.num_segments = 0
        self.shadow = QueueState.begin(setup.num_prompts, keeps_payloads=True)
        """The journal's rows replayed as they are made."""


class CountedTurns(MemoryTurns):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[SampleId, str]] = []

    async def record(self, sample_id: SampleId, key: str, turn: Turn) -> None:
        await super().record(sample_id, key, turn)
        self.log.append((sample_id, key))


@dataclass(eq=False)
class Process:
    """One process of Rollouter or Trainer: killed, it does nothing any more to anybody."""

    gate: Gate
    scope: anyio.CancelScope
    ready: anyio.Event
    go: anyio.Event
    send: Any
    records: Any
    stopped: bool = False
    _on_stop: Callable[[], None] = lambda: None
    error: AsyncRLError | None = None

    @classmethod
    def make(cls) -> Process:
        send, receive = anyio.create_memory_object_stream[RunRecord](1000)
        return cls(Gate(), anyio.CancelScope(), anyio.Event(), anyio.Event(), send, receive)

    async def put(self, record: RunRecord) -> None:
        await self.gate.passing()
        await self.send.send(record)

    def stop(self) -> None:
        self.stopped = True
        self._on_stop()

    def stops_by(self, stop: Callable[[], None]) -> None:
        """How what runs now is asked to end; it is asked at once if that has come before."""
        self._on_stop = stop
        if self.stopped:
            stop()

    async def run(self, main: Callable[[Process], Awaitable[None]]) -> None:
        try:
            with self.scope:
                await main(self)
        except AsyncRLError as error:
            self.error = error
        finally:
            self.ready.set()
            self.send.close()

    def kill(self) -> None:
        if not self.ended:
            self.gate.kill()
            self.error = InfraError("the process was killed")
            self.scope.cancel()

    @property
    def ended(self) -> bool:
        return bool(self.send.statistics().open_send_streams == 0)


class World:
    """The run of one seed."""

    def __init__(self, setup: Setup, trace: Callable[[str], None] | None = None) -> None:
        self.setup = setup
        self.files = Files(setup)
        self.rng = random.Random(setup.seed + 1)
        self.trace = trace
        self.faults = list(setup.faults)
        self.staleness: list[tuple[int, int]] = []
        """`(lineage, staleness)` of every trained sample."""
        self.launches = 0
        self.struck = 0
        self.completed_step = 0

    def say(self, told: str) -> None:
        if self.trace is not None:
            self.trace(f"{anyio.current_time():9.4f}  {told}")

    def see(self, transition: Transition) -> None:
        """Of the queue, as it is made: what a crash forgets is seen once more by `rebuilt`."""
        if self.trace is not None:
            self.say(str(transition))

    async def pause(self) -> None:
        """A message travels."""
        if self.rng.random() < 0.3:
            await anyio.sleep(self.rng.random() * 0.004)
        else:
            await anyio.lowlevel.checkpoint()

    def some(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s)

    async def run(self) -> None:
        """Launch after launch, until one completes."""
        while self.launches < MAX_LAUNCHES:
            self.launches += 1
            if await LaunchOfRun(self).run():
                return
        raise AssertionError(f"no launch out of {MAX_LAUNCHES} completed")


class FuzzQueueActor(QueueActor):
    """The real actor on a journal in memory."""

    def __init__(self, world: World, options: QueueOptions, committed: Callable[[], None]) -> None:
        self._told = ()
        self._parked = {}
        self._broken = None
        self._files = world.files
        self._log = CrashLog(world.files.journal, world.rng, world.see, committed)
        self._ready_queue = LocalSampleQueue.rebuilt(options, world.files.journal.transitions(), journal=self._log)
        world.say(f"queue rebuilt: {self._ready_queue.state.ledger.books()}")

    def die(self) -> None:
        self._log.die()

    async def _segments(self) -> list[str]:
        return list(self._files.payloads)

    async def _remove(self, files: Any) -> None:
        for file in files:
            self._files.payloads.pop(file, None)
            self._files.not_needed.add(file)


class LaunchOfRun:
    """The driver's part, as `asyncrl.cli.run` plays it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.setup, self.files, self.rng = world.setup, world.files, world.rng
        self.config = self.setup.config
        resumes = bool(self.files.journal.rows)
        state = self._rebuilt_state()
        self.lineage = state.lineage + 1 if resumes else 0
        self.resumes = resumes
        self.total_steps = self.config.trainer.total_training_steps or 0
        self.newest = self._newest()
        pacing = Pacing(
            self.config.samples_per_version, self.config.async_training.staleness_threshold, self.total_samples
        )
        options = QueueOptions(
            self.setup.num_prompts,
            pacing,
            self.config.async_training.max_staleness,
            self.config.async_training.stale_action,
        )
        self.host = ActorHost(
            lambda: FuzzQueueActor(world, options, self._committed),
            lambda: ActorUnavailableError("restarting", None),
            self.rng,
        )
        self.gate = Gate()
        self.queue = QueueClient(self.host.handle(self.gate), CALL_S)
        self.feed = FakeFeed()
        self.fleet = ShakyFleet(world, self.feed)
        self.prompts = ListPrompts([make_prompt(1, 2, number + 3) for number in range(self.setup.num_prompts)])
        self.rollout, self.train = RolloutPart(self), TrainPart(self)
        make = lambda part: Supervisor(  # noqa: E731
            part,
            RestartBudget(part.name, 1000, 1e9),
            lambda restart: world.say(str(restart)),
            incarnation=state.incarnations.get(part.name, 0) + 1,
            must_end_well=part.name == "trainer",
            clock=anyio.current_time,
            wall_clock=anyio.current_time,
        )
        self.rollouter, self.trainer = make(self.rollout), make(self.train)
        self.processes: TaskGroup
        self.commits_left = 0
        """Until the queue dies before it can answer; 0: it does not."""
        self.died = self.stopped = False
        self.trainer_ended = False
        self.trainer_moved = anyio.Event()

    def _rebuilt_state(self) -> QueueState:
        state = QueueState.begin(self.setup.num_prompts, keeps_payloads=True)
        for transition in self.files.journal.transitions():
            state.apply(transition)
        return state

    def _newest(self) -> Checkpoint | None:
        return self.files.checkpoints[max(self.files.checkpoints)] if self.files.checkpoints else None

    @property
    def progress(self) -> Progress:
        return self.newest.progress if self.newest is not None else Progress()

    @property
    def total_samples(self) -> int:
        at = self.progress
        return total_samples(
            self.config, self.total_steps, self.setup.num_prompts, step=at.step, trained_samples=at.trained_samples
        )

    async def run(self) -> bool:
        """True: the run is complete."""
        self.world.say(f"launch {self.world.launches}, lineage {self.lineage}, from step {self.progress.step}")
        async with anyio.create_task_group() as self.processes:
            try:
                await self._run()
            except (AsyncRLError, ExceptionGroup) as failure:
                error = first_failure(failure)
                # What fails after the stop leaves the run as a death of the driver does.
                if not self.stopped or not isinstance(error, InfraError):
                    raise
                self.world.say(f"while stopping: {error}")
            finally:
                for part in (self.rollout, self.train):
                    if part.process is not None:
                        part.process.kill()
                self.gate.kill()
                self.host.end()
        return not self.died and not self.stopped

    async def _run(self) -> None:
        async with anyio.create_task_group() as group:
            self.scope = group.cancel_scope
            for supervisor in (self.rollouter, self.trainer):
                await supervisor.part.start(supervisor.incarnation)
            await self.queue.attach("rollouter", self.rollouter.incarnation)
            await self.queue.attach("trainer", self.trainer.incarnation)
            if self.resumes:
                await self.train.rewind()
            group.start_soon(self._deal)
            async with anyio.create_task_group() as streams:
                streams.start_soon(self._generate)
                streams.start_soon(self._train)
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
            if not (await self.queue.status()).ended:
                return True
            await moved.wait()
        return False

    def rewound(self) -> None:
        self.trainer_moved.set()
        self.trainer_moved = anyio.Event()

    async def _put(self, record: RunRecord) -> None:
        if isinstance(record, StepRecord):
            self.world.staleness += [(record.lineage, age) for age in record.staleness]
            self.world.completed_step = record.step

    # ------------------------------------------------------------------------------------------------ faults

    async def _deal(self) -> None:
        while self.world.faults:
            fault = self.world.faults[0]
            await anyio.sleep(max(0.0, fault.at_s - anyio.current_time()))
            self.world.faults.pop(0)
            await self._strike(fault)

    async def _strike(self, fault: Fault) -> None:
        self.world.struck += 1
        self.world.say(f"FAULT {fault.kind}")
        match fault.kind:
            case "engine":
                self.fleet.crash(self.rng.choice(list(self.fleet.editions)))
            case "rollouter" | "trainer" as name:
                self._part(name).kill_now()
            case "hang rollouter" | "hang trainer":
                supervisor = self.rollouter if fault.kind.endswith("rollouter") else self.trainer
                part = self._part(supervisor.part.name)
                if (process := part.process) is not None:
                    process.gate.freeze()
                await anyio.sleep(PROBE_S)
                if part.process is process and process is not None and not process.ended:
                    supervisor.hung(InfraError("it does not answer"))
            case "queue":
                self.host.kill(self.rng.uniform(0.3, 1.0))
            case "answer":
                self.commits_left = self.rng.randint(1, 4)
            case "store":
                self.feed.forget()
                await anyio.sleep(self.rng.random())
                await self.train.republish()
            case "apply":
                self.fleet.fail_next_apply = True
            case "payload":
                if self.files.payloads:
                    del self.files.payloads[self.rng.choice(list(self.files.payloads))]
            case "driver":
                self.died = True
                self.scope.cancel()
            case "stop":
                self.stopped = True
                self.trainer_moved.set()
                await self.trainer.stop()
                await self.rollouter.stop()

    def _committed(self) -> None:
        if self.commits_left > 0:
            self.commits_left -= 1
            if self.commits_left == 0:
                self.world.say("the queue dies over its answer")
                self.host.kill(self.rng.uniform(0.3, 1.0))

    def _part(self, name: str) -> _Part:
        return self.rollout if name == "rollouter" else self.train


class _Part:
    """`supervise.Part`."""

    name: PartName

    def __init__(self, launch: LaunchOfRun) -> None:
        self.launch = launch
        self.world = launch.world
        self.process: Process | None = None

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
            raise DeadlineError("it did not come up")
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
        if self.process is not None:
            await self.process.gate.passing()
            self.process.stop()

    async def main(self, process: Process, incarnation: int) -> None:
        raise NotImplementedError

    def client(self, process: Process, incarnation: int) -> Any:
        client = QueueClient(self.launch.host.handle(process.gate), CALL_S, part=self.name, incarnation=incarnation)
        return Gated(client, process.gate, anyio.lowlevel.checkpoint)


class RolloutPart(_Part):
    name: PartName = "rollouter"

    async def claim(self, incarnation: int) -> str:
        await self.launch.queue.attach("rollouter", incarnation)
        return ""

    async def main(self, process: Process, incarnation: int) -> None:
        launch, world, files = self.launch, self.world, self.launch.files
        await anyio.sleep(world.rng.random() * 0.5)
        process.ready.set()
        await process.go.wait()

        def gated(port: Any) -> Any:
            return Gated(port, process.gate, world.pause)

        rollouter = Rollouter(
            launch.config,
            Task(launch.prompts, None, ShakyScorer(world), lambda ids: ""),
            queue=self.client(process, incarnation),
            payloads=gated(MemoryFiles(world)),
            turns=gated(files.turns),
            feed=gated(launch.feed),
            fleet=gated(launch.fleet),
            sink=process,
            start=RolloutStart(validate_first=False),
            clock=anyio.current_time,
            wall_clock=anyio.current_time,
        )
        process.stops_by(rollouter.stop)
        await rollouter.run()


class TrainPart(_Part):
    name: PartName = "trainer"

    def __init__(self, launch: LaunchOfRun) -> None:
        super().__init__(launch)
        self.lineage = launch.lineage
        self.anew = not launch.resumes
        self.ranks: Ranks | None = None

    async def claim(self, incarnation: int) -> str:
        launch = self.launch
        self.lineage += 1
        self.anew = False
        launch.newest = launch._newest()
        await launch.queue.attach("trainer", incarnation)
        await self.rewind()
        launch.rewound()
        return f"back to step {launch.progress.step}"

    async def rewind(self) -> None:
        launch = self.launch
        await launch.queue.rewind(
            launch.progress.step,
            version=launch.progress.version,
            lineage=self.lineage,
            total_samples=launch.total_samples,
        )

    async def republish(self) -> None:
        if self.ranks is not None and self.process is not None and not self.process.ended:
            await self.ranks.republish()

    async def main(self, process: Process, incarnation: int) -> None:
        launch, world, files = self.launch, self.world, self.launch.files
        await anyio.sleep(world.rng.random() * 0.5)
        newest = launch.newest
        self.ranks = ranks = Ranks(world, launch.feed, process.gate, self.lineage, newest.model if newest else ())
        progress = replace(launch.progress)
        record = Record(files, self.lineage)
        if not self.anew:
            await Gated(record, process.gate, world.pause).rewound(progress.step)
            for step in [step for step in files.checkpoints if step > progress.step]:
                del files.checkpoints[step]
        if self.lineage > 0 or progress.version > 0:
            await ranks.publish(progress.version, progress.step, validate=False)
        process.ready.set()
        await process.go.wait()
        queue = self.client(process, incarnation)
        waits = WaitBoard(anyio.current_time)
        drift = launch.config.async_training
        rules = RowRules(
            mask_beyond=drift.max_staleness if drift.stale_action == "mask" else None,
            filter_groups=False,
            vocab_size=None,
            rewound=self.lineage > 0,
        )
        intake = Intake(
            queue,
            Gated(MemoryFiles(world), process.gate, world.pause),
            rules,
            max_consecutive_filtered=None,
            max_consecutive_unusable=8,
            call_s=CALL_S,
            waits=waits,
            clock=anyio.current_time,
        )
        loop = TrainLoop(
            LoopSettings.of(launch.config, total_steps=launch.total_steps, lineage=self.lineage),
            queue=queue,
            intake=intake,
            actor=ranks,  # type: ignore[arg-type]
            critic=None,
            experience=PlainExperience(),
            checkpoints=Checkpoints(world, process.gate, ranks),
            trained=Gated(record, process.gate, world.pause),
            progress=progress,
            waits=waits,
            clock=anyio.current_time,
        )
        process.stops_by(loop.stop)
        await loop.run(process)


# ---------------------------------------------------------------------------------------------------- fakes


class ShakyFleet(FakeFleet):
    """Engines that take their time, in pieces; `fail_next_apply` makes one apply fail half-way."""

    def __init__(self, world: World, feed: FakeFeed) -> None:
        self._world = world
        self.fail_next_apply = False
        super().__init__(
            answer=lambda request: request.prompt_ids.tolist(),
            pace=self._take_time,
            num_replicas=world.setup.num_replicas,
            chunk_tokens=world.rng.randint(1, 3),
            restart_s=world.rng.uniform(0.1, 3.0),
            feed=feed,
        )

    async def _take_time(self, session: str) -> None:
        if self._world.rng.random() < self._world.setup.stragglers:
            self._world.say(f"{session} does not end")
            await anyio.sleep_forever()
        await anyio.sleep(self._world.some(self._world.setup.mean_s))

    async def apply(self, publication: Publication) -> Any:
        await anyio.sleep(self._world.some(0.05))
        if self.fail_next_apply:
            self.fail_next_apply = False
            raise InfraError("a replica could not apply it")
        return await super().apply(publication)


class ShakyScorer(FakeScorer):
    def __init__(self, world: World) -> None:
        async def gate(prompt: Prompt) -> None:
            await anyio.sleep(world.some(0.02))
            if world.rng.random() < world.setup.reward_fails:
                raise UserCodeError("the reward function raised")

        super().__init__(gate=gate)


class MemoryFiles:
    """`PayloadStore` of files in memory."""

    def __init__(self, world: World) -> None:
        self._files = world.files
        self._world = world

    async def put(self, sample: Sample) -> FileRef:
        self._files.num_segments += 1
        name = f"1-{self._files.num_segments}.safetensors"
        self._files.payloads[name] = sample
        await self._world.pause()
        return FileRef(name, 0)

    async def get(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        asked = [payload.file for payload in payloads]
        assert not (gone := self._files.not_needed.intersection(asked)), f"{gone} were deleted and are needed"
        return [self._files.payloads.get(file) for file in asked]


class Record:
    """`loop.TrainedRecord` in memory."""

    def __init__(self, files: Files, lineage: int) -> None:
        self._files = files
        self._lineage = lineage

    async def rewound(self, step: int) -> None:
        self._files.trained.append({"lineage": self._lineage, "rewound_to_step": step})

    async def put(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        line = {"lineage": self._lineage, "step": step, "version": version, "samples": list(map(str, sample_ids))}
        self._files.trained.append(line)


class Columns:
    """What the loop needs of a batch: columns by name, rows by number."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self._columns = columns

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return Columns({name: column[key] for name, column in self._columns.items()})

    def __len__(self) -> int:
        return len(self._columns["groups"])


class PlainExperience:
    """`loop.ExperienceMaker`: rows of one token, with the feed index in it."""

    async def make(self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None) -> Experience:
        numbers = [number for number, sample in enumerate(samples) for _ in sample.rows]
        ids = torch.tensor([list(samples[number].sample_id) for number in numbers])
        batch = Columns(
            {
                "groups": torch.tensor(numbers),
                "ids": ids,
                "loss_mask": torch.ones((len(numbers), 1), dtype=torch.bool),
                "advantages": torch.ones((len(numbers), 1)),
            }
        )
        return Experience(batch, {}, kl_coef)


class Ranks:
    """A role whose weights are the list of what they were trained on."""

    def __init__(self, world: World, feed: FakeFeed, gate: Gate, lineage: int, model: tuple[SampleId, ...]) -> None:
        self.model = list(model)
        self._world = world
        self._feed = feed
        self._gate = gate
        self._lineage = lineage
        self._published: tuple[int, int] | None = None

    async def train_batch(self, batch: Any) -> Metrics:
        await self._gate.passing()
        await anyio.sleep(self._world.some(self._world.setup.step_s))
        await self._gate.passing()
        self.model += dict.fromkeys(SampleId(*ids) for ids in batch["ids"].tolist())
        return {"loss": 0.0, "tokens": float(len(batch))}

    async def publish(self, version: int, step: int, *, validate: bool) -> Publication:
        await self._gate.passing()
        await self._world.pause()
        self._published = (version, step)
        return await self._feed.publish(version, lineage=self._lineage, step=step, validate=validate)

    async def republish(self) -> None:
        if self._published is not None:
            version, step = self._published
            await self._feed.publish(version, lineage=self._lineage, step=step)


class Checkpoints:
    """`loop.Checkpoints` in memory: begun is not written."""

    def __init__(self, world: World, gate: Gate, ranks: Ranks) -> None:
        self._world = world
        self._gate = gate
        self._ranks = ranks
        self._begun: Checkpoint

    async def begin(self, progress: Progress, queue: QueueSnapshot) -> None:
        await self._gate.passing()
        await self._world.pause()
        self._begun = Checkpoint(progress, queue, tuple(self._ranks.model))

    async def finish(self) -> Path:
        await anyio.sleep(self._world.some(0.2))
        await self._gate.passing()
        step = self._begun.progress.step
        self._world.files.checkpoints[step] = self._begun
        self._world.say(f"checkpoint of step {step} written")
        # As `trainer.max_checkpoints_to_keep` would have it.
        for old in sorted(self._world.files.checkpoints)[:-2]:
            del self._world.files.checkpoints[old]
        return Path(f"step_{step}")
