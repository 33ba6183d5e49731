"""The latencies of streamed responses, and what a weight sync adds to them. Pure.

Times are seconds after the start of the measurement. Tokens arrive in chunks, and a chunk's tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Chunk(NamedTuple):
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """One measured request."""

    sent: float
    chunks: tuple[Chunk, ...]
    """Those with tokens."""
    error: str = ""
    """Why it failed; its chunks are those that arrived before."""

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def first_token_s(self) -> float:
        return self.chunks[0].at - self.sent

    @property
    def token_s(self) -> float | None:
        """The mean time per token after the first chunk; None if all tokens came with it."""
        rest = self.tokens - self.chunks[0].tokens
        return (self.chunks[-1].at - self.chunks[0].at) / rest if rest else None

    @property
    def gaps(self) -> list[float]:
        """The times between chunks."""
        return [after.at - before.at for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class SyncWindow(NamedTuple):
    """A weight sync, from its publication until every replica served the version."""

    version: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """A response counts as good if it keeps these limits in seconds; None: no limit."""

    first_token_s: float | None = None
    token_s: float | None = None

    def holds(self, response: StreamedResponse) -> bool:
        if response.error or not response.chunks:
            return False
        first, token = response.first_token_s, response.token_s
        return (self.first_token_s is None or first <= self.first_token_s) and (
            self.token_s is None or token is None or token <= self.token_s
        )


def summary(responses: Sequence[StreamedResponse], bound: LatencyBound) -> dict[str, Any]:
    """Return the table row of one server. Rates count from the first request to the last token."""
    complete = [response for response in responses if response.chunks and not response.error]
    ends = [response.chunks[-1].at for response in responses if response.chunks]
    duration = max(ends) - min(response.sent for response in responses) if ends else 0.0
    good = [response for response in complete if bound.holds(response)]
    firsts = [response.first_token_s for response in complete]
    per_token = [time for response in complete if (time := response.token_s) is not None]
    gaps = [gap for response in complete for gap in response.gaps]
    tokens = sum(response.tokens for response in responses)
    return {
        "requests": len(responses),
        "failed": len(responses) - len(complete),
        "tokens/s": _rate(tokens, duration),
        "good tokens/s": _rate(sum(response.tokens for response in good), duration),
        "good %": 100 * len(good) / len(responses) if responses else None,
        **milliseconds("first token", firsts, (50, 99)),
        **milliseconds("per token", per_token, (50, 99)),
        **milliseconds("gap", gaps, (99, 100)),
        "tokens a chunk": sum(response.tokens for response in complete)
        / max(1, sum(len(one.chunks) for one in complete)),
    }


def sync_cost(responses: Sequence[StreamedResponse], syncs: Sequence[SyncWindow]) -> list[float]:
    """Return, for each sync and each response that streams across a part of it, how much longer the response's longest
    gap at that time was than its median gap elsewhere, in seconds."""
    costs: list[float] = []
    for sync in syncs:
        for response in responses:
            during: list[float] = []
            elsewhere: list[float] = []
            for before, after in zip(response.chunks, response.chunks[1:], strict=False):
                overlaps = before.at < sync.end and after.at > sync.begin
                (during if overlaps else elsewhere).append(after.at - before.at)
            if during and elsewhere:
                costs.append(max(0.0, max(during) - float(np.median(elsewhere))))
    return costs


def milliseconds(name: str, seconds: Sequence[float], percentiles: Sequence[int]) -> dict[str, float | None]:
    """Return percentiles in milliseconds by column name; 100 is the worst."""
    names = [f"{name} {'worst' if one == 100 else f'p{one}'} ms" for one in percentiles]
    values = 1e3 * np.percentile(seconds, percentiles) if len(seconds) else [None] * len(names)
    return {name: None if value is None else float(value) for name, value in zip(names, values, strict=True)}


def _rate(number: int, seconds: float) -> float | None:
    return number / seconds if seconds > 0 else None
