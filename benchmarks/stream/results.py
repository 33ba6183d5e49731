"""The latencies of streamed responses and what a weight sync adds to them, as numbers and as a plot.

Times are seconds after the start of the measurement. Tokens arrive in chunks, and a chunk's tokens at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class StreamedChunk(NamedTuple):
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """One measured request."""

    sent: float
    chunks: tuple[StreamedChunk, ...]
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


class Round(NamedTuple):
    """One measurement of one server."""

    responses: Sequence[StreamedResponse]
    syncs: Sequence[SyncWindow]

    @property
    def duration_s(self) -> float:
        """The time from the first request to the last token."""
        ends = [response.chunks[-1].at for response in self.responses if response.chunks]
        return max(ends) - min(response.sent for response in self.responses) if ends else 0.0


def speed(rounds: Sequence[Round], bound: LatencyBound) -> dict[str, Any]:
    """Return the table row of one server's rates, which are medians over the rounds."""
    responses = [response for one in rounds for response in one.responses]
    speeds = [_rate(one.responses, one.duration_s) for one in rounds]
    good_speeds = [_rate(filter(bound.holds, one.responses), one.duration_s) for one in rounds]
    return {
        "requests": len(responses),
        "failed": len(responses) - len(_complete(rounds)),
        "tokens/s": statistics.median(speeds),
        "rounds": f"{min(speeds):,.0f} to {max(speeds):,.0f}",
        "good tokens/s": statistics.median(good_speeds),
        "good %": 100 * sum(map(bound.holds, responses)) / len(responses),
    }


def latency(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the table row of one server's latencies, which are those of the complete responses of all rounds."""
    complete = _complete(rounds)
    num_chunks = sum(len(response.chunks) for response in complete)
    return {
        **milliseconds("first token", [response.first_token_s for response in complete], (50, 99)),
        **milliseconds("per token", [time for one in complete if (time := one.token_s) is not None], (50, 99)),
        **milliseconds("gap", [gap for response in complete for gap in response.gaps], (99, 100)),
        "tokens a chunk": sum(response.tokens for response in complete) / num_chunks if num_chunks else None,
    }


def sync_summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the table row of the weight syncs of one server."""
    syncs = [sync for one in rounds for sync in one.syncs]
    costs = [cost for one in rounds for cost in sync_cost(*one)]
    return {
        "syncs": len(syncs),
        **milliseconds("publish to applied", [sync.end - sync.begin for sync in syncs], (50,)),
        "responses in flight": len(costs),
        **milliseconds("cost", costs, (50, 99, 100)),
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


def _complete(rounds: Sequence[Round]) -> list[StreamedResponse]:
    return [response for one in rounds for response in one.responses if response.chunks and not response.error]


def _rate(responses: Iterable[StreamedResponse], seconds: float) -> float:
    return sum(response.tokens for response in responses) / seconds if seconds > 0 else 0.0


_STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3", "figure.facecolor": "white",
}  # fmt: skip
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7A5C00", "#000000")
_RED = "#D55E00"


def draw(measured: Mapping[str, Sequence[Round]], path: Path) -> None:
    """Write a PNG: the latencies of each server in all rounds, and the gaps of its last round. Raises `OSError`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 3.0 + 1.6 * len(measured)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1 + len(measured), 2, height_ratios=[1.8, *[1] * len(measured)])
        first, token = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        for number, (name, rounds) in enumerate(measured.items()):
            style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.2}
            complete = _complete(rounds)
            _distribution(first, [response.first_token_s for response in complete], label=name, **style)
            _distribution(token, [time for one in complete if (time := one.token_s) is not None], label=name, **style)
            axes = figure.add_subplot(grid[1 + number, :])
            points = [(after.at, 1e3 * (after.at - before.at)) for one in rounds[-1].responses
                      for before, after in zip(one.chunks, one.chunks[1:], strict=False)]  # fmt: skip
            if points:
                at, gaps = zip(*points, strict=True)
                axes.scatter(at, gaps, s=2, color=style["color"])
            for sync in rounds[-1].syncs:
                axes.axvspan(sync.begin, sync.end, color=_RED, alpha=0.3, linewidth=0)
            axes.set_title(f"{name}: time between two chunks, ms; red: a weight sync")
            axes.set_xlabel("s")
        first.set_title("time to the first token, ms: share of requests")
        token.set_title("time per token, ms: share of requests")
        first.legend()
        figure.savefig(path, dpi=80)


def _distribution(axes: Any, seconds: Sequence[float], **style: Any) -> None:
    if seconds:
        axes.plot(
            1e3 * np.sort(seconds), np.arange(1, len(seconds) + 1) / len(seconds), drawstyle="steps-post", **style
        )
        axes.set_xscale("log")
