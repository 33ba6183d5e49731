"""The Trainer as a Ray actor: adapters around `trainer.loop`, and nothing that decides."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import anyio.to_thread
import ray

from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError, BugError
from asyncrl.manifest import Progress, Resume, run_identity
from asyncrl.ports import StepRecord, TrainingWorker
from asyncrl.queue_actor import QueueClient, RayPayloads
from asyncrl.run_dir import RunDir
from asyncrl.waits import WaitBoard
from asyncrl.weights.object_store import ObjectStorePublisher
from trainer.algorithms.advantages import estimator
from trainer.checkpoint import Checkpointer
from trainer.loop import LoopSettings, TrainLoop

MAX_CONCURRENCY = 16


class TrainerActor:
    """See `start_trainer`. `run` stays inside; the other calls come beside it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._progress = Progress()
        self._waits = WaitBoard()
        self._worker: Any = None
        self._checkpoints: Checkpointer | None = None
        self._publisher: ObjectStorePublisher | None = None
        self._loop: TrainLoop | None = None
        self._stopped = False

    async def start(self, run_dir: RunDir, resume: Resume | None, store: Any) -> Mapping[str, int]:
        """Load the model, and the checkpoint if there is one; publish its version for the replicas to come up with.

        A resumed version keeps its number, though steps since its publication are in it too: everything in flight is
        generated anew, so no token carries the number under other weights, and pacing goes on exactly where it was.

        Returns:
            `step` and `version`.

        Raises:
            ConfigError: the model or the checkpoint cannot be used.
        """
        config = self._config
        self._checkpoints = Checkpointer(
            run_dir.path, identity=run_identity(config), keep=config.trainer.max_checkpoints_to_keep
        )
        self._publisher = ObjectStorePublisher(store, call_s=config.timeouts.call_s)
        with self._waits.waiting("model"):
            self._worker = await anyio.to_thread.run_sync(_load, config, resume)
        if resume is not None:
            self._progress = resume.manifest.progress
            if resume.run_dir == run_dir.path:
                await anyio.to_thread.run_sync(self._checkpoints.rewind, self._progress.step)
            if self._progress.version > 0:
                await self._publish_resumed()
        return {"step": self._progress.step, "version": self._progress.version}

    async def run(self, queue: Any, total_steps: int) -> AsyncIterator[StepRecord]:
        """Train until `total_steps` (of the whole run), the end of the stream or `stop`; then close the queue.

        Raises:
            AsyncRLError: the first failure of any part.
        """
        if self._checkpoints is None or self._publisher is None:
            raise BugError("TrainerActor.run before start")
        self._worker.plan(total_steps)
        call_s = self._config.timeouts.call_s
        self._loop = TrainLoop(
            LoopSettings.of(self._config, total_steps=total_steps),
            queue=QueueClient(queue, call_s),
            payloads=RayPayloads(call_s),
            publisher=self._publisher,
            worker=self._worker,
            checkpoints=self._checkpoints,
            estimate=estimator(self._config.algorithm),
            progress=self._progress,
            waits=self._waits,
        )
        if self._stopped:
            self._loop.stop()
        try:
            async with aclosing(self._loop.run()) as records:
                async for record in records:
                    yield record
        except AsyncRLError:
            raise
        except Exception as error:
            raise BugError.wrap(f"the trainer failed: {type(error).__name__}: {error}", error) from error

    async def stop(self) -> None:
        """End `run` soon: after the current step, with a checkpoint."""
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()

    async def status(self) -> Mapping[str, Any]:
        """`step`, `version`, `trained_samples`, `trained_tokens`, and `waits`: what is waited on, the longest first."""
        progress = self._progress
        return {
            "step": progress.step,
            "version": progress.version,
            "trained_samples": progress.trained_samples,
            "trained_tokens": progress.trained_tokens,
            "waits": self._waits.snapshot(),
        }

    async def _publish_resumed(self) -> None:
        assert self._publisher is not None
        dtype = self._config.rollout.dtype
        tensors = await anyio.to_thread.run_sync(lambda: dict(self._worker.weights(dtype)))
        await self._publisher.publish(self._progress.version, self._progress.step, tensors, validate=False)


def start_trainer(config: Config) -> Any:
    """Start the actor in this Ray job and return its handle. Never restarted: a run goes on from a checkpoint instead.

    It takes no CPU from Ray's books, so that it starts whatever the replicas have reserved; `trainer.cpu_threads` is
    what it uses. A GPU it does reserve.
    """
    actor: Any = ray.remote(TrainerActor)
    threads = str(config.trainer.cpu_threads)
    on_gpu = config.trainer.device == "cuda" or (
        config.trainer.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    return actor.options(
        num_cpus=0,
        num_gpus=1 if on_gpu else 0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
    ).remote(config)


def _load(config: Config, resume: Resume | None) -> TrainingWorker:
    # torch and transformers take seconds to import; the actor answers meanwhile.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils.logging import disable_progress_bar

    from trainer.worker import LocalTrainingWorker

    disable_progress_bar()
    worker = LocalTrainingWorker(config)
    if resume is not None:
        worker.load_checkpoint(resume.checkpoint)
    return worker
