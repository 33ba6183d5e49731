"""A dispatcher between a real queue and a fake fleet, and conversations without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Literal, TypeVar

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import OverSampleConfig, RolloutConfig
from asyncrl.config.sections.run import RecoveryConfig, TimeoutsConfig
from asyncrl.config.sections.skip import SkipConfig
from asyncrl.config.sections.trainer import TrainerConfig
from asyncrl.core.failures import first_failure
from asyncrl.core.ports import Lease, RewardScorer
from asyncrl.core.staleness import Pacing
from asyncrl.core.trajectory import SampleRequest, Trajectory, single_turn
from asyncrl.core.types import Prompt, Sample, SampleId
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from rollouter.agent.conversation import AskTurn, ConversationAgent, ConversationTokens, TurnRequest
from rollouter.dispatcher import Dispatcher
from rollouter.sample_runner import RolloutParts, ServedVersion
from rollouter.trajectory_dump import TrajectoryDump
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, ListPrompts, ManualClock, MemoryPayloads, MemoryTurns, make_prompt
from tests.fakes.workers import LocalWorkers

NUM_PROMPTS = 100
Error = TypeVar("Error", bound=Exception)


def rollout_parts(
    config: Config, *, prompts: Sequence[Prompt] = (make_prompt(1),) * NUM_PROMPTS, **changes: Any
) -> RolloutParts:
    """Return the parts of a Rollouter; those that are not in `changes` are fakes."""
    fakes: dict[str, Any] = {
        "payloads": MemoryPayloads(),
        "turns": MemoryTurns(),
        "scorer": FakeScorer(),
        "served_version": lambda: ServedVersion(0, 0),
        "settle_s": 0.01,
    }
    return RolloutParts(config=config, prompts=ListPrompts(prompts), **{**fakes, **changes})


class DispatcherRig:
    """A dispatcher between a real queue and a fake fleet, with `permits` samples at a time and `total` in the run."""

    def __init__(
        self,
        *,
        permits: int = 8,
        total: int = 1000,
        n: int = 2,
        max_concurrent_samples: int = 8,
        fleet: FakeFleet | None = None,
        scorer: RewardScorer | None = None,
        prompts: list[Prompt] | None = None,
        reward: RewardConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        sample_s: float = 60.0,
        max_crashes: int = 2,
        turns: MemoryTurns | None = None,
        skip: SkipConfig | None = None,
        mode: Literal["fully_async", "sync"] = "fully_async",
        trainer: TrainerConfig | None = None,
        over_sample: OverSampleConfig | None = None,
        agent: ConversationAgent | None = None,
        dump: TrajectoryDump | None = None,
        num_workers: int = 0,
    ) -> None:
        self.config = Config(
            mode=mode,
            skip=skip or SkipConfig(),
            trainer=trainer or TrainerConfig(),
            timeouts=TimeoutsConfig(sample_s=sample_s),
            recovery=RecoveryConfig(max_crashes=max_crashes),
            algorithm=algorithm or AlgorithmConfig(),
            rollout=RolloutConfig(
                n=n,
                response_length=16,
                max_model_len=32,
                max_concurrent_samples=max_concurrent_samples,
                over_sample=over_sample or OverSampleConfig(),
            ),
            reward=reward or RewardConfig(),
        )
        prompts = prompts or [make_prompt(*range(1, 2 + k % 7)) for k in range(NUM_PROMPTS)]
        self.pacing = Pacing(permits, 0, total, over_sample=self.config.rollout.over_sample.samples)
        self.queue = LocalSampleQueue(QueueOptions(len(prompts), self.pacing))
        self.turns = turns or MemoryTurns()
        self.fleet = fleet or FakeFleet(hold=True)
        self.clock = ManualClock()
        self.served_version = ServedVersion(0, 0)
        scorer = scorer or FakeScorer()
        self.workers = LocalWorkers(num_workers, self.fleet, lambda: scorer, lambda: agent) if num_workers else None
        self.parts = rollout_parts(
            self.config,
            prompts=prompts,
            queue=self.queue,
            fleet=self.fleet,
            clock=self.clock,
            turns=self.turns,
            scorer=scorer,
            workers=self.workers.pool if self.workers is not None else None,
            served_version=lambda: self.served_version,
            agent=agent,
            files=() if dump is None else [dump],
        )
        self.drops, self.waits = self.parts.drops, self.parts.waits
        self.dispatcher = Dispatcher(self.parts)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DispatcherRig]:
        """Run the dispatcher during the block. Then close the queue, upon which the dispatcher has to end."""
        with anyio.fail_after(20):
            async with self._with_workers(), anyio.create_task_group() as group:
                group.start_soon(self.dispatcher.run)
                yield self
                await self.queue.close()

    def _with_workers(self) -> AbstractAsyncContextManager[None]:
        return self.workers.running() if self.workers is not None else nullcontext()

    async def run(self, num_samples: int) -> list[int]:
        """Run until this many samples are leased, and return their indices."""
        async with self.running():
            lease = await self.lease(num_samples)
        return sorted(entry.meta.sample_id.index for entry in lease.samples)

    async def lease(self, num_samples: int, *, trainer_version: int = 0) -> Lease:
        with anyio.fail_after(10):
            return await self.queue.lease(num_samples, trainer_version=trainer_version, timeout_s=10)

    async def until_dropped(self, num_samples: int) -> None:
        """Wait until the queue has dropped this many samples."""
        with anyio.fail_after(10):
            while (await self.queue.status()).counts.num_dropped < num_samples:
                await anyio.lowlevel.checkpoint()

    async def fails(self, kind: type[Error]) -> Error:
        """Run until the dispatcher fails, and return the first failure."""
        with anyio.fail_after(20), pytest.raises((ExceptionGroup, kind)) as caught:
            async with self._with_workers():
                await self.dispatcher.run()
        error = first_failure(caught.value)
        assert isinstance(error, kind)
        return error


def group_request(n: int, *, max_tokens: int = 16, **options: Any) -> SampleRequest:
    """Return a request for `n` trajectories of a prompt of two tokens."""
    sampling = {"max_tokens": max_tokens}
    return SampleRequest(SampleId(0, 1), make_prompt(1, 2), sampling, n, **options)


def leased_samples(lease: Lease) -> list[Sample]:
    return [entry.payload for entry in lease.samples]


def sample_name(index: int) -> str:
    return f"sample_{(index - 1) // NUM_PROMPTS}_{index}"


class ScriptedConverser:
    """Holds conversations of `turns` turns, with the token `answer` between them."""

    def __init__(self, turns: int, answer: int = 9) -> None:
        self.turns = turns
        self.answer = answer

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        tokens = ConversationTokens(prompt.prompt_ids)
        turn = None
        for number_of_turn in range(self.turns):
            if number_of_turn:
                tokens.add_unsampled([self.answer])
            turn = await ask(TurnRequest(number_of_turn, tokens.context, 4))
            tokens.add_turn(turn)
        assert turn is not None
        (row,) = tokens.rows()
        one = single_turn(prompt, turn)
        return Trajectory((row,), one.turns, one.finish_reason, ({"role": "assistant", "content": ""},))

    def identity(self) -> Mapping[str, Any]:
        return {"turns": self.turns}

    def status(self) -> Mapping[str, float]:
        return {}

    def watch(self, waiting: Any) -> None:
        pass
