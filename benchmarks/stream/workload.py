"""What the benchmark requests: sessions of one or more turns, drawn from distributions or read from a trace. Pure.

A trace is a file of JSON lines, one per session, ordered or not:

    {"at_s": 0.25, "turns": [{"new_tokens": 310, "output_tokens": 82, "wait_s": 0}, {"new_tokens": 40, …}]}

`at_s` is when the session begins, in seconds after the start of the measurement (closed-loop arrivals ignore it).
`new_tokens` are the tokens that a turn adds to the conversation before it. `wait_s` is the time between the previous
response and the turn, such as that of a tool. Traces have lengths and no text, so that they can be shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 1 << 20
SIGMA = 0.8
"""Standard deviation of the logarithm of a length: the longest of 100 lengths is about 6 times their median."""


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One request."""

    new_tokens: int
    """Tokens that the turn adds to the conversation before it."""
    output_tokens: int
    """Length of the response."""
    wait_s: float = 0.0
    """Time between the previous response and this request."""


@dataclass(frozen=True, slots=True)
class TracedSession:
    """The requests of one conversation, one after another."""

    at_s: float
    """When it begins, in seconds after the start."""
    turns: tuple[TracedTurn, ...]

    @property
    def num_tokens(self) -> int:
        """The length of the conversation at its end."""
        return sum(turn.new_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The distributions of sessions. Lengths are log-normal, with these medians in tokens."""

    sessions: int
    turns: int
    prompt: int
    output: int
    longest: int
    """Limit of a conversation in tokens."""
    wait_s: float = 0.0


def draw_sessions(shape: WorkloadShape, rate: float | None, seed: int) -> list[TracedSession]:
    """Draw sessions. With a `rate` in sessions per second they arrive as a Poisson process, otherwise all at 0 s."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, shape.sessions)) if rate else np.zeros(shape.sessions)
    return [TracedSession(float(at), _draw_turns(shape, rng)) for at in arrivals]


def _draw_turns(shape: WorkloadShape, rng: np.random.Generator) -> tuple[TracedTurn, ...]:
    turns: list[TracedTurn] = []
    left = shape.longest
    for number in range(shape.turns):
        prompt, output = (
            max(1, round(length)) for length in rng.lognormal(np.log([shape.prompt, shape.output]), SIGMA)
        )
        prompt = min(prompt, left - 1)
        output = min(output, left - prompt)
        if prompt < 1 or output < 1:
            break
        turns.append(TracedTurn(prompt, output, shape.wait_s if number else 0.0))
        left -= prompt + output
    return tuple(turns)


def read_trace(path: Path) -> list[TracedSession]:
    """Read a trace, ordered by the beginning of its sessions.

    Raises:
        ValueError: a line is no session; the message has the file, the line and what is wrong.
    """
    sessions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            sessions.append(_session(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {why}; the format is in `--help`") from error
    if not sessions:
        raise ValueError(f"{path} has no session, so there is nothing to request")
    return sorted(sessions, key=lambda session: session.at_s)


def write_trace(path: Path, sessions: Sequence[TracedSession]) -> None:
    path.write_text("".join(json.dumps(asdict(session)) + "\n" for session in sessions), encoding="utf-8")


def _session(value: Any) -> TracedSession:
    if not isinstance(value, dict) or not isinstance(value["turns"], list) or not value["turns"]:
        raise ValueError("a session is an object with a list `turns` of at least one turn")
    turns = tuple(
        TracedTurn(
            _tokens(turn["new_tokens"], "new_tokens"),
            _tokens(turn["output_tokens"], "output_tokens"),
            _seconds(turn.get("wait_s", 0), "wait_s"),
        )
        for turn in value["turns"]
    )
    return TracedSession(_seconds(value.get("at_s", 0), "at_s"), turns)


def _tokens(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}={value!r} is no number of tokens from 1 to {MAX_TOKENS}")
    return value


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r} is no number of seconds")
    return float(value)
