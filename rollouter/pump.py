"""The Rollouter's heart: every admitted sample on its own way through generation and scoring to the queue.

    admit (permit) ─▶ slot ─▶ generate n turns ─▶ slot free ─▶ score ─▶ payload ─▶ offer
                              │ └ turn log               │
                     timeouts.sample_s            reward.timeout_s a call
                              └──────────────────────────┴── DataError, UserCodeError ──▶ drop(reason), or stop

With ReMax one more turn is drawn, greedily, and scored with the others: its score is the sample's baseline, and it is
no trajectory (https://arxiv.org/abs/2310.10505).

Each sample is one task. No lock and no order between them: a straggler holds nothing but its own slot and permit, and
the slot for `timeouts.sample_s` at most. Scoring is not on that time: a sample may wait long for its turn there, which
is nobody's fault, and every call ahead of it has a deadline of its own. After an engine crash `rollouter.probation`
says who goes on. A sample that is fed again, to a Rollouter that was restarted, has what the turn log holds of it and
asks for the rest only. The loop is unblocked by a free slot, by a permit, and by the queue's end.

Generation and scoring may be recorded and replayed (`skip`): what is replayed asks no engine, and its sample says so.
With `skip.rollout`, what `launch sync` permits at once is generated, or replayed, as one batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.failures import DataError, UserCodeError, first_failure
from asyncrl.ports import Admission, PayloadStore, SampleQueue, TurnLog
from asyncrl.profiling import profile
from asyncrl.types import DropReason, Sample, SampleId, sample_meta
from asyncrl.waits import WaitBoard
from rollouter.drops import DropRule
from rollouter.probation import Probation
from rollouter.profiled import mean_reward
from rollouter.stages import Slot, Stages
from rollouter.surplus import Surplus, SurplusError
from skip import SkipManager
from skip.generation import Asked, Generated

logger = logging.getLogger(__name__)

NUM_OLDEST = 5
"""Samples in flight that the status names."""


class PartialBatchError(Exception):
    """Some of a batch could not be generated, so it is none that is recorded."""

    def __init__(self, outcomes: Sequence[Generated | DataError | UserCodeError]) -> None:
        super().__init__()
        self.outcomes = outcomes


class Pump:
    """Keeps up to `rollout.max_concurrent_samples` samples in generation for as long as the queue gives permits."""

    def __init__(
        self,
        config: Config,
        *,
        queue: SampleQueue,
        payloads: PayloadStore,
        turns: TurnLog,
        stages: Stages,
        drops: DropRule,
        probation: Probation,
        surplus: Surplus,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._queue = queue
        self._payloads = payloads
        self._turns = turns
        self._stages = stages
        self._drops = drops
        self._probation = probation
        self._surplus = surplus
        self._waits = waits
        self._clock = clock
        self._batched_step = -1
        """The newest step whose batch was begun as one."""
        self._slots = anyio.Semaphore(config.rollout.max_concurrent_samples)
        self._in_flight: dict[SampleId, float] = {}

    @property
    def in_flight(self) -> int:
        """Samples admitted and not yet offered or dropped."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Pump until the queue is closed; what is in flight then is cancelled.

        Raises (inside an exception group):
            InfraError, UserCodeError, DataError, BugError: the run cannot go on.
        """
        self._stages.generation.start()
        try:
            async with anyio.create_task_group() as group:
                if self._config.rollout.over_sample.samples:
                    group.start_soon(self._surplus.watch, name="surplus")
                if SkipManager.get("rollout") is None:
                    await self._admit(group)
                else:
                    await self._admit_batches(group)
                # The ledger has booked what is in flight as DROPPED(shutdown).
                group.cancel_scope.cancel()
        finally:
            self._stages.generation.stop()
            self._in_flight.clear()

    async def _admit(self, group: TaskGroup) -> None:
        while True:
            slots = await self._free_slots()
            admission = await self._permits(slots)
            for sample_id in admission.sample_ids:
                self._in_flight[sample_id] = self._clock()
                # Nothing is held while it waits for permits: a sample that was cut may have taken a slot since.
                has_slot = self._slots.value > 0
                if has_slot:
                    self._slots.acquire_nowait()
                group.start_soon(self._run_sample, sample_id, has_slot, name=str(sample_id))
            if admission.closed:
                return

    async def _admit_batches(self, group: TaskGroup) -> None:
        """Whatever is permitted at once is one batch: in a synchronous run, a version's samples."""
        while True:
            admission = await self._permits(self._config.samples_per_version)
            self._in_flight |= dict.fromkeys(admission.sample_ids, self._clock())
            if admission.sample_ids:
                group.start_soon(self._run_batch, admission.sample_ids, group)
            if admission.closed:
                return

    async def _permits(self, most: int) -> Admission:
        asked = time.perf_counter()
        with self._waits.waiting("permit"), profile.span("rollout.permit") as span:
            admission = await self._queue.admit(most, timeout_s=self._config.timeouts.call_s)
            span.add(granted=len(admission.sample_ids))
        wait_s = round(time.perf_counter() - asked, 6)
        for sample_id in admission.sample_ids:
            profile.note("sample.admitted", sample=str(sample_id), permit_wait_s=wait_s)
        return admission

    async def _run_batch(self, sample_ids: Sequence[SampleId], group: TaskGroup) -> None:
        step = self._stages.serving().step + 1
        whole = len(sample_ids) == self._config.samples_per_version
        if step == self._batched_step or not whole:
            # In the place of samples of that batch that were dropped; or what a Rollouter before this one has left of
            # it, or what is left at the end of the run.
            for sample_id in sample_ids:
                with profile.span("sample.slot", sample=str(sample_id)):
                    await self._slots.acquire()
                group.start_soon(self._run_sample, sample_id, True, name=str(sample_id))
            return
        self._batched_step = step
        SkipManager.set_step(step)
        asked: list[Asked] = []
        outcomes: dict[SampleId, Generated | DataError | UserCodeError] = {}
        for sample_id in sample_ids:
            try:
                asked.append(self._stages.asked(sample_id))
            except (DataError, UserCodeError) as error:
                outcomes[sample_id] = error
        generated: Sequence[Generated | DataError | UserCodeError] = []
        if asked:
            try:
                generated = await self._generate_batch(asked)
            except PartialBatchError as partial:
                generated = partial.outcomes
        outcomes |= zip((one.sample_id for one in asked), generated, strict=True)
        for sample_id, outcome in outcomes.items():
            group.start_soon(self._finish_batched, sample_id, outcome, name=str(sample_id))

    @SkipManager.annotate(role="rollout")
    async def _generate_batch(self, batch: Sequence[Asked]) -> list[Generated]:
        """
        Raises:
            PartialBatchError: not all of them could be generated.
        """
        outcomes: list[Generated | DataError | UserCodeError | None] = [None] * len(batch)

        async def one(number: int, asked: Asked) -> None:
            try:
                with profile.context(sample=str(asked.sample_id)):
                    with profile.span("sample.slot"):
                        await self._slots.acquire()
                    slot = Slot(self._slots)
                    with slot:
                        outcomes[number] = await self._stages.generate(asked, slot)
            except (DataError, UserCodeError) as error:
                outcomes[number] = error

        try:
            async with anyio.create_task_group() as group:
                for number, asked in enumerate(batch):
                    group.start_soon(one, number, asked, name=str(asked.sample_id))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        generated = [outcome for outcome in outcomes if isinstance(outcome, Generated)]
        if len(generated) < len(batch):
            raise PartialBatchError([outcome for outcome in outcomes if outcome is not None])
        return generated

    async def _free_slots(self) -> int:
        """Wait until there are some; how many."""
        with self._waits.waiting("slot"):
            while True:
                await self._slots.acquire()
                self._slots.release()
                # It is none if somebody else has waited for this one.
                if self._slots.value:
                    return self._slots.value

    async def _take_slot(self) -> None:
        with self._waits.waiting("slot"), profile.span("sample.slot"):
            await self._slots.acquire()

    async def _run_sample(self, sample_id: SampleId, has_slot: bool) -> None:
        async def make() -> Sample:
            if not has_slot:
                await self._take_slot()
            while True:
                # The slot is held for generation only: slow files or rewards don't keep the engines waiting.
                slot = Slot(self._slots)
                try:
                    with slot:
                        return await self._stages.make(self._stages.asked(sample_id), slot)
                except SurplusError:
                    if self._config.rollout.over_sample.unfinished == "drop":
                        raise
                with self._waits.waiting("surplus"), profile.span("sample.surplus"):
                    await self._surplus.over()
                await self._take_slot()

        await self._finish_sample(sample_id, make)

    async def _finish_batched(self, sample_id: SampleId, outcome: Generated | DataError | UserCodeError) -> None:
        async def make() -> Sample:
            if isinstance(outcome, DataError | UserCodeError):
                raise outcome
            return await self._stages.sample(sample_id, outcome)

        await self._finish_sample(sample_id, make)

    async def _finish_sample(self, sample_id: SampleId, make: Callable[[], Awaitable[Sample]]) -> None:
        """Offer what is made, or drop what cannot be."""
        since = self._in_flight[sample_id]
        try:
            with profile.context(sample=str(sample_id)):
                try:
                    sample = await make()
                except SurplusError:
                    await self._drop(sample_id, DropReason.SURPLUS)
                except (DataError, UserCodeError) as error:
                    drop = self._drops.failed(sample_id, error)
                    log = logger.warning if drop.first else logger.debug
                    log("%s dropped (%s), %s: %s", sample_id, drop.reason, drop.kind, error)
                    await self._drop(sample_id, drop.reason)
                else:
                    await self._offer(sample)
        finally:
            self._stages.forget(sample_id)
            # It is fed again, and in flight once more, if its payload is found damaged before the answer is here.
            if self._in_flight.get(sample_id) == since:
                del self._in_flight[sample_id]

    async def _offer(self, sample: Sample) -> None:
        self._drops.passed()
        meta = sample_meta(sample)
        with profile.span("sample.payload", bytes=meta.payload_bytes):
            payload = await self._payloads.put(sample)
        with profile.span("sample.offer"):
            await self._queue.offer(meta, payload)
        if profile.on:
            versions = meta.newest_version - meta.oldest_version
            profile.note("sample.ready", reward=mean_reward(sample), tokens=meta.response_tokens, versions=versions)
        self._stages.counts.samples_done += 1
        await self._turns.forget(sample.sample_id)

    async def _drop(self, sample_id: SampleId, reason: DropReason) -> None:
        await self._queue.drop(sample_id, reason)
        profile.note("sample.dropped", reason=str(reason), tokens=self._stages.forget(sample_id))
        await self._turns.forget(sample_id)

    def status(self) -> Mapping[str, Any]:
        """Cumulative counts of this process and what is going on now; seconds by the pump's clock."""
        return {
            "in_flight": self.in_flight,
            "generating": self._stages.generation.inside,
            "samples_done": self._stages.counts.samples_done,
            "generated_tokens": self._stages.counts.generated_tokens,
            "busy_s": self._stages.generation.busy_s,
            "idle_s": self._stages.generation.idle_s,
            "generate_s": self._stages.counts.generate_s,
            "max_generate_s": self._stages.counts.max_generate_s,
            "reward_s": self._stages.counts.reward_s,
            "drops": self._drops.counts,
            "oldest_in_flight": self._oldest(),
            "quarantine": self._probation.figures(),
            "skip": SkipManager.status(),
            "messages": [*SkipManager.messages(), *self._drops.messages],
        }

    def _oldest(self) -> list[tuple[str, float]]:
        """The samples that are in flight longest, and their ages in seconds."""
        now = self._clock()
        return [(str(sample_id), now - since) for sample_id, since in islice(self._in_flight.items(), NUM_OLDEST)]
