"""One run, from the first actor to the last record.

    driver ──┬─ Trainer   ──▶ StepRecord ...                     closes the queue after the last step, and ends when
             │                                                   the Rollouter has: its ranks hold the last version
             ├─ Rollouter ──▶ ApplyRecord, ValidationRecord ...  ends when the queue is closed and the last version
             │                                                   is applied and validated
             ├─ probes: how is the Rollouter, the Trainer, the queue, the store? each on its own, once a second
             ├─ health: lag, memory, object store, disk; what is wrong with them is told
             ├─ tick: what they said ──▶ records, watchdog; who is gone? Nothing slow, so that it is told in time
             └─ signals: the first Ctrl-C asks both sides to stop, and the two end by themselves

Trainer and Rollouter are replaced when they fail (`supervise`), queue and weight store by Ray, replicas by Serve
(`watch`). All tasks are in one task group, `launch`'s: the first failure that nobody can mend cancels the rest and
reaches it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.cli.health import HealthWatch
from asyncrl.cli.interrupts import Interrupts
from asyncrl.cli.nothing_left import nothing_left
from asyncrl.cli.parts import RolloutPart, TrainPart
from asyncrl.cli.picture import Picture
from asyncrl.cli.probes import TICK_S, probe
from asyncrl.cli.supervise import Supervisor
from asyncrl.cli.watch import FOREVER, NAMES, Watch
from asyncrl.cli.watchdog import StallError, Watchdog
from asyncrl.config.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.ports import Books, Edition
from asyncrl.profiling import Setup, profile
from asyncrl.queue_actor import QueueClient, start_queue
from asyncrl.records import RunRecord, StepRecord, ValidationRecord
from asyncrl.resume import Resume, journal_identity
from asyncrl.retry import RestartBudget
from asyncrl.run_dir import RunDir
from asyncrl.sample_queue import QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import write_stall
from asyncrl.telemetry.summary import Resumed, happened_in
from asyncrl.weights.object_store import start_store
from rollouter.coverage import ToCome
from rollouter.rollouter import RolloutStart
from rollouter.serving.app import start_app


class Run:
    """The parts of one run. `main` is the whole of it."""

    def __init__(
        self, config: Config, run_dir: RunDir, resume: Resume | None, recorder: Recorder, view: View, picture: Picture
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._recorder = recorder
        self._view = view
        self._picture = picture
        self._stopping = False
        self._shown: set[str] = set()
        self._ended = anyio.Event()
        self._trainer_moved = anyio.Event()
        """Set when the Trainer went back to a checkpoint, or ended; then there is a new one."""
        self._trainer_ended = False
        self._explained = 0
        """Crashes of engines that the Rollouter of now has explained by a prompt."""
        self._validated: Edition | None = None
        """Newest edition whose validation this process has recorded."""
        self._watchdog = Watchdog(config.timeouts.watchdog_s, start_s=config.timeouts.start_s)
        recovery = config.recovery
        self._budgets = {
            part: RestartBudget(name, recovery.max_restarts, recovery.window_s) for part, name in NAMES.items()
        }
        self._health = HealthWatch(config, run_dir.path, picture, recorder, view)
        self._others = Watch(config, picture, recorder, view, self._budgets)
        """Queue, store and replicas."""
        earlier = resume.incarnations if resume is not None else {}
        self._generating = RolloutPart(config, run_dir, self._begin)
        self._training = TrainPart(config, run_dir, resume, self._rewound, lambda: recorder.validated_step)
        self._rollouter = Supervisor(
            self._generating,
            self._budgets["rollouter"],
            recorder.restarted,
            incarnation=earlier.get("rollouter", 0) + 1,
        )
        self._trainer = Supervisor(
            self._training,
            self._budgets["trainer"],
            recorder.restarted,
            incarnation=earlier.get("trainer", 0) + 1,
            lost=", so there may be no last checkpoint (resume=auto goes on from the one before)",
        )

    async def main(self, namespace: str, interrupts: Interrupts) -> None:
        """Start the parts in this Ray namespace and follow them to their end.

        Raises:
            AsyncRLError (alone or in an exception group): the first failure that could not be mended.
        """
        self._view.phase("starting engines, trainer and data (about 40 s on a CPU)")
        self._picture.namespace = namespace
        async with anyio.create_task_group() as group:
            await self._start(namespace, group)
            self._view.phase("")
            self._picture.phase = "running"
            interrupts.orderly = self._stop
            group.start_soon(self._watch, group)
            group.start_soon(self._health.run)
            async with anyio.create_task_group() as streams:
                streams.start_soon(self._generate)
                streams.start_soon(self._train)
            # From here on only a bounded end is left, which a signal cannot make more orderly.
            interrupts.orderly = None
            self._ended.set()
            group.cancel_scope.cancel()
        await self._close_books()

    # ------------------------------------------------------------------------------------------------ start

    async def _start(self, namespace: str, group: TaskGroup) -> None:
        """Bring everything up, what takes long side by side; probes go into `group`."""
        config = self._config
        store = start_store(namespace, max_restarts=FOREVER if config.recovery.max_restarts else 0)
        self._others.store.handle = self._generating.store_handle = self._training.store_handle = store
        group.start_soon(self._others.probe_store)
        group.start_soon(self._others.keep_store_told, self._training.republish)
        group.start_soon(self._probe_part, self._rollouter, self._heard_rollouter)
        group.start_soon(self._probe_part, self._trainer, self._heard_trainer)
        async with anyio.create_task_group() as starting:
            starting.start_soon(self._first, self._trainer)
            if config.skip.async_rollout.enable and not config.skip.async_rollout.serve_when_covered:
                await self._first(self._rollouter)
                self._picture.has_engines = not await self._is_covered()
            else:
                starting.start_soon(self._first, self._rollouter)
            if self._picture.has_engines or config.reward_model.placement == "serve":
                with happened_in("replica"):
                    await start_app(config, namespace=namespace, engines=self._picture.has_engines)
        prepared = self._generating.prepared
        self._plan()
        self._recorder.plan(self._training.total_steps)
        if (done := nothing_left(self._resume, self._training.total_steps)) is not None:
            self._view.message("warning", done)
        if filtered := prepared["num_filtered"] + prepared["num_val_filtered"]:
            self._view.message("warning", f"{filtered} prompts over data.max_prompt_length were left out")
        with happened_in("queue"):
            await self._start_queue(prepared["num_prompts"])
        group.start_soon(self._others.probe_queue)

    def _plan(self) -> None:
        """How long the run is, now that the data is read."""
        num_prompts = self._generating.prepared["num_prompts"]
        self._training.num_prompts = num_prompts
        self._training.total_steps = training_steps(self._config, num_prompts)

    async def _is_covered(self) -> bool:
        """Every sample of the run is recorded and nothing is validated, so that no engine is needed."""
        if self._config.has_validation:
            self._view.message("warning", "engines are started all the same: there is a validation set")
            return False
        self._plan()
        to_come = ToCome(self._training.total_samples)
        if (resume := self._resume) is not None:
            before = resume.manifest.queue
            left = to_come.num_samples - resume.manifest.progress.trained_samples
            to_come = ToCome(max(0, left), before.outstanding, before.next_index)
        repeated = ", or others are in their place" if self._config.skip.async_rollout.action == "repeat" else ""
        with happened_in("rollouter"):
            uncovered = await self._generating.first_uncovered(to_come)
        if uncovered:
            self._view.message("warning", f"engines are started all the same: {uncovered}")
        else:
            self._view.message("", f"no engines: all {to_come.num_samples} samples are recorded{repeated}")
        return not uncovered

    async def _first(self, supervisor: Supervisor) -> None:
        """What cannot start at all is not tried again: most likely it never will."""
        with happened_in(supervisor.part.name):
            await supervisor.part.start(supervisor.incarnation)

    async def _start_queue(self, num_prompts: int) -> None:
        config, resume = self._config, self._resume
        mode = config.async_training
        pacing = Pacing(
            samples_per_version=config.samples_per_version,
            staleness_threshold=mode.staleness_threshold,
            total_samples=self._training.total_samples,
            over_sample=config.rollout.over_sample.samples,
        )
        journal = config.journal == "on"
        actor = start_queue(
            QueueOptions(
                num_prompts,
                pacing,
                mode.max_staleness,
                mode.stale_action,
                in_feed_order=mode.deterministic,
            ),
            resume.manifest.queue if resume is not None and resume.checkpoint is not None else None,
            run_dir=self._run_dir.path if journal else None,
            identity=journal_identity(config),
            max_restarts=FOREVER if journal and config.recovery.max_restarts else 0,
            profiler=Setup.of(config.profiler, self._run_dir.path),
        )
        self._others.queue.handle = actor
        self._queue = QueueClient(actor, config.timeouts.call_s)
        for part in (self._generating, self._training):
            part.queue, part.queue_handle = self._queue, actor
        await self._queue.attach("rollouter", self._rollouter.incarnation)
        await self._queue.attach("trainer", self._trainer.incarnation)
        if resume is not None:
            before = (await self._queue.status()).books
            await self._training.rewind()
            self._view.message("", _going_on(resume, before, (await self._queue.status()).books))

    # ------------------------------------------------------------------------------------------------ while it runs

    async def _train(self) -> None:
        with happened_in("trainer"):
            await self._trainer.follow(self._put)
        self._trainer_ended = True
        self._trainer_moved.set()

    async def _generate(self) -> None:
        with happened_in("rollouter"):
            await self._rollouter.follow(self._put)
            while await self._is_needed_again():
                await self._rollouter.follow_again(self._put)

    async def _is_needed_again(self) -> bool:
        """The Rollouter has ended because the Trainer had closed the queue: nobody needs the Trainer's ranks any more.
        Waits until the Trainer has ended as well (False), or has failed at the very end and gone back, which opens the
        queue again (True): what is lost or filtered from now on has to be generated, and what is published applied."""
        while not self._trainer_ended and not self._stopping:
            moved = self._trainer_moved
            if not (await self._queue.status()).closed:
                return True
            limit_s = math.inf
            try:
                await self._training.served()
            except InfraError:  # it is replaced and goes back; or it was only not reached, and is told again
                limit_s = TICK_S
            with anyio.move_on_after(limit_s):
                await moved.wait()
        return False

    def _begin(self) -> RolloutStart:
        """What the next Rollouter is to validate first: version 0 is validated once in a run, whoever resumes it."""
        step = self._recorder.validated_step
        first = self._config.trainer.val_before_train and self._validated is None and step is None
        return RolloutStart(first, self._validated, step or 0, self._picture.has_engines)

    async def _rewound(self, resumed: Resumed) -> None:
        self._picture.back_to = resumed
        await self._recorder.rewind(resumed)
        self._trainer_moved.set()
        self._trainer_moved = anyio.Event()

    async def _put(self, record: RunRecord) -> None:
        if isinstance(record, ValidationRecord):
            edition = Edition(record.lineage, record.version)
            self._validated = max(edition, self._validated or edition)
        if isinstance(record, StepRecord):
            profile.at(step=record.step + 1, version=record.version)
            for budget in self._budgets.values():
                budget.reached(record.step)
        with happened_in("driver"):
            await self._recorder.put(record)

    async def _watch(self, group: TaskGroup) -> None:
        while True:
            self._tick()
            self._others.look_at_replicas(group)
            state = self._picture.state()
            try:
                self._watchdog.observe(time.monotonic(), state)
            except StallError:
                await to_thread.run_sync(write_stall, self._run_dir.path, state)
                raise
            await anyio.sleep(TICK_S)

    def _tick(self) -> None:
        picture = self._picture
        since = {each.part.name: each.replacing_since for each in (self._rollouter, self._trainer)}
        picture.restarting = {part: at for part, at in since.items() if at is not None}
        picture.processes = (*self._generating.processes, *self._training.processes)
        if picture.queue is not None:
            self._recorder.tick(picture.queue, picture.rollouter, picture.trainer)

    # ------------------------------------------------------------------------------------------------ probes

    async def _probe_part(self, supervisor: Supervisor, heard: Callable[[Any], None]) -> None:
        """Of Rollouter or Trainer."""
        part = supervisor.part
        assert isinstance(part, RolloutPart | TrainPart)

        async def ask_it(within_s: float) -> Any:
            try:
                return await part.status(within_s)
            except DeadlineError:
                raise
            except InfraError:  # it is gone, as its stream will tell
                return None

        async def heard_it(status: Any) -> None:
            self._picture.heard_at[part.name] = time.time()
            heard(status)

        async def missed(error: DeadlineError) -> None:
            # What is still coming up has a deadline of its own.
            if self._picture.phase != "starting":
                supervisor.hung(error)

        self._picture.heard_at[part.name] = time.time()
        await probe(ask_it, self._config.timeouts.probe_s, heard=heard_it, missed=missed)

    def _heard_rollouter(self, status: Any) -> None:
        if "waits" in status:  # it runs
            self._picture.rollouter = status
            self._show_messages(status)
            self._rollouter.at_work()
            # What a poisonous prompt has ended was not the replicas' own failure.
            explained = status["quarantine"]["explained"]
            self._budgets["replica"].excuse(max(0, explained - self._explained))
            self._explained = explained

    def _heard_trainer(self, status: Any) -> None:
        self._picture.trainer = status
        self._show_messages(status)
        if status["waits"]:
            self._trainer.at_work()

    def _show_messages(self, status: Any) -> None:
        """What records could not be served or kept, each thing once in the run."""
        for message in status.get("messages", ()):
            if message not in self._shown:
                self._shown.add(message)
                self._view.message("warning", message)

    # ------------------------------------------------------------------------------------------------ end

    async def _stop(self) -> None:
        """Ask both sides to end in order; they end by themselves, within the limit or not at all."""
        limit_s = self._config.timeouts.stop_s
        ending = (
            "with a checkpoint" if self._config.trainer.save_last else "without a checkpoint (trainer.save_last=false)"
        )
        self._stopping = True
        self._trainer_moved.set()
        self._picture.phase = "stopping"
        self._view.phase(f"stopping after this step, {ending}; Ctrl-C again stops at once")
        with anyio.move_on_after(limit_s):
            await self._trainer.stop()
            await self._rollouter.stop()
            await self._ended.wait()
            return
        raise InfraError(
            f"the run did not stop within timeouts.stop_s={limit_s:g}: what the trainer did since its last checkpoint "
            "is lost; raise timeouts.stop_s if a step takes that long"
        )

    async def _close_books(self) -> None:
        """Whatever is still live is dropped, and the last figures are taken."""
        with happened_in("queue"):
            await self._queue.close()
            self._picture.queue = await self._queue.status()
        for part, heard in ((self._generating, self._heard_rollouter), (self._training, self._heard_trainer)):
            try:
                if status := await part.status(self._config.timeouts.call_s):
                    heard(status)
            except InfraError:  # it has ended, well or not: what it said last stands
                continue
        self._tick()


def _going_on(resume: Resume, before: Books, now: Books) -> str:
    """What a resumed run begins with, in words. `before`: with what was trained after the checkpoint still trained."""
    at = resume.manifest.progress
    where = f"step {at.step} (version {at.version})" if resume.checkpoint is not None else "its beginning"
    again = max(0, before.trained - now.trained)
    return (
        f"going on from {where} in {resume.run_dir}: {now.trained} samples are trained, {again} are trained again, "
        f"{now.ready - min(again, now.ready)} more are finished already"
    )
