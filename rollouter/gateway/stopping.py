"""Turns that end at a text which the request named. Pure.

The engine is told of the texts and stops by itself. A turn that comes out of the log, or from an engine that decodes
otherwise, is cut here, behind the token that completes the text. What is kept was sampled with the same log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from asyncrl.types import FinishReason, Turn


def cut_at(turn: Turn, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Turn:
    """`turn` up to the first of `stops`, with the finish reason `stop`; as it is, if none is in it."""
    ids = turn.response_ids.tolist()

    def found(number: int) -> bool:
        text = decode(ids[:number])
        return any(stop in text for stop in stops)

    if not stops or not found(len(ids)):
        return turn
    fewest, most = 1, len(ids)
    while fewest < most:
        middle = (fewest + most) // 2
        if found(middle):
            most = middle
        else:
            fewest = middle + 1
    return Turn(
        response_ids=np.asarray(ids[:most], dtype=np.int32),
        rollout_log_probs=turn.rollout_log_probs[:most],
        spans=tuple(span for span in turn.spans if span.first_token < most),
        finish_reason=FinishReason.STOP,
    )


def text_before(text: str, stops: Sequence[str]) -> str:
    """What clients are shown: the text up to the first stop."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
