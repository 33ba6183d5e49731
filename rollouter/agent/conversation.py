"""The agent interface, and the state machine and tokens of a conversation. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.failures import BugError
from asyncrl.core.trajectory import TokenRow, Trajectory
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, TokenIds, Turn, merge_spans


class TurnRequest(NamedTuple):
    """A request to the engines for one turn."""

    number: int
    """The turn's number in its conversation, from 0."""
    context: TokenIds
    """int32: all tokens before the turn."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    """Texts that end the turn, in addition to the run's."""
    progress: Callable[[Turn], None] | None = None
    """Called with the unfinished turn, whose finish reason is ABORTED, each time the engine has reported tokens. The
    engine then reports them as they are sampled."""


AskTurn = Callable[[TurnRequest], Awaitable[Turn]]
"""Returns a complete turn that continues the context of the request."""


class ConversationAgent(Protocol):
    """Runs any number of conversations at a time; implemented by the built-in agent and by external agents."""

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        """Run one conversation from the prompt to its end.

        Args:
            sample_id: The sample's id; in validation the name of its prompt.
            number: The trajectory's number within the sample.
            ask: Gets a turn from the engines.

        Raises:
            UserCodeError: user code failed.
            DataError: the prompt cannot be used.
            Others: whatever `ask` raises.
        """

    def identity(self) -> Mapping[str, Any]:
        """Return everything that conversations depend on besides prompt and sampling, as JSON values by name."""

    def watch(self, waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Report waits from now on, by entering a context such as `waiting("tool")` around each of them."""

    def status(self) -> Mapping[str, float]:
        """Return cumulative counts of this process by the names of their metrics (`rollouter/…`)."""


class TrajectoryPhase(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


LIVE = frozenset(
    {TrajectoryPhase.PENDING, TrajectoryPhase.RUNNING, TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING}
)


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """Limits of one trajectory."""

    max_assistant_turns: int
    max_user_turns: int
    max_model_len: int
    """Maximum number of tokens of prompt and response in any one row."""
    max_response_tokens: int
    """Maximum number of tokens of all turns and of the answers between them."""
    has_environment: bool = False
    """Whether an environment answers turns that call no tool."""


class TrajectoryStateMachine:
    """Phase, counts and finish reason of one trajectory.

        PENDING ─▶ RUNNING ─▶ TOOL_CALLING ─▶ RUNNING ─▶ … ─▶ COMPLETED(stop | length | tool_call | max_turns | timeout)
                      │  ▲                                    FAILED(aborted | timeout)
                      ▼  │
                  INTERACTING      a user or environment answers a turn that calls no tool

    An illegal transition raises `BugError`.
    """

    def __init__(self, limits: TrajectoryLimits) -> None:
        self.limits = limits
        self.phase = TrajectoryPhase.PENDING
        self.finish_reason: FinishReason | None = None
        """None while the trajectory runs, or if an exception ended it."""
        self.assistant_turns = 0
        self.user_turns = 0
        self.context_tokens = 0
        self.response_tokens = 0
        self._last_reason: FinishReason | None = None
        """The reason why there will be no further turn; the environment may still judge the last one."""

    @property
    def room(self) -> int:
        """The maximum number of tokens of the next turn; zero or negative if there is no room for one."""
        limits = self.limits
        return min(limits.max_response_tokens - self.response_tokens, limits.max_model_len - self.context_tokens)

    def start(self, prompt_tokens: int) -> None:
        """The prompt is complete: PENDING → RUNNING."""
        self._require(TrajectoryPhase.PENDING)
        self.context_tokens = prompt_tokens
        self.phase = TrajectoryPhase.RUNNING

    def sampled(self, num_tokens: int, finish_reason: FinishReason, *, num_calls: int) -> None:
        """The policy has completed a turn: RUNNING → TOOL_CALLING, INTERACTING or COMPLETED.

        A turn that was truncated at its token limit ends the trajectory: its calls may be truncated too. Calls also end
        it if the policy has no turn left to read their results. An environment judges every turn that calls no tool,
        including the last one.
        """
        self._require(TrajectoryPhase.RUNNING)
        if finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise BugError(f"a turn that ended with {finish_reason} is not complete")
        self.assistant_turns += 1
        self.response_tokens += num_tokens
        self.context_tokens += num_tokens
        last = self.assistant_turns >= self.limits.max_assistant_turns
        if finish_reason is FinishReason.LENGTH:
            self._last_reason = FinishReason.LENGTH
        if self.limits.has_environment and not num_calls:
            self.phase = TrajectoryPhase.INTERACTING
        elif self._last_reason is not None:
            self._complete(self._last_reason)
        elif num_calls:
            if last:
                self._complete(FinishReason.MAX_TURNS)
            else:
                self.phase = TrajectoryPhase.TOOL_CALLING
        else:
            self._complete(FinishReason.STOP)

    def answered(self, num_tokens: int, *, rewritten: bool = False) -> bool:
        """Tools or the user have answered: TOOL_CALLING or INTERACTING → RUNNING, or COMPLETED if no turn is left.

        Args:
            num_tokens: Tokens that the answer adds, up to where the next turn begins.
            rewritten: The template has rewritten history: `num_tokens` is the length of the new row's prompt, which
                holds the answer, so the answer does not count as response.

        Returns:
            Whether the policy has a turn left to read the answer.
        """
        self._require(TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING)
        limits = self.limits
        if self._last_reason is not None:
            self._complete(self._last_reason)
            return False
        if self.phase is TrajectoryPhase.INTERACTING and (
            self.user_turns >= limits.max_user_turns or self.assistant_turns >= limits.max_assistant_turns
        ):
            self._complete(FinishReason.MAX_TURNS)
            return False
        response_tokens = self.response_tokens + (0 if rewritten else num_tokens)
        context_tokens = num_tokens + (0 if rewritten else self.context_tokens)
        if response_tokens >= limits.max_response_tokens or context_tokens >= limits.max_model_len:
            self._complete(FinishReason.LENGTH)
            return False
        self.response_tokens, self.context_tokens = response_tokens, context_tokens
        self.user_turns += self.phase is TrajectoryPhase.INTERACTING
        self.phase = TrajectoryPhase.RUNNING
        return True

    def end(self) -> None:
        """A tool or the environment ends the trajectory: TOOL_CALLING or INTERACTING → COMPLETED."""
        self._require(TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING)
        own = FinishReason.TOOL_CALL if self.phase is TrajectoryPhase.TOOL_CALLING else FinishReason.STOP
        self._complete(self._last_reason or own)

    def time_out(self) -> None:
        """The time limit has passed: any live phase → COMPLETED with the turns so far, or FAILED without any."""
        self._require(*LIVE)
        self.finish_reason = FinishReason.TIMEOUT
        self.phase = TrajectoryPhase.COMPLETED if self.assistant_turns else TrajectoryPhase.FAILED

    def abort(self) -> None:
        """The trajectory was cancelled: any phase → FAILED."""
        self.finish_reason = FinishReason.ABORTED
        self.phase = TrajectoryPhase.FAILED

    def fail(self) -> None:
        """An exception ended the trajectory: any phase → FAILED."""
        self.phase = TrajectoryPhase.FAILED
        self.finish_reason = None

    def _complete(self, reason: FinishReason) -> None:
        self.phase, self.finish_reason = TrajectoryPhase.COMPLETED, reason

    def _require(self, *phases: TrajectoryPhase) -> None:
        if self.phase not in phases:
            raise BugError(
                f"a trajectory that is {self.phase} cannot make this transition; it must be {' or '.join(phases)}"
            )


@dataclass(slots=True)
class _OpenRow:
    prompt_ids: TokenIds
    pieces: list[_Piece] = field(default_factory=list)
    spans: tuple[Span, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    def trim(self) -> None:
        """Drop the answers after the last turn."""
        while self.pieces and not self.pieces[-1].sampled:
            self.pieces.pop()

    def closed(self) -> TokenRow:
        ids, log_probs, sampled = zip(*self.pieces, strict=True)
        return TokenRow(
            prompt_ids=self.prompt_ids,
            response_ids=np.concatenate(ids),
            response_mask=np.repeat(sampled, [len(one) for one in ids]),
            rollout_log_probs=np.concatenate(log_probs),
            spans=self.spans,
        )


class _Piece(NamedTuple):
    """Tokens of one turn of the policy, or the tokens between two turns."""

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sampled: bool


class ConversationTokens:
    """The rows of one trajectory; the last row is open. Arrays passed in or returned are never changed."""

    def __init__(self, prompt_ids: TokenIds) -> None:
        self._rows = [_OpenRow(prompt_ids)]

    @property
    def context(self) -> TokenIds:
        """int32: the tokens that precede the next turn."""
        row = self._rows[-1]
        return np.concatenate([row.prompt_ids, *(piece.ids for piece in row.pieces)], dtype=np.int32)

    def add_turn(self, turn: Turn) -> tuple[int, int]:
        """Add a sampled turn. Return its row, and the position of its first token in that row's response."""
        row = self._rows[-1]
        first = row.num_tokens
        row.spans = merge_spans(row.spans, first, turn.spans)
        row.pieces.append(_Piece(turn.response_ids, turn.rollout_log_probs, True))
        return len(self._rows) - 1, first

    def add_unsampled(self, ids: Sequence[int]) -> None:
        """Add tokens that were not sampled: masked, with log-probs of 0, in the span of the tokens before them."""
        piece = _Piece(np.asarray(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32), False)
        self._rows[-1].pieces.append(piece)

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """Begin a new row with another prompt, because the template has rewritten history."""
        self._rows[-1].trim()
        self._rows.append(_OpenRow(np.asarray(prompt_ids, dtype=np.int32)))

    def rows(self) -> tuple[TokenRow, ...]:
        """Return all rows in which the policy has sampled tokens; a row ends with its last turn."""
        for row in self._rows:
            row.trim()
        return tuple(row.closed() for row in self._rows if row.num_tokens)
