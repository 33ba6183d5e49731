"""Who answers the assistant: `reset ─▶ step ─▶ … ─▶ score ─▶ close`, one object per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.types import SampleId

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
    """What the environment says to a turn."""

    text: str = ""
    """The next user message; of no use with `done`."""
    done: bool = False
    """The trajectory ends here."""
    reward: float = 0.0
    """Of the turn that it answers."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """A simulated user, a game, a task with rules: it answers each turn of the assistant that calls no tool.

    One object is made per trajectory, from `InteractionConfig.config` as keyword arguments; `close` is called once,
    whatever happens. All methods have a deadline, and what blocks in them belongs in a thread. What they raise counts
    as `InteractionConfig.on_error` says, but for `DataError`, which drops the sample, and `ConfigError`, which stops
    the run.
    """

    @classmethod
    def prepare(cls, *args: Any, **config: Any) -> Mapping[str, Any]:
        """The keyword arguments of all objects, from `InteractionConfig.config`; called once in a run, at its start.

        Override it to check the configuration, or to make what all trajectories share: a client, a data base. What is
        returned and has an `aclose` method is closed when the run ends. `args` is always empty, as for `reset`.

        Raises:
            ConfigError: a value that cannot work. The key is put in front of the message.
        """
        return config

    async def reset(self, context: EpisodeContext, *args: Any, **kwargs: Any) -> Sequence[Message]:
        """Begin. Messages returned here are said before the model's first turn, behind the prompt.

        `kwargs`: the row's `extra_info.interaction_kwargs`, without `name`; name those that you take, and rows with
        others are refused. `args` is always empty: it lets type checkers accept that.
        """
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Answer the assistant's turn. `text`: what it said; `messages`: the conversation, that turn included."""
        raise NotImplementedError

    async def score(self) -> float | None:
        """What the whole trajectory is worth, when it has ended; None: this environment does not say."""
        return None

    async def close(self) -> None:
        """Give back what it took."""
