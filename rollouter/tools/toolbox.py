"""The calls that one trajectory makes to its tools.

    arguments ─▶ JSON? a tool? do they fit? ─▶ a record? ─▶ the tool (`rollouter.tools.used`) ─▶ outcome
                           │ no                    └───────────────────────────────────────────▶ outcome
                           └─▶ a message to the model

A call that a record answers runs nothing of its tool. If a later one has no record, the tool first makes up for the
calls that it has missed, so that its state is what it would have been.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import anyio

from asyncrl.failures import BugError, DataError, UserCodeError
from asyncrl.profiling import profile
from asyncrl.trajectory import ToolCall
from asyncrl.types import SampleId
from rollouter.tools.base import ToolContext
from rollouter.tools.calling import Caller
from rollouter.tools.schemas import BadJsonError, parse_arguments, shorten
from rollouter.tools.used import Ready, Tally, UsedTool
from rollouter.user_code import nearest
from skip import SkipManager
from skip.stages import ToolOutcome

CALC_REWARD = "calc_reward"
"""Stands for the arguments in the record of that call, which is of turn -1; a model's are JSON, and never this."""
_METHODS = ("create", "execute", "calc_reward", "release")


class Called(NamedTuple):
    """One call, as it is kept."""

    call: ToolCall
    done: bool
    """The trajectory ends with it."""


