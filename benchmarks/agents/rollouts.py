"""The real pump, stages, surplus and queue over any fleet; in the Trainer's place, somebody who only takes samples."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.ports import EngineFleet, PromptSource, Score
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.trajectory import Trajectory
from asyncrl.turn_files import NoTurns
from asyncrl.types import DropReason, Prompt, Sample
from asyncrl.waits import WaitBoard
from rollouter.agent.asking import Converser
from rollouter.drops import DropRule
from rollouter.probation import Probation
from rollouter.pump import Pump
from rollouter.stages import Serving, Stages
from rollouter.surplus import Surplus

LIMIT_S = 300.0
"""Of one measurement."""
HARMLESS = {DropReason.SURPLUS, DropReason.SHUTDOWN}


class InMemory:
    """`PayloadStore`."""

    async def put(self, sample: Sample) -> Any:
        return sample

    async def get(self, payloads: Sequence[Any]) -> list[Sample | None]:
        return list(payloads)


class Unscored:
    """`RewardScorer` that takes no time."""

    whole_group = False

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.0) for _ in trajectories]


@dataclass(frozen=True, slots=True)
class Work:
    """What is rolled out, and by whom."""

    config: Config
    """Pacing, slots, n and over-sampling are its own."""
    prompts: PromptSource
    fleet: EngineFleet
    agent: Converser | None = None
    """Open; None: every trajectory is one turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `take` took."""

    seconds: float
    samples: tuple[Sample, ...]

    @property
    def trajectories(self) -> int:
        return sum(1 + sample.rows[-1].trajectory for sample in self.samples)

    @property
    def sampled_tokens(self) -> int:
        """By the policy."""
        return sum(int(row.response_mask.sum()) for sample in self.samples for row in sample.rows)


@asynccontextmanager
async def pumping(work: Work, total_samples: int | None = None) -> AsyncIterator[LocalSampleQueue]:
    """The pump is at work inside; at the end, what is in flight is cancelled.

    Raises:
        SystemExit: a sample was dropped for another reason than over-sampling, so nothing here can be compared.
    """
    config = work.config
    pacing = Pacing(
        config.samples_per_version,
        config.async_training.staleness_threshold,
        total_samples,
        config.rollout.over_sample.samples,
    )
    queue = LocalSampleQueue(QueueOptions(len(work.prompts), pacing))
    pump = _pump(work, queue)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(pump.run)
            yield queue
            await queue.close()
    dropped = {reason: count for reason, count in (await queue.status()).books.dropped.items() if count}
    if not dropped.keys() <= HARMLESS:
        raise SystemExit(f"samples were dropped, so times mean nothing: {dropped}, {pump.status()['drops']}")


def _pump(work: Work, queue: LocalSampleQueue) -> Pump:
    config, turns, waits = work.config, NoTurns(), WaitBoard()
    probation = Probation(config.recovery.max_crashes, waits=waits)
    surplus = Surplus(queue, call_s=config.timeouts.call_s)
    stages = Stages(
        config,
        prompts=work.prompts,
        turns=turns,
        fleet=work.fleet,
        scorer=Unscored(),
        agent=work.agent,
        probation=probation,
        surplus=surplus,
        waits=waits,
        serving=lambda: Serving(0, 0),
    )
    return Pump(
        config,
        queue=queue,
        payloads=InMemory(),
        turns=turns,
        stages=stages,
        drops=DropRule(on_error="stop", max_errors=0, num_prompts=len(work.prompts)),
        probation=probation,
        surplus=surplus,
        waits=waits,
    )


async def take(work: Work, versions: int) -> Outcome:
    """Roll out `versions` times `S` samples. The next version counts as applied as soon as `S` samples are there."""
    size = work.config.samples_per_version
    samples: list[Sample] = []
    started = time.perf_counter()
    async with pumping(work, versions * size) as queue:
        for version in range(versions):
            lease = await queue.lease(size, trainer_version=version, timeout_s=LIMIT_S)
            samples += (entry.payload for entry in lease.samples)
            await queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
            await queue.set_applied_version(version + 1)
        seconds = time.perf_counter() - started
    return Outcome(seconds, tuple(samples))
