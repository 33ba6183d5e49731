"""Answers the validation set with one version, concurrently with training generation and without the queue.

Validator.run     one version in a run: metrics for all sinks, and with `trainer.validation_data_dir` every answer
Validator.answer  any of the prompts, for `rollouter.validation.evaluation`
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.core.answer_statistics import Graded, prompt_figures, summarize
from asyncrl.core.failures import DataError, UserCodeError
from asyncrl.core.ports import Score, WeightsVersion
from asyncrl.core.records import Metrics, ValidationRecord
from asyncrl.core.trajectory import SampleRequest, Trajectory
from asyncrl.core.types import FinishReason, Prompt, Turn
from asyncrl.profiling import profile
from asyncrl.storage.answer_files import Answer, AnsweredPrompt, append_answers, prompt_digest
from asyncrl.storage.run_dir import replace_file
from rollouter.crash_isolation import SampleSessions, time_limit
from rollouter.drop_policy import is_permanent
from rollouter.prompts.chat_template import Decode
from rollouter.prompts.source import ValidationPrompts
from rollouter.requests import sampling_params
from rollouter.sample_runner import GenerationParts, score_trajectories
from skip import SkipManager

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4


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


Outcome = ScoredPrompt | DataError | UserCodeError
"""A scored prompt, or the error that excludes it."""


class Validator:
    """Generates and scores the validation set with `rollout.val` sampling, using the fleet and scorer of training."""

    def __init__(self, parts: GenerationParts, prompts: ValidationPrompts, decode: Decode) -> None:
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
        outcomes: dict[int, Outcome] = {}

        async def keep(number: int, outcome: Outcome) -> None:
            outcomes[number] = outcome

        await self.answer(weights_version, range(len(self._prompts)), keep, attempt=attempt)
        outcomes = dict(sorted(outcomes.items()))
        answered = [one for one in outcomes.values() if isinstance(one, ScoredPrompt)]
        if self._parts.config.trainer.validation_data_dir is not None:
            await self._dump(step, outcomes)
        if not answered:
            failures = [one for one in outcomes.values() if isinstance(one, DataError | UserCodeError)]
            message = (
                f"validation of version {weights_version.version}: no prompt of {len(self._prompts)} could be answered"
            )
            if all(map(is_permanent, failures)):
                raise DataError(f"{message}; the first error: {failures[0].message}", failures[0].cause)
            logger.error("%s, so it has no metrics; the first error: %s", message, failures[0].message)
            return None
        metrics = validation_metrics(answered, self._grade)
        metrics["duration_s"] = self._parts.clock() - started
        examples = tuple(self._example(one) for one in answered[:NUM_EXAMPLES])
        return ValidationRecord(weights_version.version, step, metrics, examples, weights_version.lineage)

    async def answer(
        self,
        weights_version: WeightsVersion,
        numbers: Iterable[int],
        on_outcome: Callable[[int, Outcome], Awaitable[None]],
        *,
        attempt: int = 1,
    ) -> None:
        """Generate and score the prompts with these numbers, and await `on_outcome` for each as soon as it is done.

        Raises as `run`, except for the last `DataError`.
        """
        limit = anyio.CapacityLimiter(self._parts.config.rollout.max_concurrent_samples)
        superseded: list[SupersededError] = []
        numbers = list(numbers)

        async def answer(number: int, group: TaskGroup) -> None:
            try:
                async with limit:
                    name = validation_session(weights_version, number, attempt)
                    outcome = await self._answer(name, self._prompts[number], weights_version.version)
                await on_outcome(number, outcome)
            except SupersededError as error:
                superseded.append(error)
                group.cancel_scope.cancel()

        with (
            self._parts.waits.waiting("validation"),
            SkipManager.suspended(),
            profile.span("validation", version=weights_version.version, prompts=len(numbers)),
        ):
            async with anyio.create_task_group() as group:
                for number in numbers:
                    group.start_soon(answer, number, group)
        if superseded:
            raise superseded[0]

    def describe(self, number: int, outcome: Outcome) -> AnsweredPrompt:
        """Return the line of a prompt in a file of answers. Blocking: decodes every answer."""
        prompt = self._prompts[number]
        described = partial(
            AnsweredPrompt, number, prompt_digest(prompt), prompt.data_source, prompt.messages, prompt.ground_truth
        )
        if not isinstance(outcome, ScoredPrompt):
            return described(error=outcome.message)
        return described(
            tuple(
                Answer(
                    **self._grade(trajectory, score)._asdict(),
                    text=self._decode(trajectory.turn_ids()),
                    extra=score.extra,
                    messages=trajectory.messages,
                )
                for trajectory, score in zip(outcome.trajectories, outcome.scores, strict=True)
            )
        )

    def _grade(self, trajectory: Trajectory, score: Score) -> Graded:
        return grade(trajectory, score, self._parts.config.rollout.val.pass_reward)

    async def _dump(self, step: int, outcomes: Mapping[int, Outcome]) -> None:
        """Write the answers and figures of this step; a failure is logged, as the run does not need them."""
        given = self._parts.config.trainer.validation_data_dir
        assert given is not None

        def write() -> None:
            directory = Path(given).expanduser()
            directory.mkdir(self._parts.config.directory_mode, parents=True, exist_ok=True)
            file = directory / f"step_{step:06d}.jsonl"
            file.unlink(missing_ok=True)  # of an attempt, or of steps that are undone
            described = [self.describe(number, outcome) for number, outcome in outcomes.items()]
            for one in described:
                append_answers(file, one)
            graded = [(one.data_source, [answer.graded for answer in one.answers]) for one in described if one.answers]
            text = json.dumps({"step": step, **(summarize(graded) if graded else {})}, ensure_ascii=False, indent=1)
            replace_file(file.with_suffix(".json"), text + "\n")

        try:
            await to_thread.run_sync(write, abandon_on_cancel=True)
        except OSError as error:
            reason = error.strerror or error
            logger.warning(
                "trainer.validation_data_dir=%s: the answers of step %d are not written there (%s); training goes on. "
                "Set it to another directory",
                given, step, reason,
            )  # fmt: skip

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


def grade(trajectory: Trajectory, score: Score, pass_reward: float) -> Graded:
    """Return the answer as the figures see it. It is correct if its `acc`, the name that verl's reward functions use,
    is above 0.5, and without `acc` if its reward is at least `pass_reward`."""
    acc = score.extra.get("acc")
    is_correct = score.reward >= pass_reward if acc is None else acc > 0.5
    return Graded(score.reward, is_correct, score.answer, trajectory.num_sampled, str(trajectory.finish_reason))


def validation_metrics(answers: Sequence[ScoredPrompt], graded: Callable[[Trajectory, Score], Graded]) -> Metrics:
    """Return means over prompts of the means over their responses; `num_prompts` counts answered prompts."""
    rewards = np.array([np.mean([score.reward for score in one.scores]) for one in answers], dtype=np.float64)
    by_source: dict[str, list[float]] = {}
    for one, reward in zip(answers, rewards.tolist(), strict=True):
        by_source.setdefault(one.prompt.data_source, []).append(reward)
    trajectories = [trajectory for one in answers for trajectory in one.trajectories]
    tokens = np.array([trajectory.num_sampled for trajectory in trajectories])
    metrics: Metrics = {"reward/mean": float(rewards.mean())}
    for source, own in sorted(by_source.items()):
        metrics[f"reward/mean/{source}"] = float(np.mean(own))
    metrics |= _figure_metrics(answers, graded)
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


def _figure_metrics(answers: Sequence[ScoredPrompt], graded: Callable[[Trajectory, Score], Graded]) -> Metrics:
    """Return `pass@<k>`, `best@<k>` and `maj@<k>`, and with several data sources `pass/<data_source>@<k>`, …; mean@n is
    `reward/mean`."""
    by_source: dict[str, list[Sequence[Graded]]] = {"": []}
    for one in answers:
        own = list(map(graded, one.trajectories, one.scores))
        by_source[""].append(own)
        by_source.setdefault(f"/{one.prompt.data_source}", []).append(own)
    if len(by_source) == 2:
        by_source.popitem()
    metrics: Metrics = {}
    for source, prompts in by_source.items():
        for name, values in prompt_figures(prompts).items():
            kind, _, k = name.partition("@")
            if kind != "mean":
                metrics[f"{kind}{source}@{k}"] = float(np.mean(values))
    return metrics


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
