"""The Trainer of a simulated run: leases, forward passes, steps and publications, by `trainer.schedule`. Pure."""

from __future__ import annotations

import math
from collections.abc import Generator

from asyncrl.config.schema import Config
from asyncrl.core.ports import Lease
from asyncrl.core.staleness import staleness
from asyncrl.core.types import DropReason, SampleMeta
from asyncrl.queue.operations import CommitSamples, DropSamples, LeaseSamples
from asyncrl.simulate.clock import Process, Signal, SimulatedClock, Timer
from asyncrl.simulate.fleet import SimulatedFleet
from asyncrl.simulate.queue import SimulatedQueue
from asyncrl.simulate.result import SimulatedStep, SimulationResult
from asyncrl.simulate.trace import Trace, speed_of
from asyncrl.storage.checkpoint_manifest import Progress
from trainer.schedule import LoopSettings

_FILTER_SEED = 1_000_003
_GOLDEN_RATIO = 0.6180339887498949


class SimulatedTrainer:
    """Trains until the run or the simulated part of it ends.

    Args:
        steps: optimizer steps to simulate.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        config: Config,
        trace: Trace,
        *,
        queue: SimulatedQueue,
        fleet: SimulatedFleet,
        result: SimulationResult,
        steps: int,
        total_steps: int,
        seed: int,
    ) -> None:
        self._clock = clock
        self._settings = LoopSettings.from_config(config, total_steps=total_steps)
        self._save_freq = config.trainer.save_freq
        self._trace = trace
        self._queue = queue
        self._fleet = fleet
        self._result = result
        self._steps = steps
        self._seed = seed
        self._progress = Progress()
        self._update_speed = speed_of(trace.trainer.update_tokens_per_s, config.trainer.num_workers)
        # Without the proximal policy's log-probs and other models that score, there is no forward pass.
        others = config.needs_reference or config.needs_teacher or config.reward_model.placement == "worker"
        skips = config.algorithm.rollout_correction.bypass_mode and not others
        experience = None if skips else trace.trainer.experience_tokens_per_s
        self._experience_speed = speed_of(experience, config.trainer.num_workers) if experience else None
        self.waits_for_samples = False
        self.ended = False
        self.committed_tokens = 0
        fleet.on_busy = self._engines_changed
        self._engines_busy = False
        self._computing = False
        self._computed = Signal(clock)
        self._left_s = 0.0
        """Work of the current computation that is left, without contention."""
        self._since = 0.0
        self._timer: Timer | None = None

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._progress.version

    def run(self) -> Process:
        """Take all steps."""
        progress, costs, clock, saved = self._progress, self._trace.trainer, self._clock, 0
        while not self.ended and (size := self._settings.next_batch_size(progress)) > 0:
            began, batch = clock.now, list[tuple[int, SampleMeta]]()
            self.waits_for_samples = True
            yield from self._fill(batch, size)
            self.waits_for_samples = False
            self._result.waits.append((began, clock.now))
            wait_s = clock.now - began
            yield costs.lease_s
            if self._experience_speed:
                yield from self._compute(sum(meta.response_tokens for _, meta in batch) / self._experience_speed)
            steps = self._settings.next_steps(range(len(batch)), progress)
            first_pass = math.ceil(len(batch) / self._settings.mini_batch_samples)
            for number, rows in enumerate(steps):
                tokens = sum(batch[row][1].response_tokens for row in rows)
                yield from self._compute(costs.step_s + tokens / self._update_speed)
                progress.step += 1
                if number < first_pass:
                    self._commit([batch[row] for row in rows])
                if number == len(steps) - 1 and self._settings.is_version_due(progress):
                    yield from self._compute(self._trace.sync.publish_s)
                    progress.version += 1
                    self._fleet.publish(progress.version, step=progress.step)
                self._result.trained_tokens += tokens
                self._result.steps.append(SimulatedStep(clock.now, wait_s, tokens))
                wait_s = 0.0
                if len(self._result.steps) == self._steps:
                    self.ended = True
                    return
            if self._save_freq > 0 and progress.step // self._save_freq > saved // self._save_freq:
                saved = progress.step
                yield costs.checkpoint_s
        self.ended = True

    def _fill(self, batch: list[tuple[int, SampleMeta]], size: int) -> Process:
        """Lease until there are as many samples as wanted; those that are filtered are dropped and replaced."""
        while len(batch) < size:
            answer = self._queue.perform(LeaseSamples(size - len(batch), self._progress.version))
            if not isinstance(answer, Lease):
                yield self._queue.changed
                continue
            for queued in answer.samples:
                if self._is_filtered(queued.meta.sample_id.index):
                    self._queue.perform(DropSamples(DropReason.FILTERED, (queued.meta.sample_id,)))
                else:
                    batch.append((answer.lease_id, queued.meta))

    def _is_filtered(self, index: int) -> bool:
        """Whether the sample is filtered: evenly spread over feed indices, in an order that the seed decides."""
        return ((index + self._seed) * _FILTER_SEED * _GOLDEN_RATIO) % 1.0 < self._trace.dispatch.filtered

    def _commit(self, leased: list[tuple[int, SampleMeta]]) -> None:
        for lease_id, meta in leased:
            self._queue.perform(CommitSamples(lease_id, (meta.sample_id,)))
            self._result.staleness[staleness(self._progress.version, meta.oldest_version)] += 1
            self.committed_tokens += meta.response_tokens
        self._progress.trained_samples += len(leased)

    # -------------------------------------------------------------------------------------------- contention

    def _compute(self, work_s: float) -> Generator[Signal, None, None]:
        """Compute for this time, which contention with engines makes longer; meanwhile engines are slower, too."""
        if work_s <= 0:
            return
        self._computing, self._left_s, self._since = True, work_s, self._clock.now
        self._engines_busy = self._fleet.num_busy > 0
        self._fleet.set_factor(self._trace.contention.engine)
        self._schedule()
        yield self._computed
        self._computing = False
        self._fleet.set_factor(1.0)

    @property
    def _factor(self) -> float:
        return self._trace.contention.trainer if self._engines_busy else 1.0

    def _engines_changed(self) -> None:
        if self._computing:
            self._left_s = max(0.0, self._left_s - (self._clock.now - self._since) / self._factor)
            self._since, self._engines_busy = self._clock.now, self._fleet.num_busy > 0
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancelled = True
        self._timer = self._clock.after(self._left_s * self._factor, self._computed.fire)
