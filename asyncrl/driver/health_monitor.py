"""Monitors the health of a run: measurements of its processes and its machine, and warnings about both."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from asyncrl.config.resources.plan import computing_processes
from asyncrl.config.schema import Config
from asyncrl.core.process_health import EngineLoad, MachineHealth, ProcessHealth, RunHealth
from asyncrl.driver.cluster.connection import detect_machine
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.observe.health.alarms import HealthNotice
from asyncrl.observe.health.balance import ThreadSplit
from asyncrl.observe.health.rules import HealthRules, HealthSettings, HealthSnapshot
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.terminal.live import ALREADY_SHOWN, View
from asyncrl.profiling.process_usage import ProcessMonitor, measure_machine

INTERVAL_S = 2.0
READ_LIMIT_S = 1.0
"""Time limit for the disk or Ray to answer; a slower measurement is skipped in this round."""
MACHINE_STALE_S = 30.0
"""Older measurements of the machine are dropped."""
STALE_S = 5.0
"""Older reports of a part are ignored; parts report every second."""
SETTLE_S = 30.0
"""A process that has reported for less than this time counts as just started."""

logger = logging.getLogger(__name__)


class HealthMonitor:
    """Watches the health of one run. The task `run` ends only when cancelled; a failure in it does not end the run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        status: RunStatus,
        recorder: Recorder,
        view: View,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._status = status
        self._recorder = recorder
        self._view = view
        self._own = ProcessMonitor("driver")
        self._rules = HealthRules(
            HealthSettings(
                private_cluster=config.ray.address is None,
                on_policy=config.async_training.staleness_threshold == 0,
                threads=_threads(config),
                kept_checkpoints=config.trainer.max_checkpoints_to_keep,
            )
        )
        self._read_machine = _BoundedRead(lambda: measure_machine(run_dir))
        self._read_object_store = _BoundedRead(lambda: object_store_share())
        self._machine: tuple[float, MachineHealth | None] = (-math.inf, None)
        self._known_since: dict[str, float] = {}
        """By process, the start of its current uninterrupted series of reports (monotonic clock)."""
        self._saves_every = config.trainer.save_freq
        """Steps between checkpoints; 0 or less: only the last one is written."""

    async def run(self) -> None:
        """Check the health every two seconds."""
        failed = False
        try:
            while True:
                try:
                    await self._check()
                except Exception:
                    if not failed:
                        logger.warning("the health of the run could not be checked", exc_info=True)
                    failed = True
                await anyio.sleep(INTERVAL_S)
        finally:
            self._own.stop()

    async def _check(self) -> None:
        machine: MachineHealth | None = await self._read_machine.within(READ_LIMIT_S)
        store_share: float | None = await self._read_object_store.within(READ_LIMIT_S)
        now_s = self._clock()
        if machine is not None:
            self._machine = (now_s, machine)
        elif now_s - self._machine[0] > MACHINE_STALE_S:
            self._machine = (-math.inf, None)
        status = self._status
        silent_s = self._silent_parts()
        health = RunHealth(dict(self._processes(silent_s)), dict(self._engines()), self._machine[1], store_share)
        warnings: list[HealthNotice] = []
        if status.phase != "starting":  # measurements of processes that still import and load mean nothing
            snapshot = HealthSnapshot(
                now_s,
                time.time(),
                health,
                *self._idle(),
                elsewhere=self._elsewhere(),
                settling=self._settling(now_s, {*health.processes, *silent_s} - set(status.restarting)),
                silent_s=self._unresponsive(health, silent_s),
                save_s=self._save_s(),
                fallback=status.store.fallback if status.store is not None else "",
                uncompared={report.replica: report.num_uncompared for report in self._replicas()},
            )
            warnings, health = self._rules.observe(snapshot)
        self._recorder.update_health(health)
        for warning in warnings:
            level = f"{warning.level}: " if warning.level else ""
            logger.info("%s%s", level, warning.text, extra=ALREADY_SHOWN)  # for the log file only
            self._view.message(warning.level, warning.text)

    def _save_s(self) -> float:
        """Return the time between two checkpoints; 0: there are none, infinity: not known yet."""
        if self._saves_every <= 0:
            return 0.0
        step_s = self._recorder.dashboard.step_s
        return math.inf if step_s is None else self._saves_every * step_s

    def _idle(self) -> tuple[float | None, float | None]:
        """Return the idle shares of Trainer and Rollouter; None at the start, once all samples are generated, and while
        the Rollouter replays records."""
        status, queue, board = self._status, self._status.queue, self._recorder.dashboard
        if status.phase != "running" or queue is None or status.trainer.get("step", 0) < status.resumed_at.step + 3:
            return None, None
        if queue.total_samples is not None and queue.counts.fed - queue.counts.num_dropped >= queue.total_samples:
            return None, None
        if board.replays:
            return None, None
        return board.metrics.get("idle/trainer"), board.metrics.get("idle/rollouter")

    def _silent_parts(self) -> dict[str, float]:
        """Return the seconds since the last answer, by part, where they exceed `STALE_S`."""
        now = time.time()
        return {part: now - at for part, at in self._status.answered_at.items() if now - at > STALE_S}

    def _unresponsive(self, health: RunHealth, silent_s: Mapping[str, float]) -> dict[str, float]:
        """Return the parts of `silent_s` that should answer.

        The result is empty while the run ends, and when this process itself was suspended and has not read any answer
        since."""
        own = health.processes.get("driver")
        if self._status.phase != "running" or (own is not None and (own.lag_s or 0.0) > INTERVAL_S):
            return {}
        return {part: seconds for part, seconds in silent_s.items() if part not in self._status.restarting}

    def _settling(self, now_s: float, known: Set[str]) -> frozenset[str]:
        """Return the processes that have just started, and ranks before their first step."""
        self._known_since = {name: self._known_since.get(name, now_s) for name in known}
        settling = {name for name, since_s in self._known_since.items() if now_s - since_s < SETTLE_S}
        if self._status.trainer.get("step", 0) <= self._status.resumed_at.step:
            settling |= {name for name in known if name.startswith("rank-")}
        return frozenset(settling)

    def _processes(self, silent_s: Mapping[str, float]) -> Iterator[tuple[str, ProcessHealth]]:
        """Yield the processes with a current report. The last status of a part that is being replaced is outdated."""
        status = self._status
        silent = {*silent_s, *status.restarting}
        parts: list[tuple[str, Any]] = [
            ("driver", self._own.measure()),
            ("queue", status.queue.health if status.queue is not None else None),
            ("store", status.store.health if status.store is not None else None),
            ("rollouter", status.rollouter.get("health")),
            ("trainer", status.trainer.get("health")),
        ]
        yield from ((name, health) for name, health in parts if name not in silent and health is not None)
        for name, _, health in self._ranks_and_replicas():
            if health is not None and not (name.startswith("rank-") and "trainer" in silent):
                yield name, health

    def _elsewhere(self) -> frozenset[str]:
        """Return the processes on other nodes than that of driver and Trainer."""
        here = self._status.trainer.get("node_id")
        return frozenset(name for name, node_id, _ in self._ranks_and_replicas() if node_id != here)

    def _ranks_and_replicas(self) -> Iterator[tuple[str, str, Any]]:
        """Yield name, node and health of the Trainer's ranks, the replicas and their engines."""
        for rank in self._status.trainer.get("ranks", []):
            yield f"rank-{rank['group']}-{rank['rank']}", rank["node_id"], rank.get("health")
        for report in self._replicas():
            yield f"replica-{report.replica}", report.node_id, report.health
            yield f"engine-{report.replica}", report.node_id, report.engine_health

    def _engines(self) -> Iterator[tuple[str, EngineLoad]]:
        return ((report.replica, report.load) for report in self._replicas() if report.load is not None)

    def _replicas(self) -> Iterator[Any]:
        """Yield the last reports of the replicas that report."""
        store = self._status.store
        replicas = store.replicas if store is not None else ()
        now = time.time()
        return (report for report in replicas if now - report.reported_at <= STALE_S)


