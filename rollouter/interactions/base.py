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
