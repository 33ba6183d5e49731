"""The figures of a report: each has a caption with its numbers and a PNG, both made from report.json alone.

Drawing is blocking and takes a second or two in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from asyncrl.observe.formats import count, percent, seconds, size
from asyncrl.observe.report.samples import KINDS
from asyncrl.observe.report.versions import waste_by_reason

Report = Mapping[str, Any]
CHEAP_LIMIT = 0.02
"""A lower limit that loses at most this share of the reward is recommended."""
_WIDTH, DPI = 11.0, 120
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _YELLOW, _SKY, _GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#999999"),
)  # the palette of Okabe and Ito, whose colours the colour-blind can distinguish
_BROWN, _PALE = "#7A5C00", "#D9D9D9"
CYCLE = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _RED, _BROWN, "#000000")
_KIND_COLOURS = {
    "permit": _PALE, "slot": "#BDBDBD", "gate": "#969696", "queued": "#C6DBEF", "prefill": _SKY, "decode": _BLUE,
    "paused": "#08306B", "tool": _ORANGE, "user": _BROWN, "handling": "#E8B9A0", "siblings": "#B2DFD0",
    "reward": _PURPLE, "payload": "#F3D9E6", "ready": _YELLOW, "leased": "#B8AE2B",
    "training": _GREEN, "other": "#F2F2F2",
}  # fmt: skip
_PART_COLOURS = (_YELLOW, _SKY, _PURPLE, _BLUE, _ORANGE, _RED, _PALE)
_OUTLINE: dict[str, Any] = {"edgecolor": "#666666", "linewidth": 0.5}
_QUANTILES = ("median", "p95", "max")
_MAX_BARS = 200
STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3",
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 10, "figure.facecolor": "white",
}  # fmt: skip


class Plot(NamedTuple):
    id: str
    """The name of its PNG, and of its anchor on the page."""
    section: str
    title: str
    parts: Callable[[Report], Iterator[Any]]
    """Yields the caption and then the figure; nothing if the run has no data for it."""


PLOTS: list[Plot] = []


def _plot(id: str, section: str, title: str) -> Callable[[Callable[[Report], Iterator[Any]]], None]:
    """Add the decorated generator to `PLOTS`; the order in this module is the order on the page."""
    return lambda parts: PLOTS.append(Plot(id, section, title, parts))


def figures(report: Report) -> list[dict[str, str]]:
    """Return the figures for which the run has data, in order: `id, section, title, text, png`."""
    return [
        {"id": each.id, "section": each.section, "title": each.title, "text": text, "png": f"{each.id}.png"}
        for each in PLOTS
        for text in islice(each.parts(report), 1)
    ]


def draw(report: Report, directory: Path, progress: Callable[[str], None] = lambda _title: None) -> None:
    """Write the PNG of each of `report["figures"]`. Raises `OSError`."""
    plots = {each.id: each.parts for each in PLOTS}
    for entry in report["figures"]:
        with matplotlib.rc_context(STYLE):
            _, figure = plots[entry["id"]](report)
            figure.savefig(directory / entry["png"], dpi=DPI)
        progress(entry["title"])


# ---------------------------------------------------------------------------------------------- requests


@_plot("request_times", "Requests", "How long requests take, by step")
def _request_times(report: Report) -> Iterator[Any]:
    time, tail_at = report["requests"]["time"], percent(report["requests"]["tail_at"])
    every, rows = time["all"], time["by_step"]
    if not rows:
        return
    worst = max(rows, key=lambda row: row["done_early"])
    yield (
        f"Half of the {count(every['count'], 'request')} take at most {seconds(every['median'])}, 95 % at most "
        f"{seconds(every['p95'])}, the longest {seconds(every['max'])}. On average {percent(time['done_early'])} of "
        f"the requests of a step are done in {tail_at} of the time of its longest: the higher this share, the longer "
        f"the tail. It is highest in step {worst['step']}: {percent(worst['done_early'])}."
    )
    figure, (left, right) = subplots(2, gridspec_kw={"width_ratios": [3, 2]})
    _curves_by_step(figure, left, report, time, "seconds of a request", "Share of requests that are done, by step")
    steps, shares = [row["step"] for row in rows], [100 * row["done_early"] for row in rows]
    right.plot(steps, shares, color=_BLUE, marker="o", markersize=3)
    right.set(title="Done at 40 % of the step's longest", xlabel="step", ylim=(0, 102))
    format_axes(right, y_percent=True, x_integers=True)
    yield figure


@_plot("request_times_by_replica", "Requests", "How long requests take, by replica")
def _replica_times(report: Report) -> Iterator[Any]:
    time = report["requests"]["time"]
    rows = [row for row in report["requests"]["by_replica"] if row["decode_s_per_token"] is not None]
    if not rows or not time["by_replica"]:
        return
    rows.sort(key=lambda row: row["decode_s_per_token"])
    fast, slow = rows[0], rows[-1]
    fastest, slowest = seconds(fast["decode_s_per_token"]), seconds(slow["decode_s_per_token"])
    if len(rows) == 1:
        yield f"The only replica decodes a token of a request in {slowest}."
    else:
        yield (
            f"Replica {slow['replica']} is the slowest: it decodes a token of a request in {slowest}, the fastest, "
            f"{fast['replica']}, in {fastest}. Curves of equally fast replicas coincide."
        )
    figure, (left, right) = subplots(2, gridspec_kw={"width_ratios": [3, 2]})
    _curves_by_replica(left, report, time, "seconds of a request", "Share of requests that are done, by replica")
    rates = [1000 * row["decode_s_per_token"] for row in rows[-20:]]
    names = [_shorten(row["replica"]) for row in rows[-20:]]
    _labelled_bars(right, names, rates, [f"{rate:.3g}" for rate in rates], _BLUE)
    right.set(title="Decode, ms per token of a request", xlim=(0, 1.15 * max(rates) or 1))
    right.set_ylim(-0.6, max(3, len(rates)) - 0.4)
    yield figure


@_plot("response_lengths", "Requests", "How long responses are")
def _response_lengths(report: Report) -> Iterator[Any]:
    lengths = report["requests"]["length"]
    every = lengths["all"]
    if every is None:
        return
    yield (
        f"Half of the responses (of one request each) have at most {every['median']:.0f} tokens, 95 % at most "
        f"{every['p95']:.0f}, the longest {every['max']:.0f}."
    )
    figure, (left, right) = subplots(2)
    label = "tokens of a response"
    _curves_by_step(figure, left, report, lengths, label, "Share of responses up to a length, by step")
    _curves_by_replica(right, report, lengths, label, "The same, by replica")
    yield figure


# ---------------------------------------------------------------------------------------------- where the time goes


@_plot("event_shares", "Where the time goes", "Where a trajectory's time goes")
def _shares(report: Report) -> Iterator[Any]:
    shares = report["shares"]
    if not shares["table"]:
        return
    top = [row for row in shares["table"] if row["kind"] != "other"][:3]
    names = ", ".join(f"{row['percent']:.0f} % {KINDS[row['kind']]}" for row in top)
    yield (
        f"A trajectory lasts {seconds(shares['lifetime_s_mean'])} on average, from the request for a permit until its "
        f"gradient is in a step. The largest shares are {names}; they are averages over "
        f"{count(shares['trajectories'], 'trajectory', 'trajectories')}, and all shares add up to 100 %."
    )
    rows = [row for row in shares["table"] if row["percent"] > 0][::-1]
    figure, axes = subplots(height=0.7 + 0.3 * max(4, len(rows)))
    values = [row["percent"] for row in rows]
    labels = [f"{row['percent']:.3g} %  ({seconds(row['mean_s'])} on average)" for row in rows]
    colours = [_KIND_COLOURS[row["kind"]] for row in rows]
    _labelled_bars(axes, [row["meaning"] for row in rows], values, labels, colours, **_OUTLINE)
    axes.set(xlim=(0, max(values, default=1) * 1.25), xlabel="percent of a trajectory's lifetime, averaged")
    yield figure


@_plot("event_shares_by_step", "Where the time goes", "The same, over the run")
def _shares_by_step(report: Report) -> Iterator[Any]:
    periods = report["shares"]["by_step"]
    if len(periods) < 2:
        return
    first, last = periods[0]["percent"], periods[-1]["percent"]
    kind = max(KINDS, key=lambda each: abs(last[each] - first[each]))
    yield (
        f"From the first to the last step, the greatest change is in “{KINDS[kind]}”: from {first[kind]:.0f} % to "
        f"{last[kind]:.0f} % of a trajectory's time."
    )
    figure, axes = subplots(height=4.2)
    steps = [(row["first_step"] + row["last_step"]) / 2 for row in periods]
    kinds = [kind for kind in KINDS if max(row["percent"][kind] for row in periods) >= 1.0]
    layers = np.array([[row["percent"][kind] for row in periods] for kind in kinds])
    axes.stackplot(
        steps, *layers, 100 - layers.sum(axis=0), labels=[*(KINDS[kind] for kind in kinds), "the rest"],
        colors=[*(_KIND_COLOURS[kind] for kind in kinds), "white"], **_OUTLINE,
    )  # fmt: skip
    axes.set(xlabel="step that trained it", ylim=(0, 100), xlim=(steps[0], steps[-1]))
    format_axes(axes, y_percent=True, x_integers=True, legend_beside=True)
    yield figure


@_plot("lifetime", "Where the time goes", "The lifetime of a sample")
def _lifetimes(report: Report) -> Iterator[Any]:
    bars, names = report["shares"]["lifetimes"], {"median": "median", "p95": "95th percentile"}
    if not bars:
        return
    lifetimes = []
    for bar in bars:
        kind = max(bar["seconds"], key=bar["seconds"].__getitem__)
        most = f"{seconds(bar['seconds'][kind])} {KINDS[kind]}"
        lifetimes.append(f"at the {names[bar['which']]} {seconds(bar['lifetime_s'])}, of which {most}")
    yield f"The lifetime of a sample is {'; '.join(lifetimes)}. It is that of the sample's longest trajectory."
    figure, axes = subplots(height=2.9)
    left, longest = np.zeros(len(bars)), max(bar["lifetime_s"] for bar in bars) or 1.0
    for kind, meaning in KINDS.items():
        widths = np.array([bar["seconds"][kind] for bar in bars])
        if widths.max() < 0.005 * longest:
            continue
        style = {"color": _KIND_COLOURS[kind], "label": meaning, "height": 0.6, **_OUTLINE}
        drawn = axes.barh([names[bar["which"]] for bar in bars], widths, left=left, **style)
        labels = [seconds(width) if width > 0.08 * longest else "" for width in widths]
        ink = "white" if kind in ("decode", "paused", "user", "training") else "black"
        axes.bar_label(drawn, labels, label_type="center", fontsize=9, color=ink)
        left += widths
    axes.set(xlabel="seconds from the request for a permit until trained", xlim=(0, longest * 1.02))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    format_axes(axes, legend_beside=True)
    yield figure


# ---------------------------------------------------------------------------------------------- turns, steps, idle time


@_plot("turns", "Turns", "Turns: what each costs, and how many there are")
def _turns(report: Report) -> Iterator[Any]:
    turns, rows = report["turns"]["turns"], report["turns"]["by_turn"]
    if not rows or turns is None:
        return
    slow = max(rows, key=lambda row: row["generation_s"] + row["tool_s"] + row["user_s"])
    names = {"generation": slow["generation_s"], "in tools": slow["tool_s"], "users and environments": slow["user_s"]}
    parts = ", ".join(f"{seconds(value)} {name}" for name, value in names.items() if value)
    yield (
        f"Trajectories take {turns['mean']:.1f} turns on average, {turns['max']:.0f} at most. The costliest is turn "
        f"{slow['turn']} (counted from 0): {parts}."
    )
    figure, (left, right) = subplots(2)
    layers = {"generation": ("generation_s", _BLUE), "tools": ("tool_s", _ORANGE), "users": ("user_s", _BROWN)}
    data = [(name, colour, [row[key] for row in rows]) for name, (key, colour) in layers.items()]
    top = _stacked_bars(left, [row["turn"] for row in rows], data)
    left.set(title="Mean seconds of a turn", xlabel="turn, counted from 0", ylim=(0, 1.25 * max(top, default=1.0)))
    left.legend(loc="upper right", ncols=3)
    shares = {int(number): share for number, share in report["turns"]["percent"].items()}
    _histogram(right, shares, "{:.3g} %", _GREEN)
    right.set(title="Trajectories by their number of turns", xlabel="turns")
    format_axes(left, x_integers=True)
    format_axes(right, y_percent=True, x_integers=True)
    yield figure


@_plot("turns_by_step", "Turns", "Turns over the run")
def _turns_by_step(report: Report) -> Iterator[Any]:
    periods = report["turns"]["by_step"]
    if len(periods) < 2:
        return
    numbers = sorted({int(number) for row in periods for number in row["percent"]})
    means = [
        sum(int(number) * share for number, share in row["percent"].items()) / 100 for row in (periods[0], periods[-1])
    ]
    yield (
        f"A trajectory of the first step takes {means[0]:.1f} turns on average, and one of the last step "
        f"{means[1]:.1f}. A turn's time includes the tools and users after it."
    )
    figure, (left, right) = subplots(2)
    steps = [(row["first_step"] + row["last_step"]) / 2 for row in periods]
    by_turn: dict[int, list[tuple[float, float]]] = {}
    for step, row in zip(steps, periods, strict=True):
        for turn in row["turns"]:
            seconds_of_it = turn["generation_s"] + turn["tool_s"] + turn["user_s"]
            by_turn.setdefault(turn["turn"], []).append((step, seconds_of_it))
    for colour, (turn, points) in zip(CYCLE, sorted(by_turn.items()), strict=False):
        left.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=f"turn {turn}")
    left.set(title="Mean seconds of a turn, by step", xlabel="step that trained it", ylim=(0, None))
    left.legend(ncols=2)
    layers = np.array([[row["percent"].get(str(number), 0.0) for row in periods] for number in numbers])
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.95, len(numbers)))
    right.stackplot(steps, *layers, labels=[f"{number}" for number in numbers], colors=colours, **_OUTLINE)
    right.set(title="Trajectories by their number of turns, by step", xlabel="step that trained it", ylim=(0, 100))
    right.set_xlim(steps[0], steps[-1])
    format_axes(left, x_integers=True)
    format_axes(right, y_percent=True, x_integers=True, legend_beside=len(numbers) <= len(CYCLE))
    yield figure


@_plot("time_by_turns", "Turns", "How long trajectories take, by their number of turns")
def _time_by_turns(report: Report) -> Iterator[Any]:
    rows = report["turns"]["by_number"]
    if len(rows) < 2:
        return
    fewest, most = rows[0], rows[-1]
    yield (
        f"A trajectory with {count(fewest['turns'], 'turn')} takes {seconds(fewest['duration_s'])} on average, one "
        f"with {count(most['turns'], 'turn')} {seconds(most['duration_s'])}."
    )
    figure, axes = subplots(height=3.4)
    layers = [
        ("generation and handling", _BLUE, [row["generation_s"] for row in rows]),
        ("tools", _ORANGE, [row["tool_s"] for row in rows]),
        ("users", _BROWN, [row["user_s"] for row in rows]),
    ]
    numbers = [row["turns"] for row in rows]
    top = _stacked_bars(axes, numbers, layers)
    late = [row["duration_s_p95"] for row in rows]
    axes.scatter(numbers, late, marker="v", color=_RED, zorder=3, label="95th percentile")
    axes.set(xlabel="turns", ylabel="mean seconds of a trajectory", ylim=(0, 1.1 * max([*top, *late]) or 1))
    format_axes(axes, x_integers=True, legend_beside=True)
    yield figure


@_plot("steps", "Steps", "How long steps take")
def _steps(report: Report) -> Iterator[Any]:
    durations, rule, threshold, rows = (report["steps"][key] for key in ("durations", "rule", "threshold_s", "by_step"))
    if durations is None:
        return
    text = f"The median step takes {seconds(durations['median'])}, the longest {seconds(durations['max'])}. "
    if outliers := report["steps"]["outliers"]:
        names = ", ".join(str(row["step"]) for row in outliers[:8])
        verb = "stands" if len(outliers) == 1 else "stand"
        yield f"{text}{count(len(outliers), 'step')} {verb} out: {names} ({rule}). Causes are below."
    else:
        yield f"{text}None stands out ({rule})."
    figure, axes = subplots(height=3.9)
    parts = zip(rows[0]["parts"], _PART_COLOURS, strict=True)
    layers = [(name, colour, [row["parts"][name] for row in rows]) for name, colour in parts]
    _stacked_bars(axes, [row["step"] for row in rows], layers)
    axes.axhline(threshold, color="#444444", linestyle="--", linewidth=1)
    highest = max([threshold, *(row["duration_s"] for row in rows)])
    marks = [(row["step"], row["duration_s"] + 0.04 * highest) for row in rows if row["outlier"]]
    if marks:
        axes.scatter(*zip(*marks, strict=True), marker="v", color=_RED, zorder=4, label="stands out")
    axes.set(xlabel="step (dashed: longer ones stand out)", ylabel="seconds", ylim=(0, 1.1 * highest or 1))
    format_axes(axes, x_integers=True, legend_beside=True)
    yield figure


@_plot("idle", "Idle time", "When a side was idle")
def _idle(report: Report) -> Iterator[Any]:
    idle = report["idle"]
    if idle["wall_s"] <= 0:
        return
    trainer, rollouter = idle["trainer"], idle["rollouter"]
    text = (
        f"The Trainer waited for samples for {percent(trainer['share'])} of the run ({seconds(trainer['idle_s'])}, "
        f"at most {seconds(trainer['longest_s'])} at once)"
    )
    strips = {"Trainer waits for samples": trainer["strip"]}
    if idle["first_wait_s"] is not None:
        text += f"; its first wait, before anything was generated, is {seconds(idle['first_wait_s'])} of that"
    if idle["lent_s"]:
        share = percent(idle["lent_s"] / idle["wall_s"])
        text += f". Its GPUs were lent to generation for {share} of the run ({seconds(idle['lent_s'])})"
    if rollouter is not None:
        text += (
            f". Nothing was in generation, neither samples nor the validation set, for {percent(rollouter['share'])} "
            f"({seconds(rollouter['idle_s'])}, at most {seconds(rollouter['longest_s'])} at once)"
        )
        strips["nothing in generation"] = rollouter["strip"]
    is_known = not any(None in strip for strip in strips.values())
    yield text + f". Darker moments were idle for a larger share.{'' if is_known else ' Grey: not known.'}"
    if idle["down_s"]:
        strips["run was down"] = idle["down"]
    figure, axes = subplots(height=0.9 + 0.55 * len(strips))
    image = axes.imshow(
        np.array(list(strips.values()), dtype=float),  # None, not known, becomes nan
        aspect="auto", cmap=matplotlib.colormaps["Blues"].with_extremes(bad="#DDDDDD"), vmin=0, vmax=1,
        interpolation="nearest", extent=(0, idle["wall_s"] + idle["down_s"], len(strips) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(strips)), list(strips))
    axes.set_yticks(np.arange(0.5, len(strips) - 0.5), minor=True)
    axes.grid(visible=False)
    axes.grid(which="minor", color="white", linewidth=6)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="seconds since the first sample was admitted")
    figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.01, ticks=[0, 0.5, 1])
    yield figure


@_plot("gpu_memory", "GPU memory", "Used memory of the ranks' GPUs")
def _gpu_memory(report: Report) -> Iterator[Any]:
    rows = report["gpu_memory"]
    if not rows:
        return
    fullest = max(rows, key=lambda row: max(row["used_bytes"]))
    most = max(fullest["used_bytes"])
    yield (
        f"All processes used at most {size(most)} of {size(fullest['total_bytes'])} at once, on the GPU of rank "
        f"{fullest['rank']}."
    )
    figure, axes = subplots()
    for row in rows:
        axes.plot(row["at_s"], [used / 1e9 for used in row["used_bytes"]], label=f"rank {row['rank']}")
    axes.set(xlabel="seconds since the first sample was admitted", ylabel="GB")
    format_axes(axes, legend_beside=True)
    yield figure


# ---------------------------------------------------------------------------------------------- versions and waste


@_plot("staleness", "Weight versions", "How stale samples are")
def _staleness(report: Report) -> Iterator[Any]:
    staleness, spans = report["staleness"]["staleness"], report["staleness"]["version_span"]["histogram"]
    if not staleness["histogram"]:
        return
    mixed = sum(number for span, number in spans.items() if span != "0") / max(1, sum(spans.values()))
    yield (
        f"Trained samples are {staleness['mean']:.2f} versions old on average, {staleness['max']:.0f} at most; "
        f"{percent(mixed)} of them were sampled by more than one version."
    )
    figure, axes = subplots(2, height=3.2)
    titles = ("Versions behind when trained", "Newest minus oldest version that sampled it")
    for each, name, title, colour in zip(axes, ("staleness", "version_span"), titles, (_BLUE, _PURPLE), strict=True):
        samples = {int(value): number for value, number in report["staleness"][name]["histogram"].items()}
        _histogram(each, samples, "{:,}", colour)
        each.set(title=title, xlabel="versions", ylabel="samples")
        format_axes(each, x_integers=True)
    yield figure


@_plot("weight_sync", "Weight versions", "How long a weight sync takes")
def _weight_sync(report: Report) -> Iterator[Any]:
    phases = {row["phase"]: row for row in report["weight_sync"]["phases"]}
    if not phases:
        return
    text = []
    if applied := phases.get("sync.apply"):
        text.append(
            f"Of {count(applied['count'], 'sync')}, half reach all replicas within {seconds(applied['median'])}, the "
            f"slowest took {seconds(applied['max'])}."
        )
    if paused := phases.get("sync.pause"):
        text.append(
            f"The median pause of a replica takes {seconds(paused['median'])}, the longest {seconds(paused['max'])}; "
            f"pauses take {percent(report['weight_sync']['paused_share'])} of the replicas' lifetimes."
        )
    if published := phases.get("trainer.publish"):
        sent = size(report["weight_sync"]["sent_bytes"])
        text.append(f"The Trainer sent {sent} for {count(published['count'], 'version')}.")
    yield " ".join(text) or "The duration of each phase of the weight syncs."
    rows = [*phases.values()][::-1]
    figure, axes = subplots(height=1.0 + 0.42 * len(rows))
    places, (median, p95, longest) = range(len(rows)), ([1000 * row[key] for row in rows] for key in _QUANTILES)
    axes.barh(places, median, color=_BLUE, height=0.6, label="median")
    axes.scatter(p95, places, color=_ORANGE, zorder=3, label="95th percentile")
    axes.scatter(longest, places, color=_RED, marker="|", s=140, zorder=3, label="longest")
    axes.set_yticks(places, [row["meaning"] for row in rows])
    axes.set(xlabel="milliseconds")
    axes.grid(axis="y", visible=False)
    format_axes(axes, x_max=max(longest), legend_beside=True)
    yield figure


@_plot("waste", "Waste", "Wasted tokens")
def _waste(report: Report) -> Iterator[Any]:
    waste, reasons = report["waste"], waste_by_reason(report["waste"])
    aborted, sampled = waste["aborted"], waste["sampled_tokens"]
    if not sampled or not (waste["wasted_tokens"] or aborted["attempts"]):
        return
    listed = ", ".join(f"{tokens:,.0f} {reason}" for reason, tokens in reasons)
    yield (
        f"{waste['wasted_tokens']:,.0f} of {sampled:,.0f} sampled tokens ({percent(waste['share'])}) were wasted"
        f"{f' ({listed})' if listed else ''}. Weight syncs or callers aborted {count(aborted['attempts'], 'attempt')} "
        f"with {aborted['tokens']:,.0f} tokens; {aborted['resumed']} were resumed, which repeated "
        f"{seconds(aborted['prefill_again_s'])} of prefill."
    )
    rows = [(reason, tokens, _RED) for reason, tokens in reasons]
    rows.append(("cut as surplus, and resumed", waste["cut"]["kept_tokens"], _GREEN))
    rows.append(("in aborted attempts", aborted["tokens"], _ORANGE))
    names, values, colours = zip(*([row for row in rows if row[1]] or rows[-1:]), strict=True)
    figure, axes = subplots(height=1.0 + 0.42 * len(names))
    labels = [f"{tokens:,.0f}  ({100 * tokens / sampled:.3g} %)" for tokens in values]
    _labelled_bars(axes, names, values, labels, colours, height=0.6)
    axes.set(xlabel=f"tokens, of {sampled:,.0f} sampled", xlim=(0, 1.25 * max(values) or 1))
    yield figure


@_plot("lower_limits", "Waste", "What a lower response limit would do")
def _limits(report: Report) -> Iterator[Any]:
    limits, rows = report["lower_limits"], report["lower_limits"]["limits"]
    if not rows:
        return
    yield _limits_caption(limits, [row for row in rows if row["cut_share"] > 0])
    figure, axes = subplots(height=3.6)
    for key, label, colour, marker in (
        ("longest_trajectory_saved_share", "saved of each step's longest trajectory", _BLUE, "o"),
        ("decode_saved_share", "saved of all decoding", _SKY, "s"),
        ("reward_lost_share", "reward lost", _RED, "v"),
        ("cut_share", "trajectories cut", _GREY, "x"),
    ):
        if all(row[key] is not None for row in rows):
            shares = [100 * row[key] for row in rows]
            axes.plot([row["limit"] for row in rows], shares, color=colour, marker=marker, label=label)
    axes.set(xlabel="limit of the response, tokens", ylim=(0, None))
    format_axes(axes, y_percent=True, legend_beside=True)
    yield figure


def _limits_caption(limits: Report, rows: Sequence[Report]) -> str:
    """Return the caption. `rows`: the limits that would cut at least one trajectory."""
    number = count(limits["trajectories"], "response")
    text = f"The longest of {number} has {limits['longest']:.0f} tokens, tools' answers included. "
    if not rows:
        return text + "None of the lower limits would cut any."
    known = all(row["reward_lost_share"] is not None for row in rows)
    best = next((row for row in rows if known and row["reward_lost_share"] <= CHEAP_LIMIT), rows[-1])
    lost = f", lose {percent(best['reward_lost_share'])} of the reward" if known else ""
    text += (
        f"A limit of {best['limit']} tokens would cut {percent(best['cut_share'])} of the trajectories{lost} and save "
        f"{percent(best['longest_trajectory_saved_share'])} of the time in requests of each step's longest trajectory. "
    )
    if known:
        return text + f"The lost reward is based on {limits['reward_from']}; a response that is cut is worth nothing."
    why = "no event has a reward" if limits["reward_from"] is None else "all rewards are equal"
    return text + f"Its cost is unknown: {why}."


# ---------------------------------------------------------------------------------------------- parts of plots


def subplots(columns: int = 1, height: float = 3.7, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, **options)


def _curves_by_step(figure: Figure, axes: Any, report: Report, data: Report, label: str, title: str) -> None:
    rows = [row for row in data["by_step"] if row["cdf"]]
    percents, viridis = report["requests"]["quantiles_percent"], matplotlib.colormaps["viridis"]
    for row, colour in zip(rows, viridis(np.linspace(0.0, 0.9, len(rows))), strict=True):
        axes.plot(row["cdf"], percents, color=colour, linewidth=1, alpha=0.75)
    axes.plot(data["cdf"], percents, color="black", linewidth=2, label="all steps")
    axes.set(title=title, xlabel=label, ylim=(0, 102))
    format_axes(axes, y_percent=True, x_max=data["cdf"][-1])
    axes.legend(loc="lower right")
    if len(rows) > 1:
        norm = matplotlib.colors.Normalize(rows[0]["step"], rows[-1]["step"])
        scale = matplotlib.colors.ListedColormap(viridis(np.linspace(0.0, 0.9, 256)))
        figure.colorbar(matplotlib.cm.ScalarMappable(norm, scale), ax=axes, label="step", pad=0.02)


def _curves_by_replica(axes: Any, report: Report, data: Report, label: str, title: str) -> None:
    """Draw the slowest replicas in colour, and the others in grey."""
    rows = sorted(data["by_replica"], key=lambda row: -row["median"])
    for place, row in enumerate(rows):
        style: dict[str, Any] = {"color": _GREY, "linewidth": 0.8, "zorder": 2}
        if place < len(CYCLE):
            style = {"color": CYCLE[place], "linewidth": 1.8, "zorder": 3, "label": _shorten(row["replica"])}
        axes.plot(row["cdf"], report["requests"]["quantiles_percent"], **style)
    axes.set(title=title, xlabel=label, ylim=(0, 102))
    format_axes(axes, y_percent=True, x_max=max((row["max"] for row in rows), default=1.0))
    axes.legend(loc="lower right", title="replica")


def format_axes(
    axes: Any,
    *,
    y_percent: bool = False,
    x_integers: bool = False,
    x_max: float | None = None,
    legend_beside: bool = False,
) -> None:
    if y_percent:
        axes.yaxis.set_major_formatter(PercentFormatter())
    if x_integers:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if x_max is not None:
        axes.set_xlim(0, 1.03 * x_max if x_max else 1.0)
    if legend_beside:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _labelled_bars(
    axes: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str], colours: Any, **style: Any
) -> None:
    axes.bar_label(axes.barh(names, values, color=colours, **style), labels, padding=4)
    axes.grid(axis="y", visible=False)


def _histogram(axes: Any, values: Mapping[int, float], label: str, colour: str) -> None:
    bars = axes.bar(list(values), list(values.values()), color=colour)
    if len(values) <= 12:
        axes.bar_label(bars, [label.format(value) for value in values.values()], padding=2, fontsize=9)
    axes.set(ylim=(0, 1.12 * max(values.values(), default=1)))
    axes.grid(axis="x", visible=False)


def _stacked_bars(axes: Any, x: Sequence[int], layers: Iterable[tuple[str, str, Sequence[float]]]) -> Any:
    """Draw layers, each of a name, a colour and heights, and return their total heights."""
    bottom = np.zeros(len(x))
    for name, colour, values in layers:
        heights = np.array(values)
        if not heights.any():
            continue
        if len(x) > _MAX_BARS:
            axes.fill_between(x, bottom, bottom + heights, step="mid", color=colour, label=name, linewidth=0)
        else:
            axes.bar(x, heights, bottom=bottom, width=1.0 if len(x) > 60 else 0.8, color=colour, label=name)
        bottom += heights
    axes.grid(axis="x", visible=False)
    return bottom


def _shorten(name: str) -> str:
    return name if len(name) <= 12 else f"…{name[-10:]}"
