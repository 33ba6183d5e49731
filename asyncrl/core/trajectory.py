"""A trajectory: all turns of one conversation, as generated and not yet scored. Pure.

    messages   system, user ─▶ assistant ─▶ tool ─▶ assistant …        for people and reward functions
    rows       prompt_ids │ turn 0 │ tool's tokens │ turn 1 …          what the policy saw and sampled, token by token

A chat template may rewrite history when a message is added (reasoning of earlier turns is stripped, say). Then the
conversation goes on in a new row whose prompt is the rewritten history, so that nobody trains on tokens that were never
sampled, nor on sampled tokens behind a context that they were not sampled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncrl.types import FinishReason, LogProbs, Mask, Prompt, Span, TokenIds, Turn

CallStatus = Literal["ok", "refused", "bad_json", "unknown_tool", "bad_arguments", "too_many", "raised", "timeout"]
"""What became of a tool call, told to the model and counted. `refused`: the tool raised `ToolError`. `raised` and
`timeout` are the tool's own failures, and told only if `on_error` says so."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of one turn, and what became of it."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    result: str = ""
    """What the model was told, cut to `max_tool_response_length`."""
    status: CallStatus = "ok"
    reward: float = 0.0
    duration_s: float = 0.0
    """In the tool; waits for a place or the tool's rate are in `wait_s`."""
    wait_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """One turn of the assistant, and where its tokens are."""

    row: int
    first_token: int
    """In the response of its row."""
    num_tokens: int
    finish_reason: FinishReason
    generate_s: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    reward: float = 0.0
    """From its tool calls and from the user or environment that answered it."""
    user_s: float = 0.0
    """Seconds that the user or environment took to answer."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Arrays of `L` response tokens; see `types.Row`."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: Mask
    rollout_log_probs: LogProbs
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One conversation."""

    rows: tuple[TokenRow, ...]
    turns: tuple[TurnInfo, ...]
    """At least one."""
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...] = ()
    """All of them, the prompt's too. Empty: there is nothing but the prompt and one answer."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """What tools and environment gave the whole of it, by name (`calc_reward`, `score`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What tools, users and environment tell besides."""
    number: int | None = None
    """It was asked for, and events name it, by this one; its place in the sample is another where more trajectories
    were asked for than count. None: nobody knows, as it was not made now."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def versions(self) -> set[int]:
        """Of the weights that sampled its tokens."""
        return {span.version for row in self.rows for span in row.spans}

    def turn_ids(self, number: int = -1) -> TokenIds:
        """int32: what the policy sampled in that turn; by default the last one."""
        turn = self.turns[number]
        return self.rows[turn.row].response_ids[turn.first_token : turn.first_token + turn.num_tokens]

    @property
    def num_calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)


def single_turn(prompt: Prompt, turn: Turn, generate_s: float = 0.0) -> Trajectory:
    """The trajectory of one turn: every response token was sampled by the policy."""
    num_tokens = len(turn.response_ids)
    row = TokenRow(
        prompt_ids=prompt.prompt_ids,
        response_ids=turn.response_ids,
        response_mask=np.ones(num_tokens, dtype=np.bool_),
        rollout_log_probs=turn.rollout_log_probs,
        spans=turn.spans,
    )
    return Trajectory((row,), (TurnInfo(0, 0, num_tokens, turn.finish_reason, generate_s),), turn.finish_reason)
