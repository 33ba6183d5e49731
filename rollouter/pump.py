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
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.failures import DataError, EngineCrashError, UserCodeError
from asyncrl.ports import EngineFleet, PayloadStore, PromptSource, RewardScorer, SampleQueue, Score, TurnLog
from asyncrl.types import Prompt, Sample, SampleId, Trajectory, Turn, sample_meta
from asyncrl.waits import WaitBoard
from rollouter.drops import DropRule
from rollouter.group import generate_group
from rollouter.meters import BusyMeter, PumpCounts
from rollouter.probation import Probation, TimeLimit, time_limit
from rollouter.sampling import greedy, sampling_params

logger = logging.getLogger(__name__)

NUM_OLDEST = 5
"""Samples in flight that the status names."""


class Pump:
    """Keeps up to `rollout.max_concurrent_samples` samples in generation for as long as the queue gives permits."""

    def __init__(
        self,
        config: Config,
        *,
        queue: SampleQueue,
        payloads: PayloadStore,
        turns: TurnLog,
        prompts: PromptSource,
        fleet: EngineFleet,
        scorer: RewardScorer,
        drops: DropRule,
        probation: Probation,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._queue = queue
        self._payloads = payloads
        self._turns = turns
        self._prompts = prompts
        self._fleet = fleet
        self._scorer = scorer
        self._drops = drops
        self._probation = probation
        self._waits = waits
        self._clock = clock
        self._wants_baseline = config.algorithm.adv_estimator == "remax"
        self._slots = anyio.Semaphore(config.rollout.max_concurrent_samples)
        self._in_flight: dict[SampleId, float] = {}
        self.generation = BusyMeter(clock)
        self.counts = PumpCounts()

    @property
    def in_flight(self) -> int:
        """Samples admitted and not yet offered or dropped."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Pump until the queue is closed; what is in flight then is cancelled.

        Raises (inside an exception group):
            InfraError, UserCodeError, DataError, BugError: the run cannot go on.
        """
        self.generation.start()
        try:
            async with anyio.create_task_group() as group:
                await self._admit(group)
                # The ledger has booked what is in flight as DROPPED(shutdown).
                group.cancel_scope.cancel()
        finally:
            self.generation.stop()

    async def _admit(self, group: TaskGroup) -> None:
        while True:
            slots = await self._take_slots()
            with self._waits.waiting("permit"):
                admission = await self._queue.admit(slots, timeout_s=self._config.timeouts.call_s)
            for _ in range(slots - len(admission.sample_ids)):
                self._slots.release()
            for sample_id in admission.sample_ids:
                self._in_flight[sample_id] = self._clock()
                group.start_soon(self._run_sample, sample_id, name=str(sample_id))
            if admission.closed:
                return

    async def _take_slots(self) -> int:
        """Wait for a free slot and take all that are free."""
        with self._waits.waiting("slot"):
            await self._slots.acquire()
        slots = 1
        while True:
            try:
                self._slots.acquire_nowait()
            except anyio.WouldBlock:
                return slots
            slots += 1

    async def _run_sample(self, sample_id: SampleId) -> None:
        try:
            sample = await self._make_sample(sample_id)
        except (DataError, UserCodeError) as error:
            drop = self._drops.failed(sample_id, error)
            log = logger.warning if drop.first else logger.debug
            log("%s dropped (%s), %s: %s", sample_id, drop.reason, drop.kind, error)
            await self._queue.drop(sample_id, drop.reason)
            await self._turns.forget(sample_id)
        else:
            self._drops.passed()
            payload = await self._payloads.put(sample)
            await self._queue.offer(sample_meta(sample), payload)
            self.counts.samples_done += 1
            await self._turns.forget(sample_id)
        finally:
            del self._in_flight[sample_id]

    async def _make_sample(self, sample_id: SampleId) -> Sample:
        with time_limit(str(sample_id), self._config.timeouts.sample_s) as limit:
            prompt, turns, generate_s = await self._generate(sample_id, limit)
        started = self._clock()
        with self._waits.waiting("reward"):
            scores = await self._scorer.score(prompt, turns)
        reward_s = self._clock() - started
        self.counts.reward_s += reward_s
        baseline = None
        if self._wants_baseline:
            *turns, _ = turns
            *scores, baseline = scores
        return Sample(
            sample_id=sample_id,
            trajectories=tuple(trajectory(prompt, turn, score) for turn, score in zip(turns, scores, strict=True)),
            data_source=prompt.data_source,
            generate_s=generate_s,
            reward_s=reward_s,
            baseline_reward=None if baseline is None else baseline.reward,
        )

    async def _generate(self, sample_id: SampleId, limit: TimeLimit) -> tuple[Prompt, list[Turn], float]:
        """Turns of the group, the greedy one last if there is one, and the seconds they took.

        The slot is held for generation only: slow rewards don't keep the engines waiting.
        """
        rollout = self._config.rollout
        name = str(sample_id)

        async def on_turn(key: str, turn: Turn) -> None:
            self.counts.generated_tokens += len(turn.response_ids)
            await self._turns.record(sample_id, key, turn)

        def on_place(replica: str) -> None:
            self._probation.placed(name, replica)

        async def on_crash(error: EngineCrashError) -> None:
            await self._probation.crashed(name, error, limit)

        try:
            prompt = self._prompts.at(sample_id)
            sampling = sampling_params(
                rollout.sampling,
                prompt,
                response_length=rollout.response_length,
                max_model_len=self._config.max_model_len,
                training=True,
            )
            baseline = greedy(sampling) if self._wants_baseline else None
            started = self._clock()
            completed = await self._turns.completed(sample_id)
            with self._waits.waiting("engine"), self.generation.busy():
                turns = await generate_group(
                    self._fleet,
                    name,
                    prompt,
                    sampling,
                    n=rollout.n,
                    baseline=baseline,
                    completed=completed,
                    on_turn=on_turn,
                    on_place=on_place,
                    on_crash=on_crash,
                )
            generate_s = self._clock() - started
        finally:
            self._probation.left(name)
            self._slots.release()
        self.counts.generate_s += generate_s
        self.counts.max_generate_s = max(self.counts.max_generate_s, generate_s)
        return prompt, turns, generate_s

    def status(self) -> Mapping[str, Any]:
        """Cumulative counts of this process and what is going on now; seconds by the pump's clock."""
        return {
            "in_flight": self.in_flight,
            "generating": self.generation.inside,
            "samples_done": self.counts.samples_done,
            "generated_tokens": self.counts.generated_tokens,
            "busy_s": self.generation.busy_s,
            "idle_s": self.generation.idle_s,
            "generate_s": self.counts.generate_s,
            "max_generate_s": self.counts.max_generate_s,
            "reward_s": self.counts.reward_s,
            "drops": self._drops.counts,
            "oldest_in_flight": self._oldest(),
            "quarantine": self._probation.figures(),
        }

    def _oldest(self) -> list[tuple[str, float]]:
        """The samples that are in flight longest, and their ages in seconds."""
        now = self._clock()
        return [(str(sample_id), now - since) for sample_id, since in islice(self._in_flight.items(), NUM_OLDEST)]


def trajectory(prompt: Prompt, turn: Turn, score: Score) -> Trajectory:
    """A single-turn trajectory: every response token was sampled by the policy."""
    return Trajectory(
        prompt_ids=prompt.prompt_ids,
        response_ids=turn.response_ids,
        response_mask=np.ones(len(turn.response_ids), dtype=np.bool_),
        rollout_log_probs=turn.rollout_log_probs,
        spans=turn.spans,
        finish_reason=turn.finish_reason,
        reward=score.reward,
        reward_extra=score.extra,
    )
