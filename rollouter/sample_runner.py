"""Takes one sample from its permit to the queue: ask, generate, score, pack, offer.

    ask ─▶ generate ─▶ n trajectories, and the baseline's ─▶ score ─▶ pack ─▶ dump ─▶ payload ─▶ offer
           │ turn log, engines, tools; or a record          │ each as soon as it has ended; or a record
           └ SurplusError: interrupted; dropped or resumed later
    anywhere: DataError, UserCodeError ─▶ drop(reason), or stop

Generation ends within `timeouts.sample_s`. That limit excludes scoring, where a sample may wait for other samples and
every call has a deadline. When a restarted Rollouter receives a sample again, it generates only the turns that the
turn log lacks. A replayed sample (`skip`) uses no engine and has `Sample.replay` set.

With ReMax, one more trajectory is generated greedily and scored with the others. Its score is the sample's baseline
(https://arxiv.org/abs/2310.10505).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError, UserCodeError
from asyncrl.core.ports import EngineFleet, PayloadStore, PromptSource, RewardScorer, Score, TurnLog
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import Generated, SampleRequest, Trajectory
from asyncrl.core.types import DropReason, Prompt, Replay, Row, Sample, SampleId, Span, Turn, sample_meta
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import SampleQueue
from rollouter.agent.conversation import ConversationAgent
from rollouter.crash_isolation import SETTLE_S, CrashIsolation, time_limit
from rollouter.drop_policy import DropPolicy
from rollouter.group import GroupGeneration, TrajectoryGroup, is_complete
from rollouter.group_workers.pool import RemoteGroup, WorkerPool, WorkerScorer
from rollouter.requests import greedy, sampling_params
from rollouter.slots import BusyMeter, GenerationSlot, GenerationSlots, SurplusError, SurplusMonitor
from rollouter.trajectory_dump import TrajectoryFiles
from rollouter.user_code import check_extras
from skip import SkipManager

logger = logging.getLogger(__name__)


class ServedVersion(NamedTuple):
    """The version that every replica serves."""

    version: int
    step: int
    """The optimizer steps that produced it."""


@dataclass(slots=True)
class SampleProgress:
    """One sample that is generated, perhaps in several attempts, and scored."""

    sample_id: SampleId
    outcome: Generated | DataError | UserCodeError | None = None
    """Its trajectories, or the error that prevented them, if it was generated together with other samples."""
    turns: dict[str, Turn] = field(default_factory=dict)
    """Complete and partial turns by `turn_key`."""
    logged_tokens: int | None = None
    """Tokens of turns that an earlier Rollouter has logged; None until the turn log is read."""
    resumed_tokens: int = 0
    """Tokens with which the current attempt began."""
    generate_s: float = 0.0
    scores: dict[Trajectory, Score] = field(default_factory=dict)
    """Scores of the trajectories that were scored while others were generated."""

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns.values())


@dataclass(slots=True)
class RolloutCounts:
    """Cumulative counts of this process."""

    samples_done: int = 0
    """Samples that were generated, scored and offered to the queue."""
    generated_tokens: int = 0
    """Response tokens of turns completed here, including samples that were dropped or are not complete yet."""
    surplus_tokens: int = 0
    """Tokens of over-sampled samples and trajectories that are not used. The tokens of the last second before an
    interruption may be missing."""
    generate_s: float = 0.0
    """Sum over samples of the time from dispatch to the last token of the group."""
    max_generate_s: float = 0.0
    reward_s: float = 0.0
    """Sum over samples of the time from the end of generation to the last score."""


def ask_for(
    config: Config, sample_id: SampleId, prompts: PromptSource, agent: ConversationAgent | None = None
) -> SampleRequest:
    """Return the request to the engines for one sample.

    Raises:
        DataError: the prompt is unusable.
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
    identity = agent.identity() if agent is not None else {}
    return SampleRequest(sample_id, prompt, sampling, rollout.n, baseline, rollout.over_sample.trajectories, identity)


