"""The tool interface: `create ─▶ execute ─▶ … ─▶ calc_reward ─▶ release`, once per trajectory that calls a tool."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from rollouter.user_code import TrajectoryContext

State = TypeVar("State")


ToolContext = TrajectoryContext


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """The result of a call. A tool may return a plain string instead of a response that has only a text."""

    text: str
    """The answer that the model reads."""
    reward: float = 0.0
    """Reward of the turn that made the call."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    """Whether this call ends the trajectory; the model then gets no answer."""


class ToolError(Exception):
    """Raise this in `execute` to explain a mistake to the model. It is not a failure of the tool and never ends the
    run; the call counts as `refused`."""


class BadArgumentsError(ToolError):
    """Raise this in `execute` for arguments that fit the schema but are wrong. The call counts as `bad_arguments`."""


class BaseTool(Generic[State]):
    """One tool of a run. All trajectories share the object, and `create` returns a state for each of them.

    Methods may be `async`; others run in a worker thread. All have the deadline of `ToolConfig`, except `release`,
    which has 10 s. `create` runs before a trajectory's first call; if it fails, that call fails, and the next call
    tries again. Calls of one turn run concurrently, on the same state. `release` is called exactly once for every
    state, even after a failure. A thread cannot be killed: if one still runs after a deadline or cancellation,
    `release` waits up to 10 s for it.

    If `calc_reward` raises, the sample fails according to `on_error`, or, if that is `message`, according to
    `reward.on_error`. `kwargs` are the row's
    `extra_info.tools_kwargs.<name>.{create,execute,calc_reward,release}_kwargs`.
    """

    name: ClassVar[str] = ""
    """The tool's name for the model. If empty, the name in the schema applies."""
    schema: ClassVar[Mapping[str, Any]] = {}
    """An OpenAI schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    def function_schema(self) -> Mapping[str, Any]:
        """Return the schema that the model sees: `schema` under `name`, unless a tool derives it from its settings."""
        function = self.schema.get("function", {})
        return {**self.schema, "function": {**function, "name": self.name or function.get("name", "")}}

    def create(self, context: ToolContext, **kwargs: Any) -> State | Awaitable[State]:
        """Return the state of one trajectory. A tool without state need not override it."""
        return cast("State", None)

    def execute(
        self, state: State, arguments: Mapping[str, Any], **kwargs: Any
    ) -> ToolResponse | str | Awaitable[ToolResponse | str]:
        """Execute one call. `arguments` have been checked against the schema.

        Raises:
            ToolError: a message for the model.
            Exception: any failure; it is handled according to `on_error`.
        """
        raise NotImplementedError

    def calc_reward(self, state: State, **kwargs: Any) -> float | Awaitable[float]:
        """Return this tool's reward for the trajectory, `scores[name]`. Called once, at the end."""
        return 0.0

    def release(self, state: State, **kwargs: Any) -> Awaitable[None] | None:
        """Free the resources of `create`."""
        return None
