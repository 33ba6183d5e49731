"""The Trainer as a Ray actor, which wraps `trainer.trainer`.

Models are in ranks: processes that the actor starts (`trainer.workers.group`) and that end with it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
import ray
from anyio import to_thread
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError
from asyncrl.core.imports import collection_paused
from asyncrl.core.records import RecordSink, RunRecord, stream_records
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.process_usage import ProcessMonitor
from asyncrl.profiling.profiler import CLOSE_S
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.payloads import make_payloads
from asyncrl.storage.checkpoint_manifest import LineageHistory, Progress, Resume
from asyncrl.storage.run_dir import RunDir
from asyncrl.weights.object_store import ObjectStorePublisher, StoreGpuTurns
from skip import SkipManager

if TYPE_CHECKING:
    from trainer.trainer import Trainer

MAX_CONCURRENCY = 16


class TrainerActor:
    """The Trainer actor, created by `start_trainer`. All other methods may be called while a run is in progress."""

    def __init__(self, config: Config, incarnation: int) -> None:
        self._config = config
        self._incarnation = incarnation
        self._run_dir: RunDir | None = None
        self._waits = WaitBoard()
        self._trainer: Trainer | None = None
        self._stopped = False
        self._records: AsyncIterator[list[RunRecord]] | None = None
        self._health = ProcessMonitor("trainer")

    async def start(
        self, run_dir: RunDir, resume: Resume | None, store: Any, history: LineageHistory, validated_step: int | None
    ) -> Mapping[str, int]:
        """See `Trainer.start`.

        Returns:
            `step`, `version`, and `attention` (`Trainer.attention`).

        Raises:
            ConfigError, UserCodeError: the configuration of `skip` is invalid (`SkipManager.init`).
        """
        profile.configure("trainer", ProfilerSettings.of(self._config.profiler, run_dir.path))
        await to_thread.run_sync(SkipManager.init, self._config)  # imports the user's modules
        SkipManager.watch(self._waits.waiting)
        sync = self._config.weight_sync
        publisher = ObjectStorePublisher(
            store,
            call_s=self._config.timeouts.call_s,
            lineage=history.lineage,
            backend=sync.backend,
            directory=sync.dir or str(run_dir.path.absolute() / "weights"),
            bucket_bytes=sync.bucket_bytes,
            max_deltas=sync.max_deltas,
        )
        turns = StoreGpuTurns(store, call_s=self._config.timeouts.call_s, lineage=history.lineage)
        # Importing torch takes seconds, so it must not block the event loop, nor the driver, which imports this module.
        parts = await to_thread.run_sync(_import_trainer)
        trainer = await parts.Trainer.start(
            self._config,
            run_dir,
            resume,
            history=history,
            validated_step=validated_step,
            publisher=publisher,
            waits=self._waits,
            turns=turns if self._config.shares_gpus else None,
        )
        self._trainer, self._run_dir = trainer, run_dir
        return {
            "step": trainer.progress.step,
            "version": trainer.progress.version,
            "attention": trainer.attention,
        }

    async def begin_run(self, queue: Any, total_steps: int) -> None:
        """Begin `Trainer.run`, whose records `next_records` returns. Call `start` first. After the last step, the run
        goes on until `confirm_served` or `stop` is called."""
        if self._trainer is None or self._run_dir is None:
            raise BugError("TrainerActor.begin_run before start")
        if self._stopped:
            self._trainer.stop()
        client = QueueClient(queue, self._config.timeouts.call_s, part="trainer", incarnation=self._incarnation)
        payloads = make_payloads(self._config, self._run_dir.path, self._incarnation)
        run = partial(self._trainer.run, client, payloads, total_steps, until_served=True)
        self._records = stream_records("trainer", partial(self._run, run))

    async def next_records(self) -> list[RunRecord]:
        """Wait until there are records of optimizer steps, and return them. After the last one, return an empty list.

        Raises:
            AsyncRLError: the first failure of any part.
        """
        if self._records is None:
            raise BugError("TrainerActor.next_records before begin_run")
        return await anext(self._records, [])

    async def _run(self, run: Callable[[RecordSink], Awaitable[None]], sink: RecordSink) -> None:
        try:
            await run(sink)
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):  # a failing disk may be what ended the run
                await to_thread.run_sync(profile.flush, abandon_on_cancel=True)

    async def confirm_served(self) -> None:
        """See `Trainer.confirm_served`."""
        if self._trainer is not None:
            self._trainer.confirm_served()

    async def stop(self) -> None:
        """See `Trainer.stop`."""
        self._stopped = True
        if self._trainer is not None:
            self._trainer.stop()

    async def republish(self) -> None:
        """See `Trainer.republish`. Does nothing until `start` has returned, because `start` publishes the weights."""
        if self._trainer is not None:
            await self._trainer.republish()

    async def status(self) -> Mapping[str, Any]:
        """Return `step`, `version`, `trained_samples`, `trained_tokens`, `attention`; `waits`, longest first; `pid`,
        `node_id` (Ray's) and `health` (`ProcessHealth`) of this process; `ranks`: `group`, `rank`, `pid`, `node_id`
        and `health` of each; `skip` (`SkipManager.status`), `profiler` (`Profiler.status`), `messages`
        (`SkipManager.messages`)."""
        progress = self._trainer.progress if self._trainer is not None else Progress()
        return {
            "step": progress.step,
            "version": progress.version,
            "trained_samples": progress.trained_samples,
            "trained_tokens": progress.trained_tokens,
            "attention": self._trainer.attention if self._trainer is not None else "",
            "waits": self._waits.snapshot(),
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "health": self._health.measure(),
            "ranks": self._trainer.ranks if self._trainer is not None else [],
            "skip": SkipManager.status(),
            "profiler": profile.status(),
            "messages": SkipManager.messages(),
        }


def _import_trainer() -> ModuleType:
    with collection_paused():
        return import_module("trainer.trainer")


def start_trainer(config: Config, *, incarnation: int = 1) -> Any:
    """Start the actor in this Ray job and return its handle. Ray never restarts it: a new incarnation with new ranks
    continues from a checkpoint instead. The old ranks die with their actor; a rank that is stopped (SIGSTOP) dies
    5 s later.

    The actor runs on the caller's node, because it writes the run directory. It reserves no resources, so that it
    starts even if the replicas have reserved all of them; `trainer.workers.processes` reserves resources for the ranks.
    """
    actor: Any = ray.remote(TrainerActor)
    return actor.options(
        num_cpus=0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}},
    ).remote(config, incarnation)