async def score_trajectories(scorer: RewardScorer, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
    """Call the scorer once, and record the call. Raises whatever the scorer raises."""
    with profile.span("reward.score", trajectories=len(trajectories)) as span:
        scores = await scorer.score(prompt, trajectories)
        if scores:
            span.add(reward=sum(score.reward for score in scores) / len(scores))
        return scores


async def score_each(scorer: RewardScorer, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
    """Call the scorer once, and record a call for each trajectory. Raises whatever the scorer raises."""
    started = time.perf_counter()
    scores: Sequence[Score | None] = [None] * len(trajectories)
    error: str | None = None
    try:
        scores = found = await scorer.score(prompt, trajectories)
        return found
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        for trajectory, score in zip(trajectories, scores, strict=True):
            profile.record_ended(
                "reward.score", time.perf_counter() - started, trajectory=trajectory.number, trajectories=1,
                reward=None if score is None else score.reward, error=error,
            )  # fmt: skip


@dataclass(kw_only=True)
class GenerationParts:
    """The ports of generation and scoring, and the state that their users in one Rollouter share."""

    config: Config
    prompts: PromptSource
    fleet: EngineFleet
    scorer: RewardScorer
    workers: WorkerPool | None = None
    """Generate and score groups; None: this process does."""
    agent: ConversationAgent | None = None
    """Holds conversations; None if every trajectory is a single turn."""
    settle_s: float = SETTLE_S
    """See `CrashIsolation`."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    groups: Callable[..., TrajectoryGroup] = field(init=False)
    """Makes a `TrajectoryGroup` of its fields."""
    waits: WaitBoard = field(init=False)
    drops: DropPolicy = field(init=False)
    isolation: CrashIsolation = field(init=False)

    def __post_init__(self) -> None:
        self.waits = WaitBoard(self.clock)
        if self.workers is not None:
            self.workers.waits = self.waits
            self.scorer = WorkerScorer(self.workers, self.scorer)
            self.groups = partial(RemoteGroup, pool=self.workers)
        else:
            if self.agent is not None:
                self.agent.watch(self.waits.waiting)
            self.groups = partial(GroupGeneration, fleet=self.fleet, agent=self.agent)
        sample_s = self.config.timeouts.sample_s
        self.drops = DropPolicy(self.config.reward, num_prompts=len(self.prompts), sample_s=sample_s)
        self.isolation = CrashIsolation(
            self.config.recovery.max_crashes, waits=self.waits, settle_s=self.settle_s, wall_clock=self.wall_clock
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the workers, or the tool servers of the agent, during the block."""
        async with AsyncExitStack() as stack:
            if self.workers is not None:
                await stack.enter_async_context(self.workers.running())
            elif isinstance(self.agent, AbstractAsyncContextManager):
                await stack.enter_async_context(self.agent)
            yield


@dataclass(kw_only=True)
class RolloutParts(GenerationParts):
    """The ports of one Rollouter, and the state that its dispatcher, sample runner and validation share."""

    queue: SampleQueue
    payloads: PayloadStore
    turns: TurnLog
    served_version: Callable[[], ServedVersion]
    engines_awake: Callable[[], Awaitable[Any]] = anyio.lowlevel.checkpoint
    """Wait until the engines are awake."""
    files: Sequence[TrajectoryFiles] = ()
    """They receive every scored sample of training."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the workers, or the tool servers of the agent, and write the files during the block."""
        async with super().running(), AsyncExitStack() as stack:
            for files in self.files:
                await stack.enter_async_context(files.running())
            yield


class SampleRunner:
    """Takes the samples of one Rollouter from their permits to the queue."""

    def __init__(self, parts: RolloutParts, *, slots: GenerationSlots, surplus: SurplusMonitor) -> None:
        self._parts = parts
        self._slots = slots
        self._surplus = surplus
        self._waiting = parts.waits.waiting
        self._unfinished = parts.config.rollout.over_sample.unfinished
        self.generation = BusyMeter(parts.clock)
        self.counts = RolloutCounts()

    async def run(self, progress: SampleProgress, slot: GenerationSlot | None = None) -> None:
        """Generate, score and offer one sample, or drop it. Without `slot`, wait for a slot first."""
        sample_id, outcome, generated_at = progress.sample_id, progress.outcome, self._parts.clock()
        whole_group = self._parts.scorer.whole_group or SkipManager.get("reward") is not None
        with profile.context(sample=str(sample_id)):
            try:
                while outcome is None:
                    slot = slot or await self._slots.acquire()
                    try:
                        # `generate` frees the slot, so that no engine idles while files or rewards are slow.
                        with slot:
                            request = self.ask(sample_id)
                            progress.scores.clear()
                            async with task_group() as scoring:
                                outcome = await self.generate(request, progress, slot, None if whole_group else scoring)
                                generated_at = self._parts.clock()
                    except SurplusError:
                        if self._unfinished == "drop":
                            raise
                        with self._waiting("surplus"), profile.span("sample.surplus"):
                            await self._surplus.wait_for_room()
                        slot = None
                if not isinstance(outcome, Generated):
                    raise outcome
                sample = await self._score_and_pack(progress, outcome, generated_at)
            except (SurplusError, DataError, UserCodeError) as error:
                await self._drop(error, progress)
            else:
                await self._offer(sample)

    def ask(self, sample_id: SampleId) -> SampleRequest:
        """See `ask_for`."""
        return ask_for(self._parts.config, sample_id, self._parts.prompts, self._parts.agent)

    @SkipManager.annotate(role="async_rollout")
    async def generate(
        self, request: SampleRequest, progress: SampleProgress, slot: GenerationSlot, scoring: TaskGroup | None = None
    ) -> Generated:
        """Generate the group, the greedy trajectory last if there is one, within `timeouts.sample_s`; free the slot.

        Args:
            progress: The progress to resume from; updated in place.
            scoring: Scores the trajectories that are generated now, as soon as they have ended. None: nothing is scored
                yet.

        Raises:
            SurplusError: enough other samples are done.
        """
        with self._attempt(request, progress, slot) as group:
            await self._resume(progress)
            with self._waiting("engine"), self.generation.busy():
                async with group.running() as ended:
                    async for trajectories in ended:
                        if scoring is not None:
                            scoring.start_soon(self._score_early, progress, request.prompt, trajectories)
        return Generated(request.prompt, tuple(group.trajectories), progress.generate_s, request.baseline is not None)

    @contextmanager
    def _attempt(
        self, request: SampleRequest, progress: SampleProgress, slot: GenerationSlot
    ) -> Iterator[TrajectoryGroup]:
        """Limit and measure one attempt at generating a group, and free the slot."""
        name, started, is_kept = str(request.sample_id), self._parts.clock(), self._unfinished != "drop"
        with (
            slot,
            self._surplus.abortable() as surplus,
            time_limit(name, self._parts.config.timeouts.sample_s) as limit,
            profile.span("sample.generate", trajectories=request.n + request.extra) as span,
            self._parts.isolation.sample(limit) as sessions,
        ):
            group = self._parts.groups(
                request, sessions=sessions, turns=progress.turns, keep_surplus=is_kept,
                record_turns=partial(self._record_turns, progress.sample_id),
            )  # fmt: skip
            try:
                yield group
            except anyio.get_cancelled_exc_class():
                if surplus.cancel_called:  # otherwise the time is up or the run ends, and nothing is resumed
                    num_tokens = progress.num_tokens - progress.resumed_tokens
                    profile.note("sample.cut", tokens=num_tokens, kept=int(is_kept))
                    if is_kept:
                        sessions.suspend_all()
                    else:
                        self.counts.surplus_tokens += num_tokens
                raise
            finally:
                progress.generate_s += self._parts.clock() - started
                span.add(tokens=progress.num_tokens - progress.resumed_tokens)
            span.add(trajectories=len(group.trajectories))
        used_tokens = sum(trajectory.num_sampled for trajectory in group.trajectories)
        self.counts.surplus_tokens += max(0, progress.num_tokens - used_tokens)
        self.counts.generate_s += progress.generate_s
        self.counts.max_generate_s = max(self.counts.max_generate_s, progress.generate_s)

    async def _score_early(self, progress: SampleProgress, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        with self._waiting("reward"):
            scores = await score_each(self._parts.scorer, prompt, trajectories)
        progress.scores |= zip(trajectories, scores, strict=True)

    async def _resume(self, progress: SampleProgress) -> None:
        """Add the turns that an earlier Rollouter logged, or discard the partial turns of an earlier attempt."""
        if progress.logged_tokens is None:
            progress.turns |= await self._parts.turns.completed(progress.sample_id)
            progress.logged_tokens = progress.num_tokens
        elif self._unfinished != "keep_partial":
            for key in [key for key, turn in progress.turns.items() if not is_complete(turn)]:
                del progress.turns[key]
        progress.resumed_tokens = progress.num_tokens

    async def _record_turns(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        num_tokens = sum(len(turn.response_ids) for turn in turns.values())
        self.counts.generated_tokens += num_tokens
        # Shielded: the turns count as complete already, so a sample that is resumed would not log them again.
        with anyio.CancelScope(shield=True), profile.span("turnlog.write", tokens=num_tokens):
            await self._parts.turns.record(sample_id, turns)

    async def _score_and_pack(self, progress: SampleProgress, generated: Generated, generated_at: float) -> Sample:
        """Score the group unless its trajectories are scored already; pack and dump the sample."""
        sample_id, prompt, trajectories = progress.sample_id, generated.prompt, generated.trajectories
        if generated.replayed_from is not None:
            num_tokens = sum(trajectory.num_sampled for trajectory in trajectories)
            profile.note("sample.generate", trajectories=len(trajectories), tokens=num_tokens, replayed=1)
        if progress.scores:
            all_scores = [progress.scores[trajectory] for trajectory in trajectories]
        else:
            with self._waiting("reward"):
                all_scores = await self.score(sample_id, prompt, trajectories)
        reward_s = self._parts.clock() - generated_at
        self.counts.reward_s += reward_s
        profile.record_ended("sample.reward", reward_s)
        if generated.replayed_from is None:
            await self._note_rewards(sample_id, [score.reward for score in all_scores])
        sample = pack_sample(sample_id, generated, all_scores, reward_s, self._replay_version())
        scored = trajectories[:-1] if generated.has_baseline else trajectories
        for files in self._parts.files:
            with self._waiting("dump"):
                await files.write(sample, prompt, scored, all_scores[: len(scored)])
        return sample

    @SkipManager.annotate(role="reward")
    async def score(self, sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory. Raises whatever the scorer raises."""
        return await score_trajectories(self._parts.scorer, prompt, trajectories)

    async def _note_rewards(self, sample_id: SampleId, rewards: Sequence[float]) -> None:
        """Store the rewards with the record, for `asyncrl skip show`."""
        await SkipManager.note("async_rollout", sample_id.index, {"rewards": list(rewards)})
        step = self._parts.served_version().step + 1
        await SkipManager.note("rollout", step, {"rewards": {str(sample_id): list(rewards)}})

    def _replay_version(self) -> int | None:
        """Return the version to assign to the tokens of replayed samples; None keeps the recorded versions."""
        role = self._parts.config.generation_skip
        return None if role is None or role.replay_versions == "recorded" else self._parts.served_version().version

    async def _offer(self, sample: Sample) -> None:
        self._parts.drops.note_success()
        meta = sample_meta(sample)
        with profile.span("sample.payload", bytes=meta.payload_bytes):
            payload = await self._parts.payloads.put(sample)
        with profile.span("sample.offer"):
            await self._parts.queue.offer(meta, payload)
        if profile.enabled:
            rewards = {row.trajectory: row.reward for row in sample.rows}
            profile.note(
                "sample.ready",
                reward=sum(rewards.values()) / len(rewards),
                tokens=meta.response_tokens,
                versions=meta.newest_version - meta.oldest_version,
            )
        self.counts.samples_done += 1
        await self._parts.turns.forget(sample.sample_id)

    async def _drop(self, error: SurplusError | DataError | UserCodeError, progress: SampleProgress) -> None:
        """Drop the sample, or raise as `DropPolicy.decide` does."""
        sample_id = progress.sample_id
        if isinstance(error, SurplusError):
            reason = DropReason.SURPLUS
        else:
            drop = self._parts.drops.decide(sample_id, error)
            log = logger.warning if drop.first else logger.debug
            log("%s dropped (%s), %s: %s", sample_id, drop.reason, drop.kind, error)
            reason = drop.reason
        await self._parts.queue.drop(sample_id, reason)
        num_tokens = progress.num_tokens - (progress.logged_tokens or 0)
        profile.note("sample.dropped", reason=str(reason), tokens=num_tokens)
        await self._parts.turns.forget(sample_id)


def pack_sample(
    sample_id: SampleId,
    generated: Generated,
    scores: Sequence[Score],
    reward_s: float,
    replay_version: int | None,
) -> Sample:
    """Build the sample that the Trainer receives.

    Args:
        scores: One per trajectory of `generated`.
        replay_version: The version to assign to replayed tokens; None keeps the recorded versions.
    """
    trajectories, baseline = generated.trajectories, None
    if generated.has_baseline:
        trajectories, scores, baseline = trajectories[:-1], scores[:-1], scores[-1].reward
    rows = [
        row
        for number, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True))
        for row in scored_rows(number, trajectory, score)
    ]
    replay = None
    if generated.replayed_from is not None:
        replay = Replay(generated.replayed_from, generated.substituted, tuple(row.spans for row in rows))
        if replay_version is not None:
            rows = [replace(row, spans=(Span(0, replay_version),)) for row in rows]
    numbers = tuple(
        index if trajectory.number is None else trajectory.number for index, trajectory in enumerate(trajectories)
    )
    return Sample(
        sample_id=sample_id,
        rows=tuple(rows),
        data_source=generated.prompt.data_source,
        generate_s=generated.generate_s,
        reward_s=reward_s,
        baseline_reward=baseline,
        replay=replay,
        media=generated.prompt.media,
        asked=() if numbers == tuple(range(len(numbers))) else numbers,
    )


def scored_rows(number: int, trajectory: Trajectory, score: Score) -> list[Row]:
    """Build the rows that the Trainer receives for the sample's `number`th trajectory.

    Raises:
        UserCodeError: an extra of its score or one of its metrics has a name that cannot be reported.
    """
    for what, numbers in (("the extras of reward functions", score.extra), ("metrics", trajectory.metrics)):
        try:
            check_extras(numbers)
        except ValueError as error:
            raise UserCodeError(f"{what} cannot be reported: {error}") from error
    extra = dict(score.extra)
    if trajectory.messages:
        counts = {"num_turns": float(len(trajectory.turns)), "num_tool_calls": float(trajectory.num_calls)}
        extra |= {**counts, **trajectory.metrics}
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
            reward_extra=extra,
            trajectory=number,
            turn_rewards=tuple(
                (turn.first_token + turn.num_tokens - 1, reward)
                for turn, reward in zip(trajectory.turns, rewards, strict=True)
                if turn.row == index and reward
            ),
        )
        for index, row in enumerate(trajectory.rows)
    ]
