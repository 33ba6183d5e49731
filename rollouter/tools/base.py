"""What a tool is: `create ─▶ execute ─▶ … ─▶ calc_reward ─▶ release`, once per trajectory that calls it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from asyncrl.types import SampleId

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The trajectory that calls a tool."""

    sample_id: SampleId | str
    """Of training; validation's is the name of its prompt."""
    trajectory: int
    """Among those of the sample, from 0."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt."""
    data_source: str = "default"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What a call gives. A plain string stands for one with nothing but a text."""

    text: str
    """For the model."""
    reward: float = 0.0
    """Of the turn that made the call."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    done: bool = False
    """The trajectory ends with this call; nobody answers it."""


class ToolError(Exception):
    """Raise it in `execute` to tell the model what it did wrong; no failure of the tool, and never the run's end. The
    call counts as `refused`."""


class BadArgumentsError(ToolError):
    """The arguments fit the schema and are wrong all the same; the call counts as `bad_arguments`."""


class BaseTool(Generic[State]):
    """One tool of a run. Its object is shared by all trajectories; what belongs to one of them is its state.

    Every method may be `async`, or not: then it runs in a worker thread. All have the deadlines of `ToolConfig`, but
    for `release`, which has 10 s. The first call that a trajectory makes is preceded by `create`, whose failure is the
    call's, and which the next call then tries again; for every state that it made, `release` is called once, whatever
    happens. Calls of one turn run at once, on one state. A thread cannot be killed: where a deadline or a cancellation
    leaves one at work, `release` waits for it, up to 10 s. A `calc_reward` that raises fails the sample, as `on_error`
    says; with `message`, as `reward.on_error`.
    `kwargs` are the row's `extra_info.tools_kwargs.<name>.{create,execute,calc_reward,release}_kwargs`.
    """

    name: ClassVar[str] = ""
    """What the model calls it; empty: the name in the schema."""
    schema: ClassVar[Mapping[str, Any]] = {}
    """OpenAI's: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    def function_schema(self) -> Mapping[str, Any]:
        """What the model is shown; here `schema` under `name`. Other tools make it of their configuration."""
        function = self.schema.get("function", {})
        return {**self.schema, "function": {**function, "name": self.name or function.get("name", "")}}

    def create(self, context: ToolContext, **kwargs: Any) -> State | Awaitable[State]:
        """The state of one trajectory. A tool without state need not have this method."""
        return cast("State", None)

    def execute(
        self, state: State, arguments: Mapping[str, Any], **kwargs: Any
    ) -> ToolResponse | str | Awaitable[ToolResponse | str]:
        """One call. `arguments` have been checked against the schema.

        Raises:
            ToolError: the model is told.
            Exception: as `on_error` says.
        """
        raise NotImplementedError

    def calc_reward(self, state: State, **kwargs: Any) -> float | Awaitable[float]:
        """What the whole trajectory earned with this tool; asked once, when it has ended. It is `scores[name]`."""
        return 0.0

    def release(self, state: State, **kwargs: Any) -> Awaitable[None] | None:
        """Give back what `create` took."""
        return None
