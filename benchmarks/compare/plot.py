"""Draw trained tokens per second of each system, and its reward over time, one column for each workload."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.compare.results import OURS, REWARD, Comparison
from benchmarks.soak.plot import COLOURS, STYLE


def draw(comparison: Comparison, path: Path) -> None:
    """Write a PNG; bars are medians, lines on them reach from the slowest to the fastest round. Raises `OSError`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 3.2 * len(comparison.runs), 6), layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots(2, len(comparison.runs), squeeze=False)
        for column, (workload, by_peer) in enumerate(comparison.runs.items()):
            bars, curves = axes[0, column], axes[1, column]
            for number, (peer, runs) in enumerate(by_peer.items()):
                colour = COLOURS[number % len(COLOURS)]
                rates = [run.trained_tokens_s for run in runs]
                if not rates:
                    bars.text(number, 0, "failed", ha="center", va="bottom", rotation=90, color="#D55E00")
                    continue
                middle = median(rates)
                reach = [[middle - min(rates)], [max(rates) - middle]]
                bars.bar(number, middle, 0.7, yerr=reach, color=colour, alpha=1.0 if peer == OURS else 0.6)
                for run in runs:
                    curves.plot(*zip(*run.rewards, strict=True), color=colour, linewidth=1.0)
            bars.set_xticks(range(len(by_peer)), list(by_peer), rotation=30)
            bars.set_title(f"{workload}: trained tokens/s")
            curves.axhline(REWARD, color="#999999", linewidth=0.8, linestyle="--")
            curves.set_title("reward")
            curves.set_xlabel("seconds since the start")
        figure.savefig(path, dpi=100)
