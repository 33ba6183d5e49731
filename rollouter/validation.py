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
from asyncrl.failures import BugError, DataError, UserCodeError
from asyncrl.ports import EngineFleet, Metrics, RewardScorer, Score, ValidationRecord
from asyncrl.types import FinishReason, Prompt, Turn
from asyncrl.waits import WaitBoard
from rollouter.drops import DropRule
from rollouter.group import generate_group
from rollouter.sampling import sampling_params
from rollouter.template import Decode

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 4


class ValidationPrompts(Protocol):
    """The validation set, by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...


class Answer(NamedTuple):
    """One validation prompt with its scored responses."""

    prompt: Prompt
    turns: Sequence[Turn]
    scores: Sequence[Score]


class Superseded(Exception):
    """Some replica serves a newer version than the one to validate, so the validation of that one cannot be had.

    Replicas are replaced when they fail, and a new one starts with the newest version there is.
    """

    def __init__(self, version: int, newer: int) -> None:
        super().__init__(f"validation of version {version}: replicas answer with version {newer}")
        self.newer = newer


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
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._fleet = fleet
        self._scorer = scorer
        self._decode = decode
        self._drops = drops
        self._waits = waits
        self._clock = clock
        self.generated_tokens = 0
        """Response tokens made for validation so far."""

    async def run(self, version: int, step: int) -> ValidationRecord:
        """Validate `version`. The caller applies no other version meanwhile.

        A prompt that a newer version has answered is asked again, up to `rollout.max_attempts` times: another replica
        may still serve `version`. Figures are of one version or none.

        Raises (the first alone, others inside an exception group):
            Superseded: replicas of a newer version keep answering.
            BugError: a token was made by an older version.
            InfraError, UserCodeError, DataError: as for training samples.
        """
        started = self._clock()
        answers: list[Answer | None] = [None] * len(self._prompts)
        limit = anyio.CapacityLimiter(self._config.rollout.max_concurrent_samples)
        superseded: list[Superseded] = []

        async def answer(number: int, group: TaskGroup) -> None:
            try:
                async with limit:
                    answers[number] = await self._answer(f"val_{version}_{number}", self._prompts[number], version)
            except Superseded as error:
                superseded.append(error)
                group.cancel_scope.cancel()

        with self._waits.waiting("validation"):
            async with anyio.create_task_group() as group:
                for number in range(len(self._prompts)):
                    group.start_soon(answer, number, group)
        if superseded:
            raise superseded[0]
        answered = [one for one in answers if one is not None]
        if not answered:
            raise DataError(f"validation of version {version}: no prompt of {len(self._prompts)} could be answered")
        metrics = validation_metrics(answered)
        metrics["duration_s"] = self._clock() - started
        return ValidationRecord(version, step, metrics, tuple(self._example(one) for one in answered[:NUM_EXAMPLES]))

    async def _answer(self, name: str, prompt: Prompt, version: int) -> Answer | None:
        """None: dropped, and logged."""
        try:
            turns = await self._generate(name, prompt, version)
            scores = await self._scorer.score(prompt, turns)
        except (DataError, UserCodeError) as error:
            drop = self._drops.failed(name, error)
            logger.warning("%s left out of the validation, %s: %s", name, drop.kind, error)
            return None
        self._drops.passed()
        return Answer(prompt, turns, scores)

    async def _generate(self, name: str, prompt: Prompt, version: int) -> list[Turn]:
        """Turns of `version` alone. Every try has a session of its own, which may lead it to another replica."""
        rollout = self._config.rollout
        params = sampling_params(
            rollout.val,
            prompt,
            response_length=rollout.response_length,
            max_model_len=self._config.max_model_len,
            training=False,
        )
        for attempt in range(1, rollout.max_attempts + 1):
            session = name if attempt == 1 else f"{name}_try_{attempt}"
            turns = await generate_group(self._fleet, session, prompt, params, n=rollout.val.n)
            self.generated_tokens += sum(len(turn.response_ids) for turn in turns)
            made_by = {span.version for turn in turns for span in turn.spans}
            if min(made_by) < version:
                raise BugError(f"{name}: tokens of version {min(made_by)} in the validation of version {version}")
            if made_by == {version}:
                return turns
        raise Superseded(version, max(made_by))

    def _example(self, answer: Answer) -> Mapping[str, Any]:
        return {
            "prompt": _question(answer.prompt),
            "response": self._decode(answer.turns[0].response_ids),
            "ground_truth": answer.prompt.ground_truth,
            "reward": answer.scores[0].reward,
        }


def validation_metrics(answers: Sequence[Answer]) -> Metrics:
    """Means over prompts of the means over their responses; `num_prompts` counts those that were answered."""
    rewards = np.array([np.mean([score.reward for score in one.scores]) for one in answers], dtype=np.float64)
    sources = np.array([one.prompt.data_source for one in answers])
    turns = [turn for one in answers for turn in one.turns]
    tokens = np.array([len(turn.response_ids) for turn in turns])
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
        "length_share": float(np.mean([turn.finish_reason is FinishReason.LENGTH for turn in turns])),
        "num_prompts": float(len(answers)),
    }


def _question(prompt: Prompt) -> str:
    """What was asked, for people: the last message."""
    return str(prompt.messages[-1].get("content", "")) if prompt.messages else ""
