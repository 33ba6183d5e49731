"""The training loop, on ports.

    lease ─▶ payloads ─▶ rows: staleness, masks, advantages ─▶ a step for each mini-batch ─▶ checkpoint?
      ▲                    │                                     │  train ─▶ commit ─▶ publish? ─▶ record
      ├──── drop ◀─────────┘ nothing to train on                 │
      └──────────────────────────────────────────────────────────┘ until total_steps, stop(), or the stream ends

    lease     unblocked by READY samples, the end of the stream, stop()
    train     the worker's thread; never cancelled
    publish   unblocked when the version can be fetched: one copy of the weights and one call; nobody waits for replicas

A mini-batch is always full, save the last one of a stream that ends: a sample without a token to train on is dropped
(`stale` or `filtered`) and another is leased in its place, so `trained` means that a gradient was taken, and books stay
exact. A version is published whenever `samples_per_version` more samples are trained, and after the last step.

What is not committed when the loop ends, for whatever reason, goes back to the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol

import anyio
import anyio.to_thread

from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError
from asyncrl.manifest import Progress
from asyncrl.ports import (
    Lease,
    Metrics,
    PayloadStore,
    QueueSnapshot,
    SampleQueue,
    StepRecord,
    TrainingWorker,
    WeightPublisher,
)
from asyncrl.waits import WaitBoard
from trainer.algorithms.advantages import Estimator
from trainer.rows import TrainSample, prepare, sample_metrics

logger = logging.getLogger(__name__)


class CheckpointWriter(Protocol):
    def save(self, worker: TrainingWorker, progress: Progress, queue: QueueSnapshot) -> Path: ...


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop needs to know of the configuration."""

    total_steps: int
    """Of the whole run, steps before a resume included."""
    mini_batch_samples: int
    samples_per_lease: int
    samples_per_version: int
    mask_beyond: int | None
    """`max_staleness`, where `stale_action` is `mask`."""
    has_validation: bool
    test_freq: int
    save_freq: int
    save_last: bool
    weights_dtype: Literal["float32", "bfloat16", "float16"]
    call_s: float
    """Longest single wait for samples; the loop asks again."""

    @classmethod
    def of(cls, config: Config, *, total_steps: int) -> LoopSettings:
        training, mode = config.trainer, config.async_training
        return cls(
            total_steps=total_steps,
            mini_batch_samples=training.ppo_mini_batch_size,
            samples_per_lease=config.samples_per_lease,
            samples_per_version=config.samples_per_version,
            mask_beyond=mode.max_staleness if mode.stale_action == "mask" else None,
            has_validation=bool(config.data.val_files) or config.data.reasoning_gym is not None,
            test_freq=training.test_freq,
            save_freq=training.save_freq,
            save_last=training.save_last,
            weights_dtype=config.rollout.dtype,
            call_s=config.timeouts.call_s,
        )


@dataclass(slots=True)
class _Batch:
    """What one turn of the loop trains on."""

    samples: list[TrainSample]
    leases: list[int]
    wait_s: float
    ended: bool
    """No sample will come after these."""


