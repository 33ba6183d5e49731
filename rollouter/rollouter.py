"""The Rollouter: runs the dispatcher, the weight update loop and the engines on lent GPUs in one task group.

    run ──┬─ dispatcher   admit ─▶ generate ─▶ score ─▶ offer   until the queue is closed
          ├─ versions     wait ─▶ apply ─▶ validate             until the dispatcher has ended and the newest is applied
          └─ lent         wake ─▶ open ─▶ close ─▶ sleep        until the dispatcher has ended (`trainer.lend_after_s`)

This module depends on Protocols only, so that tests can run it with fakes; `rollouter.actor` connects it to Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, BugError, FencedError, first_failure
from asyncrl.core.ports import (
    EngineFleet,
    LentGpus,
    PayloadStore,
    SharedGpus,
    TurnLog,
    WeightFeed,
)
from asyncrl.core.records import RecordSink
from asyncrl.queue.sample_queue import SampleQueue
from rollouter.dispatcher import Dispatcher
from rollouter.group_workers.pool import WorkerPool
from rollouter.lent_engines import LentEngines
from rollouter.loading import RolloutTask
from rollouter.sample_runner import RolloutParts, ServedVersion
from rollouter.trajectory_dump import TrajectoryFiles
from rollouter.validation.validator import Validator
from rollouter.weight_updates import RolloutStart, WeightUpdateLoop


class Rollouter:
    """The generation side of a run, for one incarnation. Call `run` once."""

    def __init__(
        self,
        config: Config,
        task: RolloutTask,
        *,
        queue: SampleQueue,
        payloads: PayloadStore,
        turns: TurnLog,
        feed: WeightFeed,
        fleet: EngineFleet,
        sink: RecordSink,
        start: RolloutStart,
        files: Sequence[TrajectoryFiles] = (),
        workers: WorkerPool | None = None,
        gpus: SharedGpus | None = None,
        lent: LentGpus | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            gpus: those that all engines share with the ranks.
            lent: those that the Trainer lends to further engines.
        """
        self._scope = anyio.CancelScope()
        self._config = config
        self._workers = workers
        self._agent = task.agent if workers is None else None
        self._parts = parts = RolloutParts(
            config=config,
            prompts=task.prompts,
            queue=queue,
            payloads=payloads,
            turns=turns,
            fleet=fleet,
            scorer=task.scorer,
            workers=workers,
            served_version=lambda: ServedVersion(self._versions.weights_version.version, self._versions.step),
            engines_awake=lambda: self._versions.awake.wait(),
            agent=task.agent,
            files=files,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.waits = parts.waits
        self._dispatcher = Dispatcher(parts)
        self._validator = Validator(parts, task.val_prompts, task.decode) if task.val_prompts is not None else None
        self._versions = WeightUpdateLoop(parts, start, feed=feed, sink=sink, validator=self._validator, gpus=gpus)
        self._lent: LentEngines | None = None
        if lent is not None:
            self._lent = LentEngines(lent, feed, workers, timeouts=config.timeouts, waits=parts.waits)

    async def run(self) -> None:
        """Generate until the queue has ended and the newest version is applied, or until `stop()`.

        Raises:
            FencedError: another incarnation is running; other failures are then ignored.
            AsyncRLError: the first failure of any part. Any other exception becomes a `BugError` with its traceback.
        """
        try:
            with self._scope:
                async with self._parts.running(), anyio.create_task_group() as group:
                    await group.start(self._versions.run, name="versions")
                    async with anyio.create_task_group() as lending:
                        if self._lent is not None:
                            lending.start_soon(self._lent.run, name="lent")
                        await self._dispatcher.run()
                        lending.cancel_scope.cancel()
                    self._versions.finish()
            if self._scope.cancelled_caught:
                await self._versions.yield_gpus()
            if self._lent is not None:
                await self._lent.leave()
        except ExceptionGroup as failures:
            fenced = failures.subgroup(FencedError)
            error = first_failure(fenced or failures)
            if isinstance(error, AsyncRLError):
                raise error from None
            raise BugError.wrap(f"the Rollouter failed with {type(error).__name__}: {error}", error) from None

    def _agent_status(self) -> Mapping[str, float]:
        """Return cumulative counts by metric name (`rollouter/…`)."""
        counts: dict[str, float] = dict(self._agent.status()) if self._agent is not None else {}
        if self._workers is not None:
            counts |= self._workers.agent_status()
        over = self._config.rollout.over_sample
        if over.samples or over.trajectories:
            counts["surplus_tokens"] = self._dispatcher.runner.counts.surplus_tokens
        return counts

    def stop(self) -> None:
        """End now: cancel samples in flight and apply no more versions. `run` returns."""
        self._scope.cancel()

    def status(self) -> Mapping[str, Any]:
        """Return the dispatcher's status, the served version and open waits as plain values, without waiting."""
        return {
            **self._dispatcher.status(),
            "agent": self._agent_status(),
            "val_generated_tokens": self._validator.generated_tokens if self._validator else 0,
            "version": self._versions.weights_version.version,
            "lineage": self._versions.weights_version.lineage,
            "waits": [*self.waits.snapshot(), *(self._workers.open_waits() if self._workers is not None else ())],
            **(self._workers.status() if self._workers is not None else {}),
            "waited_s": {"permit": self.waits.total_s("permit")},
        }
