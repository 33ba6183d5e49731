"""The figures as PNGs, drawn from report.json's numbers alone. Blocking, a second or two in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from asyncrl.report.lives import KINDS
from asyncrl.report.waste import reasons_of

Report = Mapping[str, Any]
WIDTH, DPI = 11.0, 120
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _YELLOW, _SKY, _GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#999999"),
)  # of Okabe and Ito: told apart by the colour-blind too
_CYCLE = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _RED, "#7A5C00", "#000000")
_OF_KIND = {
    "permit": "#D9D9D9", "slot": "#BDBDBD", "gate": "#969696", "queued": "#C6DBEF", "prefill": _SKY, "decode": _BLUE,
    "paused": "#08306B", "tool": _ORANGE, "user": "#7A5C00", "handling": "#E8B9A0",
    "siblings": "#B2DFD0", "reward": _PURPLE,
    "payload": "#F3D9E6", "ready": _YELLOW, "leased": "#B8AE2B", "training": _GREEN, "other": "#F2F2F2",
}  # fmt: skip
_OF_PART = (_YELLOW, _SKY, _PURPLE, _BLUE, _ORANGE, _RED, "#D9D9D9")
_MOST_CURVES = 8
_MOST_BARS = 200
_STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3",
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 10, "figure.facecolor": "white",
    "svg.fonttype": "none",
}  # fmt: skip


def draw(report: Report, directory: Path, done: Callable[[str], None] = lambda _name: None) -> None:
    """Write the PNG of each of `report["figures"]`. Raises `OSError`."""
    for entry in report["figures"]:
        with matplotlib.rc_context(_STYLE):
            figure = _DRAWN[entry["id"]](report)
            figure.savefig(directory / entry["png"], dpi=DPI)
        done(entry["title"])


def _figure(columns: int = 1, height: float = 3.7, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, **options)


# ---------------------------------------------------------------------------------------------- requests


def _request_times(report: Report) -> Figure:
    figure, (left, right) = _figure(2, gridspec_kw={"width_ratios": [3, 2]})
    _curves_by_step(figure, left, report, report["requests"]["time"], "seconds of a request")
    rows = report["requests"]["time"]["by_step"]
    steps = [row["step"] for row in rows]
    right.plot(steps, [100 * row["done_early"] for row in rows], color=_BLUE, marker="o", markersize=3)
    right.set(title="Done at 40 % of the step's longest", xlabel="step", ylim=(0, 102))
    right.yaxis.set_major_formatter(PercentFormatter())
    _whole_numbers(right)
    return figure


def _curves_by_step(figure: Figure, axes: Any, report: Report, told: Mapping[str, Any], label: str) -> None:
    rows = [row for row in told["by_step"] if row["cdf"]]
    percents = report["requests"]["quantiles_percent"]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, len(rows)))
    for row, colour in zip(rows, colours, strict=True):
        axes.plot(row["cdf"], percents, color=colour, linewidth=1, alpha=0.75)
    axes.plot(told["cdf"], percents, color="black", linewidth=2, label="all steps")
    axes.set(title="Share of requests that are done, by step", xlabel=label, ylim=(0, 102))
    _from_zero(axes, told["cdf"][-1])
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.legend(loc="lower right")
    if len(rows) > 1:
        norm = matplotlib.colors.Normalize(rows[0]["step"], rows[-1]["step"])
        scale = matplotlib.colors.ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, 256)))
        figure.colorbar(matplotlib.cm.ScalarMappable(norm, scale), ax=axes, label="step", pad=0.02)


def _replica_times(report: Report) -> Figure:
    figure, (left, right) = _figure(2, gridspec_kw={"width_ratios": [3, 2]})
    _curves_by_replica(left, report, report["requests"]["time"], "seconds of a request")
    left.set_title("Share of requests that are done, by replica")
    rows = [row for row in report["requests"]["by_replica"] if row["decode_s_per_token"] is not None]
    rows = sorted(rows, key=lambda row: -row["decode_s_per_token"])[:20][::-1]
    rates = [1000 * row["decode_s_per_token"] for row in rows]
    bars = right.barh([_short(row["replica"]) for row in rows], rates, color=_BLUE)
    right.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=3)
    right.set(title="Decode, ms per token of a request", xlim=(0, 1.15 * max(rates, default=1) or 1))
    right.set_ylim(-0.6, max(3, len(rows)) - 0.4)
    right.grid(axis="y", visible=False)
    return figure


def _curves_by_replica(axes: Any, report: Report, told: Mapping[str, Any], label: str) -> None:
    """The slowest have a colour of their own; more than a few are grey."""
    percents = report["requests"]["quantiles_percent"]
    rows = sorted(told["by_replica"], key=lambda row: -row["median"])
    for place, row in enumerate(rows):
        named = place < _MOST_CURVES
        axes.plot(
            row["cdf"], percents,
            color=_CYCLE[place] if named else _GREY, linewidth=1.8 if named else 0.8, zorder=3 if named else 2,
            label=_short(row["replica"]) if named else None,
        )  # fmt: skip
    axes.set(xlabel=label, ylim=(0, 102))
    _from_zero(axes, max((row["max"] for row in rows), default=1.0))
    axes.yaxis.set_major_formatter(PercentFormatter())
    axes.legend(loc="lower right", title="replica")


def _lengths(report: Report) -> Figure:
    figure, (left, right) = _figure(2)
    told = report["requests"]["length"]
    _curves_by_step(figure, left, report, told, "tokens of a response")
    left.set_title("Share of responses that are no longer, by step")
    _curves_by_replica(right, report, told, "tokens of a response")
    right.set_title("The same, by replica")
    return figure


# ---------------------------------------------------------------------------------------------- where the time goes


def _shares(report: Report) -> Figure:
    rows = [row for row in report["shares"]["table"] if row["percent"] > 0][::-1]
    figure, axes = _figure(height=0.7 + 0.3 * max(4, len(rows)))
    values = [row["percent"] for row in rows]
    colours = [_OF_KIND[row["kind"]] for row in rows]
    bars = axes.barh([row["meaning"] for row in rows], values, color=colours, edgecolor="#666666", linewidth=0.5)
    labels = [f"{row['percent']:.3g} %  ({_s(row['mean_s'])} on average)" for row in rows]
    axes.bar_label(bars, labels, padding=4)
    axes.set(xlim=(0, max(values, default=1) * 1.25), xlabel="percent of a trajectory's whole time, averaged")
    axes.grid(axis="y", visible=False)
    return figure


def _course(report: Report) -> Figure:
    figure, axes = _figure(height=4.2)
    course = report["shares"]["course"]
    steps = [(row["first_step"] + row["last_step"]) / 2 for row in course]
    kinds = _shown([[row["percent"][kind] for row in course] for kind in KINDS])
    layers = [[row["percent"][kind] for row in course] for kind in kinds]
    rest = [100 - sum(values) for values in zip(*layers, strict=True)]
    axes.stackplot(
        steps, *layers, rest, labels=[*(KINDS[kind] for kind in kinds), "the rest"],
        colors=[*(_OF_KIND[kind] for kind in kinds), "white"], edgecolor="#666666", linewidth=0.4,
    )  # fmt: skip
    axes.set(xlabel="step that trained it", ylim=(0, 100), xlim=(steps[0], steps[-1]))
    axes.yaxis.set_major_formatter(PercentFormatter())
    _whole_numbers(axes)
    _legend_beside(axes)
    return figure


def _shown(layers: Sequence[Sequence[float]]) -> list[str]:
    """Kinds that are ever more than a percent."""
    return [kind for kind, values in zip(KINDS, layers, strict=True) if max(values) >= 1.0]


def _life(report: Report) -> Figure:
    figure, axes = _figure(height=2.9)
    bars = report["shares"]["life"][::-1]
    names = ["median" if bar["which"] == "median" else "95th percentile" for bar in bars]
    left = np.zeros(len(bars))
    longest = max(bar["whole_s"] for bar in bars) or 1.0
    for kind, meaning in KINDS.items():
        widths = np.array([bar["seconds"][kind] for bar in bars])
        if widths.max() < 0.005 * longest:
            continue
        drawn = axes.barh(
            names,
            widths,
            left=left,
            color=_OF_KIND[kind],
            edgecolor="#666666",
            linewidth=0.5,
            label=meaning,
            height=0.6,
        )
        labels = [_s(width) if width > 0.08 * longest else "" for width in widths]
        dark = kind in ("decode", "paused", "user", "training")
        axes.bar_label(drawn, labels, label_type="center", fontsize=9, color="white" if dark else "black")
        left += widths
    axes.set(xlabel="seconds from the ask for a permit until trained", xlim=(0, longest * 1.02))
    axes.grid(axis="y", visible=False)
    _legend_beside(axes)
    return figure


# ---------------------------------------------------------------------------------------------- turns, steps, idle


def _turns(report: Report) -> Figure:
    figure, (left, right) = _figure(2)
    rows = report["turns"]["by_turn"]
    numbers = [row["turn"] for row in rows]
    bottom = np.zeros(len(rows))
    for key, label, colour in (
        ("generation_s", "generation", _BLUE), ("tool_s", "tools", _ORANGE), ("user_s", "users", "#7A5C00"),
    ):  # fmt: skip
        heights = np.array([row[key] for row in rows])
        if heights.any():
            left.bar(numbers, heights, bottom=bottom, color=colour, label=label)
            bottom += heights
    left.set(title="Mean seconds of a turn", xlabel="turn, counted from 0")
    left.set_ylim(0, 1.25 * max(bottom, default=1.0))
    left.legend(loc="upper right", ncols=3)
    counts = {int(turns): share for turns, share in report["turns"]["percent"].items()}
    bars = right.bar(list(counts), list(counts.values()), color=_GREEN)
    if len(counts) <= 12:
        right.bar_label(bars, [f"{share:.3g} %" for share in counts.values()], padding=2, fontsize=9)
    right.set(title="Trajectories with so many turns", xlabel="turns", ylim=(0, 1.12 * max(counts.values(), default=1)))
    right.yaxis.set_major_formatter(PercentFormatter())
    for axes in (left, right):
        _whole_numbers(axes)
        axes.grid(axis="x", visible=False)
    return figure


def _steps(report: Report) -> Figure:
    figure, axes = _figure(height=3.9)
    rows = report["steps"]["by_step"]
    steps = np.array([row["step"] for row in rows])
    bottom = np.zeros(len(rows))
    for name, colour in zip(rows[0]["parts"], _OF_PART, strict=True):
        heights = np.array([row["parts"][name] for row in rows])
        if heights.any():
            if len(rows) > _MOST_BARS:
                axes.fill_between(steps, bottom, bottom + heights, step="mid", color=colour, label=name, linewidth=0)
            else:
                axes.bar(steps, heights, bottom=bottom, width=1.0 if len(rows) > 60 else 0.8, color=colour, label=name)
            bottom += heights
    axes.axhline(report["steps"]["threshold_s"], color="#444444", linestyle="--", linewidth=1)
    outliers = [row for row in rows if row["outlier"]]
    highest = max([report["steps"]["threshold_s"], *(row["duration_s"] for row in rows)])
    axes.scatter(
        [row["step"] for row in outliers], [row["duration_s"] + 0.04 * highest for row in outliers],
        marker="v", color=_RED, zorder=4, label="stands out" if outliers else None,
    )  # fmt: skip
    axes.set(xlabel="step (dashed: longer ones stand out)", ylabel="seconds", ylim=(0, 1.1 * highest or 1))
    axes.grid(axis="x", visible=False)
    _whole_numbers(axes)
    _legend_beside(axes)
    return figure


def _idle(report: Report) -> Figure:
    idle = report["idle"]
    sides = [("Trainer waits for samples", idle["trainer"]), ("nothing in generation", idle["rollouter"])]
    shown = [(name, side["strip"]) for name, side in sides if side is not None]
    if idle["down_s"]:
        shown.append(("run was down", idle["down"]))
    figure, axes = _figure(height=0.9 + 0.55 * len(shown))
    image = axes.imshow(
        np.array([strip for _, strip in shown], dtype=float),  # None, not known, becomes nan
        aspect="auto", cmap=matplotlib.colormaps["Blues"].with_extremes(bad="#DDDDDD"), vmin=0, vmax=1,
        interpolation="nearest",
        extent=(0, idle["wall_s"] + idle["down_s"], len(shown) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_yticks(np.arange(0.5, len(shown) - 0.5), minor=True)
    axes.grid(visible=False)
    axes.grid(which="minor", color="white", linewidth=6)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="seconds since the first sample was admitted")
    figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.01, ticks=[0, 0.5, 1])
    return figure


# ---------------------------------------------------------------------------------------------- versions, waste


def _staleness(report: Report) -> Figure:
    figure, both = _figure(2, height=3.2)
    titles = {
        "staleness": "Versions behind when trained",
        "version_span": "Newest minus oldest version that sampled it",
    }
    for axes, (name, title) in zip(both, titles.items(), strict=True):
        told = {int(value): number for value, number in report["staleness"][name]["histogram"].items()}
        bars = axes.bar(list(told), list(told.values()), color=_BLUE if name == "staleness" else _PURPLE)
        if len(told) <= 12:
            axes.bar_label(bars, [f"{number:,}" for number in told.values()], padding=2, fontsize=9)
        axes.set(title=title, xlabel="versions", ylabel="samples", ylim=(0, 1.12 * max(told.values(), default=1)))
        axes.grid(axis="x", visible=False)
        _whole_numbers(axes)
    return figure


def _weight_sync(report: Report) -> Figure:
    rows = report["weight_sync"]["phases"][::-1]
    figure, axes = _figure(height=1.0 + 0.42 * len(rows))
    places = np.arange(len(rows))
    axes.barh(places, [1000 * row["median"] for row in rows], color=_BLUE, height=0.6, label="median")
    axes.scatter([1000 * row["p95"] for row in rows], places, color=_ORANGE, zorder=3, label="95th percentile")
    axes.scatter([1000 * row["max"] for row in rows], places, color=_RED, marker="|", s=140, zorder=3, label="longest")
    axes.set_yticks(places, [row["meaning"] for row in rows])
    axes.set(xlabel="milliseconds")
    axes.grid(axis="y", visible=False)
    _from_zero(axes, max(1000 * row["max"] for row in rows))
    _legend_beside(axes)
    return figure


def _thrown_away(report: Report) -> Figure:
    waste = report["thrown_away"]
    rows = [(reason, tokens, _RED) for reason, tokens in reasons_of(waste)]
    rows.append(("cut as surplus, gone on with", waste["cut"]["kept_tokens"], _GREEN))
    rows.append(("in aborted attempts", waste["aborted"]["tokens"], _ORANGE))
    rows = [row for row in rows if row[1]] or rows[-1:]
    figure, axes = _figure(height=1.0 + 0.42 * len(rows))
    whole = max(1.0, waste["sampled_tokens"])
    bars = axes.barh([row[0] for row in rows], [row[1] for row in rows], color=[row[2] for row in rows], height=0.6)
    axes.bar_label(bars, [f"{tokens:,.0f}  ({100 * tokens / whole:.3g} %)" for _, tokens, _ in rows], padding=4)
    axes.set(xlabel=f"tokens, of {whole:,.0f} sampled", xlim=(0, 1.25 * max(row[1] for row in rows) or 1))
    axes.grid(axis="y", visible=False)
    return figure


def _limits(report: Report) -> Figure:
    figure, axes = _figure(height=3.6)
    rows = report["lower_limits"]["limits"]
    limits = [row["limit"] for row in rows]
    for key, label, colour, marker in (
        ("longest_trajectory_saved_share", "saved of each step's longest trajectory", _BLUE, "o"),
        ("decode_saved_share", "saved of all decoding", _SKY, "s"),
        ("reward_lost_share", "reward lost", _RED, "v"),
        ("cut_share", "trajectories cut", _GREY, "x"),
    ):
        values = [None if row[key] is None else 100 * row[key] for row in rows]
        if None not in values:
            axes.plot(limits, values, color=colour, marker=marker, label=label)
    axes.set(xlabel="limit of the response, tokens", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter())
    _legend_beside(axes)
    return figure


# ---------------------------------------------------------------------------------------------- small things


def _from_zero(axes: Any, highest: float) -> None:
    axes.set_xlim(0, 1.03 * highest if highest else 1.0)


def _whole_numbers(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def _legend_beside(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _short(name: str) -> str:
    return name if len(name) <= 12 else f"…{name[-10:]}"


def _s(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


_DRAWN: Mapping[str, Callable[[Report], Figure]] = {
    "request_times": _request_times,
    "request_times_by_replica": _replica_times,
    "response_lengths": _lengths,
    "event_shares": _shares,
    "event_shares_by_step": _course,
    "life": _life,
    "turns": _turns,
    "steps": _steps,
    "idle": _idle,
    "staleness": _staleness,
    "weight_sync": _weight_sync,
    "thrown_away": _thrown_away,
    "lower_limits": _limits,
}
