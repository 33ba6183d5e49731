"""Queue, weight store and replicas, which others restart: Ray the first two, Serve the third.

Here that is noticed, paid for out of their budgets, and helped along: what hangs is ended, and a store that has
forgotten everything is told again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.cli.picture import Picture
from asyncrl.cli.probes import probe
from asyncrl.cli.processes import end_known
from asyncrl.cli.remote import ask, kill_hung, nodes_here
from asyncrl.cli.replicas import ReplicaWatch
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.ports import PartName, QueueStatus, ReplicaReport, StoreStatus
from asyncrl.queue_actor import QueueActor, QueueClient
from asyncrl.retry import RestartBudget
from asyncrl.run_state import Restart
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.summary import happened_in
from asyncrl.weights.object_store import WeightStoreActor
from asyncrl.weights.replica_reports import on_clock
from rollouter.serving.app import what_serve_says

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


class Lasting:
    """Queue or weight store: Ray starts its process again under the same handle."""

    def __init__(
        self, part: PartName, kind: type, limit_s: float, picture: Picture, recorder: Recorder, budget: RestartBudget
    ) -> None:
        """
        Args:
            part: which of the two.
            kind: the actor's class, by which its process is known.
            limit_s: `timeouts.start_s`: by then the next process answers.
            picture: learns when it answered last.
            recorder: is told of its restarts.
            budget: of them.
        """
        self.handle: Any = None
        self._part = part
        self._kind = kind
        self._limit_s = limit_s
        self._picture = picture
        self._recorder = recorder
        self._budget = budget
        self._pid: int | None = None
        self._incarnation = 1
        self._killed: tuple[int, float] | None = None
        """The process that was killed last, and when (monotonic)."""
        self._hung = ""
        """Why it was killed, or is gone, until the next one answers."""
        self._died = f"the {NAMES[part]}'s process died"

    def asked(self) -> None:
        """From now on it is asked."""
        self._picture.heard_at[self._part] = time.time()

    def heard(self, pid: int, detail: str) -> bool:
        """It answers, from this process. True: from another one than the last time, which is told with `detail`.

        Raises:
            InfraError: that was once too often.
        """
        now, known = time.time(), self._pid
        failed_at = self._picture.heard_at[self._part]
        self._picture.heard_at[self._part], self._pid = now, pid
        if known == pid:
            return False
        if known is not None:
            cause = self._hung or self._died
            self._hung = ""
            self._incarnation += 1
            self._recorder.restarted(Restart(self._part, self._incarnation, failed_at, cause, now, detail))
            if self._picture.phase != "stopping":
                self._budget.spend(time.monotonic(), InfraError(f"{cause}; see logs/ray in the run directory"))
        return True

    async def missed(self, error: DeadlineError) -> None:
        """It does not answer: end its process, once, and Ray starts the next one. It may have died by itself: then the
        next one is starting already.

        Raises:
            InfraError: the next one has not come up in time.
        """
        if self._pid is None:  # what is still coming up is the start's matter
            return
        now_s = time.monotonic()
        if self._killed is not None and self._killed[0] == self._pid:
            # The next one is starting, and must not be killed over it.
            if now_s - self._killed[1] > self._limit_s:
                raise InfraError(
                    f"the {NAMES[self._part]} was replaced because {self._hung}, and the next one did not answer "
                    f"within {self._limit_s:g} s (timeouts.start_s); logs/ray in the run directory may say why"
                ) from error
            return
        self._killed, self._hung = (self._pid, now_s), error.message
        if not await kill_hung(self._kind.__name__, self._pid, self._picture.heard_at[self._part]):
            self._hung = self._died


class Watch:
    """Of one run. `probe_queue`, `probe_store` and `keep_store_told` are tasks, until cancelled."""

    def __init__(
        self,
        config: Config,
        picture: Picture,
        recorder: Recorder,
        view: View,
        budgets: Mapping[PartName, RestartBudget],
    ) -> None:
        self._config = config
        self._picture = picture
        self._recorder = recorder
        self._view = view
        self._budgets = budgets
        start_s = config.timeouts.start_s
        self.queue = Lasting("queue", QueueActor, start_s, picture, recorder, budgets["queue"])
        self.store = Lasting("store", WeightStoreActor, start_s, picture, recorder, budgets["store"])
        self._replicas = ReplicaWatch(config.rollout.num_replicas, 2 * config.timeouts.probe_s, start_s)
        self._store_since = 0.0
        """When the store's present process was first heard of, wall clock."""
        self._store_forgot = anyio.Event()

    # ------------------------------------------------------------------------------------------------ queue, store

    async def probe_queue(self) -> None:
        """
        Raises:
            InfraError: it is gone for good, or too often.
        """

        async def ask_it(within_s: float) -> QueueStatus:
            return await QueueClient(self.queue.handle, within_s).status()

        async def missed(error: DeadlineError) -> None:
            if self._config.journal == "off" or self._picture.queue is None:  # nothing could be rebuilt
                raise error
            await self.queue.missed(error)

        with happened_in("queue"):
            self.queue.asked()
            await probe(ask_it, self._config.timeouts.probe_s, heard=self._heard_queue, missed=missed)

    async def _heard_queue(self, status: QueueStatus) -> None:
        live = status.books.running + status.books.ready + status.books.leased
        if self.queue.heard(status.pid, f"{live} live samples rebuilt from the journal"):
            for told in status.told:  # of how it found its journal
                self._view.message("warning", told)
        self._picture.queue = status

    async def probe_store(self) -> None:
        """
        Raises:
            InfraError: it is gone for good, or too often.
        """
        # A status may be asked for twice: Ray asks again over a restart.
        call = self.store.handle.status.options(max_task_retries=FOREVER)

        async def ask_it(within_s: float) -> StoreStatus:
            status: StoreStatus = await ask(NAMES["store"], call.remote(), within_s, doing="telling its status")
            return on_clock(status, time.time())

        with happened_in("store"):
            self.store.asked()
            await probe(ask_it, self._config.timeouts.probe_s, heard=self._heard_store, missed=self.store.missed)

    async def _heard_store(self, status: StoreStatus) -> None:
        if self.store.heard(status.pid, "the newest version is published again"):
            self._store_since = status.at
        if not status.informed:
            self._store_forgot.set()
        self._picture.store = status

    async def keep_store_told(self, republish: Callable[[], Awaitable[None]]) -> None:
        """A store that was restarted knows nothing until the Trainer has told it, and replicas that start wait for it.

        Args:
            republish: asks the Trainer for it; returns at once where there is none that could.
        """
        while True:
            await self._store_forgot.wait()
            try:
                await republish()
            except InfraError as error:  # the Trainer is being replaced, and publishes by itself
                self._view.message("warning", f"the weight store could not be told the newest version: {error.brief}")
            # Its next answer says whether it knows by now.
            self._store_forgot = anyio.Event()

    # ------------------------------------------------------------------------------------------------ replicas

    def look_at_replicas(self, ends: TaskGroup) -> None:
        """What they last reported to the store. Those that hang are ended by tasks in `ends`.

        Raises:
            InfraError: they were replaced too often. The tasks raise it if one is not replaced at all.
        """
        if (store := self._picture.store) is None:
            return
        seen = self._replicas.look(store.replicas, store.at, store_since=self._store_since)
        for restart in (*seen.begun, *seen.recovered):
            self._recorder.restarted(restart)
        for restart in seen.begun:
            with happened_in("replica"):
                self._budgets["replica"].spend(time.monotonic(), InfraError(restart.cause))
        for report in seen.hung:
            ends.start_soon(_end_replica, report)
        for report in seen.missing:
            ends.start_soon(self._not_replaced, report)

    async def _not_replaced(self, report: ReplicaReport) -> None:
        """Raises `InfraError`, with what Serve has to say."""
        said = ""
        with anyio.move_on_after(self._config.timeouts.call_s), suppress(InfraError):
            said = await what_serve_says(self._picture.namespace)
        with happened_in("replica"):
            raise InfraError(
                f"replica {report.replica} (pid {report.pid}) is gone, and none has come in its place within "
                f"timeouts.start_s={self._config.timeouts.start_s:g}: those that start end before they can tell of "
                "themselves, or there is no room for one; logs/ray in the run directory may say why",
                said,
            )


async def _end_replica(report: ReplicaReport) -> None:
    """Serve sees to replicas by itself, if slowly; one on this machine that it does not see hanging ends here."""
    if report.node_id in await to_thread.run_sync(nodes_here):
        await to_thread.run_sync(partial(end_known, [report.pid], report.reported_at, title=SERVE_TITLE))
