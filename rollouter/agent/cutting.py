"""A text that is too long, in as many tokens as it may have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Side = Literal["left", "middle", "right"]

_CHARACTERS_PER_TOKEN = 128
"""More than any text has that is worth keeping: what is longer is cut without a look at the rest."""
_CUT_MARKS = ("…", "...", "")
"""For the place where a text is cut: the first one that the tokenizer can write."""


def cut_text(
    text: str,
    max_tokens: int,
    side: Side,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], Any],
) -> str:
    """`text` in at most `max_tokens`, the mark where it is cut included; characters stay whole.

    `side` is where it is cut: `left` keeps the end. Takes milliseconds for a text of kilobytes; no more for a longer
    one.
    """
    window = _CHARACTERS_PER_TOKEN * max_tokens
    if len(text) <= window and len(encode(text)) <= max_tokens:
        return text
    marks = ((mark, encode(mark)) for mark in _CUT_MARKS)
    mark = next(mark for mark, ids in marks if len(ids) <= max_tokens and decode(list(ids)) == mark)

    def keep(number: int) -> str:
        head = {"left": 0, "middle": (number + 1) // 2, "right": number}[side]
        return text[:head] + mark + text[len(text) - (number - head) :]

    # Fewer characters may take more tokens; whatever is kept has been counted.
    fits, most = 0, min(window, len(text) - 1)
    while fits < most:
        number = (fits + most + 1) // 2
        if len(encode(keep(number))) <= max_tokens:
            fits = number
        else:
            most = number - 1
    return keep(fits)
