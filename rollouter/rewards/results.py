"""What a reward function may return: a finite number, or a mapping with one, scores of turns and extras. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from asyncrl.failures import UserCodeError
from asyncrl.ports import Score

SHOWN = 120
"""Characters of a value that an error repeats."""


def score_of(result: Any, about: str, *, num_turns: int) -> Score:
    """What one trajectory got. Extras that are no finite numbers are left out: text among them is nobody's metric.

    Args:
        result: Of the function.
        about: Which call it was, for errors.
        num_turns: Turns of the assistant in the trajectory.

    Raises:
        UserCodeError: it is none.
    """
    if not isinstance(result, Mapping):
        return Score(_score(result, about))
    if "score" not in result:
        raise UserCodeError(f"{about} returned a mapping without 'score': {shown(result)}")
    turns = _turn_scores(result.get("turn_scores"), about, num_turns)
    extras = {str(key): finite(item) for key, item in result.items() if key not in ("score", "turn_scores")}
    extra = {key: item for key, item in extras.items() if item is not None}
    return Score(_score(result["score"], about) + sum(turns), extra, turns)


def listed(results: Any, about: str, *, length: int) -> Sequence[Any]:
    """What a function of a whole group returned, as a sequence: a list, or an array or tensor of one dimension.

    Raises:
        UserCodeError: it is none of that length.
    """
    items = _sequence(results)
    if items is None or len(items) != length:
        raise UserCodeError(f"{about} returned {shown(results)}; expected a list of {length} scores")
    return items


def finite(value: Any) -> float | None:
    """The value as float if it is one finite number: Python's, numpy's, or a tensor of one element."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _score(value: Any, about: str) -> float:
    number = finite(value)
    if number is None:
        raise UserCodeError(
            f"{about} returned {shown(value)}; expected a finite number, or a mapping with one under 'score'"
        )
    return number


def _turn_scores(value: Any, about: str, num_turns: int) -> tuple[float, ...]:
    if value is None:
        return ()
    items = _sequence(value)
    numbers = [finite(item) for item in items or ()]
    scores = tuple(number for number in numbers if number is not None)
    if items is None or len(scores) != len(numbers) or len(scores) != num_turns:
        raise UserCodeError(
            f"{about} returned turn_scores {shown(value)}; expected a list of {num_turns} finite numbers, one for each "
            "turn of the assistant"
        )
    return scores


def _sequence(value: Any) -> Sequence[Any] | None:
    if not isinstance(value, Sequence) and hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None
