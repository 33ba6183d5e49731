"""The stages of one sample, generation and scoring, each of which may be recorded and replayed (`skip`).

    asked ─▶ generate ─▶ n trajectories, and the baseline's ─▶ score ─▶ Sample
             └ turn log, engines, tools; or a record           └ each as soon as it has ended; or a record

What is replayed asks no engine, and its sample says so (`types.Replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import anyio

from asyncrl.config.schema import Config
from asyncrl.failures import first_failure
from asyncrl.ports import EngineFleet, PromptSource, RewardScorer, Score, TurnLog
from asyncrl.profiling import profile
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt, Replay, Row, Sample, SampleId, Span, Turn
from asyncrl.waits import WaitBoard
from rollouter.agent.asking import Converser
from rollouter.dump import TrajectoryDump
from rollouter.group import Group, generate_group, is_complete
from rollouter.meters import BusyMeter, PumpCounts
from rollouter.probation import Probation, Sessions, TimeLimit, time_limit
from rollouter.profiled import ask_scorer
from rollouter.sampling import greedy, sampling_params
from rollouter.surplus import Surplus
from skip import SkipManager
from skip.generation import Asked, Generated


class Serving(NamedTuple):
    """What the replicas serve."""

    version: int
    step: int
    """Optimizer steps behind it."""


class _Kept(NamedTuple):
    """What there is of a sample whose generation was cut."""

    turns: Mapping[str, Turn]
    generate_s: float
    """In generation until then."""


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


def ask_for(config: Config, sample_id: SampleId, prompts: PromptSource, agent: Converser | None = None) -> Asked:
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
    told = agent.identity() if agent is not None else {}
    return Asked(sample_id, prompt, sampling, rollout.n, baseline, rollout.over_sample.trajectories, told)


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
        surplus: Surplus,
        waits: WaitBoard,
        serving: Callable[[], Serving],
        agent: Converser | None = None,
        dump: TrajectoryDump | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            agent: Holds conversations; None: every trajectory is one turn.
            dump: Is told of every scored sample; None: nobody is.
            serving: What every replica serves now.
        """
        self._config = config
        self._prompts = prompts
        self._turns = turns
        self._fleet = fleet
        self._scorer = scorer
        self._agent = agent
        self.probation = probation
        self._surplus = surplus
        self._waits = waits
        self._dump = dump
        self._clock = clock
        self._unfinished = config.rollout.over_sample.unfinished
        self._kept: dict[SampleId, _Kept] = {}
        """Of samples whose generation was cut: what they go on from."""
        self._sampled: dict[SampleId, dict[str, int]] = {}
        """Of samples in flight: tokens by turn, for what is told of them."""
        self.serving = serving
        self.generation = BusyMeter(clock)
        self.counts = PumpCounts()

    def asked(self, sample_id: SampleId) -> Asked:
        """See `ask_for`."""
        return ask_for(self._config, sample_id, self._prompts, self._agent)

    async def make(self, asked: Asked, slot: Slot) -> Sample:
        """Generate a sample and score it, each trajectory as soon as it has ended, unless they are scored together."""
        if self._scorer.whole_group or SkipManager.get("reward") is not None:
            return await self.sample(asked.sample_id, await self.generate(asked, slot))
        scores: dict[Trajectory, Score] = {}

        def ended(trajectory: Trajectory) -> None:
            scoring.start_soon(score, trajectory)

        async def score(trajectory: Trajectory) -> None:
            with self._waits.waiting("reward"):
                (scores[trajectory],) = await ask_scorer(self._scorer, asked.prompt, [trajectory])

        try:
            async with anyio.create_task_group() as scoring:
                generated = await self.generate(asked, slot, ended)
                generated_at = self._clock()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        return await self.sample(asked.sample_id, generated, scores, generated_at)

    async def keep_turn(self, sample_id: SampleId, key: str, turn: Turn) -> None:
        """One that was made now."""
        self.counts.generated_tokens += len(turn.response_ids)
        with profile.span("turnlog.write", tokens=len(turn.response_ids)):
            await self._turns.record(sample_id, key, turn)

    def forget(self, sample_id: SampleId) -> int:
        """It is at its end. How many tokens were sampled for it here, as far as known."""
        return sum(self._sampled.pop(sample_id, {}).values())

    @SkipManager.annotate(role="async_rollout")
    async def generate(self, asked: Asked, slot: Slot, ended: Callable[[Trajectory], None] | None = None) -> Generated:
        """Trajectories of the group, the greedy one last if there is one, within `timeouts.sample_s`; frees the slot.

        `ended` is called with each of those that are made now, as soon as it is whole.

        Raises:
            SurplusError: enough others are done.
        """
        limit_s = self._config.timeouts.sample_s
        with slot, self._surplus.abortable() as cut, time_limit(str(asked.sample_id), limit_s) as limit:
            return await self._generate(asked, limit, cut, ended)

    async def _generate(
        self,
        asked: Asked,
        limit: TimeLimit,
        cut: anyio.CancelScope,
        ended: Callable[[Trajectory], None] | None,
    ) -> Generated:
        group = Group(
            str(asked.sample_id),
            asked.sample_id,
            asked.prompt,
            asked.sampling,
            asked.n,
            asked.baseline,
            asked.extra,
            keep_surplus=self._unfinished != "drop",
        )
        events = _Events(self, group, limit, ended)
        with profile.span("sample.generate") as span:
            try:
                trajectories, generate_s = await self._trajectories(asked, group, events, cut)
            finally:
                span.add(trajectories=asked.n + asked.extra, tokens=events.num_tokens)
            span.add(trajectories=len(trajectories))
        return Generated(asked.prompt, tuple(trajectories), generate_s, asked.baseline is not None)

    async def _trajectories(
        self, asked: Asked, group: Group, events: _Events, cut: anyio.CancelScope
    ) -> tuple[list[Trajectory], float]:
        """And the seconds that they took, those before a cut included."""
        started = self._clock()
        before = self._kept.pop(asked.sample_id, _Kept({}, 0.0))
        completed = events.so_far = before.turns
        try:
            completed = events.so_far = {**await self._turns.completed(asked.sample_id), **before.turns}
            with self._waits.waiting("engine"), self.generation.busy():
                trajectories = await generate_group(self._fleet, group, events, agent=self._agent, completed=completed)
        except anyio.get_cancelled_exc_class():
            if not cut.cancel_called:
                raise  # out of time, or the run ends: it is gone on with by nobody
            profile.note("sample.cut", tokens=events.num_tokens, kept=int(self._unfinished != "drop"))
            if self._unfinished != "drop":
                made = events.kept(partial=self._unfinished == "keep_partial")
                generate_s = before.generate_s + self._clock() - started
                self._kept[asked.sample_id] = _Kept({**completed, **made}, generate_s)
                events.suspended()
            else:
                self.counts.surplus_tokens += events.num_tokens
            raise
        finally:
            events.left()
            self._sampled.setdefault(asked.sample_id, {}).update(events.tokens)
        kept = sum(one.num_sampled for one in trajectories)
        whole = sum(len(turn.response_ids) for turn in {**completed, **events.made}.values())
        self.counts.surplus_tokens += max(0, whole - kept)
        generate_s = before.generate_s + self._clock() - started
        self.counts.generate_s += generate_s
        self.counts.max_generate_s = max(self.counts.max_generate_s, generate_s)
        return trajectories, generate_s

    async def sample(
        self,
        sample_id: SampleId,
        generated: Generated,
        scores: Mapping[Trajectory, Score] | None = None,
        generated_at: float | None = None,
    ) -> Sample:
        """Put the sample together, and score it if it has no `scores` yet, which is what a replayed one has not."""
        prompt, trajectories = generated.prompt, generated.trajectories
        if generated.replayed_from is not None:
            num_tokens = sum(one.num_sampled for one in trajectories)
            profile.note("sample.generate", trajectories=len(trajectories), tokens=num_tokens, replayed=1)
        started = self._clock() if generated_at is None else generated_at
        if scores:
            told = [scores[trajectory] for trajectory in trajectories]
        else:
            with self._waits.waiting("reward"):
                told = await self.score(sample_id, prompt, trajectories)
        reward_s = self._clock() - started
        self.counts.reward_s += reward_s
        profile.took("sample.reward", reward_s)
        if generated.replayed_from is None:
            await self._note(sample_id, [score.reward for score in told])
        baseline = None
        if generated.has_baseline:
            trajectories = trajectories[:-1]
            *told, baseline = told
        rows = [
            row
            for number, (trajectory, score) in enumerate(zip(trajectories, told, strict=True))
            for row in scored_rows(number, trajectory, score)
        ]
        replay = None
        if generated.replayed_from is not None:
            replay = Replay(generated.replayed_from, generated.substituted, tuple(row.spans for row in rows))
            rows = self._as_versions(rows)
        sample = Sample(
            sample_id=sample_id,
            rows=tuple(rows),
            data_source=prompt.data_source,
            generate_s=generated.generate_s,
            reward_s=reward_s,
            baseline_reward=None if baseline is None else baseline.reward,
            replay=replay,
            media=prompt.media,
            asked=_asked(trajectories),
        )
        if self._dump is not None:
            with self._waits.waiting("dump"), profile.span("dump.write"):
                await self._dump.write(sample, prompt, trajectories, told)
        return sample

    async def _note(self, sample_id: SampleId, rewards: Sequence[float]) -> None:
        """For people who look at the record; what is replayed is scored again."""
        await SkipManager.note("async_rollout", sample_id.index, {"rewards": list(rewards)})
        await SkipManager.note("rollout", self.serving().step + 1, {"rewards": {str(sample_id): list(rewards)}})

    @SkipManager.annotate(role="reward")
    async def score(self, sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory. Raises as the scorer does."""
        return await ask_scorer(self._scorer, prompt, trajectories)

    def _as_versions(self, rows: Sequence[Row]) -> list[Row]:
        """Replayed rows by the versions that they count as."""
        role = self._config.generation_skip
        if role is None or role.replay_versions == "recorded":
            return list(rows)
        now = (Span(0, self.serving().version),)
        return [replace(row, spans=now) for row in rows]


class _Events(Sessions):
    """`GroupEvents` of a training sample."""

    def __init__(
        self, stages: Stages, group: Group, limit: TimeLimit, ended: Callable[[Trajectory], None] | None
    ) -> None:
        super().__init__(stages.probation, limit)
        assert isinstance(group.sample_id, SampleId)
        self._stages = stages
        self._sample_id = group.sample_id
        self._ended = ended
        self.made: dict[str, Turn] = {}
        """Turns that were completed or cut since this began, what they went on from included."""
        self.so_far: Mapping[str, Turn] = {}
        """What there was before."""

    async def turn(self, key: str, turn: Turn) -> None:
        self.made[key] = turn
        await self._stages.keep_turn(self._sample_id, key, turn)

    def ended(self, key: str, trajectory: Trajectory) -> None:
        if self._ended is not None:
            self._ended(trajectory)

    def cut(self, key: str, turn: Turn) -> None:
        self.made[key] = turn

    def kept(self, *, partial: bool) -> dict[str, Turn]:
        """What was made: the turns that are complete, or all."""
        return {key: turn for key, turn in self.made.items() if partial or is_complete(turn)}

    @property
    def num_tokens(self) -> int:
        """Sampled since this began, for turns that are complete or were cut."""
        before = sum(len(self.so_far[key].response_ids) for key in self.made if key in self.so_far)
        return sum(self.tokens.values()) - before

    @property
    def tokens(self) -> dict[str, int]:
        """Of each of those turns, what it went on from included."""
        return {key: len(turn.response_ids) for key, turn in self.made.items()}


def _asked(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """For `Sample.asked`."""
    asked = tuple(place if one.number is None else one.number for place, one in enumerate(trajectories))
    return () if asked == tuple(range(len(asked))) else asked


def scored_rows(number: int, trajectory: Trajectory, score: Score) -> list[Row]:
    """The rows of the sample's `number`th trajectory, as they are trained on."""
    told = dict(score.extra)
    if trajectory.messages:
        counts = {"num_turns": float(len(trajectory.turns)), "num_tool_calls": float(trajectory.num_calls)}
        told |= {**counts, **trajectory.metrics}
    rewards = score.turn_rewards or (0.0,) * len(trajectory.turns)
    return [
        Row(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            rollout_log_probs=row.rollout_log_probs,
            spans=row.spans,
            finish_reason=trajectory.finish_reason,
            reward=score.reward,
            reward_extra=told,
            trajectory=number,
            turn_rewards=tuple(
                (turn.first_token + turn.num_tokens - 1, reward)
                for turn, reward in zip(trajectory.turns, rewards, strict=True)
                if turn.row == place and reward
            ),
        )
        for place, row in enumerate(trajectory.rows)
    ]
