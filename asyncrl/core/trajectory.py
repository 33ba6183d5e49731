"""A trajectory: all turns of one conversation, before it is scored. Pure.

    messages   system, user ─▶ assistant ─▶ tool ─▶ assistant …        for users and reward functions
    rows       prompt_ids │ turn 0 │ tool's tokens │ turn 1 …          what the policy saw and sampled, token by token

A chat template may rewrite history when a message is added (reasoning of earlier turns is stripped, say). Then the
conversation continues in a new row whose prompt is the rewritten history, so that training uses only sampled tokens,
each after the context in which it was sampled.

`SampleRequest` asks for the trajectories of one sample; `Generated` is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncrl.core.types import FinishReason, LogProbs, Mask, Prompt, SampleId, Span, TokenIds, Turn

CallStatus = Literal["ok", "refused", "bad_json", "unknown_tool", "bad_arguments", "too_many", "raised", "timeout"]
"""Outcome of a tool call, which the model receives and metrics count. `refused`: the tool raised `ToolError`. `raised`
and `timeout` are failures of the tool itself, which the model receives only with `on_error: message`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of one turn, and its outcome."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    result: str = ""
    """The response that the model received, cut to `max_tool_response_length`."""
    status: CallStatus = "ok"
    reward: float = 0.0
    duration_s: float = 0.0
    """Time inside the tool. `wait_s` has the time spent waiting for a slot or for the tool's rate limit."""
    wait_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """One turn of the assistant, and where its tokens are."""

    row: int
    first_token: int
    """Position in the response of its row."""
    num_tokens: int
    finish_reason: FinishReason
    generate_s: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    reward: float = 0.0
    """Reward from its tool calls and from the user or environment that answered it."""
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trajectory:
    """One conversation."""

    rows: tuple[TokenRow, ...]
    turns: tuple[TurnInfo, ...]
    """At least one."""
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...] = ()
    """All messages, including the prompt's. Empty: the conversation is the prompt and one answer."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Rewards that tools and the environment gave to the whole conversation, by name (`calc_reward`, `score`)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics from tools, users and environment."""
    number: int | None = None
    """Number that the trajectory had in generation and has in profiling events. It differs from the position in the
    sample if surplus trajectories were requested. None: unknown, because this run did not generate it."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def versions(self) -> set[int]:
        """Return the versions of the weights that sampled its tokens."""
        return {span.version for row in self.rows for span in row.spans}

    def turn_ids(self, number: int = -1) -> TokenIds:
        """Return the tokens (int32) that the policy sampled in that turn; by default the last one."""
        turn = self.turns[number]
        return self.rows[turn.row].response_ids[turn.first_token : turn.first_token + turn.num_tokens]

    @property
    def num_calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """The trajectories to generate for one prompt."""

    sample_id: SampleId | str
    """In validation, the name of the prompt."""
    prompt: Prompt
    sampling: Mapping[str, Any]
    """Parameters of vLLM's SamplingParams."""
    n: int
    baseline: Mapping[str, Any] | None = None
    """Sampling parameters of one more trajectory (ReMax)."""
    extra: int = 0
    """Number of trajectories that may be generated beyond `n`; the first `n` that end count."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    """Settings of conversations and schemas of their tools; empty: there is one turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """The trajectories of one sample."""

    prompt: Prompt
    """The requested prompt, or with `repeat` the prompt of the record."""
    trajectories: tuple[Trajectory, ...]
    """`n` or more trajectories, followed by that of the baseline."""
    generate_s: float = 0.0
    has_baseline: bool = False
    """Whether the last trajectory is the baseline of ReMax."""
    replayed_from: int | None = None
    """The step of the record; None: they were generated."""
    substituted: bool = False
    """The record is of another step, or has another fingerprint."""
    knows_columns: bool = True
    """False: the record does not contain the prompt's columns, because JSON cannot represent them."""


def single_turn(prompt: Prompt, turn: Turn) -> Trajectory:
    """Return the trajectory of a single turn, in which the policy sampled every response token."""
    num_tokens = len(turn.response_ids)
    row = TokenRow(
        prompt_ids=prompt.prompt_ids,
        response_ids=turn.response_ids,
        response_mask=np.ones(num_tokens, dtype=np.bool_),
        rollout_log_probs=turn.rollout_log_probs,
        spans=turn.spans,
    )
    return Trajectory((row,), (TurnInfo(0, 0, num_tokens, turn.finish_reason),), turn.finish_reason)
