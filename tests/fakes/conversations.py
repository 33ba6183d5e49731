"""Trajectories for tests of scores: a sum, with or without calls of a calculator, and with one token per character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.core.trajectory import TokenRow, ToolCall, Trajectory, TurnInfo, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, TokenIds, Turn

QUESTION: Mapping[str, Any] = {"role": "user", "content": "17+5?"}
CALL: Mapping[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 17, "b": 5}}},
    ],
}
RESULT: Mapping[str, Any] = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "22"}


def ids(text: str) -> TokenIds:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def decode(tokens: TokenIds) -> str:
    return "".join(map(chr, tokens.tolist()))


def prompt(**changes: Any) -> Prompt:
    fields: dict[str, Any] = {"messages": (QUESTION,), "data_source": "sums", "ground_truth": "22"}
    return Prompt(ids("17+5?"), **{**fields, **changes})


def answer(text: str) -> Trajectory:
    """Return a trajectory of one turn with this text."""
    turn = Turn(ids(text), np.zeros(len(text), dtype=np.float32), (Span(0, 0),), FinishReason.STOP)
    return single_turn(prompt(), turn)


def dialogue(
    *texts: str,
    rewards: Sequence[float] = (),
    scores: Mapping[str, float] | None = None,
    reason: str = "stop",
) -> Trajectory:
    """Return a trajectory with these turns of the assistant. Each but the last calls `add`, which returns 22."""
    messages: list[Mapping[str, Any]] = [QUESTION]
    turns: list[TurnInfo] = []
    tokens, mask = "", []
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        calls = () if is_last else (ToolCall("add", '{"a": 17, "b": 5}', "22"),)
        finish = FinishReason.STOP if is_last else FinishReason.TOOL_CALL
        reward = rewards[number] if rewards else 0.0
        turns.append(TurnInfo(0, len(tokens), len(text), finish, calls=calls, reward=reward))
        messages += [{"role": "assistant", "content": text}] if is_last else [CALL, RESULT]
        between = "" if is_last else "=22;"
        tokens += text + between
        mask += [True] * len(text) + [False] * len(between)
    row = TokenRow(
        prompt_ids=prompt().prompt_ids,
        response_ids=ids(tokens),
        response_mask=np.array(mask, dtype=np.bool_),
        rollout_log_probs=np.zeros(len(tokens), dtype=np.float32),
        spans=(Span(0, 0),),
    )
    return Trajectory((row,), tuple(turns), FinishReason(reason), tuple(messages), dict(scores or {}))
