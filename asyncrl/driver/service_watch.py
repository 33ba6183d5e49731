"""Supervision of queue and weight store, which Ray restarts, and of replicas, which Serve restarts.

The driver notices a restart, charges it to a budget and helps: it ends unresponsive processes, and asks the Trainer to
publish again to a weight store that was restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.core.failures import DeadlineError, InfraError
from asyncrl.core.ports import PartName, QueueStatus, ReplicaReport, StoreStatus
from asyncrl.driver.actors import KILL_S, call, kill_process_of, local_nodes
from asyncrl.driver.cluster.processes import end_known
from asyncrl.driver.cluster.state import ENGINE_REPLICA
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.supervision import QUIET_S, ReplicaWatch, RestartBudget, probe
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.run_status import Restart
from asyncrl.observe.status.summary import attribute_failure_to
from asyncrl.observe.terminal.live import View
from asyncrl.queue.actor import QueueActor, QueueClient
from asyncrl.weights.object_store import WeightStoreActor, on_clock
from rollouter.serving.app import serve_messages
from rollouter.serving.options import rollout_app
from rollouter.serving.ray_internals import REPLICA_TITLE

PART_TITLES: dict[PartName, str] = {
    "rollouter": "Rollouter",
    "worker": "Rollouter's workers",
    "trainer": "Trainer",
    "queue": "sample queue",
    "store": "weight store",
    "replica": "replicas",
}
UNLIMITED = -1
"""The value of Ray's `max_restarts` for no limit; the driver's budget limits restarts instead."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RestartableActor:
    """The queue or the weight store, which Ray restarts under the same handle."""

    part: PartName
    kind: type
    """The actor's class, whose name is in the title of its process."""
    start_s: float
    """`timeouts.start_s`, within which the next process has to answer."""
    status: RunStatus
    recorder: Recorder
    budget: RestartBudget
    handle: Any = field(default=None, init=False)
    _pid: int | None = field(default=None, init=False)
    _incarnation: int = field(default=1, init=False)
    _killed: tuple[int, float] | None = field(default=None, init=False)
    """The last process that was killed, and the time (monotonic)."""
    _cause: str = field(default="", init=False)
    """Reason for the end of the last process, until the next one answers; empty: it died by itself."""

    def start_probing(self) -> None:
        self.status.answered_at[self.part] = time.time()

    def on_answer(self, pid: int, detail: str) -> bool:
        """Record an answer of process `pid`. Return whether the process is new; a restart is recorded with `detail`.

        Raises:
            InfraError: the budget is spent.
        """
        now, known = time.time(), self._pid
        failed_at = self.status.answered_at[self.part]
        self.status.answered_at[self.part], self._pid = now, pid
        if known == pid:
            return False
        if known is not None:
            cause, self._cause = self._cause or self._died, ""
            self._incarnation += 1
            self.recorder.record_restart(Restart(self.part, self._incarnation, failed_at, cause, now, detail))
            if self.status.phase != "stopping":
                self.budget.spend(time.monotonic(), InfraError(f"{cause}; see logs/ray in the run directory"))
        return True

    async def on_timeout(self, error: DeadlineError) -> None:
        """End the unresponsive process, unless it is gone already; Ray starts a new one.

        Raises:
            InfraError: the new process did not answer in time.
        """
        if self._pid is None:  # the start of the run has a separate deadline
            return
        now_s = time.monotonic()
        if self._killed is not None and self._killed[0] == self._pid:
            if now_s - self._killed[1] > self.start_s:
                raise InfraError(
                    f"the {PART_TITLES[self.part]} was replaced because {self._cause or self._died}, and the next one "
                    f"did not answer within {self.start_s:g} s (timeouts.start_s); logs/ray in the run directory may "
                    "say why"
                ) from error
            return
        self._killed, self._cause = (self._pid, now_s), error.message
        if not await kill_process_of(self.kind.__name__, self._pid, self.status.answered_at[self.part]):
            self._cause = ""

    @property
    def _died(self) -> str:
        return f"the {PART_TITLES[self.part]}'s process died"


