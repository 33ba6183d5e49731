"""A user who says what is written down: `class_name: scripted`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.sections.base import Section
from asyncrl.failures import ConfigError, DataError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.settings import parse


class ScriptedSettings(Section):
    replies: tuple[str, ...] = ()
    """What it says, one a turn, for rows that bring no `interaction_kwargs.replies`. After the last one has been
    answered, the trajectory ends."""
    stop_when: str | None = None
    """A regular expression: a turn of the assistant in which it is found ends the trajectory."""


class ScriptedUser(Environment):
    """Says its replies in order, whatever the assistant says."""

    def __init__(self, settings: ScriptedSettings) -> None:
        self._settings = settings
        self._replies: tuple[str, ...] = ()
        self._said = 0

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse(ScriptedSettings, config)
        try:
            re.compile(settings.stop_when or "")
        except re.error as error:
            raise ConfigError(f"stop_when: {settings.stop_when!r} is not a regular expression: {error}") from error
        if "" in settings.replies:
            raise ConfigError("replies: one of them is empty, and nobody can answer it; take it out")
        return {"settings": settings}

    async def reset(self, context: EpisodeContext, replies: Sequence[str] | None = None) -> Sequence[Message]:
        """`replies`: of this row, in place of the configuration's.

        Raises:
            DataError: they are no list of texts.
        """
        if replies is None:
            self._replies = self._settings.replies
            return ()
        if hasattr(replies, "tolist"):  # a column of lists in parquet
            replies = replies.tolist()
        listed = isinstance(replies, Sequence) and not isinstance(replies, str)
        if not listed or not all(isinstance(reply, str) and reply for reply in replies):
            raise DataError(f"interaction_kwargs.replies: {replies!r} is no list of texts")
        self._replies = tuple(replies)
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        stop_when = self._settings.stop_when
        if self._said == len(self._replies) or (stop_when is not None and re.search(stop_when, text)):
            return Reply(done=True)
        self._said += 1
        return Reply(self._replies[self._said - 1])
