"""Supervised training of the policy on demonstrations, in the same ranks and with the same checkpoints as a launch.

    validation? ─▶ rows of the step ─▶ step ─▶ checkpoint? ─▶ validation? ─▶ … until total_steps or stop()

There is no queue of samples: the rows of a step follow from its number (`trainer.schedule.RowOrder`), so a resumed run
continues with the next rows. Every call to the ranks has a deadline, and `WorkerGroup.watch` finds ranks that hang.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.config.resources.plan import validation_due
from asyncrl.core.records import Metrics
from asyncrl.core.types import Demonstration
from asyncrl.profiling import profile
from asyncrl.storage.checkpoint_manifest import Progress
from trainer.checkpoints import RoleCheckpoints
from trainer.schedule import RowOrder
from trainer.step_records import role_metrics
from trainer.workers.tensors import demonstration_batch
from trainer.workers.worker import RoleGroup

VALIDATION_ROWS = 256
"""Rows of one call of a validation."""

Report = Callable[[str, int, Metrics], Awaitable[None]]
"""Receives the kind of a row (`step` or `validation`), the step and its metrics."""


class SupervisedLoop:
    """Trains `actor` on demonstrations. `run` is called once; everything runs on one event loop.

    Args:
        progress: where the loop starts, which it updates.
        validation: the rows of the validation set; empty: none.
        test_freq: steps between validations, besides those before and after training; -1: none.
        end_traces: called with the number of each step that has ended.
    """

    def __init__(
        self,
        actor: RoleGroup,
        checkpoints: RoleCheckpoints,
        *,
        rows: Sequence[Demonstration],
        order: RowOrder,
        validation: Sequence[Demonstration] = (),
        progress: Progress,
        test_freq: int = -1,
        val_before_train: bool = True,
        save_last: bool = True,
        end_traces: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._actor = actor
        self._checkpoints = checkpoints
        self._rows = rows
        self._order = order
        self._validation = validation
        self._test_freq = test_freq
        self._val_before_train = val_before_train
        self._save_last = save_last
        self._end_traces = end_traces
        self._stopping = False
        self._validated_step = progress.step
        self.progress = progress

    def stop(self) -> None:
        """Request an orderly end: finish the current step and, with `save_last`, write a checkpoint."""
        self._stopping = True

    async def run(self, report: Report) -> None:
        """Train to the last step. After a failure, wait for the checkpoint that is being written, if its ranks live.

        Raises:
            DivergenceError: loss or gradient is not finite. InfraError, DeadlineError: ranks died or did not answer, or
                the disk is full.
        """
        async with self._checkpoints.in_background() as tasks:
            await self._train(report, tasks)

    async def _train(self, report: Report, tasks: TaskGroup) -> None:
        progress, total = self.progress, self._order.total_steps
        if progress.step == 0 and self._val_before_train:
            await self._validate(report)
        while progress.step < total and not self._stopping:
            metrics = await self._step()
            await report("step", progress.step, metrics)
            if self._end_traces is not None:
                await self._end_traces(progress.step)
            if self._checkpoints.is_due(progress.step):
                await self._checkpoints.begin(progress, tasks, last=self._stopping or progress.step == total)
            due = validation_due(self._test_freq, validated_step=self._validated_step, step=progress.step)
            if due or (progress.step == total and not self._stopping):
                await self._validate(report)
        if self._save_last and self._checkpoints.is_due_at_end(progress.step):
            await self._checkpoints.begin(progress, tasks, last=True)
        await self._checkpoints.wait_written()

    async def _step(self) -> Metrics:
        progress, started = self.progress, time.perf_counter()
        profile.set_position(step=progress.step + 1)
        rows = [self._rows[row] for row in self._order.rows(progress.step + 1)]
        batch = await to_thread.run_sync(demonstration_batch, rows)
        # Shielded, because once the gradient is in the weights the step has to be counted.
        with anyio.CancelScope(shield=True):
            result = await self._actor.train_batch(batch)
            progress.step += 1
            progress.trained_samples += len(rows)
            progress.trained_tokens += int(batch["loss_mask"].sum())
        duration_s = time.perf_counter() - started
        tokens = result.pop("tokens")
        return role_metrics("actor", result) | {
            "sft/tokens_per_s": tokens / duration_s,
            "tokens/trained": tokens,
            "timing/step_s": duration_s,
        }

    async def _validate(self, report: Report) -> None:
        """Report the mean cross-entropy of the validation set, over all its trained tokens."""
        self._validated_step = self.progress.step
        losses, tokens = [], 0
        for first in range(0, len(self._validation), VALIDATION_ROWS):
            if self._stopping:
                return
            rows = self._validation[first : first + VALIDATION_ROWS]
            batch = await to_thread.run_sync(demonstration_batch, rows)
            scores = (await self._actor.infer_batch(batch))["log_probs"]
            losses.append(-float(scores[batch["loss_mask"]].double().sum()))
            tokens += int(batch["loss_mask"].sum())
        if losses:
            await report("validation", self.progress.step, {"validation/loss": math.fsum(losses) / tokens})
