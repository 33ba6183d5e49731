"""Draws simulated settings as a PNG. Blocking; takes about a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from asyncrl.core.failures import ConfigError
from asyncrl.simulate.result import SimulationResult
from asyncrl.simulate.sweep import SimulatedSetting

Values = NDArray[np.float64]
_BLUE, _ORANGE, _GREEN, _PALE = "#0072B2", "#E69F00", "#009E73", "#D9D9D9"
_NUM_TIMELINES = 4
_BINS = 400


def draw(done: Sequence[SimulatedSetting], file: Path) -> None:
    """Write a figure with the time per step and the idle shares of all settings, and the timelines of the first ones.

    Raises:
        ConfigError: the file cannot be written.
    """
    shown = done[:_NUM_TIMELINES]
    heights = [max(1.5, 0.35 * len(done)), *([1.0] * len(shown))]
    figure = Figure(figsize=(11, 1.3 * sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    _bars(axes[0], done)
    for axis, one in zip(axes[1:], shown, strict=True):
        _timeline(axis, one)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file} cannot be written: {error}. Give a .png, .svg or .pdf file") from error


def _bars(axis: Axes, done: Sequence[SimulatedSetting]) -> None:
    places = np.arange(len(done))
    step_s = np.array([one.result.step_s for one in done])
    waits = step_s * [one.result.trainer_waits for one in done]
    axis.barh(places, step_s - waits, color=_BLUE, label="Trainer works")
    axis.barh(places, waits, left=step_s - waits, color=_ORANGE, label="Trainer waits for samples")
    for place, one, total in zip(places, done, step_s, strict=True):
        axis.text(float(total), float(place), f"  engines idle {one.result.engines_idle:.0%}", va="center", fontsize=9)
    axis.set_yticks(places, [one.name for one in done])
    axis.invert_yaxis()
    axis.set_xlim(0, step_s.max() * 1.25)
    axis.set_xlabel("seconds per optimizer step")
    axis.legend(frameon=False, loc="lower right")


def _timeline(axis: Axes, one: SimulatedSetting) -> None:
    """Draw the share of engines that decode, and below it when the Trainer waited."""
    result = one.result
    edges = np.linspace(0, result.wall_s, _BINS + 1)
    axis.fill_between(edges[:-1], _busy_share(result, edges), step="post", color=_GREEN, label="engines that decode")
    for begin, end in result.waits:
        axis.axvspan(begin, end, ymin=0.0, ymax=0.06, color=_ORANGE)
    axis.set_ylim(-0.08, 1.02)
    axis.set_xlim(0, result.wall_s)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_title(f"{one.name}: engines that decode; orange: the Trainer waits", fontsize=10, loc="left")
    axis.set_xlabel("seconds")


def _busy_share(result: SimulationResult, edges: Values) -> Values:
    """Return the mean share of engines that decode in each bin."""
    if not result.busy:
        return np.zeros(len(edges) - 1)
    times, shares = np.array(result.busy).T
    area = np.concatenate(([0.0], np.cumsum(shares[:-1] * np.diff(times))))
    at = np.interp(edges, times, area)
    after = np.maximum(edges - times[-1], 0.0) * shares[-1]
    share: Values = np.diff(at + after) / np.diff(edges)
    return share
