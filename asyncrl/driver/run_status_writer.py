"""What is going on in a run, put together from what its parts say, and written down again and again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio

from asyncrl.cli.probes import TICK_S
from asyncrl.cli.watchdog import Progress, progress
from asyncrl.config.schema import Config
from asyncrl.health.facts import RunHealth
from asyncrl.ports import Books, QueueStatus, StoreStatus
from asyncrl.run_dir import RunDir
from asyncrl.run_state import FILE_NAME, Phase, ProcessInfo, RunState
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import StateFile
from asyncrl.telemetry.summary import Resumed

ANSWERS_S = 3.0
"""A part that answered within so many seconds answers."""


class Picture:
    """The driver's view of its run. Whoever learns something sets it; `state` is all of it."""

    def __init__(self, config: Config, run_dir: RunDir, recorder: Recorder, *, back_to: Resumed | None = None) -> None:
        self.phase: Phase = "starting"
        self.error = ""
        self.namespace = ""
        self.queue: QueueStatus | None = None
        self.store: StoreStatus | None = None
        self.rollouter: Mapping[str, Any] = {}
        self.trainer: Mapping[str, Any] = {}
        self.back_to = back_to or Resumed(0, 0, "")
        """Where training went on from last: until its Trainer has loaded that, it is where the run stands."""
        self.heard_at: dict[str, float] = {}
        """Part → when it last answered, or was first asked. Wall clock."""
        self.restarting: Mapping[str, float] = {}
        self.processes: tuple[ProcessInfo, ...] = ()
        """Of Rollouter and Trainer."""
        self.has_engines = True
        """False: every sample is recorded, and `skip.async_rollout.serve_when_covered` is false."""
        self.health = RunHealth()
        self._config = config
        self._recorder = recorder
        self._file = StateFile(run_dir.path / FILE_NAME)
        self._started_at = time.time()
        self._moved_at = self._started_at
        self._moved: Progress | None = None

    async def keep(self) -> None:
        """Write it down every second, until cancelled."""
        while True:
            await self.write()
            await anyio.sleep(TICK_S)

    async def write(self) -> None:
        await self._file.write(self.state())

    def end(self, phase: Phase, error: str) -> None:
        """The run is over; write that down. Blocking."""
        self.phase, self.error = phase, error
        self._file.write_now(self.state())

    def state(self) -> RunState:
        """Everything, as of now."""
        now = time.time()
        queue, store, config = self.queue, self.store, self._config
        state = RunState(
            written_at=now,
            started_at=self._started_at,
            pid=os.getpid(),
            phase=self.phase,
            experiment=config.experiment_name,
            mode=config.mode,
            namespace=self.namespace,
            host=socket.gethostname(),
            ray_address=config.ray.address,
            error=self.error,
            samples_per_lease=config.samples_per_lease,
            step=max(self.trainer.get("step", 0), self.back_to.step),
            version=max(self.trainer.get("version", 0), self.back_to.version),
            lineage=self.back_to.lineage,
            published=store.newest if store is not None else None,
            queue=queue,
            replicas=store.replicas if store is not None else (),
            num_replicas=config.rollout.num_replicas if self.has_engines else 0,
            waits={
                part: tuple(status["waits"])
                for part, status in (("trainer", self.trainer), ("rollouter", self.rollouter))
                if status
            },
            unheard_s={part: now - at for part, at in self.heard_at.items() if now - at > ANSWERS_S},
            restarting=dict(self.restarting),
            processes=self._processes(),
            books=queue.books if queue is not None else Books(),
            last_progress_at=self._moved_at,
            health=self.health,
        )
        state = self._recorder.tell(state)
        before, self._moved = self._moved, progress(state)
        if self._moved.is_beyond(before):
            self._moved_at = now
            state = replace(state, last_progress_at=now)
        return state

    def _processes(self) -> tuple[ProcessInfo, ...]:
        found = [ProcessInfo("driver", "driver", os.getpid(), ""), *self.processes]
        if self.queue is not None:
            found.append(ProcessInfo("queue", "queue", self.queue.pid, ""))
        if self.store is not None:
            found.append(ProcessInfo("store", "store", self.store.pid, ""))
            for report in self.store.replicas:
                name = f"replica {report.replica}"
                found.append(ProcessInfo("replica", name, report.pid, report.node_id))
                found += [ProcessInfo("engine", name, pid, report.node_id) for pid in report.engine_pids]
        return tuple(found)
