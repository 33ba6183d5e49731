"""What lies between an agent and the engines: it asks for turns, and gives whole trajectories. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt, SampleId, TokenIds, Turn


class TurnRequest(NamedTuple):
    """What the engines are asked for."""

    number: int
    """Of the turn, from 0."""
    context: TokenIds
    """int32: everything before it."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Texts that end the turn, besides those of the run."""


AskTurn = Callable[[TurnRequest], Awaitable[Turn]]
"""A complete turn behind that context."""


class Converser(Protocol):
    """Holds conversations, any number at a time: the built-in loop, or an agent of the user's."""

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """One trajectory, from the prompt to its end.

        Args:
            sample_id: Of training; of validation, its name.
            number: The trajectory's, within the sample.
            ask: Gets a turn from the engines.

        Raises:
            UserCodeError: code of the user's failed.
            DataError: it cannot be held; what `ask` raises.
        """

    def identity(self) -> Mapping[str, Any]:
        """What its conversations depend on besides prompt and sampling, as JSON values by name."""

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Tell of waits from now on: `waiting("tool")` is around each."""

    def status(self) -> Mapping[str, float]:
        """Cumulative counts of this process, by the names of their metrics (`rollouter/…`)."""
