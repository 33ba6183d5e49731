"""Conversations for fuzzed runs. Messages between turns are constant, so that logged turns can be reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.core.trajectory import Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, Prompt, SampleId
from rollouter.agent.conversation import AskTurn, ConversationTokens, TurnRequest

REPLY = 3


class FuzzConversationAgent:
    """A `ConversationAgent` with up to `max_turns` turns, in one row or, with `forks`, each in a new row."""

    def __init__(self, max_turns: int, max_tokens: int, *, forks: bool) -> None:
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._forks = forks

    async def converse(self, sample_id: SampleId | str, number: int, prompt: Prompt, ask: AskTurn) -> Trajectory:
        tokens = ConversationTokens(prompt.prompt_ids)
        turns: list[TurnInfo] = []
        room = self._max_tokens
        while True:
            turn = await ask(TurnRequest(len(turns), tokens.context, room))
            row, first = tokens.add_turn(turn)
            turns.append(TurnInfo(row, first, len(turn.response_ids), turn.finish_reason))
            room -= len(turn.response_ids) + 1
            if len(turns) == self._max_turns or turn.finish_reason is FinishReason.LENGTH or room < 1:
                break
            if self._forks:
                tokens.fork([*prompt.prompt_ids, REPLY])
            else:
                tokens.add_unsampled([REPLY])
        return Trajectory(tokens.rows(), tuple(turns), turn.finish_reason, ({"role": "assistant", "content": ""},))

    async def __aenter__(self) -> FuzzConversationAgent:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def identity(self) -> Mapping[str, Any]:
        return {}

    def status(self) -> Mapping[str, float]:
        return {}

    def watch(self, waiting: Any) -> None:
        pass
