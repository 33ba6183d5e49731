"""A user who knows the answer, and asks for another try while it is wrong: `class_name: retry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from asyncrl.config.sections.base import Positive, Section, Share
from rollouter.interactions.answer_check import AnswerCheck
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.settings import parse


class RetrySettings(Section):
    function: str = "exact_match"
    """A reward function, as in `reward.function`: it scores each answer."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    threshold: float = 1.0
    """An answer that scores as much is right."""
    max_tries: Positive = 3
    """Answers; the last one ends the trajectory, right or wrong."""
    wrong: Annotated[str, Field(min_length=1)] = "That is wrong, try again."
    """What it says to a wrong answer."""
    right_reward: float = 1.0
    """Of the turn with the right answer, times `discount` for each wrong one before it."""
    discount: Share = 1.0
    wrong_reward: float = 0.0
    """Of each turn with a wrong answer."""


class RetryUser(Environment):
    """Its rewards are of turns. The run's reward function scores the last answer besides: one of the two should weigh
    nothing, or a right answer counts twice.

    Metrics, once it ends: `tries`, and `solved`, 0 or 1.
    """

    def __init__(self, settings: RetrySettings, check: AnswerCheck) -> None:
        self._settings = settings
        self._check = check
        self._tries = 0
        self._context: EpisodeContext

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse(RetrySettings, config)
        return {"settings": settings, "check": AnswerCheck(settings.function, settings.kwargs)}

    async def reset(self, context: EpisodeContext) -> Sequence[Message]:
        self._context = context
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        settings = self._settings
        score = await self._check.score(text, self._context)
        self._tries += 1
        if score >= settings.threshold:
            reward = settings.right_reward * settings.discount ** (self._tries - 1)
            return Reply(done=True, reward=reward, metrics={"tries": self._tries, "solved": 1.0})
        if self._tries == settings.max_tries:
            return Reply(done=True, reward=settings.wrong_reward, metrics={"tries": self._tries, "solved": 0.0})
        return Reply(settings.wrong, reward=settings.wrong_reward)
