"""Where a trajectory stands, and what may happen to it next. Pure.

    PENDING ─▶ RUNNING ─▶ TOOL_CALLING ─▶ RUNNING ─▶ … ─▶ COMPLETED(stop | length | tool_call | max_turns | timeout)
                  │  ▲                                    FAILED(aborted)
                  ▼  │
              INTERACTING      a user or environment answers a turn that calls no tool

An illegal transition raises `BugError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.failures import BugError
from asyncrl.types import FinishReason


class Phase(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"


LIVE = frozenset({Phase.PENDING, Phase.RUNNING, Phase.TOOL_CALLING, Phase.INTERACTING})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one trajectory may take."""

    max_assistant_turns: int
    max_user_turns: int
    max_model_len: int
    """Tokens of the prompt and everything behind it, in any one row."""
    max_response_tokens: int
    """Tokens of all turns, and of what was said between them."""
    has_environment: bool = False
    """Somebody answers turns that call no tool."""


class Machine:
    """One trajectory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.phase = Phase.PENDING
        self.finish_reason: FinishReason | None = None
        """Of the whole trajectory; None while it lives, or if it failed for another reason than `aborted`."""
        self.assistant_turns = 0
        self.user_turns = 0
        self.context_tokens = 0
        self.response_tokens = 0
        self._last_reason: FinishReason | None = None
        """There will be no further turn, for this reason; the last one may still be judged."""

    @property
    def room(self) -> int:
        """Most tokens of the next turn; not positive: there is no room for one."""
        limits = self.limits
        return min(limits.max_response_tokens - self.response_tokens, limits.max_model_len - self.context_tokens)

    def start(self, prompt_tokens: int) -> None:
        """PENDING → RUNNING."""
        self._require(Phase.PENDING)
        self.context_tokens = prompt_tokens
        self.phase = Phase.RUNNING

    def sampled(self, num_tokens: int, finish_reason: FinishReason, *, num_calls: int) -> None:
        """The policy has completed a turn: RUNNING → TOOL_CALLING, INTERACTING or COMPLETED.

        A turn that was cut by its length ends the trajectory: its calls may be cut as well. So do calls that the policy
        would have no turn left to read the results of. An environment judges every turn that calls no tool, the last
        one too.
        """
        self._require(Phase.RUNNING)
        if finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise BugError(f"a turn that ended with {finish_reason} is not complete")
        self.assistant_turns += 1
        self.response_tokens += num_tokens
        self.context_tokens += num_tokens
        last = self.assistant_turns >= self.limits.max_assistant_turns
        if finish_reason is FinishReason.LENGTH:
            self._last_reason = FinishReason.LENGTH
        if self.limits.has_environment and not num_calls:
            self.phase = Phase.INTERACTING
        elif self._last_reason is not None:
            self._complete(self._last_reason)
        elif num_calls:
            if last:
                self._complete(FinishReason.MAX_TURNS)
            else:
                self.phase = Phase.TOOL_CALLING
        else:
            self._complete(FinishReason.STOP)

    def answered(self, num_tokens: int, *, context_tokens: int | None = None) -> bool:
        """Tools or the user have answered: TOOL_CALLING or INTERACTING → RUNNING, or COMPLETED where no turn is left.

        Args:
            num_tokens: What the conversation grows by, to where the next turn begins.
            context_tokens: The template has rewritten history, and this is how long the new row's prompt is. What was
                said lies in that prompt, and does not count as response.

        Returns:
            Whether the answer is said to the policy: False where it has no turn left to read it.
        """
        self._require(Phase.TOOL_CALLING, Phase.INTERACTING)
        limits = self.limits
        if self._last_reason is not None:
            self._complete(self._last_reason)
            return False
        if self.phase is Phase.INTERACTING and (
            self.user_turns >= limits.max_user_turns or self.assistant_turns >= limits.max_assistant_turns
        ):
            self._complete(FinishReason.MAX_TURNS)
            return False
        response_tokens = self.response_tokens + (num_tokens if context_tokens is None else 0)
        context = self.context_tokens + num_tokens if context_tokens is None else context_tokens
        if response_tokens >= limits.max_response_tokens or context >= limits.max_model_len:
            self._complete(FinishReason.LENGTH)
            return False
        self.response_tokens, self.context_tokens = response_tokens, context
        self.user_turns += self.phase is Phase.INTERACTING
        self.phase = Phase.RUNNING
        return True

    def end(self) -> None:
        """A tool, or the environment, says that it is over: TOOL_CALLING or INTERACTING → COMPLETED."""
        self._require(Phase.TOOL_CALLING, Phase.INTERACTING)
        own = FinishReason.TOOL_CALL if self.phase is Phase.TOOL_CALLING else FinishReason.STOP
        self._complete(self._last_reason or own)

    def time_out(self) -> None:
        """Out of time: live → COMPLETED with the turns it has, or FAILED without any."""
        self._require(*LIVE)
        self.finish_reason = FinishReason.TIMEOUT
        self.phase = Phase.COMPLETED if self.assistant_turns else Phase.FAILED

    def abort(self) -> None:
        """Nobody wants it any more: → FAILED, wherever it stood."""
        self.finish_reason = FinishReason.ABORTED
        self.phase = Phase.FAILED

    def fail(self) -> None:
        """Something raised: → FAILED, wherever it stood."""
        self.phase = Phase.FAILED
        self.finish_reason = None

    def _complete(self, reason: FinishReason) -> None:
        self.phase, self.finish_reason = Phase.COMPLETED, reason

    def _require(self, *phases: Phase) -> None:
        if self.phase not in phases:
            raise BugError(
                f"a trajectory that is {self.phase} cannot do that; it would have to be {' or '.join(phases)}"
            )
