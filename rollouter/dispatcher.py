"""Requests permits from the queue while generation slots are free, and starts a task for every admitted sample.

    admit (permit) ─▶ slot ─▶ `sample_runner`: generate, slot free, score, offer

Samples share no lock and have no order. A straggler occupies only its permit and its slot, the slot for at most
`timeouts.sample_s`. A free slot, a permit or the end of the queue wakes the loop.

With `skip.rollout`, the samples that `launch sync` permits at once are generated, or replayed, as one batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncrl.core.failures import DataError, UserCodeError
from asyncrl.core.ports import Admission
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import Generated, SampleRequest
from asyncrl.core.types import SampleId
from asyncrl.profiling import profile
from rollouter.sample_runner import RolloutParts, SampleProgress, SampleRunner
from rollouter.slots import GenerationSlot, GenerationSlots, SurplusMonitor
from skip import SkipManager

NUM_OLDEST = 5
"""The number of samples in flight that the status lists."""


class PartialBatchError(Exception):
    """Some samples of a batch could not be generated, so the batch is not recorded."""


class Dispatcher:
    """Keeps up to `rollout.max_concurrent_samples` samples in generation for as long as the queue grants permits."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._slots = GenerationSlots(parts.config.rollout.max_concurrent_samples, parts.waits)
        self._surplus = SurplusMonitor(parts.queue, call_s=parts.config.timeouts.call_s)
        self.runner = SampleRunner(parts, slots=self._slots, surplus=self._surplus)
        self._batched_step = -1
        """The newest step whose samples were started as one batch."""
        self._in_flight: dict[SampleId, float] = {}

    @property
    def in_flight(self) -> int:
        """Samples admitted and not yet offered or dropped."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Dispatch samples until the queue is closed, and then cancel the samples in flight.

        Raises (inside an exception group):
            InfraError, UserCodeError, DataError, BugError: the run cannot continue.
        """
        self.runner.generation.start()
        try:
            async with anyio.create_task_group() as group:
                if self._config.rollout.over_sample.samples:
                    group.start_soon(self._surplus.watch, name="surplus")
                if SkipManager.get("rollout") is None:
                    await self._admit(group)
                else:
                    await self._admit_batches(group)
                # The queue has already dropped the samples in flight, with the reason `shutdown`.
                group.cancel_scope.cancel()
        finally:
            self.runner.generation.stop()
            self._in_flight.clear()

    async def _admit(self, group: TaskGroup) -> None:
        while True:
            slots = await self._slots.wait_for_free()
            admission = await self._permits(slots)
            for sample_id in admission.sample_ids:
                # This loop holds no slot while it waits for permits, so a resumed sample may have acquired the slot.
                slot = self._slots.try_acquire()
                group.start_soon(self._track, SampleProgress(sample_id), slot, name=str(sample_id))
            if admission.closed:
                return

    async def _track(self, progress: SampleProgress, slot: GenerationSlot | None = None) -> None:
        sample_id = progress.sample_id
        since = self._in_flight[sample_id]
        try:
            await self.runner.run(progress, slot)
        finally:
            # If the queue has requeued the sample because of a damaged payload, the sample is already in flight again.
            if self._in_flight.get(sample_id) == since:
                del self._in_flight[sample_id]

    async def _permits(self, max_samples: int) -> Admission:
        started = time.perf_counter()
        with self._parts.waits.waiting("permit"), profile.span("rollout.permit") as span:
            admission = await self._parts.queue.admit(max_samples, timeout_s=self._config.timeouts.call_s)
            span.add(granted=len(admission.sample_ids))
        wait_s = round(time.perf_counter() - started, 6)
        for sample_id in admission.sample_ids:
            self._in_flight[sample_id] = self._parts.clock()
            profile.note("sample.admitted", sample=str(sample_id), permit_wait_s=wait_s)
        if admission.sample_ids:  # of a sample that replaces a dropped one, perhaps while the engines sleep
            await self._parts.engines_awake()
        return admission

    async def _admit_batches(self, group: TaskGroup) -> None:
        """Treat samples that are admitted at once as one batch. In a synchronous run these are a version's samples."""
        while True:
            admission = await self._permits(self._config.samples_per_version)
            if admission.sample_ids:
                group.start_soon(self._run_batch, admission.sample_ids, group)
            if admission.closed:
                return

    async def _run_batch(self, sample_ids: Sequence[SampleId], group: TaskGroup) -> None:
        step = self._parts.served_version().step + 1
        samples = [SampleProgress(sample_id) for sample_id in sample_ids]
        # Other samples replace dropped ones of the batch, remain from an earlier Rollouter, or are the run's last.
        if step != self._batched_step and len(samples) >= self._config.samples_per_version:
            self._batched_step = step
            SkipManager.set_step(step)
            await self._generate_together(samples)
        for progress in samples:
            group.start_soon(self._track, progress, name=str(progress.sample_id))

    async def _generate_together(self, samples: Sequence[SampleProgress]) -> None:
        """Set `SampleProgress.outcome` of all samples."""
        requests: list[SampleRequest] = []
        asked: list[SampleProgress] = []
        for progress in samples:
            try:
                requests.append(self.runner.ask(progress.sample_id))
                asked.append(progress)
            except (DataError, UserCodeError) as error:
                progress.outcome = error
        if requests:
            with suppress(PartialBatchError):
                for progress, generated in zip(asked, await self._generate_batch(requests, asked), strict=True):
                    progress.outcome = generated

    @SkipManager.annotate(role="rollout")
    async def _generate_batch(
        self, batch: Sequence[SampleRequest], samples: Sequence[SampleProgress]
    ) -> list[Generated]:
        """Generate the batch, and update `samples` in place.

        Raises:
            PartialBatchError: some samples could not be generated.
        """

        async def generate(request: SampleRequest, progress: SampleProgress) -> None:
            try:
                with profile.context(sample=str(request.sample_id)), await self._slots.acquire() as slot:
                    progress.outcome = await self.runner.generate(request, progress, slot)
            except (DataError, UserCodeError) as error:
                progress.outcome = error

        async with task_group() as group:
            for request, progress in zip(batch, samples, strict=True):
                group.start_soon(generate, request, progress, name=str(request.sample_id))
        generated = [one.outcome for one in samples if isinstance(one.outcome, Generated)]
        if len(generated) < len(batch):
            raise PartialBatchError
        return generated

    def status(self) -> Mapping[str, Any]:
        """Return the cumulative counts and the current state of this process; durations are in seconds."""
        return {
            "in_flight": self.in_flight,
            "generating": self.runner.generation.inside,
            "samples_done": self.runner.counts.samples_done,
            "generated_tokens": self.runner.counts.generated_tokens,
            "busy_s": self.runner.generation.busy_s,
            "idle_s": self.runner.generation.idle_s,
            "generate_s": self.runner.counts.generate_s,
            "max_generate_s": self.runner.counts.max_generate_s,
            "reward_s": self.runner.counts.reward_s,
            "drops": self._parts.drops.counts,
            "oldest_in_flight": self._oldest_in_flight(),
            "crash_isolation": self._parts.isolation.status(),
            "skip": SkipManager.status(),
            "messages": [*SkipManager.messages(), *self._parts.drops.messages],
        }

    def _oldest_in_flight(self) -> list[tuple[str, float]]:
        """Return the samples that have been in flight longest, and their ages in seconds."""
        now = self._parts.clock()
        return [(str(sample_id), now - since) for sample_id, since in islice(self._in_flight.items(), NUM_OLDEST)]