class TrainLoop:
    """Drives a `TrainingWorker` over a `SampleQueue`. One `run()` per object; everything on one event loop."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        queue: SampleQueue,
        payloads: PayloadStore,
        publisher: WeightPublisher,
        worker: TrainingWorker,
        checkpoints: CheckpointWriter,
        estimate: Estimator,
        progress: Progress | None = None,
        waits: WaitBoard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._payloads = payloads
        self._publisher = publisher
        self._worker = worker
        self._checkpoints = checkpoints
        self._estimate = estimate
        self._clock = clock
        self._stopping = False
        self._wait_scope: anyio.CancelScope | None = None
        self.progress = progress if progress is not None else Progress()
        self.waits = waits if waits is not None else WaitBoard(clock)
        self._first_step = self._saved_step = self.progress.step
        self._validated_step = self.progress.published_step

    def stop(self) -> None:
        """End soon and in order: the current step is finished, the rest of its lease released, a checkpoint written."""
        self._stopping = True
        if self._wait_scope is not None:
            self._wait_scope.cancel()

    async def run(self) -> AsyncGenerator[StepRecord, None]:
        """Train to the end; one record per optimizer step, right after it.

        Raises:
            AsyncRLError: whatever a part raised. What was leased and not committed has been released.
        """
        ended = False
        while not ended and not self._stopping and self._samples_wanted() > 0:
            batch = _Batch([], [], 0.0, ended=False)
            try:
                await self._fill(batch)
                async with aclosing(self._train(batch)) as records:
                    async for record in records:
                        yield record
            except BaseException:
                await self._release_after_failure(batch)
                raise
            if self._stopping:
                await self._release(batch)
            ended = batch.ended
            await self._checkpoint_if_due()
        await self._finish()

    # ------------------------------------------------------------------------------------------------ samples

    def _samples_wanted(self) -> int:
        """Samples of the next turn; 0: the run is over.

        Never beyond the next version: pacing promises no more than `samples_per_version` before a version is applied,
        so a turn that wanted more (after a stop in the middle of a lease) would wait for ever.
        """
        settings, progress = self._settings, self.progress
        to_next_version = (progress.version + 1) * settings.samples_per_version - progress.trained_samples
        to_end = (settings.total_steps - progress.step) * settings.mini_batch_samples
        return max(0, min(settings.samples_per_lease, to_next_version, to_end))

    async def _fill(self, batch: _Batch) -> None:
        """Lease until `batch` is full, the stream ends or stop() is called."""
        started = self._clock()
        wanted = self._samples_wanted()
        with self.waits.waiting("samples"):
            while len(batch.samples) < wanted and not self._stopping:
                lease = await self._lease(wanted - len(batch.samples))
                if lease is None:
                    continue
                num_dropped = await self._take(batch, lease)
                # A drop may bring a replacement even behind the end of the stream.
                if lease.ended and num_dropped == 0:
                    batch.ended = True
                    break
        batch.wait_s = self._clock() - started

    async def _lease(self, num_samples: int) -> Lease | None:
        """One ask; None if stop() came first. A cancelled ask leaves nothing leased."""
        lease = None
        with anyio.CancelScope() as self._wait_scope:
            lease = await self._queue.lease(
                num_samples, trainer_version=self.progress.version, timeout_s=self._settings.call_s
            )
        self._wait_scope = None
        return lease

    async def _take(self, batch: _Batch, lease: Lease) -> int:
        """Fetch and prepare a lease's samples into `batch`; returns how many had nothing to train on."""
        if not lease.samples:
            return 0
        batch.leases.append(lease.lease_id)
        self.progress.leases += 1
        num_dropped = 0
        for sample in await self._payloads.get([queued.payload for queued in lease.samples]):
            prepared = prepare(
                sample,
                lease_id=lease.lease_id,
                trainer_version=self.progress.version,
                mask_beyond=self._settings.mask_beyond,
                estimate=self._estimate,
            )
            if prepared.untrainable is None:
                batch.samples.append(prepared)
            else:
                num_dropped += 1
                await self._queue.drop(prepared.sample_id, prepared.untrainable)
        return num_dropped

    async def _release(self, batch: _Batch) -> None:
        for lease_id in batch.leases:
            await self._queue.release(lease_id)

    async def _release_after_failure(self, batch: _Batch) -> None:
        """Shielded: a cancelled run still gives back what it holds; the queue's own deadline bounds it."""
        with anyio.CancelScope(shield=True):
            try:
                await self._release(batch)
            except AsyncRLError:
                logger.exception(
                    "leases %s could not be released; the failure before this one is what counts", batch.leases
                )

    # ------------------------------------------------------------------------------------------------ steps

    async def _train(self, batch: _Batch) -> AsyncGenerator[StepRecord, None]:
        size = self._settings.mini_batch_samples
        started, wait_s = self._clock() - batch.wait_s, batch.wait_s
        for first in range(0, len(batch.samples), size):
            if self._stopping:
                return
            mini_batch = batch.samples[first : first + size]
            metrics = await self._step(mini_batch)
            at_end = batch.ended and first + size >= len(batch.samples)
            metrics["timing/publish_s"] = await self._publish_if_due(at_end=at_end)
            now = self._clock()
            metrics |= {"timing/wait_samples_s": wait_s, "timing/step_s": now - started, "time/monotonic_s": now}
            yield StepRecord(
                step=self.progress.step,
                version=self.progress.version,
                metrics=metrics,
                rewards=tuple(sum(sample.rewards) / len(sample.rewards) for sample in mini_batch),
                staleness=tuple(sample.staleness for sample in mini_batch),
            )
            started, wait_s = self._clock(), 0.0

    async def _step(self, mini_batch: Sequence[TrainSample]) -> Metrics:
        """One optimizer step, and its samples committed."""
        started = self._clock()
        rows = [row for sample in mini_batch for row in sample.rows]
        metrics = await anyio.to_thread.run_sync(self._worker.train_mini_batch, rows)
        metrics = metrics | sample_metrics(mini_batch) | {"timing/update_s": self._clock() - started}
        progress = self.progress
        progress.step += 1
        progress.trained_samples += len(mini_batch)
        progress.trained_tokens += int(metrics["tokens/trained"])
        # Shielded: the gradient is in the weights now, so the ledger has to hear of it even if the run is cancelled.
        with anyio.CancelScope(shield=True):
            for lease_id, samples in groupby(mini_batch, key=lambda sample: sample.lease_id):
                await self._queue.commit(lease_id, [sample.sample_id for sample in samples])
        return metrics

    # ------------------------------------------------------------------------------------------------ versions

    async def _publish_if_due(self, *, at_end: bool) -> float:
        """Publish at a version's last sample or the run's; returns the seconds it took."""
        settings, progress = self._settings, self.progress
        last = at_end or progress.step >= settings.total_steps
        if not last and progress.trained_samples < (progress.version + 1) * settings.samples_per_version:
            return 0.0
        return await self._publish(last=last)

    async def _publish(self, *, last: bool) -> float:
        settings, progress = self._settings, self.progress
        started = self._clock()
        freq = settings.test_freq
        crossed = freq > 0 and progress.step // freq > progress.published_step // freq
        validate = settings.has_validation and (last or crossed)
        with self.waits.waiting("publish"):
            tensors = await anyio.to_thread.run_sync(lambda: dict(self._worker.weights(settings.weights_dtype)))
            await self._publisher.publish(progress.version + 1, progress.step, tensors, validate=validate)
        progress.version += 1
        progress.published_step = progress.step
        if validate:
            self._validated_step = progress.step
        return self._clock() - started

    # ------------------------------------------------------------------------------------------------ the end

    async def _finish(self) -> None:
        """The last version (unless stopped), the last checkpoint, and word to whoever waits on the queue."""
        progress = self.progress
        if not self._stopping and progress.step > self._first_step:
            unvalidated = self._settings.has_validation and self._validated_step < progress.step
            # Unvalidated: the stream ended right after a publication that could not know it was the last.
            if progress.published_step < progress.step or unvalidated:
                await self._publish(last=True)
        if self._settings.save_last and self._saved_step < progress.step:
            await self._checkpoint()
        await self._queue.close()

    async def _checkpoint_if_due(self) -> None:
        freq = self._settings.save_freq
        if freq > 0 and self.progress.step // freq > self._saved_step // freq:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Between turns: nothing is leased, so the snapshot counts every sample as trained, dropped or outstanding."""
        with self.waits.waiting("checkpoint"):
            snapshot = await self._queue.snapshot()
            path = await anyio.to_thread.run_sync(
                self._checkpoints.save, self._worker, replace(self.progress), snapshot
            )
        self._saved_step = self.progress.step
        logger.info("checkpoint %s", path)
