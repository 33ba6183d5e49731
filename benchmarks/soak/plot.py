"""Draw memory and descriptors of every role over time, with the faults as vertical lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.soak.processes import Recording
from benchmarks.soak.summary import RoleGrowth

STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3", "figure.facecolor": "white",
}  # fmt: skip
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7A5C00", "#000000")
_RED = "#D55E00"


def draw(recording: Recording, roles: Sequence[RoleGrowth], path: Path) -> None:
    """Write a PNG with a row for each role; the last one is shared memory and run directory. Raises `OSError`."""
    begin, end = recording.samples[0].at, recording.samples[-1].at
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 0.5 + 1.2 * len(roles)), layout="constrained")
        FigureCanvasAgg(figure)
        rows: Any = figure.subplots(len(roles), 2, sharex=True, squeeze=False)
        for (left, right), role in zip(rows, roles, strict=True):
            for number, one in enumerate(role.lifetimes):
                style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.2}
                left.plot((one.at - begin) / 60, one.memory_mb, **style)
                if role is not roles[-1]:
                    right.plot((one.at - begin) / 60, one.descriptors, **style)
            left.set_title(f"{role.name}, MB ({role.memory.verdict})")
            right.set_title(f"{role.name}, descriptors ({role.descriptors.verdict})")
        minutes = [(sample.at - begin) / 60 for sample in recording.samples]
        rows[-1][1].plot(minutes, [sample.run_dir_mb for sample in recording.samples], color=COLOURS[0], linewidth=1.2)
        rows[-1][1].set_title("run directory, MB (not judged)")
        for axes in rows.flat:
            axes.margins(y=0.2)
            axes.set_xlim(0, max(1.0, (end - begin) / 60))
            for at, _ in recording.faults:
                axes.axvline((at - begin) / 60, color=_RED, linewidth=0.8, alpha=0.7, zorder=0)
        for axes in rows[-1]:
            axes.set_xlabel("minutes; red: a fault; each colour: another process")
        figure.savefig(path, dpi=100)
