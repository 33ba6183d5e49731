"""The built-in environments that need neither an endpoint nor another package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from asyncrl.config.sections.base import ConfigSection, Positive, Share
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import ConfigError, DataError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.rewards.functions import load_reward_function
from rollouter.user_code import finite, parse_settings


class ScriptedSettings(ConfigSection):
    replies: tuple[str, ...] = ()
    """The replies, one per turn, for rows without `interaction_kwargs.replies`. The trajectory ends when the assistant
    has answered the last one."""
    stop_when: str | None = None
    """A regular expression: a turn of the assistant that contains a match ends the trajectory."""


class ScriptedUser(Environment):
    """A user that gives fixed replies in order: `class_name: scripted`."""

    def __init__(self, settings: ScriptedSettings) -> None:
        self._settings = settings
        self._replies: tuple[str, ...] = ()
        self._said = 0

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(ScriptedSettings, config)
        try:
            re.compile(settings.stop_when or "")
        except re.error as error:
            raise ConfigError(f"stop_when: {settings.stop_when!r} is not a regular expression: {error}") from error
        if "" in settings.replies:
            raise ConfigError("replies: one reply is empty, and the model cannot answer it; remove it")
        return {"settings": settings}

    async def reset(self, context: EpisodeContext, replies: Sequence[str] | None = None) -> Sequence[Message]:
        """Begin with the `replies` of the row, or else with those of the configuration.

        Raises:
            DataError: the row's `replies` are not a list of texts.
        """
        if replies is None:
            self._replies = self._settings.replies
            return ()
        if hasattr(replies, "tolist"):  # a column of lists in parquet
            replies = replies.tolist()
        listed = isinstance(replies, Sequence) and not isinstance(replies, str)
        if not listed or not all(isinstance(reply, str) and reply for reply in replies):
            raise DataError(f"interaction_kwargs.replies: {replies!r} is not a list of texts")
        self._replies = tuple(replies)
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        stop_when = self._settings.stop_when
        if self._said == len(self._replies) or (stop_when is not None and re.search(stop_when, text)):
            return Reply(done=True)
        self._said += 1
        return Reply(self._replies[self._said - 1])


class AnswerScorer:
    """Scores answers in the middle of a conversation with a reward function, named as in `reward.function`."""

    def __init__(self, function: str, kwargs: Mapping[str, Any]) -> None:
        """Load the function.

        Raises:
            ConfigError: there is no function of that name, or it cannot be called with the arguments.
            UserCodeError: the function's module raised when it was imported.
        """
        try:
            self._function = load_reward_function(RewardConfig(function=function, kwargs=dict(kwargs)))
        except ConfigError as error:
            # The loader's message begins with the section `reward`, which does not contain these keys.
            raise ConfigError(error.message.removeprefix("reward."), error.cause) from error
        if "trajectory" in self._function.arguments:
            raise ConfigError(
                f"function: {function} needs the whole trajectory, but it must score answers before the trajectory ends"
            )

    async def score(self, text: str, context: EpisodeContext) -> float:
        """Return the function's score of `text`.

        Raises:
            ValueError: the result is neither a finite number nor a mapping with one under `score`.
            Exception: whatever the function raises.
        """
        function = self._function
        row = {
            "data_source": context.data_source,
            "solution_str": text,
            "ground_truth": context.ground_truth,
            "extra_info": dict(context.extra_info),
        }
        async with function.slots:
            result = await function.invoke([row])
        if function.batch:
            result = result[0]
        value = finite(result.get("score") if isinstance(result, Mapping) else result)
        if value is None:
            raise ValueError(f"{function.name} returned {result!r}; expected a finite number, or a mapping with one")
        return value


class RetrySettings(ConfigSection):
    function: str = "exact_match"
    """The reward function that scores each answer, named as in `reward.function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    threshold: float = 1.0
    """The lowest score of a right answer."""
    max_tries: Positive = 3
    """Maximum number of answers; the last one ends the trajectory, right or wrong."""
    wrong: Annotated[str, Field(min_length=1)] = "That is wrong, try again."
    """The reply to a wrong answer."""
    right_reward: float = 1.0
    """Reward of the turn with the right answer, multiplied by `discount` for each earlier wrong answer."""
    discount: Share = 1.0
    wrong_reward: float = 0.0
    """Reward of each turn with a wrong answer."""


class RetryUser(Environment):
    """A user that knows the answer and asks for another try after each wrong one: `class_name: retry`.

    The user rewards turns, and the run's reward function also scores the last answer. Give one of the two a weight of
    0, or a right answer counts twice. The last turn has the metrics `tries` and `solved` (0 or 1).
    """

    def __init__(self, settings: RetrySettings, check: AnswerScorer) -> None:
        self._settings = settings
        self._check = check
        self._tries = 0
        self._context: EpisodeContext

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(RetrySettings, config)
        return {"settings": settings, "check": AnswerScorer(settings.function, settings.kwargs)}

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


class ReasoningGymSettings(ConfigSection):
    max_tries: Positive = 3
    """Maximum number of answers; the last one ends the trajectory, right or wrong."""
    tag: Annotated[str, Field(min_length=1)] = "answer"
    """The answer is the text of the last `<tag>…</tag>`, or else the whole turn."""
    full_score: float = 1.0
    """The lowest score of a right answer."""
    feedback: Annotated[str, Field(min_length=1)] = "That is not right. Try again."
    """The reply to any other answer; `{score}` becomes the task's score."""


class ReasoningGymEnvironment(Environment):
    """A reasoning-gym task with several tries: `class_name: reasoning_gym`, for the rows of `data.reasoning_gym`.

    The task's `score_answer` scores each turn, and the best of these scores is the trajectory's. The last turn has the
    metrics `tries`, `solved` (0 or 1) and `best_score`.
    """

    def __init__(self, settings: ReasoningGymSettings, check: AnswerScorer) -> None:
        self._settings = settings
        self._check = check
        self._tries = 0
        self._best: float | None = None
        self._context: EpisodeContext

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(ReasoningGymSettings, config)
        return {"settings": settings, "check": AnswerScorer("reasoning_gym", {"tag": settings.tag})}

    async def reset(self, context: EpisodeContext) -> Sequence[Message]:
        """Begin with the task entry of the row.

        Raises:
            DataError: the row does not belong to a reasoning-gym task.
        """
        entry = context.extra_info.get("entry")
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise DataError(
                "the row has no extra_info.entry with metadata.source_dataset; use rows of data.reasoning_gym, or "
                "rows that contain the task's entry"
            )
        self._context = context
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        settings = self._settings
        score = await self._check.score(text, self._context)
        self._tries += 1
        self._best = score if self._best is None else max(self._best, score)
        solved = score >= settings.full_score
        if not solved and self._tries < settings.max_tries:
            return Reply(settings.feedback.replace("{score}", f"{score:.2f}"))
        metrics = {"tries": float(self._tries), "solved": float(solved), "best_score": self._best}
        return Reply(done=True, metrics=metrics)

    async def score(self) -> float:
        """Return the best score of a turn, or 0.0 if there was no turn to score."""
        return self._best or 0.0
