"""Parts of responses, as a replica tells of them while it generates. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncrl.types import FinishReason, Span, Turn


@dataclass(frozen=True, slots=True)
class Taken:
    """A replica's engine has all requests of a call: what ends that replica from now on may be of their making."""

    replica: str


@dataclass(frozen=True, slots=True)
class Told:
    """Events of a replica (`asyncrl.profiling`), which has no run directory to write them to."""

    replica: str
    events: Sequence[Mapping[str, Any]]
    sent: int | None = None
    """How many it has sent until now, with these (`Profiler.take`); None: it does not say."""


class Piece(NamedTuple):
    """What one request has made since the last piece of it."""

    number: int
    """The request's place in its call."""
    turn: Turn
    """Its finish reason is ABORTED as long as it goes on, since that is what it was if no more comes."""
    done: bool
    """The engine has ended it: it is complete, or was aborted."""


def cut(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    starts: Sequence[tuple[str, int]],
    first: int,
    finish: FinishReason,
) -> Turn:
    """The part of a response from token `first` on.

    Args:
        token_ids: Of the whole response.
        log_probs: As many.
        starts: The versions that sampled it, each with its first token, ascending; none if there are no tokens.
        first: What has been told before ends here.
        finish: Why it ends, or ABORTED.
    """
    ends = [*(start for _, start in starts), len(token_ids)][1:]
    return Turn(
        response_ids=np.asarray(token_ids[first:], dtype=np.int32),
        rollout_log_probs=np.asarray(log_probs[first:], dtype=np.float32),
        spans=tuple(
            Span(max(start, first) - first, int(version))
            for (version, start), end in zip(starts, ends, strict=True)
            if end > max(start, first)
        ),
        finish_reason=finish,
    )
