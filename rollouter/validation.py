"""The validation set, answered by one version, beside the training generation and never through the queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.failures import DataError, UserCodeError
from asyncrl.ports import Edition, EngineFleet, RewardScorer, Score
from asyncrl.profiling import profile
from asyncrl.records import Metrics, ValidationRecord
from asyncrl.trajectory import Trajectory
from asyncrl.types import FinishReason, Prompt, Turn
from asyncrl.waits import WaitBoard
from rollouter.agent.asking import Converser
from rollouter.drops import DropRule, lasts
from rollouter.group import Group, generate_group
from rollouter.probation import Probation, Sessions, TimeLimit, time_limit
from rollouter.profiled import ask_scorer
from rollouter.sampling import sampling_params
from rollouter.template import Decode
from skip import SkipManager

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4


class ValidationPrompts(Protocol):
    """The validation set, by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...


class Answer(NamedTuple):
    """One validation prompt with its scored responses."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    scores: Sequence[Score]


class Superseded(Exception):
    """Some replica serves another edition than the one to validate, so the validation of that one cannot be had so.

    Replicas are replaced when they fail, and a new one starts with the newest edition that it hears of: of a newer
    version, of a newer lineage, whose versions may be lower, or of an older one.
    """

    def __init__(self, version: int, other: int) -> None:
        super().__init__(f"validation of version {version}: replicas answer with version {other}")
        self.version = version
        self.other = other


class Validator:
    """Generates and scores the validation set with `rollout.val` sampling. It shares fleet and scorer with the pump."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: ValidationPrompts,
        fleet: EngineFleet,
        scorer: RewardScorer,
        decode: Decode,
        drops: DropRule,
        probation: Probation,
        waits: WaitBoard,
        agent: Converser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._fleet = fleet
        self._scorer = scorer
        self._agent = agent
        self._decode = decode
        self._drops = drops
        self._probation = probation
        self._waits = waits
        self._clock = clock
        self.generated_tokens = 0
        """Response tokens made for validation so far."""

    async def run(self, edition: Edition, step: int, *, ask: int = 1) -> ValidationRecord | None:
        """Validate `edition`, for the `ask`th time. The caller applies no other one meanwhile.

        A prompt that another version has answered is asked again, up to `rollout.max_attempts` times: another replica
        may still serve the one wanted. Figures are of one version or none. None: there are none, as no prompt was
        answered this time, for reasons that another time may not have; it is logged.

        Raises (the first alone, others inside an exception group):
            Superseded: replicas of another version keep answering.
            InfraError, UserCodeError, DataError: as for training samples.
            DataError: no prompt can ever be answered.
        """
        started = self._clock()
        answers: list[Answer | DataError | UserCodeError | None] = [None] * len(self._prompts)
        limit = anyio.CapacityLimiter(self._config.rollout.max_concurrent_samples)
        superseded: list[Superseded] = []

        async def answer(number: int, group: TaskGroup) -> None:
            try:
                async with limit:
                    name = session_name(edition, number, ask)
                    answers[number] = await self._answer(name, self._prompts[number], edition.version)
            except Superseded as error:
                superseded.append(error)
                group.cancel_scope.cancel()

        with (
            self._waits.waiting("validation"),
            SkipManager.suspended(),
            profile.span("validation", version=edition.version, prompts=len(self._prompts)),
        ):
            async with anyio.create_task_group() as group:
                for number in range(len(self._prompts)):
                    group.start_soon(answer, number, group)
        if superseded:
            raise superseded[0]
        answered = [one for one in answers if isinstance(one, Answer)]
        if not answered:
            failures = [one for one in answers if isinstance(one, DataError | UserCodeError)]
            told = f"validation of version {edition.version}: no prompt of {len(self._prompts)} could be answered"
            if all(map(lasts, failures)):
                raise DataError(f"{told}, the first: {failures[0].message}", failures[0].cause)
            logger.error("%s, so it has no figures; the first: %s", told, failures[0].message)
            return None
        metrics = validation_metrics(answered)
        metrics["duration_s"] = self._clock() - started
        examples = tuple(self._example(one) for one in answered[:NUM_EXAMPLES])
        return ValidationRecord(edition.version, step, metrics, examples, edition.lineage)

    async def _answer(self, name: str, prompt: Prompt, version: int) -> Answer | DataError | UserCodeError:
        """An error: dropped for it, and logged."""
        try:
            with profile.context(sample=name):
                with time_limit(name, self._config.timeouts.sample_s) as limit:
                    trajectories = await self._generate(name, prompt, version, limit)
                scores = await ask_scorer(self._scorer, prompt, trajectories)
        except (DataError, UserCodeError) as error:
            drop = self._drops.failed(name, error)
            logger.warning("%s left out of the validation, %s: %s", name, drop.kind, error)
            return error
        self._drops.passed()
        return Answer(prompt, trajectories, scores)

    async def _generate(self, name: str, prompt: Prompt, version: int, limit: TimeLimit) -> list[Trajectory]:
        """Trajectories of `version` alone. Every try has a session of its own, which may lead it to another replica."""
        rollout = self._config.rollout
        params = sampling_params(
            rollout.val,
            prompt,
            response_length=rollout.response_length,
            max_model_len=self._config.max_model_len,
            training=False,
        )

        events = _Events(self, self._probation, limit)
        try:
            for attempt in range(1, rollout.max_attempts + 1):
                session = name if attempt == 1 else f"{name}_try_{attempt}"
                group = Group(session, name, prompt, params, rollout.val.n)
                trajectories = await generate_group(self._fleet, group, events, agent=self._agent)
                others = {made for one in trajectories for made in one.versions} - {version}
                if not others:
                    return trajectories
        finally:
            events.left()
        oldest = min(others)
        raise Superseded(version, oldest if oldest < version else max(others))

    def _example(self, answer: Answer) -> Mapping[str, Any]:
        return {
            "prompt": _question(answer.prompt),
            "response": self._decode(answer.trajectories[0].turn_ids()),
            "ground_truth": answer.prompt.ground_truth,
            "reward": answer.scores[0].reward,
        }


