"""The training loop, on ports.

    lease ─▶ payloads ─▶ rows ─▶ experience ─▶ critic ─▶ a step for each mini-batch of each pass ─▶ checkpoint?
      ▲         │         │                                │  train ─▶ commit ─▶ note ─▶ publish? ─▶ record
      ├─ redo ◀─┘ lost    │                                │
      ├──── drop ◀────────┘ nothing to train on            │
      └────────────────────────────────────────────────────┘ until total_steps, stop(), or the stream ends

    lease       unblocked by READY samples, the end of the stream, stop()
    experience  forward passes of the ranks: log-probs, values, scores (`trainer.experience`)
    train       the ranks; never cancelled, bounded by `timeouts.train_s`, and sooner if one is hung (`Trainer.run`)
    note        which samples the step took, in the Trainer's own record (`trainer.record`)
    publish     unblocked when the version can be fetched: one copy of the weights; nobody waits for replicas
    record      and the event `step`; ranks that are traced write what they saw of it (`trainer.tracing`)
    checkpoint  begun between turns, written while the next ones train (`trainer.saves`)

A turn is one lease's worth of samples, gone through `ppo_epochs` times; every mini-batch of every pass is one step. A
sample without a token to train on is dropped (`stale` or `filtered`), so `trained` means that a gradient was taken, and
books stay exact. Where its rows tell, another is leased in its place. Where the off-policy correction rejects all of
it, which is known only of a whole lease, the turn goes on without it, and its last mini-batch is smaller. What is left
when the stream ends and does not fill a lease is a smaller turn (`partial_final_batch: train`), or is given back
(`drop`). A sample is committed with its first step. A version is published at the end of the turn that brings
`samples_per_version` more samples, and after the last step.

With a critic, the first `critic_warmup_steps` steps leave the policy as it is: they count like any other, their samples
are committed (the gradient is the critic's), and their versions have equal weights, because pacing goes by versions.
The critic learns from the whole turn before the policy's first step on it, so after a stop in the middle of a turn it
sees the samples that were given back once more; the policy never does.

What is not committed when the loop ends, for whatever reason, goes back to the queue. A failure waits for the
checkpoint that is being written, as long as its ranks live. The queue is closed last, when the last checkpoint is
written: whatever fails before that, the run can still go back to a checkpoint and go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol

import anyio
import anyio.lowlevel
import torch
from anyio.abc import TaskGroup
from tensordict import TensorDict

from asyncrl.config.plan import validation_due
from asyncrl.failures import DataError, first_failure
from asyncrl.manifest import Progress
from asyncrl.ports import SampleQueue
from asyncrl.profiling import profile
from asyncrl.records import Metrics, RecordSink, StepRecord
from asyncrl.types import DropReason, SampleId
from asyncrl.waits import WaitBoard
from skip import SkipManager
from trainer.algorithms.objective import finish
from trainer.batching import mini_batches
from trainer.experience import Experience
from trainer.intake import Intake, Turn
from trainer.loop_settings import LoopSettings
from trainer.notes import note_drop, note_step, note_trained
from trainer.roles import RoleGroup
from trainer.rows import TrainSample, sample_metrics
from trainer.saves import Checkpoints, Saves

EXPERIENCE_CALLS = 5
"""At most: policy, policy without adapters or reference, critic, reward model; and one for the arithmetic."""


class ExperienceMaker(Protocol):
    async def make(
        self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None
    ) -> Experience: ...


class TrainedRecord(Protocol):
    """The Trainer's own account of what is in the weights, beside the queue's books."""

    async def put(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        """The queue has acknowledged the commit of these, whose first gradient is in `step`, taken on `version`.

        Raises:
            DiskFullError, InfraError: it could not be written.
        """


class TrainLoop:
    """Drives the roles over a `SampleQueue`. One `run()` per object; everything on one event loop."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        queue: SampleQueue,
        intake: Intake,
        actor: RoleGroup,
        critic: RoleGroup | None,
        experience: ExperienceMaker,
        checkpoints: Checkpoints,
        trained: TrainedRecord,
        progress: Progress | None = None,
        validated_step: int = 0,
        waits: WaitBoard | None = None,
        end_traces: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            end_traces: told of each step that is over.
            progress: where the loop begins; it counts on in it.
            validated_step: the newest step whose weights were validated, or are about to be; 0: none.
        """
        self._settings = settings
        self._queue = queue
        self._intake = intake
        self._actor = actor
        self._critic = critic
        self._experience = experience
        self._trained = trained
        self._end_traces = end_traces
        self._clock = clock
        self._stopping = False
        self._num_rejected = 0
        """Samples of the turns since the last one that had any to train on."""
        self.progress = progress if progress is not None else Progress()
        self.waits = waits if waits is not None else WaitBoard(clock)
        self._first_step = self.progress.step
        self._validated_step = validated_step
        self._saves = Saves(
            checkpoints,
            queue,
            step=self.progress.step,
            save_freq=settings.save_freq,
            call_limit_s=settings.call_limit_s,
            waits=self.waits,
        )

    def stop(self) -> None:
        """End soon and in order: the current step is finished, the rest of its lease released, and, with `save_last`, a
        checkpoint written."""
        self._stopping = True
        self._intake.stop()

    async def run(self, sink: RecordSink) -> None:
        """Train to the end; one record per optimizer step, right after it.

        Raises:
            AsyncRLError: whatever a part raised. What was leased and not committed has been released.
        """
        failure: Exception | None = None
        try:
            # Owns the one background task there is: the writing of a checkpoint.
            async with anyio.create_task_group() as tasks:
                try:
                    await self._turns(sink, tasks)
                except Exception as error:
                    failure = error
                    await self._saves.keep()
                    raise
        except BaseExceptionGroup as failures:
            # A checkpoint that fails too, behind the failure that it was kept for, is not what counts.
            raise failure or first_failure(failures) from None

    async def _turns(self, sink: RecordSink, tasks: TaskGroup) -> None:
        ended = False
        while not ended and not self._stopping and self._samples_wanted() > 0:
            ended = await self._turn(sink)
            if self._saves.is_due(self.progress.step):
                await self._saves.begin(self.progress, tasks)
        await self._finish(tasks)

    def _samples_wanted(self) -> int:
        """Samples of the next turn; 0: the run is over.

        Never beyond the next version: pacing promises no more than `samples_per_version` before a version is applied,
        so a turn that wanted more (after a stop in the middle of a lease) would wait for ever.
        """
        settings, progress = self._settings, self.progress
        to_next_version = (progress.version + 1) * settings.samples_per_version - progress.trained_samples
        # A stop may have left out passes over its last samples; the steps they would have been go to other samples, for
        # which the resumed run's pacing makes room.
        to_end = math.ceil((settings.total_steps - progress.step) / settings.ppo_epochs) * settings.mini_batch_samples
        return max(0, min(settings.samples_per_lease, to_next_version, to_end))

    async def _turn(self, sink: RecordSink) -> bool:
        """One lease's worth; returns whether the stream has ended."""
        turn, wanted = Turn(), self._samples_wanted()
        left_out, began = False, self._begin_step()
        try:
            await self._intake.fill(turn, wanted, trainer_version=self.progress.version)
            self.progress.leases += len(turn.leases)
            left_out = self._settings.drop_partial and turn.ended and len(turn.samples) < wanted
            if turn.samples and not self._stopping and not left_out:
                await self._train(turn, sink, began)
        except BaseException:
            await self._intake.release_after_failure(turn)
            raise
        if self._stopping or left_out:
            await self._intake.release(turn)
        return turn.ended

    # ------------------------------------------------------------------------------------------------ steps

    def _begin_step(self) -> float:
        """Events from now on are of the next step. Returns when that is, by `time.perf_counter`."""
        profile.at(step=self.progress.step + 1, version=self.progress.version)
        return time.perf_counter()

    async def _train(self, turn: Turn, sink: RecordSink, began: float) -> None:
        """All steps of a turn, the first of which has `began` when its samples were asked for."""
        settings = self._settings
        started, wait_s = self._clock() - turn.wait_s, turn.wait_s
        batch, metrics, kl_coef = await self._make_experience(turn)
        batch = await self._drop_rejected(turn, batch)
        if not turn.samples:
            return
        groups = batch["groups"].tolist()
        # Seeded by what a resume knows too, so that it goes through its leases in the order it would have.
        seed = settings.seed * 1_000_003 + self.progress.trained_samples
        size, left = settings.mini_batch_samples, settings.total_steps - self.progress.step
        passes = mini_batches(groups, size=size, epochs=settings.ppo_epochs, seed=seed)[:left]
        if self._stopping:
            return
        metrics |= await self._train_critic(batch, groups, seed)
        if self._stopping:
            return
        self.progress.kl_coef = kl_coef
        num_first = math.ceil(len(turn.samples) / size)
        for number, rows in enumerate(passes):
            samples = [turn.samples[group] for group in dict.fromkeys(groups[row] for row in rows)]
            first_pass = number < num_first
            metrics |= await self._step(batch[torch.tensor(rows)], samples, commits=first_pass)
            last = number == len(passes) - 1
            ends = last or self._stopping
            metrics["timing/publish_s"] = 0.0
            if ends:
                metrics |= await self._publish_if_due(at_end=last and turn.ended)
            now = self._clock()
            metrics |= {"timing/wait_samples_s": wait_s, "timing/step_s": now - started, "time/monotonic_s": now}
            counted = samples if first_pass else []
            await sink.put(
                StepRecord(
                    step=self.progress.step,
                    version=self.progress.version,
                    metrics=metrics,
                    rewards=tuple(sum(sample.rewards) / len(sample.rewards) for sample in counted),
                    staleness=tuple(sample.staleness for sample in counted),
                    lineage=settings.lineage,
                )
            )
            took_s = time.perf_counter() - began
            note_step(took_s, metrics, num_samples=len(counted), lineage=settings.lineage)
            if self._end_traces is not None:
                with self._asking("trace"):
                    await self._end_traces(self.progress.step)
            if ends:
                return
            began, started, wait_s, metrics = self._begin_step(), self._clock(), 0.0, {}

    async def _make_experience(self, turn: Turn) -> Experience:
        started = self._clock()
        SkipManager.set_step(self.progress.step + 1)  # the first that this turn will take
        with self._asking("experience", EXPERIENCE_CALLS), profile.span("trainer.experience"):
            batch, metrics, kl_coef = await self._experience.make(
                turn.samples, trainer_version=self.progress.version, kl_coef=self.progress.kl_coef
            )
        return Experience(batch, metrics | {"timing/experience_s": self._clock() - started}, kl_coef)

    async def _drop_rejected(self, turn: Turn, batch: TensorDict) -> TensorDict:
        """Without the samples of which the correction left no token; they are dropped, and leave `turn`.

        Raises:
            DataError: these, with those right before them, are a whole lease or more.
        """
        trained = {int(group) for group in batch["groups"][batch["loss_mask"].any(dim=1)]}
        if len(trained) == len(turn.samples):
            self._num_rejected = 0
            return batch
        self._num_rejected = 0 if trained else self._num_rejected + len(turn.samples)
        if self._num_rejected >= self._settings.samples_per_lease:
            raise DataError(
                f"the off-policy correction rejected every token of {self._num_rejected} samples in a row, so there "
                "is nothing to train on: raise algorithm.rollout_correction.rollout_rs_threshold, or bound "
                "async_training.max_staleness"
            )
        for group, sample in enumerate(turn.samples):
            if group not in trained:
                await self._queue.drop(sample.sample_id, DropReason.FILTERED)
                note_drop(sample.sample_id, DropReason.FILTERED, sample.response_tokens)
        turn.samples = [sample for group, sample in enumerate(turn.samples) if group in trained]
        # Each drop frees a permit, so another sample may come even behind the end of the stream.
        turn.ended = False
        number = {group: place for place, group in enumerate(sorted(trained))}
        rows = [row for row, group in enumerate(batch["groups"].tolist()) if group in number]
        batch = batch[torch.tensor(rows, dtype=torch.int64)]
        batch["groups"] = torch.tensor([number[group] for group in batch["groups"].tolist()], dtype=torch.int64)
        return batch

    async def _train_critic(self, batch: TensorDict, groups: Sequence[int], seed: int) -> Metrics:
        """All passes of the critic, unless it is stopped between two of its steps; means over them."""
        if self._critic is None:
            return {}
        started = self._clock()
        steps = mini_batches(
            groups, size=self._settings.mini_batch_samples, epochs=self._settings.critic_epochs, seed=seed + 1
        )
        results: list[Metrics] = []
        with profile.span("trainer.critic"):
            for rows in steps:
                # A call of its own for each step: each has the whole deadline, and a stop or a cancel waits for one.
                with self._asking("critic"), anyio.CancelScope(shield=True):
                    results.append(await self._critic.train_batch(batch[torch.tensor(rows)]))
                await anyio.lowlevel.checkpoint()
                if self._stopping:
                    break
        means = {name: math.fsum(result[name] for result in results) / len(results) for name in results[0]}
        return _named("critic", means) | {"timing/update_critic_s": self._clock() - started}

    async def _step(self, batch: TensorDict, samples: Sequence[TrainSample], *, commits: bool) -> Metrics:
        """One optimizer step of the policy, and its samples committed. None is taken in the critic's warm-up; it counts
        as one all the same.
        """
        started, progress = self._clock(), self.progress
        metrics: Metrics = {}
        # Shielded: once the gradient is in the weights the ledger has to hear of it, even if the run is cancelled.
        with anyio.CancelScope(shield=True), profile.span("trainer.update"):
            if progress.step >= self._settings.critic_warmup_steps:
                with self._asking("train"):
                    metrics = finish(_named("actor", await self._actor.train_batch(batch)))
            progress.step += 1
            progress.trained_tokens += int(batch["loss_mask"].sum())
            metrics["timing/commit_s"] = await self._commit(samples if commits else ())
        await anyio.lowlevel.checkpoint()  # where a cancellation from meanwhile arrives
        return {
            **metrics,
            **sample_metrics(samples),
            **_batch_metrics(batch),
            "timing/update_s": self._clock() - started,
        }

    async def _commit(self, samples: Sequence[TrainSample]) -> float:
        """The gradient of these is in the weights since this step. Returns the seconds it took to tell."""
        started, progress = self._clock(), self.progress
        progress.trained_samples += len(samples)
        with profile.span("trainer.commit", samples=len(samples)):
            for lease_id, held in groupby(samples, key=lambda sample: sample.lease_id):
                await self._queue.commit(lease_id, [sample.sample_id for sample in held])
            await self._trained.put(progress.step, progress.version, [sample.sample_id for sample in samples])
        note_trained(samples)
        return self._clock() - started

    # ------------------------------------------------------------------------------------------------ versions

    async def _publish_if_due(self, *, at_end: bool) -> Metrics:
        """Publish at a version's last sample or the run's; returns what that took."""
        settings, progress = self._settings, self.progress
        last = at_end or progress.step >= settings.total_steps
        if not last and progress.trained_samples < (progress.version + 1) * settings.samples_per_version:
            return {}
        return await self._publish(last=last)

    async def _publish(self, *, last: bool) -> Metrics:
        settings, progress = self._settings, self.progress
        started = self._clock()
        due = validation_due(settings.test_freq, validated_step=self._validated_step, step=progress.step)
        validate = settings.has_validation and (last or due)
        with self._asking("publish"), profile.span("trainer.publish", version=progress.version + 1):
            published = await self._actor.publish(progress.version + 1, progress.step, validate=validate)
        progress.version += 1
        progress.published_step = progress.step
        if validate:
            self._validated_step = progress.step
        return {
            "timing/publish_s": self._clock() - started,
            "timing/gather_s": published.gather_s,
            "timing/put_s": published.put_s,
        }

    async def _finish(self, tasks: TaskGroup) -> None:
        """The last version (unless stopped), the last checkpoint, and word to whoever waits on the queue."""
        progress = self.progress
        if not self._stopping:
            unpublished = progress.published_step < progress.step and progress.step > self._first_step
            # The stream ended right after a publication that could not know it was the last; or training went back to
            # the last checkpoint of all while what that is was being validated.
            unvalidated = self._settings.has_validation and self._validated_step < progress.step
            if unpublished or unvalidated:
                await self._publish(last=True)
        if self._settings.save_last and self._saves.step < progress.step:
            await self._saves.begin(progress, tasks)
        await self._saves.until_written()
        if not self._saves.failed:
            await self._queue.close()

    def _asking(self, edge: str, num_calls: int = 1) -> AbstractContextManager[None]:
        """Waiting on so many calls to the ranks, each of which has its deadline."""
        return self.waits.waiting(edge, limit_s=num_calls * self._settings.call_limit_s)


def _named(role: str, metrics: Metrics) -> Metrics:
    """A role's own figures under its name; those that have a family of their own keep it."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items() if name != "tokens"}


def _batch_metrics(batch: TensorDict) -> Metrics:
    learns = ((batch["advantages"] != 0) & batch["loss_mask"]).any(dim=1)
    groups = batch["groups"]
    silent = [not bool(learns[groups == group].any()) for group in groups.unique()]
    return {
        "advantages/zero_share": sum(silent) / len(silent),
        "tokens/trained": float(batch["loss_mask"].sum()),
    }
