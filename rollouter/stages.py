"""The stages of one sample, generation and scoring, each of which may be recorded and replayed (`skip`).

    asked ─▶ generate ─▶ n turns, and the baseline's ─▶ score ─▶ Sample
             └ turn log, engines; or a record          └ reward function and model; or a record

What is replayed asks no engine, and its sample says so (`types.Replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.failures import EngineCrashError
from asyncrl.ports import EngineFleet, PromptSource, RewardScorer, Score, TurnLog
from asyncrl.types import Prompt, Replay, Sample, SampleId, Span, Trajectory, Turn
from asyncrl.waits import WaitBoard
from rollouter.group import generate_group
from rollouter.meters import BusyMeter, PumpCounts
from rollouter.probation import Probation, TimeLimit, time_limit
from rollouter.sampling import greedy, sampling_params
from skip import SkipManager
from skip.generation import Asked, Generated


class Serving(NamedTuple):
    """What the replicas serve."""

    version: int
    step: int
    """Optimizer steps behind it."""


class Slot:
    """A place in generation; leaving it more than once is leaving it once."""

    def __init__(self, slots: anyio.Semaphore) -> None:
        self._slots: anyio.Semaphore | None = slots

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


def ask_for(config: Config, sample_id: SampleId, prompts: PromptSource) -> Asked:
    """What is asked of the engines for one sample.

    Raises:
        DataError: it cannot be asked for.
    """
    rollout = config.rollout
    prompt = prompts.at(sample_id)
    sampling = sampling_params(
        rollout.sampling,
        prompt,
        response_length=rollout.response_length,
        max_model_len=config.max_model_len,
        training=True,
    )
    baseline = greedy(sampling) if config.algorithm.adv_estimator == "remax" else None
    return Asked(sample_id, prompt, sampling, rollout.n, baseline)


class Stages:
    """Of every sample of one Rollouter; what they need is given once."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: PromptSource,
        turns: TurnLog,
        fleet: EngineFleet,
        scorer: RewardScorer,
        probation: Probation,
        waits: WaitBoard,
        serving: Callable[[], Serving],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serving`: what every replica serves now."""
        self._config = config
        self._prompts = prompts
        self._turns = turns
        self._fleet = fleet
        self._scorer = scorer
        self._probation = probation
        self._waits = waits
        self._clock = clock
        self._wants_baseline = config.algorithm.adv_estimator == "remax"
        self.serving = serving
        self.generation = BusyMeter(clock)
        self.counts = PumpCounts()

    def asked(self, sample_id: SampleId) -> Asked:
        """See `ask_for`."""
        return ask_for(self._config, sample_id, self._prompts)

    @SkipManager.annotate(role="async_rollout")
    async def generate(self, asked: Asked, slot: Slot) -> Generated:
        """Turns of the group, the greedy one last if there is one, in `timeouts.sample_s`. The slot is free then."""
        with slot, time_limit(str(asked.sample_id), self._config.timeouts.sample_s) as limit:
            return await self._generate(asked, limit)

    async def _generate(self, asked: Asked, limit: TimeLimit) -> Generated:
        sample_id, name = asked.sample_id, str(asked.sample_id)

        async def on_turn(key: str, turn: Turn) -> None:
            self.counts.generated_tokens += len(turn.response_ids)
            await self._turns.record(sample_id, key, turn)

        def on_place(replica: str) -> None:
            self._probation.placed(name, replica)

        async def on_crash(error: EngineCrashError) -> None:
            await self._probation.crashed(name, error, limit)

        started = self._clock()
        try:
            completed = await self._turns.completed(sample_id)
            with self._waits.waiting("engine"), self.generation.busy():
                turns = await generate_group(
                    self._fleet,
                    name,
                    asked.prompt,
                    asked.sampling,
                    n=asked.n,
                    baseline=asked.baseline,
                    completed=completed,
                    on_turn=on_turn,
                    on_place=on_place,
                    on_crash=on_crash,
                )
        finally:
            self._probation.left(name)
        generate_s = self._clock() - started
        self.counts.generate_s += generate_s
        self.counts.max_generate_s = max(self.counts.max_generate_s, generate_s)
        return Generated(asked.prompt, tuple(turns), generate_s, asked.baseline is not None)

    async def sample(self, sample_id: SampleId, generated: Generated) -> Sample:
        prompt, turns = generated.prompt, generated.turns
        started = self._clock()
        with self._waits.waiting("reward"):
            scores = await self.score(sample_id, prompt, turns)
        reward_s = self._clock() - started
        self.counts.reward_s += reward_s
        if generated.replayed_from is None:
            await self._note(sample_id, [score.reward for score in scores])
        baseline = None
        if self._wants_baseline:
            turns = turns[:-1]
            *scores, baseline = scores
        replay = None
        if generated.replayed_from is not None:
            recorded = tuple(turn.spans for turn in turns)
            replay = Replay(generated.replayed_from, generated.substituted, recorded)
            turns = self._as_versions(turns)
        return Sample(
            sample_id=sample_id,
            trajectories=tuple(trajectory(prompt, turn, score) for turn, score in zip(turns, scores, strict=True)),
            data_source=prompt.data_source,
            generate_s=generated.generate_s,
            reward_s=reward_s,
            baseline_reward=None if baseline is None else baseline.reward,
            replay=replay,
        )

    async def _note(self, sample_id: SampleId, rewards: Sequence[float]) -> None:
        """For people who look at the record; what is replayed is scored again."""
        await SkipManager.note("async_rollout", sample_id.index, {"rewards": list(rewards)})
        await SkipManager.note("rollout", self.serving().step + 1, {"rewards": {str(sample_id): list(rewards)}})

    @SkipManager.annotate(role="reward")
    async def score(self, sample_id: SampleId, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]:
        """One score per turn. Raises as the scorer does."""
        return await self._scorer.score(prompt, turns)

    def _as_versions(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """Replayed turns by the versions that they count as."""
        role = self._config.generation_skip
        if role is None or role.replay_versions == "recorded":
            return tuple(turns)
        now = (Span(0, self.serving().version),)
        return tuple(replace(turn, spans=now) for turn in turns)


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
