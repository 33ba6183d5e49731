"""The status of a run, collected from its parts and written to `state.json` every second."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError
from asyncrl.core.ports import QueueStatus, StoreStatus
from asyncrl.driver.stall_watchdog import ProgressMarks, progress_of
from asyncrl.driver.supervision import TICK_S
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.run_status import STATE_FILE, ProcessInfo, RunPhase, RunState, StateFile
from asyncrl.observe.status.summary import ResumePoint
from asyncrl.queue.journal_reader import JournalCounts, read_counts
from asyncrl.storage.run_dir import RunDir

logger = logging.getLogger(__name__)

SILENT_S = 3.0
"""Seconds without an answer after which a part counts as silent."""


class RunStatus:
    """The driver's view of its run. The driver's tasks set the attributes; `state` combines them."""

    def __init__(
        self, config: Config, run_dir: RunDir, recorder: Recorder, *, resumed_at: ResumePoint | None = None
    ) -> None:
        self.phase: RunPhase = "starting"
        self.error = ""
        self.namespace = ""
        self.queue: QueueStatus | None = None
        self.store: StoreStatus | None = None
        self.rollouter: Mapping[str, Any] = {}
        self.trainer: Mapping[str, Any] = {}
        self.resumed_at = resumed_at or ResumePoint(0, 0, "")
        """Point from which training last continued. Until the Trainer reports a later one, it is the run's position."""
        self.answered_at: dict[str, float] = {}
        """By part, the time of its last answer, or of the first request to it if it has not answered. Wall clock."""
        self.restarting: Mapping[str, float] = {}
        self.processes: tuple[ProcessInfo, ...] = ()
        """Processes of Rollouter and Trainer, as they last reported them."""
        self.has_engines = True
        """False: every sample is recorded, and the role `async_rollout` needs no engines."""
        self.num_replicas = config.rollout.num_replicas + config.num_lent_replicas
        self.pending_demands: tuple[str, ...] = ()
        """What the run waits for on a shared cluster."""
        self._config = config
        self._recorder = recorder
        self._run_dir = run_dir
        self._file = StateFile(run_dir.path / STATE_FILE)
        self._started_at = time.time()
        self._progress_at = self._started_at
        self._progress: ProgressMarks | None = None

    async def keep_written(self) -> None:
        """Write the state every second, until cancelled."""
        while True:
            await self._file.write(self.state())
            await anyio.sleep(TICK_S)

    async def take_final_counts(self) -> None:
        """Replace the counts of samples and trained tokens by those of the journal, which has everything that the queue
        has acknowledged. Call it once the queue's process has ended, before the summary and the final state.

        Without a journal, the queue's last answer stays, and so it does if the journal cannot be read, which is logged.
        See `read_queue_state` for the cost.
        """
        if (counts := await to_thread.run_sync(self._journal_counts)) is not None:
            self._recorder.update_counts(counts.samples, counts.trained_tokens)
            if self.queue is not None:
                known = self.queue
                self.queue = replace(
                    known, counts=counts.samples, trained_tokens=counts.trained_tokens, journal_seq=counts.seq
                )
        elif self.queue is not None:
            self._recorder.update_counts(self.queue.counts, self.queue.trained_tokens)

    def _journal_counts(self) -> JournalCounts | None:
        if not self._run_dir.journal.exists():
            return None
        try:
            return read_counts(self._run_dir.path, is_own=True)
        except (AsyncRLError, OSError) as error:
            logger.warning(
                "the final counts are the queue's last answer, because its journal cannot be read: %s", error
            )
            return None

    def end(self, phase: RunPhase, error: str) -> None:
        """Write the final state. Blocking."""
        self.phase, self.error = phase, error
        self._file.write_now(self.state())

    def state(self) -> RunState:
        """Return the current state."""
        now = time.time()
        store, config = self.store, self._config
        state = RunState(
            written_at=now,
            started_at=self._started_at,
            pid=os.getpid(),
            phase=self.phase,
            experiment=config.experiment_name,
            mode=config.mode,
            namespace=self.namespace,
            host=socket.gethostname(),
            error=self.error,
            samples_per_lease=config.samples_per_lease,
            step=max(self.trainer.get("step", 0), self.resumed_at.step),
            version=max(self.trainer.get("version", 0), self.resumed_at.version),
            lineage=self.resumed_at.lineage,
            attention=self.trainer.get("attention", ""),
            published=store.newest if store is not None else None,
            queue=self.queue,
            replicas=store.replicas if store is not None else (),
            num_replicas=self.num_replicas if self.has_engines else 0,
            pending_demands=self.pending_demands,
            waits={
                part: tuple(status["waits"])
                for part, status in (("trainer", self.trainer), ("rollouter", self.rollouter))
                if status
            },
            silent_s={part: now - at for part, at in self.answered_at.items() if now - at > SILENT_S},
            restarting=dict(self.restarting),
            processes=self._all_processes(),
            last_progress_at=self._progress_at,
        )
        state = self._recorder.complete_state(state)
        before, self._progress = self._progress, progress_of(state)
        if self._progress.is_beyond(before):
            self._progress_at = now
            state = replace(state, last_progress_at=now)
        return state

    def _all_processes(self) -> tuple[ProcessInfo, ...]:
        processes = [ProcessInfo("driver", "driver", os.getpid(), ""), *self.processes]
        if self.queue is not None:
            processes.append(ProcessInfo("queue", "queue", self.queue.pid, ""))
        if self.store is not None:
            processes.append(ProcessInfo("store", "store", self.store.pid, ""))
            for report in self.store.replicas:
                name = f"replica {report.replica}"
                processes.append(ProcessInfo("replica", name, report.pid, report.node_id))
                processes += [ProcessInfo("engine", name, pid, report.node_id) for pid in report.engine_pids]
        return tuple(processes)
