"""The environment interface: `reset ─▶ step ─▶ … ─▶ score ─▶ close`, one object per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouter.user_code import TrajectoryContext

Message = Mapping[str, Any]


EpisodeContext = TrajectoryContext


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a turn."""

    text: str = ""
    """The next user message; ignored with `done`."""
    done: bool = False
    """Whether the trajectory ends."""
    reward: float = 0.0
    """The reward of the turn that this reply answers."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """A simulated user, a game or a task with rules that answers each turn of the assistant without tool calls.

    Each trajectory gets a new object, with the result of `prepare` as keyword arguments. `close` is called exactly
    once, even after a failure. All async methods have a deadline; run blocking work in a thread. Exceptions are
    handled according to `InteractionConfig.on_error`, except `DataError`, which drops the sample, and `ConfigError`,
    which stops the run.
    """

    @classmethod
    def prepare(cls, *args: Any, **config: Any) -> Mapping[str, Any]:
        """Return the keyword arguments for every object, from `InteractionConfig.config`. Called once, at the start.

        Override it to check the configuration, or to create shared resources such as a client or a database. Returned
        values with an `aclose` method are closed when the run ends. `args` is always empty, as for `reset`.

        Raises:
            ConfigError: a value is invalid. The caller prefixes the message with the key.
        """
        return config

    async def reset(self, context: EpisodeContext, *args: Any, **kwargs: Any) -> Sequence[Message]:
        """Begin the episode, and return messages to insert between the prompt and the model's first turn.

        `kwargs` are the row's `extra_info.interaction_kwargs` without `name`. Override with named parameters, so that
        rows with unknown arguments are refused. `args` is always empty: it lets type checkers accept such overrides.
        """
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Answer the assistant's turn `text`; `messages` is the conversation up to and including that turn."""
        raise NotImplementedError

    async def score(self) -> float | None:
        """Return the score of the whole trajectory after its end, or None."""
        return None

    async def close(self) -> None:
        """Free the environment's resources."""
