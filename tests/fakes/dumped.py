"""Scored samples as the Rollouter dumps them: conversations whose tokens are the characters of their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.core.ports import Score
from asyncrl.core.trajectory import TokenRow, ToolCall, Trajectory, TurnInfo, single_turn
from asyncrl.core.types import FinishReason, Prompt, Replay, Row, Sample, SampleId, Span, TokenIds, Turn

PROMPT = "user: 6*7? "


def ids(text: str) -> TokenIds:
    return np.array([ord(letter) for letter in text], np.int32)


def decode(tokens: TokenIds) -> str:
    return "".join(map(chr, tokens.tolist()))


def prompt(text: str = PROMPT) -> Prompt:
    messages = ({"role": "system", "content": "Use the calculator."}, {"role": "user", "content": "6*7?"})
    return Prompt(ids(text), messages, "arithmetic", "42")


def calculation() -> Trajectory:
    """Return two turns with a call between them. The weights version changes from 3 to 4 within the first turn."""
    parts = ("calculate(6*7)", "[tool: 42]", "It is 42.")
    tokens = ids("".join(parts))
    mask = np.repeat([True, False, True], [len(part) for part in parts])
    log_probs = np.where(mask, -0.123456789, 0.0).astype(np.float32)
    row = TokenRow(ids(PROMPT), tokens, mask, log_probs, (Span(0, 3), Span(9, 4)))
    call = ToolCall("calculator", '{"expression": "6*7"}', "42", "ok", 0.25, 0.012, 0.5, {"calls": 1.0})
    turns = (
        TurnInfo(0, 0, 14, FinishReason.TOOL_CALL, 0.5, (call,), 0.25),
        TurnInfo(0, 24, 9, FinishReason.STOP, 0.25),
    )
    messages = (
        *prompt().messages,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator"}}]},
        {"role": "tool", "name": "calculator", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    )
    return Trajectory((row,), turns, FinishReason.STOP, messages, {"calc_reward": 1.0}, {"calculator/calls": 1.0})


def guess() -> Trajectory:
    """Return a trajectory of one turn, without messages."""
    answer = "It is 41."
    log_probs = np.full(len(answer), -1.0, np.float32)
    return single_turn(prompt(), Turn(ids(answer), log_probs, (Span(0, 4),), FinishReason.LENGTH))


SCORES = (Score(1.25, {"rule": 1.0}, (0.25, 0.0)), Score(0.0, {"rule": 0.0}))


def group() -> tuple[Trajectory, ...]:
    """Return the trajectories that `SCORES` belongs to."""
    return calculation(), guess()


def sample(
    index: int = 42, trajectories: Sequence[Trajectory] = (), *, epoch: int = 0, replay: Replay | None = None
) -> Sample:
    """Return a sample with these trajectories, by default those of `group`, as it goes to training."""
    rows = [
        Row(
            row.prompt_ids,
            row.response_ids,
            row.response_mask,
            row.rollout_log_probs,
            row.spans,
            trajectory.finish_reason,
            score.reward,
            score.extra,
            number,
        )
        for number, (trajectory, score) in enumerate(zip(trajectories or group(), SCORES, strict=False))
        for row in trajectory.rows
    ]
    rows[0] = replace(rows[0], turn_rewards=((13, 0.25),))
    return Sample(SampleId(epoch, index), tuple(rows), "arithmetic", 1.5, 0.05, replay=replay)
