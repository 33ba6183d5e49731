"""Runs the environment of one trajectory: creates it, limits its calls, checks its answers, and always closes it.

async with ─▶ reset ─▶ step ─▶ … ─▶ score ─▶ close
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from asyncrl.config.import_path import call_problem
from asyncrl.config.sections.rollout import InteractionConfig
from asyncrl.core.failures import AsyncRLError, ConfigError, DataError
from asyncrl.core.text import encodable, encodable_values
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.user_code import describe, finite, name_of, shorten, shown

T = TypeVar("T")

CLOSE_S = 10.0
"""Upper bound on the deadline of `close`, which also runs while the run is being cancelled."""
ROLES = frozenset({"system", "user", "assistant", "tool"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ConfiguredInteraction:
    """A checked entry of `rollout.multi_turn.interactions`."""

    key: str
    """The configuration key, such as `rollout.multi_turn.interactions[0]`."""
    config: InteractionConfig
    kind: type[Environment]
    arguments: Mapping[str, Any]
    calls: anyio.CapacityLimiter
    """Limits calls of `reset`, `step` and `score` over all trajectories."""


class InteractionSession:
    """An async context manager that creates the environment of one trajectory and closes it. Use it from one task.

    A `DataError` or `ConfigError` of the environment keeps its class. Any other exception becomes a `ToolFailedError`
    with the interaction's `on_error` and the original traceback.
    """

    def __init__(self, interaction: ConfiguredInteraction, context: EpisodeContext, kwargs: Mapping[str, Any]) -> None:
        """`kwargs` are the row's arguments for `reset`."""
        self._interaction = interaction
        self._context = context
        self._kwargs = kwargs
        self._environment: Environment

    @property
    def name(self) -> str:
        return self._interaction.config.name

    async def __aenter__(self) -> Self:
        """Create the environment.

        Raises:
            ToolFailedError: `__init__` of the environment raised.
        """
        try:
            self._environment = self._interaction.kind(**self._interaction.arguments)
        except Exception as error:
            raise self._raised("__init__", error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the environment, even under cancellation.

        Raises:
            ToolFailedError: `close` failed and there was no earlier error; after an earlier error it is only logged.
        """
        timeout_s = min(CLOSE_S, self._interaction.config.timeout_s)
        try:
            with anyio.CancelScope(shield=True):
                await self._within(timeout_s, "close", self._environment.close)
        except AsyncRLError as failure:
            if error is None:
                raise
            logger.warning("%s", failure)

    async def reset(self) -> Sequence[Message]:
        """Begin the episode, and return the messages to insert between the prompt and the model's first turn.

        Raises:
            DataError: `reset` does not accept the row's `interaction_kwargs`.
            ToolFailedError: `reset` raised, took too long or returned something other than messages.
        """
        reset = self._environment.reset
        if problem := call_problem(reset, self._context, **self._kwargs):
            raise DataError(
                f"extra_info.interaction_kwargs: {shown(dict(self._kwargs))} does not fit interaction {self.name!r}, "
                f"{problem}"
            )
        result = await self._call("reset", lambda: reset(self._context, **self._kwargs))
        return self._messages(result)

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Return the answer to the assistant's turn, which is the last of `messages`. Its numbers are finite floats.

        Raises:
            ToolFailedError: `step` raised, took too long or returned an invalid `Reply`.
        """
        return self._reply(await self._call("step", lambda: self._environment.step(text, messages)))

    async def score(self) -> float | None:
        """Return the finite score of the whole trajectory, or None if the environment gives none.

        Raises:
            ToolFailedError: `score` raised, took too long or returned something else.
        """
        result = await self._call("score", self._environment.score)
        if result is None:
            return None
        number = finite(result)
        if number is None:
            raise self._failed("score", f"returned {shown(result)}; expected a finite number or None")
        return number

    async def _call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        # The deadline starts once the limiter lets the call run.
        async with self._interaction.calls:
            return await self._within(self._interaction.config.timeout_s, method, call)

    async def _within(self, timeout_s: float, method: str, call: Callable[[], Awaitable[T]]) -> T:
        with anyio.move_on_after(timeout_s) as deadline:
            try:
                return await call()
            except Exception as error:
                raise self._raised(method, error) from error
        assert deadline.cancelled_caught
        raise self._failed(
            method,
            f"did not return within {timeout_s:g} s; raise {self._interaction.key}.timeout_s, or bound its work",
        )

    def _raised(self, method: str, error: Exception) -> AsyncRLError:
        if isinstance(error, DataError | ConfigError):
            return type(error)(f"{self._about(method)}: {error.message}", error.cause)
        wrapped = ToolFailedError.wrap(f"{self._about(method)} raised {describe(error)}", error)
        wrapped.on_error = self._interaction.config.on_error
        return wrapped

    def _failed(self, method: str, what: str) -> ToolFailedError:
        return ToolFailedError(f"{self._about(method)} {what}", on_error=self._interaction.config.on_error)

    def _about(self, method: str) -> str:
        return f"interaction {self.name!r}, {self._interaction.kind.__name__}.{method}"

    def _messages(self, result: Any) -> Sequence[Message]:
        if result is None:  # a reset without a return
            return ()
        if isinstance(result, str | Mapping) or not isinstance(result, Sequence):
            raise self._failed("reset", f"returned {shown(result)}; expected a list of messages")
        for message in result:
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or role not in ROLES:
                what = f"returned the message {shown(message)}; expected a mapping with a role of {sorted(ROLES)}"
                raise self._failed("reset", what)
            content = message.get("content")
            parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
            if not (isinstance(content, str) or parts):
                what = f"returned the message {shown(message)}; its content must be a text or a list of parts"
                raise self._failed("reset", what)
        try:
            return tuple(encodable_values(list(result)))
        except ValueError as error:
            raise self._failed("reset", f"returned a message that cannot be used: {error}") from error

    def _reply(self, result: Any) -> Reply:
        if not isinstance(result, Reply):
            raise self._failed("step", f"returned {shown(result)}; expected a rollouter.interactions.Reply")
        if not isinstance(result.text, str):
            raise self._failed("step", f"returned the text {shown(result.text)}; expected a str")
        if not result.done and not result.text:
            raise self._failed("step", "returned neither a text nor done, so the conversation cannot continue")
        reward = finite(result.reward)
        if reward is None:
            raise self._failed("step", f"returned the reward {shown(result.reward)}; expected a finite number")
        if not isinstance(result.metrics, Mapping):
            raise self._failed("step", f"returned the metrics {shown(result.metrics)}; expected a mapping")
        metrics: dict[str, float] = {}
        for key, value in result.metrics.items():
            name, number = name_of(key), finite(value)
            if number is None:
                what = f"returned the metric {shorten(name)} = {shown(value)}; expected a finite number"
                raise self._failed("step", what)
            metrics[name] = number
        return Reply(encodable(result.text), done=bool(result.done), reward=reward, metrics=metrics)
