"""Draws simulated settings as a figure. Blocking; takes about a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from asyncrl.core.failures import ConfigError
from asyncrl.simulate.sweep import SimulatedSetting

Values = NDArray[np.float64]
_BLUE, _ORANGE, _GREEN, _GRAY = "#0072B2", "#E69F00", "#009E73", "#555555"
_MAX_TIMELINES = 6
_BINS = 400


def draw(done: Sequence[SimulatedSetting], file: Path) -> None:
    """Write a figure with the time per step and the idle shares of all settings, and timelines of up to six, which
    share their time axis.

    Raises:
        ConfigError: the file cannot be written.
    """
    shown = list(done)
    if len(done) > _MAX_TIMELINES:  # the fastest ones
        shown = sorted(done, key=lambda one: one.result.step_s)[:_MAX_TIMELINES]
    heights = [0.7 + 0.28 * len(done), *([1.0] * len(shown))]
    figure = Figure(figsize=(11, sum(heights) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    _bars(axes[0], done)
    end_s = min(one.result.wall_s for one in shown)
    for axis, one in zip(axes[1:], shown, strict=True):
        _timeline(axis, one, end_s)
        axis.tick_params(labelbottom=one is shown[-1])
    marks = [Patch(color=_GREEN, label="replicas that decode"), Patch(color=_GRAY, label="replicas"),
             Patch(color=_ORANGE, label="Trainer waits for samples")]  # fmt: skip
    figure.legend(handles=marks, frameon=False, ncols=3, fontsize=9, loc="outside lower right")
    axes[-1].set_xlabel("seconds since the start of the run")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(
            f"--plot {file} cannot be written: {error.strerror or error}. Give a file in a folder that exists and that "
            "you may write to"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--plot {file} cannot be written: {error}. Give a .png, .svg or .pdf file") from error


def _bars(axis: Axes, done: Sequence[SimulatedSetting]) -> None:
    """Draw the Trainer's time per step, which is that of the run."""
    places = np.arange(len(done))
    step_s = np.array([one.result.step_s for one in done])
    waits = step_s * [one.result.trainer_waits for one in done]
    axis.barh(places, step_s - waits, color=_BLUE, label="Trainer works")
    axis.barh(places, waits, left=step_s - waits, color=_ORANGE, label="Trainer waits for samples")
    for place, one, total in zip(places, done, step_s, strict=True):
        text = f"  {one.tokens_per_s:,.0f} tokens/s, engines idle {one.result.engines_idle:.0%}"
        axis.text(float(total), float(place), text, va="center", fontsize=9)
    axis.set_yticks(places, [one.short_name for one in done])
    axis.invert_yaxis()
    axis.set_xlim(0, step_s.max() * 1.6)
    axis.set_xlabel("seconds per optimizer step")
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=9)


def _timeline(axis: Axes, one: SimulatedSetting, end_s: float) -> None:
    """Draw how many replicas decode, and below it when the Trainer waits."""
    result = one.result
    edges = np.linspace(0, end_s, _BINS + 1)
    times, numbers = np.array(result.replicas_from).T
    most = numbers.max()
    axis.fill_between(edges[:-1], _mean_number(result.busy, edges), step="post", color=_GREEN, linewidth=0)
    axis.step([*times, end_s], [*numbers, numbers[-1]], where="post", color=_GRAY, linewidth=1)
    for begin, end in result.waits:
        axis.axvspan(begin, end, ymin=0.0, ymax=0.1, color=_ORANGE, linewidth=0)
    axis.set_ylim(-0.14 * most, 1.12 * most)
    axis.set_yticks([0, most])
    axis.set_xlim(0, end_s)
    axis.set_title(one.short_name, fontsize=9, loc="left")


def _mean_number(counts: Sequence[tuple[float, int]], edges: Values) -> Values:
    """Return the mean in each bin of a number that changes at certain times."""
    if not counts:
        return np.zeros(len(edges) - 1)
    times, numbers = np.array(counts, dtype=np.float64).T
    area = np.concatenate(([0.0], np.cumsum(numbers[:-1] * np.diff(times))))
    at = np.interp(edges, times, area) + np.maximum(edges - times[-1], 0.0) * numbers[-1]
    mean: Values = np.diff(at) / np.diff(edges)
    return mean
