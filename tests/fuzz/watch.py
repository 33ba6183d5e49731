"""The driver's probes of queue, store, parts and replicas, and its watchdog, as `asyncrl.driver` has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncrl.core.failures import DeadlineError, InfraError
from asyncrl.core.ports import QueueStatus, SampleCounts, StoreStatus
from asyncrl.core.waits import Wait
from asyncrl.driver.stall_watchdog import Watchdog
from asyncrl.driver.supervision import TICK_S, ReplicaWatch, Supervisor, probe
from asyncrl.observe.status.run_status import RunState
from asyncrl.queue.actor import QueueClient
from asyncrl.storage.checkpoint_manifest import Progress
from asyncrl.weights.object_store import on_clock
from tests.fuzz.fleet import SERVE_S
from tests.fuzz.parts import FuzzPart
from tests.fuzz.process import Process
from tests.fuzz.scaling import ScalingWatch
from tests.fuzz.setup import PROBE_S, START_S, WATCHDOG_S

if TYPE_CHECKING:
    from tests.fuzz.launch import LaunchOfRun

Answer = TypeVar("Answer")


class DriverWatch:
    def __init__(self, launch: LaunchOfRun) -> None:
        self._launch = launch
        self._world = launch.world
        self._queue: QueueStatus | None = None
        self._store: StoreStatus | None = None
        self._store_forgot = anyio.Event()
        self._awake = anyio.Event()
        self._awake.set()
        self._asks_store = anyio.Event()
        self._answers: dict[str, tuple[Progress, tuple[Wait, ...]]] = {}
        self._watchdog = Watchdog(WATCHDOG_S, start_s=START_S)
        # A replica that hangs is unknown to a new store, and Serve replaces it only after SERVE_S.
        self._replicas = ReplicaWatch(launch.engines.wanted, 2 * PROBE_S, SERVE_S + START_S)
        self._scaling = ScalingWatch(launch, self) if launch.setup.autoscales else None

    def start(self, group: TaskGroup) -> None:
        for task in (self._probe_queue, self._probe_store, self._keep_store_informed, self._watch):
            group.start_soon(task)
        for supervisor in (self._launch.rollouter, self._launch.trainer):
            group.start_soon(self._probe_part, supervisor)
        if self._scaling is not None:
            self._scaling.start(group)

    @property
    def queue_number(self) -> int | None:
        """The number of the queue's process that answered last."""
        return self._queue.pid if self._queue is not None else None

    @property
    def is_awake(self) -> bool:
        return self._awake.is_set()

    @property
    def num_replicas(self) -> int:
        """The number of replicas that the driver expects."""
        return self._scaling.expected if self._scaling is not None else self._launch.engines.wanted

    async def awake(self) -> None:
        """Wait until the driver is not stopped."""
        await self._awake.wait()

    async def stand_still(self, seconds: float) -> None:
        """Stop the driver as a signal does, in half of the cases while an answer of the store is in transit."""
        if self._world.rng.random() < 0.5:
            await self._asks_store.wait()
        self._awake = anyio.Event()
        await anyio.sleep(seconds)
        self._awake.set()

    async def _watch(self) -> None:
        while True:
            await self._awake.wait()
            if self._store is not None:
                self._watch_replicas(self._store)
            if self._scaling is not None:
                self._scaling.follow(self._state(), self._store)
            self._watchdog.observe(anyio.current_time(), self._state())
            await anyio.sleep(TICK_S)

    def _state(self) -> RunState:
        launch = self._launch
        supervisors = (launch.rollouter, launch.trainer)
        progress = self._answers["trainer"][0] if "trainer" in self._answers else Progress()
        return RunState(
            written_at=anyio.current_time(),
            started_at=0.0,
            pid=1,
            phase="stopping" if launch.stopped else "running",
            experiment="fuzz",
            mode=launch.setup.mode,
            step=progress.step,
            version=progress.version,
            lineage=launch.train.lineage,
            published=self._store.newest if self._store is not None else None,
            queue=self._queue,
            counts=self._queue.counts if self._queue is not None else SampleCounts(),
            replicas=self._store.replicas if self._store is not None else (),
            num_replicas=self.num_replicas,
            waits={part: waits for part, (_, waits) in self._answers.items()},
            restarting={
                each.part.name: each.replacing_since for each in supervisors if each.replacing_since is not None
            },
        )

    # ------------------------------------------------------------------------------------------------ probes

    async def asked(self, ask: Callable[[], Awaitable[Answer]], limit_s: float) -> Answer:
        """Return the answer of `ask`, or raise `DeadlineError`, as a driver that may be stopped does.

        While the driver is stopped, the answer may arrive and the deadline may pass. When the driver continues, it may
        notice either of them first.
        """
        await self._awake.wait()
        answers: list[Answer] = []
        with anyio.move_on_after(limit_s) as deadline:
            answers.append(await ask())
            await self._awake.wait()
        await self._awake.wait()
        if not answers or (deadline.cancelled_caught and self._world.rng.random() < 0.5):
            raise DeadlineError("it does not answer")
        return answers[0]

    async def _probe_part(self, supervisor: Supervisor) -> None:
        """Probe Rollouter or Trainer."""
        launch, part = self._launch, supervisor.part
        assert isinstance(part, FuzzPart)
        asked: Process | None = None

        async def status() -> tuple[Progress, tuple[Wait, ...]] | None:
            nonlocal asked
            if (asked := part.process) is None or asked.ended:
                return None
            await asked.gate.answering()
            loop = launch.train.loop
            return replace(loop.progress) if loop is not None else Progress(), part.waits()

        async def answered(answer: tuple[Progress, tuple[Wait, ...]]) -> None:
            self._answers[part.name] = answer

        async def missed(error: DeadlineError) -> None:
            if asked is part.process and asked is not None and not asked.ended:
                if not asked.gate.frozen:
                    self._world.broken.append(f"the {part.name} was healthy but was killed")
                supervisor.replace_unresponsive(error)

        await probe(lambda limit_s: self.asked(status, limit_s), PROBE_S, on_answer=answered, on_timeout=missed)

    async def _probe_queue(self) -> None:
        launch = self._launch
        handle = launch.queue_host.handle(launch.gate)

        async def answered(status: QueueStatus) -> None:
            self._queue = status

        async def missed(error: DeadlineError) -> None:
            if self._queue is not None and launch.queue_host.end_known(self._queue.pid, 0.5) is False:
                self._world.broken.append("the queue was healthy but was killed")

        async def ask(limit_s: float) -> QueueStatus:
            return await self.asked(QueueClient(handle, limit_s).status, limit_s)

        await probe(ask, PROBE_S, on_answer=answered, on_timeout=missed)

    async def _probe_store(self) -> None:
        handle = self._launch.store_host.handle(self._launch.gate)

        async def status() -> StoreStatus:
            self._asks_store.set()
            self._asks_store = anyio.Event()
            answer: StoreStatus = await handle.status.options(max_task_retries=-1).remote()
            return answer

        async def answered(status: StoreStatus) -> None:
            status = on_clock(status, anyio.current_time())
            if self._store is None or self._store.pid != status.pid:
                self._store_since = status.at
            if not status.knows_newest:
                self._store_forgot.set()
            self._store = status

        async def missed(error: DeadlineError) -> None:
            """End a store that does not answer."""
            if self._store is not None and self._launch.store_host.end_known(self._store.pid, 0.5) is not None:
                self._world.broken.append("the store was healthy but was killed")

        await probe(lambda limit_s: self.asked(status, limit_s), PROBE_S, on_answer=answered, on_timeout=missed)

    async def _keep_store_informed(self) -> None:
        while True:
            await self._store_forgot.wait()
            try:
                await self._launch.train.republish()
            except InfraError as error:
                self._world.log(f"nothing could be published to the store again: {error}")
            self._store_forgot = anyio.Event()

    def _watch_replicas(self, store: StoreStatus) -> None:
        engines = self._launch.engines
        self._replicas.num_replicas = None if self._world.setup.attaches else self.num_replicas
        changes = self._replicas.update(store.replicas, store.at, store_since=self._store_since)
        if changes.replaced and not self._world.setup.unplanned and self._world.setup.poison is None:
            self._world.broken.append(f"a planned change is recorded as a restart: {changes.replaced[0]}")
        for report in changes.unresponsive:
            for replica in [one for one in engines.replicas if one.name == report.replica]:
                if not replica.hung and not replica.ended:
                    self._world.broken.append(f"{replica.name} was healthy but was ended for missing reports")
                engines.crash(replica, "it hangs")
        if changes.missing:
            self._world.broken.append(f"{changes.missing[0].replica} is reported to have no successor")
