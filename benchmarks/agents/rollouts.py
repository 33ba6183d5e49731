"""Run the real dispatcher and queue on any fleet; in place of a Trainer, a consumer only leases and commits samples."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet, PromptSource, Score
from asyncrl.core.staleness import Pacing
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import DropReason, Prompt, Sample
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.queue.turn_log import NoTurns
from rollouter.agent.conversation import ConversationAgent
from rollouter.dispatcher import Dispatcher
from rollouter.sample_runner import RolloutParts, ServedVersion

LIMIT_S = 300.0
"""Timeout of one measurement."""
HARMLESS = {DropReason.SURPLUS, DropReason.SHUTDOWN}


class SamplesAsPayloads:
    """A `PayloadStore` whose references are the samples themselves."""

    async def put(self, sample: Sample) -> Any:
        return sample

    async def get(self, payloads: Sequence[Any]) -> list[Sample | None]:
        return list(payloads)


class ConstantScorer:
    """A `RewardScorer` that returns 0 at once."""

    whole_group = False

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.0) for _ in trajectories]


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """What to roll out: configuration, prompts, engines and agent."""

    config: Config
    """Determines pacing, slots, n and over-sampling."""
    prompts: PromptSource
    fleet: EngineFleet
    agent: ConversationAgent | None = None
    """None: each trajectory has one turn."""


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """The samples that `take` returned, and the time they took."""

    seconds: float
    samples: tuple[Sample, ...]

    @property
    def trajectories(self) -> int:
        return sum(1 + sample.rows[-1].trajectory for sample in self.samples)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(int(row.response_mask.sum()) for sample in self.samples for row in sample.rows)


@asynccontextmanager
async def running_dispatcher(work: RolloutWork, total_samples: int | None = None) -> AsyncIterator[LocalSampleQueue]:
    """Run the dispatcher for the duration of the block, then cancel the samples in flight.

    Raises:
        SystemExit: a sample was dropped for another reason than over-sampling, so times cannot be compared.
    """
    config = work.config
    pacing = Pacing(
        config.samples_per_version,
        config.async_training.staleness_threshold,
        total_samples,
        config.rollout.over_sample.samples,
    )
    queue = LocalSampleQueue(QueueOptions(len(work.prompts), pacing))
    dispatcher = _dispatcher(work, queue)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(dispatcher.run)
            yield queue
            await queue.close()
    dropped = {reason: count for reason, count in (await queue.status()).counts.dropped.items() if count}
    if not dropped.keys() <= HARMLESS:
        raise SystemExit(
            f"samples were dropped, so times cannot be compared: {dropped}, {dispatcher.status()['drops']}"
        )


def _dispatcher(work: RolloutWork, queue: LocalSampleQueue) -> Dispatcher:
    parts = RolloutParts(
        config=work.config,
        prompts=work.prompts,
        queue=queue,
        payloads=SamplesAsPayloads(),
        turns=NoTurns(),
        fleet=work.fleet,
        scorer=ConstantScorer(),
        agent=work.agent,
        served_version=lambda: ServedVersion(0, 0),
    )
    return Dispatcher(parts)


async def take(work: RolloutWork, versions: int) -> RolloutOutcome:
    """Roll out the samples of `versions` versions; a version counts as applied once its samples are complete."""
    size = work.config.samples_per_version
    samples: list[Sample] = []
    started = time.perf_counter()
    async with running_dispatcher(work, versions * size) as queue:
        for version in range(versions):
            lease = await queue.lease(size, trainer_version=version, timeout_s=LIMIT_S)
            samples += (entry.payload for entry in lease.samples)
            await queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
            await queue.set_applied_version(version + 1)
        seconds = time.perf_counter() - started
    return RolloutOutcome(seconds, tuple(samples))
