"""Validates one version on the validation set, concurrently with training generation and without the queue."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncrl.core.failures import DataError, UserCodeError
from asyncrl.core.ports import Score, WeightsVersion
from asyncrl.core.records import Metrics, ValidationRecord
from asyncrl.core.trajectory import SampleRequest, Trajectory
from asyncrl.core.types import FinishReason, Prompt, Turn
from asyncrl.profiling import profile
from rollouter.crash_isolation import SampleSessions, time_limit
from rollouter.drop_policy import is_permanent
from rollouter.prompts.chat_template import Decode
from rollouter.requests import sampling_params
from rollouter.sample_runner import RolloutParts, score_trajectories
from skip import SkipManager

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4


class ValidationPrompts(Protocol):
    """The validation set, by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...


class ScoredPrompt(NamedTuple):
    """One validation prompt with its scored responses."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    scores: Sequence[Score]


class SupersededError(Exception):
    """A replica serves a weights version that differs from the one to validate.

    A replica that replaces a failed one starts with the newest version that it knows. That version may be older than
    the one to validate, newer, or of a newer lineage, where numbers may be lower.
    """

    def __init__(self, version: int, other: int) -> None:
        super().__init__(f"validation of version {version}: replicas answer with version {other}")
        self.version = version
        self.other = other


class Validator:
    """Generates and scores the validation set with `rollout.val` sampling, using the fleet and scorer of training."""

    def __init__(self, parts: RolloutParts, prompts: ValidationPrompts, decode: Decode) -> None:
        self._parts = parts
        self._prompts = prompts
        self._decode = decode
        self.generated_tokens = 0
        """Response tokens generated for validation so far."""

    async def run(self, weights_version: WeightsVersion, step: int, *, attempt: int = 1) -> ValidationRecord | None:
        """Validate `weights_version`, for the `attempt`th time. The caller applies no other version meanwhile.

        A prompt that another version has answered is tried up to `rollout.max_attempts` times, because another replica
        may serve the right version. The metrics never mix versions. Returns None and logs an error if no prompt was
        answered and the reason may be temporary.

        Raises (`SupersededError` directly, the others inside an exception group):
            SupersededError: replicas of another version keep answering.
            InfraError, UserCodeError, DataError: as for training samples.
            DataError: no prompt can ever be answered.
        """
        started = self._parts.clock()
        answers: list[ScoredPrompt | DataError | UserCodeError | None] = [None] * len(self._prompts)
        limit = anyio.CapacityLimiter(self._parts.config.rollout.max_concurrent_samples)
        superseded: list[SupersededError] = []

        async def answer(number: int, group: TaskGroup) -> None:
            try:
                async with limit:
                    name = validation_session(weights_version, number, attempt)
                    answers[number] = await self._answer(name, self._prompts[number], weights_version.version)
            except SupersededError as error:
                superseded.append(error)
                group.cancel_scope.cancel()

        with (
            self._parts.waits.waiting("validation"),
            SkipManager.suspended(),
            profile.span("validation", version=weights_version.version, prompts=len(self._prompts)),
        ):
            async with anyio.create_task_group() as group:
                for number in range(len(self._prompts)):
                    group.start_soon(answer, number, group)
        if superseded:
            raise superseded[0]
        answered = [one for one in answers if isinstance(one, ScoredPrompt)]
        if not answered:
            failures = [one for one in answers if isinstance(one, DataError | UserCodeError)]
            message = (
                f"validation of version {weights_version.version}: no prompt of {len(self._prompts)} could be answered"
            )
            if all(map(is_permanent, failures)):
                raise DataError(f"{message}; the first error: {failures[0].message}", failures[0].cause)
            logger.error("%s, so it has no metrics; the first error: %s", message, failures[0].message)
            return None
        metrics = validation_metrics(answered)
        metrics["duration_s"] = self._parts.clock() - started
        examples = tuple(self._example(one) for one in answered[:NUM_EXAMPLES])
        return ValidationRecord(weights_version.version, step, metrics, examples, weights_version.lineage)

    async def _answer(self, name: str, prompt: Prompt, version: int) -> ScoredPrompt | DataError | UserCodeError:
        """Return the scored prompt, or the error that excludes it from the validation."""
        try:
            with profile.context(sample=name):
                with (
                    time_limit(name, self._parts.config.timeouts.sample_s) as limit,
                    self._parts.isolation.sample(limit) as sessions,
                ):
                    trajectories = await self._generate(name, prompt, version, sessions)
                scores = await score_trajectories(self._parts.scorer, prompt, trajectories)
        except (DataError, UserCodeError) as error:
            drop = self._parts.drops.decide(name, error)
            logger.warning("%s left out of the validation, %s: %s", name, drop.kind, error)
            return error
        self._parts.drops.note_success()
        return ScoredPrompt(prompt, trajectories, scores)

    async def _generate(self, name: str, prompt: Prompt, version: int, sessions: SampleSessions) -> list[Trajectory]:
        """Return trajectories that only `version` generated. Each attempt uses a new session, which may be routed to
        another replica."""
        rollout = self._parts.config.rollout
        params = sampling_params(
            rollout.val,
            prompt,
            response_length=rollout.response_length,
            max_model_len=self._parts.config.max_model_len,
            training=False,
        )
        for attempt in range(1, rollout.max_attempts + 1):
            session = name if attempt == 1 else f"{name}_try_{attempt}"
            request = SampleRequest(name, prompt, params, rollout.val.n)
            group = self._parts.groups(request, session=session, sessions=sessions, record_turns=self._count_turns)
            trajectories = await group.run()
            others = {other for one in trajectories for other in one.versions} - {version}
            if not others:
                return trajectories
        oldest = min(others)
        raise SupersededError(version, oldest if oldest < version else max(others))

    async def _count_turns(self, turns: Mapping[str, Turn]) -> None:
        self.generated_tokens += sum(len(turn.response_ids) for turn in turns.values())

    def _example(self, answer: ScoredPrompt) -> Mapping[str, Any]:
        return {
            "prompt": _last_message(answer.prompt),
            "response": self._decode(answer.trajectories[0].turn_ids()),
            "ground_truth": answer.prompt.ground_truth,
            "reward": answer.scores[0].reward,
        }


def validation_session(weights_version: WeightsVersion, number: int, attempt: int = 1) -> str:
    """Return the session of one validation prompt, which is unique within a Rollouter."""
    lineage, version = weights_version
    name = f"val_{version}_{number}" if lineage == 0 else f"val_{lineage}_{version}_{number}"
    return name if attempt == 1 else f"{name}_ask_{attempt}"


def validation_metrics(answers: Sequence[ScoredPrompt]) -> Metrics:
    """Return means over prompts of the means over their responses; `num_prompts` counts answered prompts."""
    rewards = np.array([np.mean([score.reward for score in one.scores]) for one in answers], dtype=np.float64)
    sources = np.array([one.prompt.data_source for one in answers])
    trajectories = [trajectory for one in answers for trajectory in one.trajectories]
    tokens = np.array([trajectory.num_sampled for trajectory in trajectories])
    metrics: Metrics = {"reward/mean": float(rewards.mean())}
    for source in sorted(set(sources.tolist())):
        metrics[f"reward/mean/{source}"] = float(rewards[sources == source].mean())
    scores = [score for one in answers for score in one.scores]
    for part in ("rule", "model"):  # with a reward model, see `rewards.scorer`
        if all(part in score.extra for score in scores):
            metrics[f"{part}/mean"] = float(np.mean([np.mean([s.extra[part] for s in one.scores]) for one in answers]))
    return metrics | {
        "response_tokens/mean": float(tokens.mean()),
        "response_tokens/max": float(tokens.max()),
        "length_share": float(np.mean([one.finish_reason is FinishReason.LENGTH for one in trajectories])),
        "num_prompts": float(len(answers)),
        **_conversation_metrics(trajectories),
    }


def _conversation_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    if not any(one.messages for one in trajectories):
        return {}
    return {
        "turns/mean": float(np.mean([len(one.turns) for one in trajectories])),
        "tool_calls/mean": float(np.mean([one.num_calls for one in trajectories])),
        "tool_call_share": float(np.mean([one.num_calls > 0 for one in trajectories])),
    }


def _last_message(prompt: Prompt) -> str:
    return str(prompt.messages[-1].get("content", "")) if prompt.messages else ""
