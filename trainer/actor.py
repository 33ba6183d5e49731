"""The Trainer as a Ray actor: adapters around `trainer.trainer`, and nothing that decides.

It computes nothing itself: models live in the ranks that it starts (`trainer.groups`) and that end with it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import anyio
import ray
from anyio import to_thread
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.failures import BugError
from asyncrl.health.processes import OwnHealth
from asyncrl.lineage import Line
from asyncrl.manifest import Progress
from asyncrl.payload_files import make_payloads
from asyncrl.profiling import Setup, profile
from asyncrl.profiling.profiler import CLOSE_S
from asyncrl.queue_actor import QueueClient
from asyncrl.record_stream import stream_records
from asyncrl.records import RunRecord
from asyncrl.resume import Resume
from asyncrl.run_dir import RunDir
from asyncrl.waits import WaitBoard
from asyncrl.weights.object_store import ObjectStorePublisher
from skip import SkipManager

if TYPE_CHECKING:
    from trainer.trainer import Trainer

MAX_CONCURRENCY = 16


class TrainerActor:
    """See `start_trainer`. `run` stays inside; the other calls come beside it."""

    def __init__(self, config: Config, incarnation: int) -> None:
        self._config = config
        self._incarnation = incarnation
        self._run_dir: RunDir | None = None
        self._waits = WaitBoard()
        self._trainer: Trainer | None = None
        self._stopped = False
        self._health = OwnHealth("trainer")

    async def start(
        self, run_dir: RunDir, resume: Resume | None, store: Any, line: Line, validated_step: int | None
    ) -> Mapping[str, int]:
        """See `Trainer.start`.

        Returns:
            `step` and `version`.

        Raises:
            ConfigError, UserCodeError: `skip` cannot work (`SkipManager.init`).
        """
        profile.configure("trainer", Setup.of(self._config.profiler, run_dir.path))
        await to_thread.run_sync(SkipManager.init, self._config)  # imports the user's modules
        SkipManager.watch(self._waits.waiting)
        publisher = ObjectStorePublisher(store, call_s=self._config.timeouts.call_s, lineage=line.lineage)
        # torch takes seconds to import: not on the event loop, and not where the driver imports this file.
        parts = await to_thread.run_sync(import_module, "trainer.trainer")
        trainer = await parts.Trainer.start(
            self._config,
            run_dir,
            resume,
            line=line,
            validated_step=validated_step,
            publisher=publisher,
            waits=self._waits,
        )
        self._trainer, self._run_dir = trainer, run_dir
        return {"step": trainer.progress.step, "version": trainer.progress.version}

    async def run(self, queue: Any, total_steps: int) -> AsyncIterator[RunRecord]:
        """See `Trainer.run`; one record per optimizer step, right after it. After `start`. Ends after `served`.

        Raises:
            AsyncRLError: the first failure of any part.
        """
        if self._trainer is None or self._run_dir is None:
            raise BugError("TrainerActor.run before start")
        if self._stopped:
            self._trainer.stop()
        client = QueueClient(queue, self._config.timeouts.call_s, part="trainer", incarnation=self._incarnation)
        payloads = make_payloads(self._config, self._run_dir.path, self._incarnation)
        run = partial(self._trainer.run, client, payloads, total_steps, until_served=True)
        try:
            async for record in stream_records("trainer", run):
                yield record
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):  # the disk may be what has failed
                await to_thread.run_sync(profile.flush, abandon_on_cancel=True)

    async def served(self) -> None:
        """See `Trainer.served`."""
        if self._trainer is not None:
            self._trainer.served()

    async def stop(self) -> None:
        """End `run` soon: after the current step, with a checkpoint if `trainer.save_last`."""
        self._stopped = True
        if self._trainer is not None:
            self._trainer.stop()

    async def republish(self) -> None:
        """See `Trainer.republish`. Before the end of `start`: nothing, since that ends with a publication."""
        if self._trainer is not None:
            await self._trainer.republish()

    async def status(self) -> Mapping[str, Any]:
        """`step`, `version`, `trained_samples`, `trained_tokens`; `waits`: what is waited on, the longest first; `pid`,
        `node_id` (Ray's) and `health` (`ProcessHealth`) of this process, `ranks`: `group`, `rank`, `pid`, `node_id` and
        `health` of each, `skip` (`SkipManager.status`) and `profiler` (`Profiler.status`)."""
        progress = self._trainer.progress if self._trainer is not None else Progress()
        return {
            "step": progress.step,
            "version": progress.version,
            "trained_samples": progress.trained_samples,
            "trained_tokens": progress.trained_tokens,
            "waits": self._waits.snapshot(),
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "health": self._health.tell(),
            "ranks": self._trainer.ranks if self._trainer is not None else [],
            "skip": SkipManager.status(),
            "profiler": profile.status(),
            "messages": SkipManager.messages(),
        }


def start_trainer(config: Config, *, incarnation: int = 1) -> Any:
    """Start the actor in this Ray job and return its handle. Ray never restarts it: a new incarnation goes on from a
    checkpoint instead, with ranks of its own. The old ones die with their actor, a stopped one (SIGSTOP) 5 s later.

    It runs on the caller's node: it writes the run directory. It takes nothing from Ray's books, so that it starts
    whatever the replicas have reserved; what its ranks take, and where they run, is `trainer.group`'s matter.
    """
    actor: Any = ray.remote(TrainerActor)
    return actor.options(
        num_cpus=0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}},
    ).remote(config, incarnation)
