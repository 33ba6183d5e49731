"""Names of requests: made on the Rollouter, and read by replicas to say whose a request is. Pure.

    sample_0_42/3          the first turn of trajectory 3, which is also its session's name with an agent
    sample_0_42/3.1        the turn after it
    sample_0_42/3.1-2      the second call to a replica about that turn
    sample_0_42/baseline   ReMax's

In validation the prompt's name stands in place of the sample's: `val_3_17/0`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BASELINE = "baseline"
"""The key of ReMax's greedy trajectory; the others' are their numbers."""
BASELINE_NUMBER = -1
"""What events call it."""

_ID = re.compile(rf"(.+)/(\d+|{BASELINE})(?:\.(\d+))?(?:-\d+)?", re.DOTALL)


class Whose(NamedTuple):
    """What a request is about; all None: its name does not say."""

    sample: str | None = None
    """In validation, the prompt's name there."""
    trajectory: int | None = None
    turn: int | None = None


def trajectory_id(name: str, key: str) -> str:
    """Of a trajectory's session and of its first turn; `name` is its group's."""
    return f"{name}/{key}"


def turn_id(session: str, number: int) -> str:
    """Of turn `number` of the trajectory `session`."""
    return session if number == 0 else f"{session}.{number}"


def call_id(request_id: str, number: int) -> str:
    """Of the call `number` about a turn: an engine may still hold the one before."""
    return f"{request_id}-{number}"


def number_of(key: str) -> int:
    """Of the trajectory with this key, as events have it."""
    return BASELINE_NUMBER if key == BASELINE else int(key)


def parse(request_id: str) -> Whose:
    """Whose turn it is."""
    match = _ID.fullmatch(request_id)
    if match is None:
        return Whose()
    sample, key, turn = match.groups()
    return Whose(sample, number_of(key), int(turn or 0))
