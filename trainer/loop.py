"""The training loop, which reaches queue, ranks and weight store through interfaces only.

    lease ─▶ payloads ─▶ rows ─▶ experience ─▶ critic ─▶ a step for each mini-batch of each pass ─▶ checkpoint?
      ▲         │         │                                │  train ─▶ commit ─▶ log ─▶ publish? ─▶ record
      ├ requeue ◀┘ lost    │                                │
      ├──── drop ◀────────┘ nothing to train on            │
      └────────────────────────────────────────────────────┘ until total_steps, stop(), or the stream ends

    lease       waits for READY samples, the end of the stream, or stop(). On GPUs that the engines use, too, the ranks'
                turn ends before it and begins after it (`trainer.ranks_turn`)
    experience  the ranks' forward passes: log-probs, values, scores (`trainer.experience`)
    train       a call to the ranks; never cancelled, and ended by `timeouts.train_s` or a hung rank (`Trainer.run`)
    log         writes the samples of the step to the Trainer's own log (`asyncrl.storage.trained_steps`)
    publish     waits until the version can be fetched: one copy of the weights, without waiting for replicas
    record      metrics and events (`trainer.step_records`); traced ranks write their trace (`trainer.workers.tracing`)
    checkpoint  begins between two leased batches and is written while training continues (`trainer.checkpoints`)

A leased batch passes through training `ppo_epochs` times; every mini-batch of every pass is one step. A sample without
a token to train on is dropped (`stale` or `filtered`), so that every `trained` sample has contributed to a gradient and
sample counts stay exact. If its rows already show that it has no such token, another sample is leased instead. If the
off-policy correction rejects all its tokens, which is known only once the batch is complete, training continues without
the sample, and the last mini-batch is smaller. Samples at the end of the stream that do not fill a lease form a smaller
batch (`partial_final_batch: train`) or are released (`drop`). A sample is committed with its first step. A version is
published at the end of each batch that completes another `samples_per_version` samples, and after the last step.

With a critic, the first `critic_warmup_steps` steps leave the policy unchanged. They count like any other step: their
samples are committed (only the critic has a gradient), and versions are published with unchanged weights, because
pacing counts versions. The critic trains on the whole batch before the policy's first step on it. So after a stop in
the middle of a batch, the critic trains a second time on the samples that were released; the policy never does.

Samples that are not committed when the loop ends, for whatever reason, return to the queue. After a failure the loop
still waits for the checkpoint that is being written, as long as its ranks are alive. The queue is closed last, after
the last checkpoint is written, so that after any earlier failure the run can continue from a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

import anyio
import anyio.lowlevel
import torch
from anyio.abc import TaskGroup
from tensordict import TensorDict

from asyncrl.config.resources.plan import validation_due
from asyncrl.core.failures import BugError, DataError
from asyncrl.core.records import Metrics, RecordSink
from asyncrl.core.types import DropReason
from asyncrl.core.waits import WaitBoard
from asyncrl.queue.sample_queue import SampleQueue
from asyncrl.storage.checkpoint_manifest import Progress
from asyncrl.storage.trained_steps import TrainedStepsFile
from skip import SkipManager
from trainer.algorithms.objective import finish_metrics
from trainer.batches import BatchSource, LeasedBatch, TrainSample
from trainer.checkpoints import RoleCheckpoints
from trainer.experience import ExperienceBuilder
from trainer.ranks_turn import RanksTurn
from trainer.schedule import LoopSettings, mini_batches
from trainer.step_records import StepRecorder, batch_metrics, note_trained, role_metrics, sample_metrics
from trainer.thread_search import ThreadSearch
from trainer.workers.worker import RoleGroup

EXPERIENCE_CALLS = 6
"""Upper bound of the calls to ranks for one batch: policy, policy without adapters or reference, teacher, critic and
reward model; one more allows for the arithmetic."""


class TrainLoop:
    """Trains the roles on the samples of a `SampleQueue`. `run()` is called once; everything runs on one event loop."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        queue: SampleQueue,
        batch_source: BatchSource,
        actor: RoleGroup,
        critic: RoleGroup | None,
        experience: ExperienceBuilder,
        checkpoints: RoleCheckpoints,
        trained_steps: TrainedStepsFile,
        progress: Progress | None = None,
        validated_step: int = 0,
        waits: WaitBoard | None = None,
        turn: RanksTurn | None = None,
        end_traces: Callable[[int], Awaitable[None]] | None = None,
        threads: ThreadSearch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            end_traces: called with the number of each step that has ended.
            threads: finds the number of threads of the ranks; None: it is fixed.
            progress: the counts from which the loop starts, and which it updates.
            validated_step: the newest step whose weights were validated or will be; 0: none.
            turn: that of the ranks on GPUs that they share with the engines; None: they have their own.
        """
        self._settings = settings
        self._queue = queue
        self._batch_source = batch_source
        self._actor = actor
        self._critic = critic
        self._experience = experience
        self._trained_steps = trained_steps
        self._end_traces = end_traces
        self._threads = threads
        self._clock = clock
        self._stopping = False
        self._waited_s = 0.0
        """Time for which the loop waited for the samples of the last batch."""
        self._num_rejected = 0
        """Number of samples rejected in the batches since the last one with a sample to train on."""
        self.progress = progress if progress is not None else Progress()
        self.waits = waits if waits is not None else WaitBoard(clock)
        self._turn = turn if turn is not None else RanksTurn(None, self.waits, offload_s=0.0)
        self._first_step = self.progress.step
        self._steps = StepRecorder(self.progress, lineage=settings.lineage, clock=clock)
        self._validated_step = validated_step
        self._checkpoints = checkpoints

    def stop(self) -> None:
        """Request an orderly end: finish the current step, release the rest of its lease and, with `save_last`, write a
        checkpoint."""
        self._stopping = True
        self._batch_source.stop()

    async def run(self, sink: RecordSink) -> None:
        """Train to the end, and put a record into `sink` right after each optimizer step.

        Raises:
            AsyncRLError: the failure of any part. Samples that were leased and not committed have been released.
        """
        async with self._checkpoints.in_background() as tasks:
            await self._train_all(sink, tasks)

    async def _train_all(self, sink: RecordSink, tasks: TaskGroup) -> None:
        ended = False
        while not ended and not self._stopping and self._settings.next_batch_size(self.progress) > 0:
            started, tokens = self._clock(), self.progress.trained_tokens
            ended = await self._train_next_batch(sink)
            await self._set_threads(self._clock() - started, self.progress.trained_tokens - tokens)
            if self._checkpoints.is_due(self.progress.step):
                over = ended or self._stopping or self._settings.next_batch_size(self.progress) == 0
                await self._checkpoints.begin(self.progress, tasks, last=over)
        await self._finish(tasks)

    async def _set_threads(self, batch_s: float, tokens: int) -> None:
        """Give the ranks the threads of the search, after a batch that took this long."""
        if self._threads is None or not tokens:
            return
        before = self._threads.threads
        if (threads := self._threads.batch_ended(batch_s, self._waited_s, tokens)) != before:
            with self._calling("threads"):
                await self._actor.set_threads(threads)

    async def _train_next_batch(self, sink: RecordSink) -> bool:
        """Lease a batch and take all its steps; returns whether the stream has ended."""
        batch, size, left_out = LeasedBatch(), self._settings.next_batch_size(self.progress), False
        self._steps.begin()
        try:
            async with self._turn.released(self._queue.status, lambda: size - len(batch.samples)):
                with self.waits.waiting("samples"), self._steps.phase("wait_samples") as span:
                    await self._batch_source.fill(batch, size, trainer_version=self.progress.version)
                    span.add(samples=len(batch.samples))
            self._waited_s = self._steps.metrics["timing/wait_samples_s"]
            self.progress.leases += len(batch.leases)
            left_out = self._settings.drop_partial and batch.ended and len(batch.samples) < size
            if batch.samples and not self._stopping and not left_out:
                await self._turn.begin()
                await self._train(batch, sink)
        except BaseException:
            await self._batch_source.release_after_failure(batch)
            raise
        if self._stopping or left_out:
            await self._batch_source.release(batch)
        return batch.ended

    # ------------------------------------------------------------------------------------------------ steps

    async def _train(self, leased: LeasedBatch, sink: RecordSink) -> None:
        """Take all steps of a leased batch, which belongs to the step that has begun."""
        settings = self._settings
        SkipManager.set_step(self.progress.step + 1)  # the first step of this batch
        with self._calling("experience", EXPERIENCE_CALLS), self._steps.phase("experience"):
            batch, metrics, kl_coef = await self._experience.make(
                leased.samples, trainer_version=self.progress.version, kl_coef=self.progress.kl_coef
            )
        self._steps.metrics |= metrics
        batch = await self._drop_rejected(leased, batch)
        if not leased.samples:
            return
        groups = batch["groups"].tolist()
        steps = settings.next_steps(groups, self.progress)
        if self._stopping:
            return
        await self._train_critic(batch, groups)
        if self._stopping:
            return
        self.progress.kl_coef = kl_coef
        num_first_pass = math.ceil(len(leased.samples) / settings.mini_batch_samples)
        for number, rows in enumerate(steps):
            samples = [leased.samples[group] for group in dict.fromkeys(groups[row] for row in rows)]
            committed = samples if number < num_first_pass else []
            await self._step(batch[torch.tensor(rows)], samples, committed)
            is_last = number == len(steps) - 1
            ends = is_last or self._stopping
            if ends:
                await self._publish_if_due(at_end=is_last and leased.ended)
            await self._steps.end(sink, committed)
            if self._end_traces is not None:
                with self._calling("trace"):
                    await self._end_traces(self.progress.step)
            if ends:
                return
            self._steps.begin()

    async def _drop_rejected(self, leased: LeasedBatch, batch: TensorDict) -> TensorDict:
        """Drop samples whose tokens the correction has all rejected, from the queue, from `leased` and from `batch`.

        Raises:
            DataError: a whole lease or more of consecutive samples was rejected.
        """
        trained = {int(group) for group in batch["groups"][batch["loss_mask"].any(dim=1)]}
        if len(trained) == len(leased.samples):
            self._num_rejected = 0
            return batch
        self._num_rejected = 0 if trained else self._num_rejected + len(leased.samples)
        if self._num_rejected >= self._settings.samples_per_lease:
            raise DataError(
                f"the off-policy correction rejected every token of {self._num_rejected} samples in a row, so there "
                "is nothing to train on: raise algorithm.rollout_correction.rollout_rs_threshold, or bound "
                "async_training.max_staleness"
            )
        for group, sample in enumerate(leased.samples):
            if group not in trained:
                await self._batch_source.drop(sample.sample_id, DropReason.FILTERED, sample.response_tokens)
        leased.samples = [sample for group, sample in enumerate(leased.samples) if group in trained]
        # Each drop frees a permit, so another sample may follow even after the end of the stream.
        leased.ended = False
        number = {group: place for place, group in enumerate(sorted(trained))}
        rows = [row for row, group in enumerate(batch["groups"].tolist()) if group in number]
        batch = batch[torch.tensor(rows, dtype=torch.int64)]
        batch["groups"] = torch.tensor([number[group] for group in batch["groups"].tolist()], dtype=torch.int64)
        return batch

    async def _train_critic(self, batch: TensorDict, groups: Sequence[int]) -> None:
        """Take all passes of the critic, unless stopped between two of its steps. Its metrics are means over steps."""
        if self._critic is None:
            return
        settings = self._settings
        seed = settings.batch_seed(self.progress) + 1
        steps = mini_batches(groups, size=settings.mini_batch_samples, epochs=settings.critic_epochs, seed=seed)
        results: list[Metrics] = []
        with self._steps.phase("critic", "update_critic"):
            for rows in steps:
                # One call per step, so that each has the full deadline, and a stop or cancellation waits for one
                # step only.
                with self._calling("critic"), anyio.CancelScope(shield=True):
                    results.append(await self._critic.train_batch(batch[torch.tensor(rows)]))
                await anyio.lowlevel.checkpoint()
                if self._stopping:
                    break
        means = {name: math.fsum(result[name] for result in results) / len(results) for name in results[0]}
        self._steps.metrics |= role_metrics("critic", means)

    async def _step(self, batch: TensorDict, samples: Sequence[TrainSample], committed: Sequence[TrainSample]) -> None:
        """Take one optimizer step of the policy and commit its samples. During the critic's warm-up the step is only
        counted."""
        progress = self.progress
        # Shielded, because once the gradient is in the weights the samples must be committed, even if the run is
        # cancelled.
        with anyio.CancelScope(shield=True), self._steps.phase("update"):
            if progress.step >= self._settings.critic_warmup_steps:
                with self._calling("train"):
                    metrics = finish_metrics(role_metrics("actor", await self._actor.train_batch(batch)))
                self._check_mismatch(metrics)
                self._steps.metrics |= metrics
            progress.step += 1
            progress.trained_tokens += int(batch["loss_mask"].sum())
            progress.trained_samples += len(committed)
            with self._steps.phase("commit", samples=len(committed)):
                commits = [
                    (lease_id, [sample.sample_id for sample in members])
                    for lease_id, members in groupby(committed, key=lambda sample: sample.lease_id)
                ]
                # The samples of a later pass are committed already; its tokens are not.
                for lease_id, sample_ids in commits or [(samples[0].lease_id, [])]:
                    await self._queue.commit(lease_id, sample_ids, trained_tokens=progress.trained_tokens)
                sample_ids = [sample.sample_id for sample in committed]
                await self._trained_steps.append(progress.step, progress.version, sample_ids)
            note_trained(committed)
        await anyio.lowlevel.checkpoint()  # raises if the run was cancelled meanwhile
        self._steps.metrics |= sample_metrics(samples) | batch_metrics(batch)
        if self._threads is not None:
            self._steps.metrics["trainer/cpu_threads"] = self._threads.threads
        self._steps.add_extras(samples)

    def _check_mismatch(self, metrics: Metrics) -> None:
        """Raise BugError if the engines sampled from another distribution than the weights of this step have. The step
        is not committed then. Nothing is checked if the weights have changed since they were published."""
        limit, progress = self._settings.max_mismatch_kl, self.progress
        mismatch_kl = metrics.get("rollout/mismatch_kl_age_0", 0.0)
        if limit is not None and progress.published_step == progress.step and not mismatch_kl <= limit:
            raise BugError(
                f"rollout/mismatch_kl is {mismatch_kl:.2g} nats per token in step {progress.step + 1}, and "
                f"weight_sync.max_mismatch_kl allows {limit:g}: the engines sample from another distribution than the "
                f"Trainer computes with the same weights (version {progress.version}), so every policy ratio is wrong. "
                "Raise the limit if the dtypes of rollout and trainer, a quantized rollout, or a truncated sampling "
                "(top_p, top_k, min_p) explain the difference, else report the model"
            )

    # ------------------------------------------------------------------------------------------------ versions

    async def _publish_if_due(self, *, at_end: bool) -> None:
        """Publish a version if the last sample of a version or of the run is trained."""
        settings, progress = self._settings, self.progress
        last = at_end or progress.step >= settings.total_steps
        if last or settings.is_version_due(progress):
            await self._publish(last=last)

    async def _publish(self, *, last: bool) -> None:
        settings, progress = self._settings, self.progress
        due = validation_due(settings.test_freq, validated_step=self._validated_step, step=progress.step)
        validate = settings.has_validation and (last or due)
        with self._calling("publish"), self._steps.phase("publish", version=progress.version + 1):
            published = await self._actor.publish(
                progress.version + 1, progress.step, validate=validate, probe=settings.has_probes
            )
        progress.version += 1
        progress.published_step = progress.step
        if validate:
            self._validated_step = progress.step
        self._steps.metrics |= {"timing/gather_s": published.gather_s, "timing/put_s": published.put_s}

    async def _finish(self, tasks: TaskGroup) -> None:
        """Publish the last version (unless stopped), write the last checkpoint and close the queue."""
        progress = self.progress
        if not self._stopping:
            unpublished = progress.published_step < progress.step and progress.step > self._first_step
            # Either the stream ended right after a publication that was not known to be the last, or training went
            # back to the last checkpoint while its weights were being validated.
            unvalidated = self._settings.has_validation and self._validated_step < progress.step
            if unpublished or unvalidated:
                await self._turn.begin()
                await self._publish(last=True)
        if self._settings.save_last and self._checkpoints.is_due_at_end(progress.step):
            await self._turn.begin()
            await self._checkpoints.begin(progress, tasks, last=True)
        await self._turn.end_run()
        await self._checkpoints.wait_written()
        if not self._checkpoints.failed:
            await self._queue.close()

    def _calling(self, edge: str, num_calls: int = 1) -> AbstractContextManager[None]:
        """Report a wait for this many calls to the ranks, each of which has a deadline."""
        return self.waits.waiting(edge, limit_s=num_calls * self._settings.call_limit_s)
