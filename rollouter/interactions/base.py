"""The environment interface: `reset ─▶ step ─▶ … ─▶ score ─▶ close`, one object per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic

from asyncrl.config.import_path import nearest
from asyncrl.config.sections.base import ConfigSection
from asyncrl.core.failures import ConfigError
from asyncrl.core.types import SampleId

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The trajectory that an environment is for."""

    sample_id: SampleId | str
    trajectory: int
    messages: tuple[Message, ...] = ()
    """The prompt."""
    data_source: str = "default"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a turn."""

    text: str = ""
    """The next user message; ignored with `done`."""
    done: bool = False
    """End the trajectory."""
    reward: float = 0.0
    """Reward of the turn that it answers."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """A simulated user, a game or a task with rules that answers each turn of the assistant without tool calls.

    Each trajectory gets its own object, made from `InteractionConfig.config` as keyword arguments; `close` is called
    once, whatever happens. All methods have a deadline, and blocking work in them belongs in a thread. Exceptions are
    handled according to `InteractionConfig.on_error`, except `DataError`, which drops the sample, and `ConfigError`,
    which stops the run.
    """

    @classmethod
    def prepare(cls, *args: Any, **config: Any) -> Mapping[str, Any]:
        """Return the keyword arguments of all objects, from `InteractionConfig.config`; called once, at the start.

        Override it to check the configuration, or to create shared resources such as a client or a database. Returned
        values with an `aclose` method are closed when the run ends. `args` is always empty, as for `reset`.

        Raises:
            ConfigError: an invalid value. The message gets the key as a prefix.
        """
        return config

    async def reset(self, context: EpisodeContext, *args: Any, **kwargs: Any) -> Sequence[Message]:
        """Begin, and return messages that follow the prompt, before the model's first turn.

        `kwargs` are the row's `extra_info.interaction_kwargs` without `name`. Name the ones you accept, so that rows
        with others are refused. `args` is always empty: it lets type checkers accept such overrides.
        """
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Answer the assistant's turn `text`; `messages` is the conversation, including that turn."""
        raise NotImplementedError

    async def score(self) -> float | None:
        """Return the score of the whole trajectory after its end, or None."""
        return None

    async def close(self) -> None:
        """Free the environment's resources."""


S = TypeVar("S", bound=ConfigSection)


def parse(kind: type[S], config: Mapping[str, Any]) -> S:
    """Validate the `config` of a built-in environment.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type.
    """
    if unknown := [name for name in config if name not in kind.model_fields]:
        names = list(kind.model_fields)
        raise ConfigError(f"{unknown[0]}: there is no such key, so it would have no effect{nearest(unknown[0], names)}")
    try:
        return kind.model_validate(dict(config))
    except pydantic.ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            raise ConfigError(f"{key}: it is required here and was not given") from error
        raise ConfigError(f"{key}: {detail['input']!r} cannot be used: {detail['msg']}") from error
