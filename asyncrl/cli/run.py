"""One run, from the first actor to the last record.

    driver ──┬─ Trainer   ──▶ StepRecord ...                     ends after the last step and closes the queue
             ├─ Rollouter ──▶ ApplyRecord, ValidationRecord ...  ends when the queue is closed and the last version
             │                                                   is applied and validated
             ├─ probes: how is the queue, the store, the Rollouter, the Trainer? each on its own, once a second
             ├─ tick: what they said ──▶ records, watchdog; who is gone?
             └─ signals: the first Ctrl-C asks both sides to stop, and the two end by themselves

Trainer and Rollouter are replaced when they fail (`supervise`), queue and weight store by Ray, replicas by Serve. All
tasks are in one task group, `launch`'s: the first failure that nobody can mend cancels the rest and reaches it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.cli.interrupts import Interrupts
from asyncrl.cli.nothing_left import nothing_left
from asyncrl.cli.parts import RolloutPart, TrainPart
from asyncrl.cli.picture import Picture
from asyncrl.cli.probes import TICK_S, probe
from asyncrl.cli.processes import end_known
from asyncrl.cli.remote import ask, kill_hung, nodes_here
from asyncrl.cli.replicas import ReplicaWatch
from asyncrl.cli.supervise import Supervisor
from asyncrl.cli.watchdog import StallError, Watchdog
from asyncrl.config.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.manifest import Resume, run_identity
from asyncrl.ports import Edition, PartName, QueueStatus, RunRecord, StoreStatus, ValidationRecord
from asyncrl.queue_actor import QueueActor, QueueClient, start_queue
from asyncrl.retry import RestartBudget
from asyncrl.run_dir import RunDir
from asyncrl.run_state import Restart
from asyncrl.sample_queue import QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import write_stall
from asyncrl.telemetry.summary import Resumed, happened_in
from asyncrl.weights.object_store import WeightStoreActor, start_store
from rollouter.rollouter import RolloutStart
from rollouter.serving.app import start_app

NAMES: dict[PartName, str] = {
    "rollouter": "Rollouter",
    "trainer": "Trainer",
    "queue": "sample queue",
    "store": "weight store",
    "replica": "replicas",
}
SERVE_TITLE = "ray::ServeReplica"
"""How the command line of a replica's process begins."""
FOREVER = -1
"""Ray's number of restarts without a limit: the budget is the driver's."""


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
        self._ended = anyio.Event()
        self._trainer_moved = anyio.Event()
        """Set when the Trainer went back to a checkpoint, or ended; then there is a new one."""
        self._trainer_ended = False
        self._validated: Edition | None = None
        """Newest edition whose validation this process has recorded."""
        self._watchdog = Watchdog(config.timeouts.watchdog_s, start_s=config.timeouts.start_s)
        self._replicas = ReplicaWatch(config.rollout.num_replicas, 2 * config.timeouts.probe_s)
        recovery = config.recovery
        self._budgets = {
            part: RestartBudget(name, recovery.max_restarts, recovery.window_s) for part, name in NAMES.items()
        }
        earlier = resume.incarnations if resume is not None else {}
        self._generating = RolloutPart(config, run_dir, self._begin)
        self._training = TrainPart(config, run_dir, resume, self._rewound)
        self._rollouter = Supervisor(
            self._generating,
            self._budgets["rollouter"],
            recorder.restarted,
            incarnation=earlier.get("rollouter", 0) + 1,
            must_end_well=False,
        )
        self._trainer = Supervisor(
            self._training,
            self._budgets["trainer"],
            recorder.restarted,
            incarnation=earlier.get("trainer", 0) + 1,
            must_end_well=True,
        )
        self._store_forgot = False
        self._store_since = 0.0
        """When the store's present process was first heard of, wall clock."""
        self._killed: dict[PartName, tuple[int, float]] = {}
        """Process of queue or store that was killed last, and when (monotonic)."""
        self._hung: dict[PartName, str] = {}
        """Why queue or store was killed, until the next one answers."""
        self._incarnations: Counter[PartName] = Counter({"queue": 1, "store": 1})
        """Of these two, whose restarts are Ray's."""

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
            group.start_soon(self._watch)
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
        self._store = start_store(namespace, max_restarts=FOREVER if config.recovery.max_restarts else 0)
        self._generating.store_handle = self._training.store_handle = self._store
        group.start_soon(self._probe_store)
        group.start_soon(self._probe_part, self._rollouter, self._heard_rollouter)
        group.start_soon(self._probe_part, self._trainer, self._heard_trainer)
        async with anyio.create_task_group() as starting:
            starting.start_soon(self._first, self._rollouter)
            starting.start_soon(self._first, self._trainer)
            with happened_in("replica"):
                await start_app(config, namespace=namespace)
        prepared = self._generating.prepared
        total_steps = training_steps(config, prepared["num_prompts"])
        self._training.total_steps, self._training.num_prompts = total_steps, prepared["num_prompts"]
        self._recorder.plan(total_steps)
        if (done := nothing_left(self._resume, total_steps)) is not None:
            self._view.message("warning", done)
        if filtered := prepared["num_filtered"] + prepared["num_val_filtered"]:
            self._view.message("warning", f"{filtered} prompts over data.max_prompt_length were left out")
        with happened_in("queue"):
            await self._start_queue(prepared["num_prompts"])
        group.start_soon(self._probe_queue)

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
        )
        journal = config.journal == "on"
        self._queue_actor = start_queue(
            QueueOptions(num_prompts, pacing, mode.max_staleness, mode.stale_action),
            resume.manifest.queue if resume is not None and resume.checkpoint is not None else None,
            run_dir=self._run_dir.path if journal else None,
            identity=run_identity(config),
            max_restarts=FOREVER if journal and config.recovery.max_restarts else 0,
        )
        self._queue = QueueClient(self._queue_actor, config.timeouts.call_s)
        for part in (self._generating, self._training):
            part.queue, part.queue_handle = self._queue, self._queue_actor
        await self._queue.attach("rollouter", self._rollouter.incarnation)
        await self._queue.attach("trainer", self._trainer.incarnation)
        if resume is not None:
            await self._training.rewind()

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
        """The Rollouter has ended because the Trainer had closed the queue. Waits until the Trainer has ended as well
        (False), or has failed at the very end, so that there is more to train (True)."""
        while not self._trainer_ended and not self._stopping:
            moved = self._trainer_moved
            if not (await self._queue.status()).ended:
                return True
            await moved.wait()
        return False

    def _begin(self) -> RolloutStart:
        """What the next Rollouter is to validate first."""
        return RolloutStart(self._config.trainer.val_before_train and self._validated is None, self._validated)

    async def _rewound(self, resumed: Resumed) -> None:
        self._picture.lineage = resumed.lineage
        await self._recorder.rewind(resumed)
        self._trainer_moved.set()
        self._trainer_moved = anyio.Event()

    async def _put(self, record: RunRecord) -> None:
        if isinstance(record, ValidationRecord):
            edition = Edition(record.lineage, record.version)
            self._validated = max(edition, self._validated or edition)
        with happened_in("driver"):
            await self._recorder.put(record)

    async def _watch(self) -> None:
        while True:
            self._tick()
            if (store := self._picture.store) is not None:
                await self._look_at_replicas(store)
            await self._tell_store()
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
        limit_s, part = self._config.timeouts.probe_s, supervisor.part
        assert isinstance(part, RolloutPart | TrainPart)

        async def ask_it() -> Any:
            try:
                return await part.status(limit_s)
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
        await probe(ask_it, heard=heard_it, missed=missed)

    def _heard_rollouter(self, status: Any) -> None:
        if "waits" in status:  # it runs
            self._picture.rollouter = status
            self._rollouter.at_work()

    def _heard_trainer(self, status: Any) -> None:
        self._picture.trainer = status
        if status["waits"]:
            self._trainer.at_work()

    async def _probe_queue(self) -> None:
        client = QueueClient(self._queue_actor, self._config.timeouts.probe_s)

        async def heard(status: QueueStatus) -> None:
            known = self._picture.queue
            if known is None or status.pid != known.pid:
                for told in status.told:  # of how it found its journal
                    self._view.message("warning", told)
            if known is not None and status.pid != known.pid:
                books = status.books
                live = books.running + books.ready + books.leased
                self._was_restarted("queue", f"{live} live samples rebuilt from the journal")
            self._picture.queue = status
            self._picture.heard_at["queue"] = time.time()

        async def missed(error: DeadlineError) -> None:
            if self._config.journal == "off" or self._picture.queue is None:
                raise error
            await self._replace_hung("queue", self._queue_actor, QueueActor, self._picture.queue.pid, error)

        self._picture.heard_at["queue"] = time.time()
        with happened_in("queue"):
            await probe(client.status, heard=heard, missed=missed)

    async def _probe_store(self) -> None:
        # A status may be asked for twice: Ray asks again over a restart.
        call = self._store.status.options(max_task_retries=FOREVER)

        async def ask_it() -> StoreStatus:
            status: StoreStatus = await ask(
                NAMES["store"], call.remote(), self._config.timeouts.probe_s, doing="telling its status"
            )
            return status

        async def heard(status: StoreStatus) -> None:
            known = self._picture.store
            if known is not None and status.pid != known.pid:
                self._was_restarted("store", "the newest version is published again")
                self._store_forgot = True
            if known is None or status.pid != known.pid:
                self._store_since = time.time()
            self._picture.store = status
            self._picture.heard_at["store"] = time.time()

        async def missed(error: DeadlineError) -> None:
            if self._picture.store is not None:
                await self._replace_hung("store", self._store, WeightStoreActor, self._picture.store.pid, error)

        self._picture.heard_at["store"] = time.time()
        with happened_in("store"):
            await probe(ask_it, heard=heard, missed=missed)

    async def _replace_hung(self, part: PartName, actor: Any, kind: type, pid: int, error: DeadlineError) -> None:
        """Queue or store does not answer: end its process, once, and Ray starts the next one.

        Raises:
            InfraError: the next one has not come up within `timeouts.start_s`.
        """
        now_s, limit_s = time.monotonic(), self._config.timeouts.start_s
        killed, killed_s = self._killed.get(part, (0, 0.0))
        if killed == pid:  # the next one is starting, and must not be killed over it
            if now_s - killed_s > limit_s:
                raise InfraError(
                    f"the {NAMES[part]} was replaced because {self._hung[part]}, and the next one did not answer "
                    f"within {limit_s:g} s (timeouts.start_s); logs/ray in the run directory may say why"
                ) from error
            return
        self._killed[part] = pid, now_s
        self._hung[part] = error.message
        await kill_hung(actor, kind.__name__, pid, self._picture.heard_at[part])

    def _was_restarted(self, part: PartName, detail: str) -> None:
        """Queue or store answers from another process than the last time.

        Raises:
            InfraError: that was once too often.
        """
        now, failed_at = time.time(), self._picture.heard_at[part]
        cause = self._hung.pop(part, f"the {NAMES[part]}'s process died")
        self._incarnations[part] += 1
        self._recorder.restarted(Restart(part, self._incarnations[part], failed_at, cause, now, detail))
        self._budgets[part].spend(time.monotonic(), InfraError(f"{cause}; see logs/ray in the run directory"))

    async def _tell_store(self) -> None:
        """A store that was restarted knows nothing until the Trainer has told it."""
        if self._store_forgot and self._trainer.is_up:
            try:
                await self._training.republish()
            except InfraError as error:  # it is being replaced, and publishes by itself
                self._view.message("warning", f"the weight store could not be told the newest version: {error.brief}")
            else:
                self._store_forgot = False

    async def _look_at_replicas(self, store: StoreStatus) -> None:
        seen = self._replicas.look(
            store.replicas, self._picture.heard_at.get("store", 0.0), store_since=self._store_since
        )
        for restart in (*seen.begun, *seen.recovered):
            self._recorder.restarted(restart)
        for restart in seen.begun:
            with happened_in("replica"):
                self._budgets["replica"].spend(time.monotonic(), InfraError(restart.cause))
        here = await to_thread.run_sync(nodes_here) if seen.hung else ()
        for report in seen.hung:
            # Serve sees to replicas by itself, if slowly; one on this machine that it does not see hanging ends here.
            if report.node_id in here:
                await to_thread.run_sync(partial(end_known, [report.pid], report.reported_at, title=SERVE_TITLE))

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