class _Events(Sessions):
    """`GroupEvents` of a validation prompt."""

    def __init__(self, validator: Validator, probation: Probation, limit: TimeLimit) -> None:
        super().__init__(probation, limit)
        self._validator = validator

    async def turn(self, key: str, turn: Turn) -> None:
        self._validator.generated_tokens += len(turn.response_ids)

    def ended(self, key: str, trajectory: Trajectory) -> None:
        pass

    def cut(self, key: str, turn: Turn) -> None:
        pass


def session_name(edition: Edition, number: int, ask: int = 1) -> str:
    """Of one validation prompt; no two validations of a Rollouter have one in common."""
    lineage, version = edition
    name = f"val_{version}_{number}" if lineage == 0 else f"val_{lineage}_{version}_{number}"
    return name if ask == 1 else f"{name}_ask_{ask}"


def validation_metrics(answers: Sequence[Answer]) -> Metrics:
    """Means over prompts of the means over their responses; `num_prompts` counts those that were answered."""
    rewards = np.array([np.mean([score.reward for score in one.scores]) for one in answers], dtype=np.float64)
    sources = np.array([one.prompt.data_source for one in answers])
    made = [trajectory for one in answers for trajectory in one.trajectories]
    tokens = np.array([trajectory.num_sampled for trajectory in made])
    metrics: Metrics = {"reward/mean": float(rewards.mean())}
    for source in sorted(set(sources.tolist())):
        metrics[f"reward/mean/{source}"] = float(rewards[sources == source].mean())
    scores = [score for one in answers for score in one.scores]
    for part in ("rule", "model"):  # with a reward model, see `rewards.combination`
        if all(part in score.extra for score in scores):
            metrics[f"{part}/mean"] = float(np.mean([np.mean([s.extra[part] for s in one.scores]) for one in answers]))
    return metrics | {
        "response_tokens/mean": float(tokens.mean()),
        "response_tokens/max": float(tokens.max()),
        "length_share": float(np.mean([one.finish_reason is FinishReason.LENGTH for one in made])),
        "num_prompts": float(len(answers)),
        **_conversations(made),
    }


def _conversations(made: Sequence[Trajectory]) -> Metrics:
    """Only where there are any: most runs have one turn."""
    if not any(one.messages for one in made):
        return {}
    return {
        "turns/mean": float(np.mean([len(one.turns) for one in made])),
        "tool_calls/mean": float(np.mean([one.num_calls for one in made])),
        "tool_call_share": float(np.mean([one.num_calls > 0 for one in made])),
    }


def _question(prompt: Prompt) -> str:
    """What was asked, for people: the last message."""
    return str(prompt.messages[-1].get("content", "")) if prompt.messages else ""