def _threads(config: Config) -> ThreadSplit | None:
    """Return the threads of engines and ranks; None unless these alone compute, here and on CPU, in fixed numbers."""
    machine, rollout = detect_machine(), config.rollout
    if config.ray.address is not None or machine.gpus or rollout.autoscaling.enable:
        return None
    engines, *ranks = computing_processes(config, machine)
    if len(ranks) != 1 or ranks[0].threads_key != "trainer.cpu_threads":
        return None
    searches = config.trainer.max_cpu_threads is not None
    return ThreadSplit(machine.cpus, engines.count, engines.threads, ranks[0].count, ranks[0].threads, searches)


class _BoundedRead:
    """Calls a function that may block (on a dead disk) in a thread, one call at a time."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._busy = False

    async def within(self, limit_s: float) -> Any:
        """Return the result; None: there was none in time."""
        if self._busy:
            return None
        with anyio.move_on_after(limit_s):
            return await to_thread.run_sync(self._run, abandon_on_cancel=True)
        return None

    def _run(self) -> Any:
        self._busy = True
        try:
            return self._read()
        finally:
            self._busy = False


def object_store_share() -> float | None:
    """Return the used share of the fullest node's object store; None: not known. Blocking, milliseconds.

    This uses a private module of Ray, because the public `ray.available_resources` has only the sum over all nodes.
    """
    try:
        from ray._private import state

        totals = state.total_resources_per_node()
        available = state.available_resources_per_node()
        name = "object_store_memory"
        shares = [  # an exhausted resource is not in `available`
            1 - available[node].get(name, 0.0) / total[name]
            for node, total in totals.items()
            if total.get(name) and node in available
        ]
        return max(shares, default=None)
    except Exception:  # noqa: BLE001 - another version of Ray may raise anything
        return None
