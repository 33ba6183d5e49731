"""Draws the latencies of each server, and the gaps between chunks over time with the weight syncs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.stream.statistics import StreamedResponse, SyncWindow

_STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3", "figure.facecolor": "white",
}  # fmt: skip
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7A5C00", "#000000")
_RED = "#D55E00"

Measured = Mapping[str, tuple[Sequence[StreamedResponse], Sequence[SyncWindow]]]
"""Responses and weight syncs by server."""


def draw(measured: Measured, path: Path) -> None:
    """Write a PNG. Raises `OSError`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 3.0 + 1.6 * len(measured)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1 + len(measured), 2, height_ratios=[1.8, *[1] * len(measured)])
        first, token = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        for number, (name, (responses, syncs)) in enumerate(measured.items()):
            style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.2}
            complete = [response for response in responses if response.chunks and not response.error]
            _distribution(first, [response.first_token_s for response in complete], label=name, **style)
            _distribution(token, [time for one in complete if (time := one.token_s) is not None], label=name, **style)
            axes = figure.add_subplot(grid[1 + number, :])
            points = [(after.at, 1e3 * (after.at - before.at)) for one in responses
                      for before, after in zip(one.chunks, one.chunks[1:], strict=False)]  # fmt: skip
            if points:
                at, gaps = zip(*points, strict=True)
                axes.scatter(at, gaps, s=2, color=style["color"])
            for sync in syncs:
                axes.axvspan(sync.begin, sync.end, color=_RED, alpha=0.3, linewidth=0)
            axes.set_title(f"{name}: time between two chunks, ms; red: a weight sync")
            axes.set_xlabel("s")
        first.set_title("time to the first token, ms: share of requests")
        token.set_title("time per token, ms: share of requests")
        first.legend()
        figure.savefig(path, dpi=100)


def _distribution(axes: Any, seconds: Sequence[float], **style: Any) -> None:
    if seconds:
        axes.plot(
            1e3 * np.sort(seconds), np.arange(1, len(seconds) + 1) / len(seconds), drawstyle="steps-post", **style
        )
        axes.set_xscale("log")
