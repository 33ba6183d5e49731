"""One run, from the first actor to the last record.

    driver ──┬─ Trainer   ──▶ StepRecord ...                     closes the queue after the last step, and ends after
             │                                                   the Rollouter, as its ranks hold the last version
             ├─ Rollouter ──▶ ApplyRecord, ValidationRecord ...  ends when the queue is closed and the last version
             │                                                   is applied and validated
             ├─ probes: Rollouter, Trainer, queue and store report their status, independently, once a second
             ├─ replica scaling: how many replicas the run wants (`rollout.autoscaling`)
             ├─ health: lag, memory, object store and disk, with warnings about them
             ├─ tick: status ──▶ metrics and watchdog; does nothing slow, so that failures are noticed in time
             └─ signals: the first Ctrl-C asks both sides to stop, and the two end by themselves

A `Supervisor` replaces Trainer and Rollouter when they fail; Ray restarts queue and weight store, and Serve the
replicas (`ServiceWatch`). One task group, `launch`'s, owns all tasks: the first failure that cannot be repaired cancels
the others and reaches `launch`.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import ray
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.config.resources.placement import ranks_come_first
from asyncrl.config.resources.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, DeadlineError, InfraError
from asyncrl.core.ports import PartName, QueueStatus, SampleCounts, WeightsVersion
from asyncrl.core.records import RunRecord, StepRecord, ValidationRecord
from asyncrl.core.tasks import Interrupts, task_group
from asyncrl.driver.actors import SupervisedRollouter, SupervisedTrainer, create, kill
from asyncrl.driver.cluster.state import check_room, pending_demands
from asyncrl.driver.health_monitor import HealthMonitor
from asyncrl.driver.replica_scaling import ReplicaScaling
from asyncrl.driver.resume import journal_identity
from asyncrl.driver.run_directory import already_finished
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.service_watch import PART_TITLES, UNLIMITED, ServiceWatch
from asyncrl.driver.stall_watchdog import StallError, Watchdog
from asyncrl.driver.supervision import TICK_S, RestartBudget, Supervisor, probe
from asyncrl.observe.formats import duration
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.run_status import ProcessInfo, Restart
from asyncrl.observe.status.summary import ResumePoint, attribute_failure_to
from asyncrl.observe.status.why import write_stall
from asyncrl.observe.terminal.live import ALREADY_SHOWN, View
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.queue.actor import QueueClient, start_queue
from asyncrl.queue.sample_queue import QueueOptions
from asyncrl.storage.checkpoint_manifest import Resume
from asyncrl.storage.run_dir import RunDir
from asyncrl.weights.object_store import ServedRun, claim_store
from rollouter.coverage import RemainingSamples
from rollouter.serving.app import attach, start_app
from rollouter.serving.options import ReplicaFacts, rollout_app
from rollouter.weight_updates import RolloutStart

DEMANDS_S = 5.0
"""Interval at which Ray is asked for what the run waits for."""
LAST_ANSWER_S = 5.0
"""Time limit of the last status reports after a failure; a healthy part answers within milliseconds."""
STOP_STEPS = 3
"""A run that stops has as long as so many steps took, if that is longer than `timeouts.stop_s`."""

logger = logging.getLogger(__name__)


class Run:
    """Starts the parts of one run and supervises them to the end, see `main`."""

    def __init__(
        self, config: Config, run_dir: RunDir, resume: Resume | None, recorder: Recorder, view: View, status: RunStatus
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._recorder = recorder
        self._view = view
        self._status = status
        self._stopping = False
        self._messages_shown: set[str] = set()
        self._ended = anyio.Event()
        self._trainer_changed = anyio.Event()
        """Set when the Trainer was rewound or has ended; a new event follows."""
        self._trainer_ended = False
        self._excused_crashes = 0
        """Engine crashes that the current Rollouter blames on a prompt."""
        self._lost_workers: dict[tuple[int, int], tuple[int, Any]] = {}
        """The losses in the Rollouter's last report, each with its number in the run. Keys are the Rollouter's
        incarnation and the number that it gave."""
        self._num_lost_workers = 0
        self._validated: WeightsVersion | None = None
        """Newest version whose validation this process has recorded."""
        self._watchdog = Watchdog(config.timeouts.watchdog_s, start_s=config.timeouts.start_s)
        recovery = config.recovery
        self._budgets = {
            part: RestartBudget(title, recovery.max_restarts, recovery.window_s) for part, title in PART_TITLES.items()
        }
        self._health = HealthMonitor(config, run_dir.path, status, recorder, view)
        self._services = ServiceWatch(config, status, recorder, view, self._budgets)
        incarnations = resume.incarnations if resume is not None else {}
        self._rollouter_part = SupervisedRollouter(config, run_dir, self._rollout_start)
        self._trainer_part = SupervisedTrainer(
            config, run_dir, resume, self._on_rewind, lambda: recorder.validated_step
        )
        self._rollouter = Supervisor(
            self._rollouter_part,
            self._budgets["rollouter"],
            recorder.record_restart,
            incarnation=incarnations.get("rollouter", 0) + 1,
        )
        self._trainer = Supervisor(
            self._trainer_part,
            self._budgets["trainer"],
            recorder.record_restart,
            incarnation=incarnations.get("trainer", 0) + 1,
            loss=", so the last checkpoint may be missing (resume=auto continues from the one before)",
        )

    async def main(self, namespace: str, interrupts: Interrupts) -> None:
        """Start the parts in this Ray namespace and follow them to their end.

        Raises:
            AsyncRLError (alone or in an exception group): the first failure that could not be repaired.
        """
        self._view.phase("starting engines, trainer and data (about 40 s on a CPU)")
        self._status.namespace = namespace
        try:
            async with anyio.create_task_group() as group:
                await self._start(namespace, group)
                self._view.phase("")
                self._status.phase = "running"
                interrupts.on_first = self._stop
                group.start_soon(self._watch, group)
                group.start_soon(self._health.run)
                async with anyio.create_task_group() as streams:
                    streams.start_soon(self._follow_rollouter)
                    streams.start_soon(self._follow_trainer)
                # The remaining steps have time limits, so signals are ignored here.
                interrupts.on_first = None
                self._ended.set()
                group.cancel_scope.cancel()
            with attribute_failure_to("queue"):
                await self._queue.close()  # the samples that are still live are dropped
                self._status.queue = await self._queue.status()
        except BaseException:
            with anyio.CancelScope(shield=True):
                with suppress(BugError):  # the first failure is the one that is raised
                    await self._take_last_answers(LAST_ANSWER_S)
                await self._end_queue()
            raise
        await self._take_last_answers(self._config.timeouts.call_s)

    # ------------------------------------------------------------------------------------------------ start

    async def _start(self, namespace: str, group: TaskGroup) -> None:
        """Start everything, slow parts concurrently; the probes become tasks of `group`."""
        config = self._config
        app = rollout_app(config, namespace)
        if config.ray.address is not None:
            if delay := await check_room(config):
                self._view.message("warning", delay)
            group.start_soon(self._watch_demands, namespace, app.name)
        with attribute_failure_to("store"):
            name = f"{self._run_dir.path} on {socket.gethostname()}"
            engines = await to_thread.run_sync(ReplicaFacts.wanted, config) if app.attached else None
            store = await claim_store(
                app.store_namespace,
                ServedRun.of(config, name=name, namespace=namespace, engines=engines),
                max_restarts=UNLIMITED if config.recovery.max_restarts else 0,
                limit_s=config.timeouts.start_s,
            )
        self._services.store.handle = store
        self._rollouter_part.store_handle = self._trainer_part.store_handle = store
        group.start_soon(self._services.probe_store)
        group.start_soon(self._services.keep_store_informed, self._trainer_part.republish)
        group.start_soon(self._probe_part, self._rollouter, self._on_rollouter_status)
        group.start_soon(self._probe_part, self._trainer, self._on_trainer_status)
        async with anyio.create_task_group() as starting:
            engines_decided = anyio.Event()
            starting.start_soon(self._start_parts, group, engines_decided)
            await engines_decided.wait()
            if self._status.has_engines or config.reward_model.placement == "serve":
                with attribute_failure_to("replica"):
                    await start_app(config, namespace=namespace, engines=self._status.has_engines)
                    if app.attached and self._status.has_engines:
                        await attach(config, app)
        if config.rollout.autoscaling.enable and self._status.has_engines:
            scaling = ReplicaScaling(config, self._status, self._view, self._services.expect_replicas)
            group.start_soon(scaling.run, store)

    async def _start_parts(self, group: TaskGroup, engines_decided: anyio.Event) -> None:
        """Start Trainer and Rollouter, and then the queue, which needs the length of the run. The engines, which take
        longest, start meanwhile, once it is decided whether the run needs them."""
        skip = self._config.skip.async_rollout
        async with anyio.create_task_group() as parts:
            if ranks_come_first(self._config):
                await self._start_first(self._trainer)
            else:
                parts.start_soon(self._start_first, self._trainer)
            if skip.enable and skip.engines == "auto":
                await self._start_first(self._rollouter)
                self._status.has_engines = not await self._is_covered()
            else:
                parts.start_soon(self._start_first, self._rollouter)
            engines_decided.set()
        self._view.message("", f"the Trainer's attention: {self._trainer_part.attention} (trainer.attn_implementation)")
        prepared = self._rollouter_part.prepared
        self._plan_steps()
        self._recorder.set_total_steps(self._trainer_part.total_steps)
        if (message := already_finished(self._resume, self._trainer_part.total_steps)) is not None:
            self._view.message("warning", message)
        if filtered := prepared["num_filtered"] + prepared["num_val_filtered"]:
            self._view.message("warning", f"{filtered} prompts over data.max_prompt_length were left out")
        if parser := prepared["call_format"]:
            self._view.message("", f"the parser of tool calls: {parser} (rollout.multi_turn.format=auto)")
        with attribute_failure_to("queue"):
            await self._start_queue(prepared["num_prompts"])
        group.start_soon(self._services.probe_queue)

    async def _watch_demands(self, namespace: str, app: str) -> None:
        """Report what the run waits for on a shared cluster, whenever it changes. A bundle that is just being placed is
        pending for a moment, too, so only what two answers in a row contain counts."""
        before: tuple[str, ...] = ()
        while True:
            waiting = None
            with anyio.move_on_after(self._config.timeouts.call_s):
                waiting = await to_thread.run_sync(pending_demands, namespace, app, abandon_on_cancel=True)
            if waiting is None:
                await anyio.sleep(DEMANDS_S)
                continue
            if waiting == before != self._status.pending_demands:
                text = f"waiting for room on the cluster: {'; '.join(waiting)}" if waiting else "the cluster has room"
                self._view.message("", text)
                self._status.pending_demands = waiting
            before = waiting
            await anyio.sleep(DEMANDS_S)

    def _plan_steps(self) -> None:
        """Compute the length of the run, which requires the data to be read."""
        num_prompts = self._rollouter_part.prepared["num_prompts"]
        self._trainer_part.num_prompts = num_prompts
        self._trainer_part.total_steps = training_steps(self._config, num_prompts)

    async def _is_covered(self) -> bool:
        """Whether every sample of the run is recorded and nothing is validated, so that no engine is needed."""
        if self._config.has_validation:
            self._view.message("warning", "engines are started because there is a validation set")
            return False
        self._plan_steps()
        remaining = RemainingSamples(self._trainer_part.total_samples)
        if (resume := self._resume) is not None:
            before = resume.manifest.queue
            left = remaining.num_samples - resume.manifest.progress.trained_samples
            remaining = RemainingSamples(max(0, left), before.outstanding, before.next_index)
        repeated = (
            ", or replaced by recorded samples of other prompts"
            if self._config.skip.async_rollout.action == "repeat"
            else ""
        )
        with attribute_failure_to("rollouter"):
            uncovered = await self._rollouter_part.first_uncovered(remaining)
        if uncovered:
            self._view.message("warning", f"engines are started: {uncovered}")
        else:
            self._view.message("", f"no engines: all {remaining.num_samples} samples are recorded{repeated}")
        return not uncovered

    async def _start_first(self, supervisor: Supervisor) -> None:
        """Start the first process of a part, without a retry: a part that fails at its first start would most likely
        fail again."""
        with attribute_failure_to(supervisor.part.name):
            await supervisor.part.start(supervisor.incarnation)

    async def _start_queue(self, num_prompts: int) -> None:
        config, resume = self._config, self._resume
        has_journal = config.journal == "on"
        start = partial(
            start_queue,
            QueueOptions.from_config(config, num_prompts, total_samples=self._trainer_part.total_samples),
            resume.manifest.queue if resume is not None and resume.checkpoint is not None else None,
            run_dir=self._run_dir.path if has_journal else None,
            identity=journal_identity(config),
            max_restarts=UNLIMITED if has_journal and config.recovery.max_restarts else 0,
            profiler=ProfilerSettings.of(config.profiler, self._run_dir.path),
        )
        actor = await create("queue", start, config.timeouts.start_s)
        self._services.queue.handle = actor
        self._queue = QueueClient(actor, config.timeouts.call_s)
        for part in (self._rollouter_part, self._trainer_part):
            part.queue, part.queue_handle = self._queue, actor
        await self._queue.attach("rollouter", self._rollouter.incarnation)
        await self._queue.attach("trainer", self._trainer.incarnation)
        if resume is not None:
            before = (await self._queue.status()).counts
            await self._trainer_part.rewind()
            self._view.message("", _resume_message(resume, before, (await self._queue.status()).counts))

    # ------------------------------------------------------------------------------------------------ while it runs

    async def _follow_trainer(self) -> None:
        with attribute_failure_to("trainer"):
            await self._trainer.follow(self._put)
        self._trainer_ended = True
        self._trainer_changed.set()

    async def _follow_rollouter(self) -> None:
        with attribute_failure_to("rollouter"):
            await self._rollouter.follow(self._put)
            while await self._is_needed_again():
                await self._rollouter.follow_again(self._put)

    async def _is_needed_again(self) -> bool:
        """Wait, after the Rollouter has ended, until the Trainer ends (False) or is rewound (True).

        The Rollouter ends once the Trainer has closed the queue and the last version is applied and validated; the
        Trainer's ranks are then no longer needed. A Trainer that fails at the very end is rewound, which reopens the
        queue: then samples have to be generated again, and published versions applied.
        """
        while not self._trainer_ended and not self._stopping:
            changed = self._trainer_changed
            if not (await self._queue.status()).closed:
                return True
            limit_s = math.inf
            try:
                await self._trainer_part.confirm_served()
            except InfraError:  # the Trainer is being replaced, or the call failed and is repeated
                limit_s = TICK_S
            with anyio.move_on_after(limit_s):
                await changed.wait()
        return False

    def _rollout_start(self) -> RolloutStart:
        """Return the start values of the next Rollouter. Version 0 is validated once in a run, resumes included."""
        step = self._recorder.validated_step
        validate_first = self._config.trainer.val_before_train and self._validated is None and step is None
        return RolloutStart(validate_first, self._validated, step or 0, self._status.has_engines)

    async def _on_rewind(self, resumed: ResumePoint) -> None:
        self._status.resumed_at = resumed
        profile.set_position(step=resumed.step + 1, version=resumed.version)
        await self._recorder.rewind(resumed)
        self._trainer_changed.set()
        self._trainer_changed = anyio.Event()

    async def _put(self, record: RunRecord) -> None:
        if isinstance(record, ValidationRecord):
            weights_version = WeightsVersion(record.lineage, record.version)
            self._validated = max(weights_version, self._validated or weights_version)
        if isinstance(record, StepRecord):
            profile.set_position(step=record.step + 1, version=record.version)
            for budget in self._budgets.values():
                budget.reached(record.step)
        with attribute_failure_to("driver"):
            await self._recorder.put(record)

    async def _watch(self, group: TaskGroup) -> None:
        while True:
            self._tick()
            self._services.watch_replicas(group)
            state = self._status.state()
            try:
                self._watchdog.observe(time.monotonic(), state)
            except StallError:
                await to_thread.run_sync(write_stall, self._run_dir.path, state)
                raise
            await anyio.sleep(TICK_S)

    def _tick(self) -> None:
        status = self._status
        since = {each.part.name: each.replacing_since for each in (self._rollouter, self._trainer)}
        status.restarting = {part: at for part, at in since.items() if at is not None}
        status.processes = (*self._rollouter_part.processes, *self._trainer_part.processes)
        if status.queue is not None:
            self._recorder.update_parts(status.queue, status.rollouter, status.trainer)

    # ------------------------------------------------------------------------------------------------ probes

    async def _probe_part(self, supervisor: Supervisor, on_status: Callable[[Any], None]) -> None:
        part = supervisor.part
        assert isinstance(part, SupervisedRollouter | SupervisedTrainer)

        async def ask(within_s: float) -> Any:
            try:
                return await part.status(within_s)
            except DeadlineError:
                raise
            except InfraError:  # it is gone, which its record stream reports
                return None

        async def on_answer(status: Any) -> None:
            self._status.answered_at[part.name] = time.time()
            on_status(status)

        async def on_timeout(error: DeadlineError) -> None:
            if self._status.phase != "starting":  # the start of a part has a separate deadline
                supervisor.replace_unresponsive(error)

        self._status.answered_at[part.name] = time.time()
        await probe(ask, self._config.timeouts.probe_s, on_answer=on_answer, on_timeout=on_timeout)

    def _on_rollouter_status(self, status: Any) -> None:
        if "waits" in status:  # it runs
            self._status.rollouter = status
            self._show_messages(status)
            self._rollouter.mark_working()
            # A crash that a prompt caused is not the replicas' own failure.
            explained = status["crash_isolation"]["explained"]
            self._budgets["replica"].excuse(max(0, explained - self._excused_crashes))
            self._excused_crashes = explained
            self._count_lost_workers(status)
        elif status.get("loading"):
            self._view.progress(status["loading"])

    def _count_lost_workers(self, status: Any) -> None:
        """Record the workers that the Rollouter has lost and replaced.

        Raises:
            InfraError: the budget of restarts is spent.
        """
        before, self._lost_workers = self._lost_workers, {}
        for lost in status.get("lost_workers", ()):
            key = (status["incarnation"], lost.number)
            number, known = before.get(key, (0, None))
            if known is None:
                number = self._num_lost_workers = self._num_lost_workers + 1
            self._lost_workers[key] = (number, lost)
            if known == lost:
                continue
            detail = f"worker {lost.worker}; its samples go on with all turns that it had reported"
            restart = Restart("worker", number + 1, lost.at, lost.cause, lost.recovered_at, detail)
            self._recorder.record_restart(restart)
            if known is None:
                with attribute_failure_to("worker"):
                    self._budgets["worker"].spend(time.monotonic(), InfraError(lost.cause))

    def _on_trainer_status(self, status: Any) -> None:
        self._status.trainer = status
        self._show_messages(status)
        if status["waits"]:
            self._trainer.mark_working()

    def _show_messages(self, status: Any) -> None:
        """Show messages about records that could not be replayed or written, each of them once."""
        for message in status.get("messages", ()):
            if message not in self._messages_shown:
                self._messages_shown.add(message)
                self._view.message("warning", message)

    # ------------------------------------------------------------------------------------------------ end

    async def _stop(self) -> None:
        """Ask Rollouter and Trainer for an orderly end; fail the run if they do not end within the limit."""
        # A step of a large model takes minutes, and so does its checkpoint.
        limit_s = max(self._config.timeouts.stop_s, STOP_STEPS * (self._recorder.dashboard.step_s or 0.0))
        ending = (
            "with a checkpoint" if self._config.trainer.save_last else "without a checkpoint (trainer.save_last=false)"
        )
        self._stopping = True
        self._trainer_changed.set()
        self._status.phase = "stopping"
        self._view.phase(f"stopping after this step, {ending}, within {duration(limit_s)}; Ctrl-C again stops at once")
        with anyio.move_on_after(limit_s):
            await self._trainer.stop()
            await self._rollouter.stop()
            await self._ended.wait()
            return
        raise InfraError(
            f"the run did not stop within {duration(limit_s)} (timeouts.stop_s, or {STOP_STEPS} times the time of a "
            "step): the trainer's work since its last checkpoint is lost; raise timeouts.stop_s if a step and its "
            "checkpoint take that long"
        )

    async def _take_last_answers(self, limit_s: float) -> None:
        """Ask queue, Rollouter and Trainer for their statuses once more, at the same time.

        The previous answer stays if a part is gone or does not answer within `limit_s`. Generated tokens come from
        these answers, and without a journal all counts do; see `RunStatus.take_final_counts` for the others.

        Raises:
            BugError: see `Recorder.update_parts`.
        """

        async def ask(part: PartName, status: Awaitable[Any], on_status: Callable[[Any], None]) -> None:
            try:
                answer = await status
            except Exception:  # whatever ended the run may have ended this part, too
                logger.info("the %s did not report its last status", part, exc_info=True, extra=ALREADY_SHOWN)
                return
            if answer:
                on_status(answer)

        def on_queue_status(status: QueueStatus) -> None:
            self._status.queue = status

        async with task_group() as asking:
            if (handle := self._services.queue.handle) is not None:
                asking.start_soon(ask, "queue", QueueClient(handle, limit_s).status(), on_queue_status)
            if self._status.phase != "starting":  # until then, parts that load answer late, and have done nothing
                asking.start_soon(ask, "rollouter", self._rollouter_part.status(limit_s), self._on_rollouter_status)
                asking.start_soon(ask, "trainer", self._trainer_part.status(limit_s), self._on_trainer_status)
        self._tick()

    async def _end_queue(self) -> None:
        """End the queue's process after a failure on a shared cluster, whose actors otherwise live until this process
        ends: nothing may change the journal once the final counts are read. A private cluster ends as a whole."""
        if self._config.ray.address is None or (handle := self._services.queue.handle) is None:
            return
        here = ray.get_runtime_context().get_node_id()
        known = [ProcessInfo("queue", "queue", status.pid, here)] if (status := self._status.queue) is not None else []
        await kill(handle, known, time.time())


def _resume_message(resume: Resume, before: SampleCounts, now: SampleCounts) -> str:
    """Return a message about the state that a resumed run begins with.

    `before` counts samples trained after the checkpoint as trained."""
    at = resume.manifest.progress
    where = f"step {at.step} (version {at.version})" if resume.checkpoint is not None else "the beginning"
    again = max(0, before.trained - now.trained)
    return (
        f"continuing from {where} in {resume.run_dir or resume.checkpoint}: {now.trained} samples are trained, "
        f"{again} are trained again, {now.ready - min(again, now.ready)} more are finished already"
    )