class ServiceWatch:
    """Watches queue, weight store and replicas of one run.

    `probe_queue`, `probe_store` and `keep_store_informed` are tasks that run until they are cancelled.
    """

    def __init__(
        self,
        config: Config,
        status: RunStatus,
        recorder: Recorder,
        view: View,
        budgets: Mapping[PartName, RestartBudget],
    ) -> None:
        self._config = config
        self._status = status
        self._recorder = recorder
        self._view = view
        self._budgets = budgets
        start_s = config.timeouts.start_s
        self.queue = RestartableActor("queue", QueueActor, start_s, status, recorder, budgets["queue"])
        self.store = RestartableActor("store", WeightStoreActor, start_s, status, recorder, budgets["store"])
        # Other users and Serve's own autoscaling may change the replicas of a separately deployed application.
        num_replicas = status.num_replicas if config.rollout.attach is None else None
        self._replicas = ReplicaWatch(num_replicas, 2 * config.timeouts.probe_s, start_s)
        self._num_without_room = 0
        self._store_since = 0.0
        """Time of the first answer of the store's current process, wall clock."""
        self._store_is_empty = anyio.Event()

    def expect_replicas(self, num_replicas: int) -> None:
        """Set the number of replicas that the run wants from now on."""
        self._replicas.num_replicas = self._status.num_replicas = num_replicas

    async def probe_queue(self) -> None:
        """Probe the queue. Raises `InfraError` if it is gone for good, or was restarted too often."""

        async def ask(within_s: float) -> QueueStatus:
            return await QueueClient(self.queue.handle, within_s).status()

        async def on_timeout(error: DeadlineError) -> None:
            if self._config.journal == "off" or self._status.queue is None:  # without a journal, the state is lost
                raise error
            await self.queue.on_timeout(error)

        with attribute_failure_to("queue"):
            self.queue.start_probing()
            limit_s = self._config.timeouts.probe_s
            await probe(ask, limit_s, on_answer=self._on_queue_status, on_timeout=on_timeout)

    async def _on_queue_status(self, status: QueueStatus) -> None:
        live = status.counts.running + status.counts.ready + status.counts.leased
        if self.queue.on_answer(status.pid, f"{live} live samples rebuilt from the journal"):
            for notice in status.notices:
                self._view.message("warning", notice)
        self._status.queue = status

    async def probe_store(self) -> None:
        """Probe the weight store. Raises `InfraError` if it is gone for good, or was restarted too often."""
        # A status request is idempotent, so Ray may repeat it after a restart.
        ask_status = self.store.handle.status.options(max_task_retries=UNLIMITED)

        async def ask(within_s: float) -> StoreStatus:
            status: StoreStatus = await call(
                PART_TITLES["store"], ask_status.remote(), within_s, doing="its status report"
            )
            return on_clock(status, time.time())

        with attribute_failure_to("store"):
            self.store.start_probing()
            limit_s = self._config.timeouts.probe_s
            await probe(ask, limit_s, on_answer=self._on_store_status, on_timeout=self.store.on_timeout)

    async def _on_store_status(self, status: StoreStatus) -> None:
        if self.store.on_answer(status.pid, "the newest version is published again"):
            self._store_since = status.at
        if not status.knows_newest:
            self._store_is_empty.set()
        self._status.store = status
        if self._config.rollout.attach is not None:
            present = [report for report in status.replicas if status.at - report.reported_at <= QUIET_S]
            self._status.num_replicas = sum(report.phase != "leaving" for report in present)

    async def keep_store_informed(self, republish: Callable[[], Awaitable[None]]) -> None:
        """Let the Trainer publish the newest version again to a restarted store; starting replicas wait for it.

        Args:
            republish: asks the Trainer to publish; returns at once if no Trainer has a model.
        """
        while True:
            await self._store_is_empty.wait()
            try:
                await republish()
            except InfraError as error:  # the Trainer is being replaced, and the next one publishes
                self._view.message("warning", f"the newest version could not be published again: {error.brief}")
            self._store_is_empty = anyio.Event()

    def watch_replicas(self, tasks: TaskGroup) -> None:
        """Process the replicas' last reports. Tasks in `tasks` end unresponsive replicas.

        Raises:
            InfraError: replicas were replaced too often. The tasks raise it if a replica is not replaced at all.
        """
        if (store := self._status.store) is None:
            return
        pending = [demand for demand in self._status.pending_demands if ENGINE_REPLICA in demand]
        changes = self._replicas.update(store.replicas, store.at, store_since=self._store_since, has_room=not pending)
        for restart in (*changes.replaced, *changes.recovered):
            self._recorder.record_restart(restart)
        for restart in changes.replaced:
            with attribute_failure_to("replica"):
                self._budgets["replica"].spend(time.monotonic(), InfraError(restart.cause))
        for report in changes.unresponsive:
            tasks.start_soon(_end_replica, report)
        for report in changes.missing:
            tasks.start_soon(self._fail_for_missing, report)
        if changes.num_without_room > self._num_without_room:
            logger.warning(
                "%d of %d replicas are lost, and the cluster has no room for their successors (%s): the run goes on "
                "with the others. Free resources on the cluster, or add nodes; the missing replicas then start",
                changes.num_without_room,
                self._status.num_replicas,
                "; ".join(pending),
            )
        self._num_without_room = changes.num_without_room

    async def _fail_for_missing(self, report: ReplicaReport) -> None:
        """Raise `InfraError`, with Serve's message if there is one."""
        message = ""
        with anyio.move_on_after(self._config.timeouts.call_s), suppress(InfraError):
            message = await serve_messages(rollout_app(self._config, self._status.namespace).name)
        with attribute_failure_to("replica"):
            raise InfraError(
                f"replica {report.replica} (pid {report.pid}) is gone and was not replaced within "
                f"timeouts.start_s={self._config.timeouts.start_s:g}: new replicas end before their first report, or "
                "there is no room for one and no other replica serves; logs/ray in the run directory may say why",
                message,
            )


async def _end_replica(report: ReplicaReport) -> None:
    """End an unresponsive replica on this machine, because Serve notices one late or never."""

    def end() -> None:
        if report.node_id in local_nodes():
            end_known([report.pid], report.reported_at, title=REPLICA_TITLE)

    with anyio.move_on_after(KILL_S) as scope:
        await to_thread.run_sync(end, abandon_on_cancel=True)
    if scope.cancelled_caught:
        logger.warning("the unresponsive replica %s could not be ended within %g s", report.replica, KILL_S)