class ToolSession:
    """The calls of one trajectory; on leaving it, all that its tools have made is released."""

    def __init__(self, caller: Caller, tally: Tally, ready: Mapping[str, Ready], context: ToolContext) -> None:
        self._caller = caller
        self._tally = tally
        self._ready = ready
        self._context = context
        self._kwargs = {name: _rows_kwargs(context, name) for name in ready}
        self._used: dict[str, UsedTool] = {}
        self._calls: list[tuple[str, int, str]] = []
        """Tool, turn and arguments of each call that got as far as the tool, or its record."""
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.release()

    async def call(self, name: str, arguments: str, *, turn: int) -> Called:
        """Make one call of turn `turn`; calls of one turn may be made at once.

        Args:
            arguments: JSON, as the model wrote it.

        Raises:
            ToolFailedError: the tool raised or took too long, and `on_error` is `drop` or `stop`.
            UserCodeError: what the tool gave is no result.
        """
        if self._closed:
            raise BugError(f"{self._context.sample_id}: {name} is called after its trajectory has ended")
        refusal = self._refusal(name, arguments)
        outcome = refusal or await self._outcome(name, arguments, turn)
        if refusal is not None or outcome.replayed:
            _note_unmade(name, outcome)
        return Called(self._kept(name, arguments, outcome), outcome.done)

    def malformed(self, text: str) -> ToolCall:
        """A call that could not be read from what the model wrote."""
        told = f"Error: this is no tool call: {shorten(text)}"
        outcome = ToolOutcome(told, status="bad_json")
        _note_unmade("", outcome)
        return self._kept("", text, outcome)

    def refused(self, name: str, arguments: str, limit: int) -> ToolCall:
        """A call that is not made, for there are more than `limit` in its turn."""
        told = f"Error: this call was not made: at most {limit} are made in one turn"
        outcome = ToolOutcome(told, status="too_many")
        _note_unmade(name, outcome)
        return self._kept(name, arguments, outcome)

    async def scores(self) -> Mapping[str, float]:
        """What the trajectory earned with each tool that it used, by name (`calc_reward`). One whose state could not be
        made has none.

        Raises:
            ToolFailedError, UserCodeError: it raised, took too long, or is no finite number.
        """
        scores: dict[str, float] = {}
        for name, used in self._used.items():
            if not used.scores:
                scores[name] = 0.0
                continue
            outcome = await self._recorded(name, CALC_REWARD, turn=-1)
            if outcome.status == "ok":
                scores[name] = outcome.reward
        return scores

    async def release(self) -> None:
        """Release every state that was made, once; each tool has `RELEASE_S`, and what it raises is only logged."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for used in self._used.values():
                    group.start_soon(used.release)

    # ------------------------------------------------------------------------------------------------ one call

    def _refusal(self, name: str, arguments: str) -> ToolOutcome | None:
        """What the model did wrong; None: nothing, and the tool can be called."""
        ready = self._ready.get(name)
        if ready is None:
            told = f"Error: there is no tool {shorten(name)!r}{nearest(name, list(self._ready))}"
            return ToolOutcome(told, status="unknown_tool")
        try:
            parsed = parse_arguments(arguments)
        except BadJsonError as error:
            return ToolOutcome(f"Error: the arguments of {name} are no JSON object: {error}", status="bad_json")
        try:
            problem = ready.loaded.schema.problem(parsed)
        except Exception as error:
            raise UserCodeError.wrap(f"the schema of tool {name} cannot be used: {error}", error) from error
        if problem:
            return ToolOutcome(f"Error: the arguments of {name} do not fit: {problem}", status="bad_arguments")
        return None

    async def _outcome(self, name: str, arguments: str, turn: int) -> ToolOutcome:
        if name not in self._used:
            kwargs = self._kwargs[name]
            self._used[name] = UsedTool(self._ready[name], self._context, kwargs, self._caller, self._tally)
        self._calls.append((name, turn, arguments))
        outcome = await self._recorded(name, arguments, turn)
        if outcome.replayed:
            self._used[name].missed(arguments)
        return outcome

    async def _recorded(self, name: str, arguments: str, turn: int) -> ToolOutcome:
        """One call to the tool, or the record of it; validation has none."""
        context = self._context
        if not isinstance(context.sample_id, SampleId):
            return await self._run(name, arguments)
        # Calls of one turn are made at once, in no order.
        before = sorted([when, what] for tool, when, what in self._calls if tool == name and (turn < 0 or when < turn))
        row = [context.messages, context.data_source, context.ground_truth, context.extra_info]
        background = {"before": before, "prompt": row}
        return await self._recordable(context.sample_id, context.trajectory, turn, name, arguments, background)

    @SkipManager.annotate(role="tool")
    async def _recordable(
        self,
        sample_id: SampleId,
        trajectory: int,
        turn: int,
        name: str,
        arguments: str,
        background: Mapping[str, Any],
    ) -> ToolOutcome:
        return await self._run(name, arguments)

    async def _run(self, name: str, arguments: str) -> ToolOutcome:
        used = self._used[name]
        return await (used.score() if arguments == CALC_REWARD else used.call(arguments))

    def _kept(self, name: str, arguments: str, outcome: ToolOutcome) -> ToolCall:
        self._tally.add(outcome.status, outcome.duration_s)
        # A lone surrogate, which JSON can write and no tokenizer reads, would end the trajectory.
        text = outcome.text.encode(errors="replace").decode()
        return ToolCall(
            name=name,
            arguments=arguments,
            result=text,
            status=outcome.status,
            reward=outcome.reward,
            duration_s=outcome.duration_s,
            wait_s=outcome.wait_s,
            metrics=outcome.metrics,
        )


def _note_unmade(name: str, outcome: ToolOutcome) -> None:
    """The event of a call that did not get as far as a tool."""
    profile.note("tool.execute", tool=shorten(name), status=outcome.status, wait_s=0.0)


def _rows_kwargs(context: ToolContext, name: str) -> Mapping[str, Mapping[str, Any]]:
    """The row's keyword arguments for the methods of a tool. A parquet file has None wherever another row has a value.

    Raises:
        DataError: they are none.
    """
    key = "extra_info.tools_kwargs"
    of_row = _mapping(context.extra_info.get("tools_kwargs"), key)
    of_tool = _mapping(of_row.get(name), f"{key}.{name}")
    known = {f"{method}_kwargs": method for method in _METHODS}
    for one in of_tool:
        if one not in known:
            raise DataError(f"{key}.{name}: there is nothing that takes {one!r}{nearest(one, list(known))}")
    return {method: _mapping(of_tool.get(one), f"{key}.{name}.{one}") for one, method in known.items()}


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{key} = {shorten(repr(value))}: it has arguments by name; write a mapping")
    return {str(name): item for name, item in value.items() if item is not None}
