"""Requests permits from the queue while generation slots are free, and starts a task for every admitted sample.

    admit (permit) ─▶ slot ─▶ `sample_runner`: generate, slot free, score, offer

Samples share no lock and have no order. A straggler occupies only its permit and its slot, the slot for at most
`timeouts.sample_s`. A free slot, a permit or the end of the queue wakes the loop.

With `skip.rollout`, the samples that `launch sync` permits at once are generated, or replayed, as one batch.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncrl.core.failures import DataError, UserCodeError, first_failure
from asyncrl.core.ports import Admission
from asyncrl.core.trajectory import Generated, SampleRequest
from asyncrl.core.types import SampleId
from asyncrl.profiling import profile
from rollouter.sample_runner import BatchedSample, RolloutParts, SampleProgress, SampleRunner
from rollouter.slots import GenerationSlots, SurplusMonitor
from skip import SkipManager

NUM_OLDEST = 5
"""The number of samples in flight that the status lists."""

Outcome = Generated | DataError | UserCodeError


class PartialBatchError(Exception):
    """Some samples of a batch could not be generated, so the batch is not recorded."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__()
        self.outcomes = outcomes


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
                group.start_soon(self._track, sample_id, self.runner.run, slot, name=str(sample_id))
            if admission.closed:
                return

    async def _track(self, sample_id: SampleId, run: Callable[[SampleId, Any], Awaitable[None]], start: Any) -> None:
        since = self._in_flight[sample_id]
        try:
            await run(sample_id, start)
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
        if step == self._batched_step or len(sample_ids) < self._config.samples_per_version:
            # These samples replace dropped ones of the batch, remain from an earlier Rollouter, or are the run's last.
            for sample_id in sample_ids:
                group.start_soon(self._track, sample_id, self.runner.run, None, name=str(sample_id))
            return
        self._batched_step = step
        SkipManager.set_step(step)
        requests: list[SampleRequest] = []
        outcomes: dict[SampleId, Outcome] = {}
        progress = {sample_id: SampleProgress() for sample_id in sample_ids}
        for sample_id in sample_ids:
            try:
                requests.append(self.runner.ask(sample_id))
            except (DataError, UserCodeError) as error:
                outcomes[sample_id] = error
        generated: Sequence[Outcome] = []
        if requests:
            try:
                generated = await self._generate_batch(requests, progress)
            except PartialBatchError as partial:
                generated = partial.outcomes
        outcomes |= zip((request.sample_id for request in requests), generated, strict=True)
        for sample_id, outcome in outcomes.items():
            batched = BatchedSample(outcome, progress[sample_id])
            group.start_soon(self._track, sample_id, self.runner.finish_batched, batched, name=str(sample_id))

    @SkipManager.annotate(role="rollout")
    async def _generate_batch(
        self, batch: Sequence[SampleRequest], progress: Mapping[SampleId, SampleProgress]
    ) -> list[Generated]:
        """Generate the batch, and update `progress` in place.

        Raises:
            PartialBatchError: some samples could not be generated.
        """
        outcomes: list[Outcome | None] = [None] * len(batch)

        async def generate(number: int, request: SampleRequest) -> None:
            try:
                with profile.context(sample=str(request.sample_id)):
                    slot = await self._slots.acquire()
                    with slot:
                        outcomes[number] = await self.runner.generate(request, progress[request.sample_id], slot)
            except (DataError, UserCodeError) as error:
                outcomes[number] = error

        try:
            async with anyio.create_task_group() as group:
                for number, request in enumerate(batch):
                    group.start_soon(generate, number, request, name=str(request.sample_id))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        generated = [outcome for outcome in outcomes if isinstance(outcome, Generated)]
        if len(generated) < len(batch):
            raise PartialBatchError([outcome for outcome in outcomes if outcome is not None])
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
