"""A reasoning-gym task with several tries: `class_name: reasoning_gym`, for the rows of `data.reasoning_gym`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import anyio
from anyio import to_thread
from pydantic import Field

from asyncrl.config.sections.base import Positive, Section
from asyncrl.failures import DataError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.settings import parse
from rollouter.rewards.builtin import reasoning_gym


class GymSettings(Section):
    max_tries: Positive = 3
    """Answers; the last one ends the trajectory, right or wrong."""
    tag: Annotated[str, Field(min_length=1)] = "answer"
    """The answer stands in the last `<tag>…</tag>`, or is the whole turn if there is none."""
    full_score: float = 1.0
    """An answer that the task scores so high is right."""
    feedback: Annotated[str, Field(min_length=1)] = "That is not right. Try again."
    """What is said to any other answer; `{score}` becomes the task's score."""


class GymTask(Environment):
    """Scores each turn by the task's own `score_answer`. The whole is worth the best of them.

    Metrics, once it ends: `tries`, `solved` (0 or 1) and `best_score`.
    """

    def __init__(self, settings: GymSettings) -> None:
        self._settings = settings
        self._tries = 0
        self._best: float | None = None
        self._context: EpisodeContext
        # Calls are bounded by the interaction's max_concurrency; an abandoned thread must not take a place for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        return {"settings": parse(GymSettings, config)}

    async def reset(self, context: EpisodeContext) -> Sequence[Message]:
        """
        Raises:
            DataError: the row is of no reasoning-gym task.
        """
        entry = context.extra_info.get("entry")
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise DataError(
                "the row has no extra_info.entry with metadata.source_dataset; take rows of data.reasoning_gym, or "
                "rows that carry the task's entry"
            )
        self._context = context
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        settings = self._settings
        score = await to_thread.run_sync(
            partial(self._task_score, text), abandon_on_cancel=True, limiter=self._unbounded
        )
        self._tries += 1
        self._best = score if self._best is None else max(self._best, score)
        solved = score >= settings.full_score
        if not solved and self._tries < settings.max_tries:
            return Reply(settings.feedback.replace("{score}", f"{score:.2f}"))
        metrics = {"tries": float(self._tries), "solved": float(solved), "best_score": self._best}
        return Reply(done=True, metrics=metrics)

    async def score(self) -> float:
        """0.0 if there was no turn to score."""
        return self._best or 0.0

    def _task_score(self, text: str) -> float:
        context = self._context
        scores = reasoning_gym(
            data_sources=[context.data_source],
            solution_strs=[text],
            ground_truths=[context.ground_truth],
            extra_infos=[context.extra_info],
            tag=self._settings.tag,
        )
        return scores[0]
