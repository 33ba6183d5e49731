"""How well the run is: what its parts tell of themselves, what its machine has left, and warnings about both."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from asyncrl.cli.picture import Picture
from asyncrl.config.schema import Config
from asyncrl.health.alarms import Told
from asyncrl.health.facts import EngineLoad, MachineHealth, ProcessHealth, RunHealth
from asyncrl.health.processes import OwnHealth, look_at_machine
from asyncrl.health.rules import Rules, Settings, Snapshot
from asyncrl.telemetry.live import View
from asyncrl.telemetry.logs import ALREADY_SHOWN
from asyncrl.telemetry.recorder import Recorder

EVERY_S = 2.0
LOOK_S = 1.0
"""For the disk or for Ray to answer; what takes longer is not known this time."""
MACHINE_STALE_S = 30.0
"""What was found out of the machine longer ago is not known any more."""
STALE_S = 5.0
"""What a part told of itself longer ago says nothing about now: it tells every second."""
SETTLE_S = 30.0
"""A process of which nothing was known so long ago has just started."""

logger = logging.getLogger(__name__)


class HealthWatch:
    """Of one run. `run` is a task, until cancelled; nothing that fails in it ends the run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        picture: Picture,
        recorder: Recorder,
        view: View,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._picture = picture
        self._recorder = recorder
        self._view = view
        self._own = OwnHealth("driver")
        self._rules = Rules(
            Settings(
                private_cluster=config.ray.address is None,
                on_policy=config.async_training.staleness_threshold == 0,
                kept_checkpoints=config.trainer.max_checkpoints_to_keep,
            )
        )
        self._look_at_machine = _MayHang(lambda: look_at_machine(run_dir))
        self._look_at_store = _MayHang(lambda: object_store_share())
        self._machine: tuple[float, MachineHealth | None] = (-math.inf, None)
        self._known_since: dict[str, float] = {}
        """Process → since when without a break, monotonic."""
        self._saves_every = config.trainer.save_freq
        """Steps; 0 and less: no checkpoints in between."""

    async def run(self) -> None:
        """Look every two seconds."""
        failed = False
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    if not failed:
                        logger.warning("how well the run is could not be found out", exc_info=True)
                    failed = True
                await anyio.sleep(EVERY_S)
        finally:
            self._own.stop()

    async def _look(self) -> None:
        machine: MachineHealth | None = await self._look_at_machine.within(LOOK_S)
        store_share: float | None = await self._look_at_store.within(LOOK_S)
        now_s = self._clock()
        if machine is not None:
            self._machine = (now_s, machine)
        elif now_s - self._machine[0] > MACHINE_STALE_S:
            self._machine = (-math.inf, None)
        picture = self._picture
        unheard_s = self._unheard_s()
        health = RunHealth(dict(self._processes(unheard_s)), dict(self._engines()), self._machine[1], store_share)
        told: list[Told] = []
        if picture.phase != "starting":  # until then everything imports and loads
            snapshot = Snapshot(
                now_s,
                time.time(),
                health,
                *self._idle(),
                elsewhere=self._elsewhere(),
                settling=self._settling(now_s, {*health.processes, *unheard_s} - set(picture.restarting)),
                unheard_s=self._silent(health, unheard_s),
                save_s=self._save_s(),
            )
            told, health = self._rules.observe(snapshot)
        picture.health = health
        self._recorder.health(health)
        for message in told:
            self._tell(message)

    def _tell(self, told: Told) -> None:
        logger.info("%s%s", f"{told.level}: " if told.level else "", told.text, extra=ALREADY_SHOWN)  # for the file
        self._view.message(told.level, told.text)

    def _save_s(self) -> float:
        """Between two checkpoints; 0: there are none, infinite: not known yet."""
        if self._saves_every <= 0:
            return 0.0
        step_s = self._recorder.step_s
        return math.inf if step_s is None else self._saves_every * step_s

    def _idle(self) -> tuple[float | None, float | None]:
        """Of Trainer and Rollouter, while that means something: not at the beginning, nor when all is generated."""
        picture, queue = self._picture, self._picture.queue
        if picture.phase != "running" or queue is None or picture.trainer.get("step", 0) < picture.back_to.step + 3:
            return None, None
        if queue.total_samples is not None and queue.books.fed - queue.books.num_dropped >= queue.total_samples:
            return None, None
        return self._recorder.idle

    # ---------------------------------------------------------------------------------------------- who is there

    def _unheard_s(self) -> dict[str, float]:
        """Parts that have told nothing of themselves for longer than `STALE_S`."""
        now = time.time()
        return {part: now - at for part, at in self._picture.heard_at.items() if now - at > STALE_S}

    def _silent(self, health: RunHealth, unheard_s: Mapping[str, float]) -> dict[str, float]:
        """Of `unheard_s` those that should answer. Not while an end is near, nor when it was this process that slept:
        then no answer was looked at."""
        own = health.processes.get("driver")
        if self._picture.phase != "running" or (own is not None and (own.lag_s or 0.0) > EVERY_S):
            return {}
        return {part: seconds for part, seconds in unheard_s.items() if part not in self._picture.restarting}

    def _settling(self, now_s: float, known: Set[str]) -> frozenset[str]:
        """Processes that have just started, and ranks before their first step."""
        self._known_since = {name: self._known_since.get(name, now_s) for name in known}
        settling = {name for name, since_s in self._known_since.items() if now_s - since_s < SETTLE_S}
        if self._picture.trainer.get("step", 0) <= self._picture.back_to.step:
            settling |= {name for name in known if name.startswith("rank-")}
        return frozenset(settling)

    def _processes(self, unheard_s: Mapping[str, float]) -> Iterator[tuple[str, ProcessHealth]]:
        """Those of which something is known now. Of a part that is being replaced the last status is its dead
        process's."""
        picture = self._picture
        silent = {*unheard_s, *picture.restarting}
        told: list[tuple[str, Any]] = [
            ("driver", self._own.tell()),
            ("queue", picture.queue.health if picture.queue is not None else None),
            ("store", picture.store.health if picture.store is not None else None),
            ("rollouter", picture.rollouter.get("health")),
            ("trainer", picture.trainer.get("health")),
        ]
        told = [(name, health) for name, health in told if name not in silent]
        if "trainer" not in silent:  # it tells of them
            ranks: list[Mapping[str, Any]] = picture.trainer.get("ranks", [])
            told += [(f"rank-{rank['group']}-{rank['rank']}", rank.get("health")) for rank in ranks]
        for report in self._replicas():
            told += [(f"replica-{report.replica}", report.health), (f"engine-{report.replica}", report.engine_health)]
        return ((name, health) for name, health in told if health is not None)

    def _elsewhere(self) -> frozenset[str]:
        """Processes on other nodes than this one's, which is the Trainer's too."""
        here = self._picture.trainer.get("node_id")
        ranks: list[Mapping[str, Any]] = self._picture.trainer.get("ranks", [])
        found = {f"rank-{rank['group']}-{rank['rank']}" for rank in ranks if rank["node_id"] != here}
        for report in self._replicas():
            if report.node_id != here:
                found |= {f"replica-{report.replica}", f"engine-{report.replica}"}
        return frozenset(found)

    def _engines(self) -> Iterator[tuple[str, EngineLoad]]:
        return ((report.replica, report.load) for report in self._replicas() if report.load is not None)

    def _replicas(self) -> Iterator[Any]:
        """Those that are heard of."""
        store = self._picture.store
        replicas = store.replicas if store is not None else ()
        now = time.time()
        return (report for report in replicas if now - report.reported_at <= STALE_S)


class _MayHang:
    """What is looked at in a thread, which may be stuck with it (a dead disk): until that returns there is no other."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look
        self._busy = False

    async def within(self, limit_s: float) -> Any:
        """What it found; None: nothing in time."""
        if self._busy:
            return None
        with anyio.move_on_after(limit_s):
            return await to_thread.run_sync(self._run, abandon_on_cancel=True)
        return None

    def _run(self) -> Any:
        self._busy = True
        try:
            return self._look()
        finally:
            self._busy = False


def object_store_share() -> float | None:
    """Of the node whose object store is fullest, the share that is taken by what is still needed; None: not known.

    Blocking, milliseconds: the GCS has it from every node. This is private to Ray, whose public
    `ray.available_resources` has only the sum over all nodes, and so it is all in this function.
    """
    try:
        from ray._private import state

        totals = state.total_resources_per_node()
        available = state.available_resources_per_node()
        name = "object_store_memory"
        shares = [  # what is used up is not in `available`
            1 - available[node].get(name, 0.0) / total[name]
            for node, total in totals.items()
            if total.get(name) and node in available
        ]
        return max(shares, default=None)
    except Exception:  # noqa: BLE001 - whatever another Ray makes of it: then it is not known
        return None
