"""The figures of a report: each has a caption with its numbers and a PNG, both made from report.json alone.

A figure whose caption is empty has no data in this run and is left out. Drawing blocks, for a second or two in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from asyncrl.observe.report.samples import KINDS
from asyncrl.observe.report.statistics import count, percent, seconds
from asyncrl.observe.report.versions import waste_by_reason

Report = Mapping[str, Any]
CHEAP_LIMIT = 0.02
"""A lower limit that loses at most this share of the reward is recommended."""
_WIDTH, _DPI = 11.0, 120
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _YELLOW, _SKY, _GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#999999"),
)  # of Okabe and Ito, which the colour-blind can distinguish
_BROWN, _PALE = "#7A5C00", "#D9D9D9"
_CYCLE = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _RED, _BROWN, "#000000")
_KIND_COLOURS = {
    "permit": _PALE, "slot": "#BDBDBD", "gate": "#969696", "queued": "#C6DBEF", "prefill": _SKY, "decode": _BLUE,
    "paused": "#08306B", "tool": _ORANGE, "user": _BROWN, "handling": "#E8B9A0", "siblings": "#B2DFD0",
    "reward": _PURPLE, "payload": "#F3D9E6", "ready": _YELLOW, "leased": "#B8AE2B",
    "training": _GREEN, "other": "#F2F2F2",
}  # fmt: skip
_PART_COLOURS = (_YELLOW, _SKY, _PURPLE, _BLUE, _ORANGE, _RED, _PALE)
_OUTLINE: dict[str, Any] = {"edgecolor": "#666666", "linewidth": 0.5}
_MAX_BARS = 200
_STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E3E3E3",
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 10, "figure.facecolor": "white",
}  # fmt: skip


def figures(report: Report) -> list[dict[str, str]]:
    """Return the figures for which the run has data, in order: `id, section, title, text, png`."""
    return [
        {"id": each.id, "section": each.section, "title": each.title, "text": text, "png": f"{each.id}.png"}
        for each in PLOTS
        if (text := each.caption(report))
    ]


def draw(report: Report, directory: Path, progress: Callable[[str], None] = lambda _title: None) -> None:
    """Write the PNG of each of `report["figures"]`. Raises `OSError`."""
    drawers = {each.id: each.draw for each in PLOTS}
    for entry in report["figures"]:
        with matplotlib.rc_context(_STYLE):
            drawers[entry["id"]](report).savefig(directory / entry["png"], dpi=_DPI)
        progress(entry["title"])


# ---------------------------------------------------------------------------------------------- requests


def _request_times_caption(report: Report) -> str:
    time = report["requests"]["time"]
    if not time["by_step"]:
        return ""
    every, worst = time["all"], max(time["by_step"], key=lambda row: row["done_early"])
    return (
        f"Half of the {count(every['count'], 'request')} take at most {seconds(every['median'])}, 95 % at most "
        f"{seconds(every['p95'])}, the longest {seconds(every['max'])}. On average {percent(time['done_early'])} of "
        f"the requests of a step are done in {percent(report['requests']['tail_at'])} of the time of its longest: the "
        f"higher this share, the longer the tail. It is highest in step {worst['step']}: "
        f"{percent(worst['done_early'])}."
    )


def _draw_request_times(report: Report) -> Figure:
    figure, (left, right) = _subplots(2, gridspec_kw={"width_ratios": [3, 2]})
    time = report["requests"]["time"]
    _curves_by_step(figure, left, report, time, "seconds of a request", "Share of requests that are done, by step")
    rows = time["by_step"]
    steps, shares = [row["step"] for row in rows], [100 * row["done_early"] for row in rows]
    right.plot(steps, shares, color=_BLUE, marker="o", markersize=3)
    right.set(title="Done at 40 % of the step's longest", xlabel="step", ylim=(0, 102))
    _format(right, y_percent=True, x_integers=True)
    return figure


def _replica_times_caption(report: Report) -> str:
    rows = [row for row in report["requests"]["by_replica"] if row["decode_s_per_token"] is not None]
    if not rows or not report["requests"]["time"]["by_replica"]:
        return ""
    rows.sort(key=lambda row: row["decode_s_per_token"])
    fast, slow = rows[0], rows[-1]
    if len(rows) == 1:
        return f"The only replica decodes a token of a request in {seconds(slow['decode_s_per_token'])}."
    return (
        f"Replica {slow['replica']} is the slowest: it decodes a token of a request in "
        f"{seconds(slow['decode_s_per_token'])}, the fastest, {fast['replica']}, in "
        f"{seconds(fast['decode_s_per_token'])}. Curves of equally fast replicas coincide."
    )


def _draw_replica_times(report: Report) -> Figure:
    figure, (left, right) = _subplots(2, gridspec_kw={"width_ratios": [3, 2]})
    title = "Share of requests that are done, by replica"
    _curves_by_replica(left, report, report["requests"]["time"], "seconds of a request", title)
    rows = [row for row in report["requests"]["by_replica"] if row["decode_s_per_token"] is not None]
    rows = sorted(rows, key=lambda row: -row["decode_s_per_token"])[:20][::-1]
    rates = [1000 * row["decode_s_per_token"] for row in rows]
    _labelled_bars(right, [_shorten(row["replica"]) for row in rows], rates, [f"{rate:.3g}" for rate in rates], _BLUE)
    right.set(title="Decode, ms per token of a request", xlim=(0, 1.15 * max(rates, default=1) or 1))
    right.set_ylim(-0.6, max(3, len(rows)) - 0.4)
    return figure


def _lengths_caption(report: Report) -> str:
    every = report["requests"]["length"]["all"]
    if every is None:
        return ""
    return (
        f"Half of the responses (of one request each) have at most {every['median']:.0f} tokens, 95 % at most "
        f"{every['p95']:.0f}, the longest {every['max']:.0f}."
    )


def _draw_lengths(report: Report) -> Figure:
    figure, (left, right) = _subplots(2)
    lengths, label = report["requests"]["length"], "tokens of a response"
    _curves_by_step(figure, left, report, lengths, label, "Share of responses up to a length, by step")
    _curves_by_replica(right, report, lengths, label, "The same, by replica")
    return figure


def _curves_by_step(figure: Figure, axes: Any, report: Report, data: Report, label: str, title: str) -> None:
    rows = [row for row in data["by_step"] if row["cdf"]]
    percents, viridis = report["requests"]["quantiles_percent"], matplotlib.colormaps["viridis"]
    for row, colour in zip(rows, viridis(np.linspace(0.0, 0.9, len(rows))), strict=True):
        axes.plot(row["cdf"], percents, color=colour, linewidth=1, alpha=0.75)
    axes.plot(data["cdf"], percents, color="black", linewidth=2, label="all steps")
    axes.set(title=title, xlabel=label, ylim=(0, 102))
    _format(axes, y_percent=True, x_max=data["cdf"][-1])
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
        if place < len(_CYCLE):
            style = {"color": _CYCLE[place], "linewidth": 1.8, "zorder": 3, "label": _shorten(row["replica"])}
        axes.plot(row["cdf"], report["requests"]["quantiles_percent"], **style)
    axes.set(title=title, xlabel=label, ylim=(0, 102))
    _format(axes, y_percent=True, x_max=max((row["max"] for row in rows), default=1.0))
    axes.legend(loc="lower right", title="replica")


# ---------------------------------------------------------------------------------------------- where the time goes


def _shares_caption(report: Report) -> str:
    shares = report["shares"]
    if not shares["table"]:
        return ""
    top = [row for row in shares["table"] if row["kind"] != "other"][:3]
    names = ", ".join(f"{row['percent']:.0f} % {KINDS[row['kind']]}" for row in top)
    return (
        f"A trajectory lasts {seconds(shares['lifetime_s_mean'])} on average, from the request for a permit until its "
        f"gradient is in a step; most of that: {names}. Shares are averages over "
        f"{count(shares['trajectories'], 'trajectory', 'trajectories')}, and add up to 100 %."
    )


def _draw_shares(report: Report) -> Figure:
    rows = [row for row in report["shares"]["table"] if row["percent"] > 0][::-1]
    figure, axes = _subplots(height=0.7 + 0.3 * max(4, len(rows)))
    values = [row["percent"] for row in rows]
    labels = [f"{row['percent']:.3g} %  ({seconds(row['mean_s'])} on average)" for row in rows]
    colours = [_KIND_COLOURS[row["kind"]] for row in rows]
    _labelled_bars(axes, [row["meaning"] for row in rows], values, labels, colours, **_OUTLINE)
    axes.set(xlim=(0, max(values, default=1) * 1.25), xlabel="percent of a trajectory's lifetime, averaged")
    return figure


def _shares_by_step_caption(report: Report) -> str:
    periods = report["shares"]["by_step"]
    if len(periods) < 2:
        return ""
    first, last = periods[0]["percent"], periods[-1]["percent"]
    kind = max(KINDS, key=lambda each: abs(last[each] - first[each]))
    return (
        f"From the first to the last step, the greatest change is in “{KINDS[kind]}”: from {first[kind]:.0f} % to "
        f"{last[kind]:.0f} % of a trajectory's time."
    )


def _draw_shares_by_step(report: Report) -> Figure:
    figure, axes = _subplots(height=4.2)
    periods = report["shares"]["by_step"]
    steps = [(row["first_step"] + row["last_step"]) / 2 for row in periods]
    kinds = [kind for kind in KINDS if max(row["percent"][kind] for row in periods) >= 1.0]
    layers = np.array([[row["percent"][kind] for row in periods] for kind in kinds])
    axes.stackplot(
        steps, *layers, 100 - layers.sum(axis=0), labels=[*(KINDS[kind] for kind in kinds), "the rest"],
        colors=[*(_KIND_COLOURS[kind] for kind in kinds), "white"], **_OUTLINE,
    )  # fmt: skip
    axes.set(xlabel="step that trained it", ylim=(0, 100), xlim=(steps[0], steps[-1]))
    _format(axes, y_percent=True, x_integers=True, legend_beside=True)
    return figure


_LIFETIMES = {"median": "median", "p95": "95th percentile"}


def _lifetimes_caption(report: Report) -> str:
    lifetimes = []
    for bar in report["shares"]["lifetimes"]:
        kind = max(bar["seconds"], key=bar["seconds"].__getitem__)
        lifetimes.append(
            f"at the {_LIFETIMES[bar['which']]} {seconds(bar['lifetime_s'])}, of which {seconds(bar['seconds'][kind])} "
            f"{KINDS[kind]}"
        )
    if not lifetimes:
        return ""
    return f"The lifetime of a sample is {'; '.join(lifetimes)}. A sample counts by its longest trajectory."


def _draw_lifetimes(report: Report) -> Figure:
    figure, axes = _subplots(height=2.9)
    bars = report["shares"]["lifetimes"][::-1]
    left, longest = np.zeros(len(bars)), max(bar["lifetime_s"] for bar in bars) or 1.0
    for kind, meaning in KINDS.items():
        widths = np.array([bar["seconds"][kind] for bar in bars])
        if widths.max() < 0.005 * longest:
            continue
        style = {"color": _KIND_COLOURS[kind], "label": meaning, "height": 0.6, **_OUTLINE}
        drawn = axes.barh([_LIFETIMES[bar["which"]] for bar in bars], widths, left=left, **style)
        labels = [seconds(width) if width > 0.08 * longest else "" for width in widths]
        ink = "white" if kind in ("decode", "paused", "user", "training") else "black"
        axes.bar_label(drawn, labels, label_type="center", fontsize=9, color=ink)
        left += widths
    axes.set(xlabel="seconds from the request for a permit until trained", xlim=(0, longest * 1.02))
    axes.grid(axis="y", visible=False)
    _format(axes, legend_beside=True)
    return figure


# ---------------------------------------------------------------------------------------------- turns, steps, idle time


def _turns_caption(report: Report) -> str:
    turns = report["turns"]
    if not turns["by_turn"] or turns["turns"] is None:
        return ""
    slow = max(turns["by_turn"], key=lambda row: row["generation_s"] + row["tool_s"] + row["user_s"])
    names = {"generation": slow["generation_s"], "in tools": slow["tool_s"], "users and environments": slow["user_s"]}
    parts = ", ".join(f"{seconds(value)} {name}" for name, value in names.items() if value)
    return (
        f"Trajectories take {turns['turns']['mean']:.1f} turns on average, {turns['turns']['max']:.0f} at most. The "
        f"costliest is turn {slow['turn']} (counted from 0): {parts}."
    )


def _draw_turns(report: Report) -> Figure:
    figure, (left, right) = _subplots(2)
    rows = report["turns"]["by_turn"]
    layers = {"generation": ("generation_s", _BLUE), "tools": ("tool_s", _ORANGE), "users": ("user_s", _BROWN)}
    data = [(name, colour, [row[key] for row in rows]) for name, (key, colour) in layers.items()]
    top = _stacked_bars(left, [row["turn"] for row in rows], data)
    left.set(title="Mean seconds of a turn", xlabel="turn, counted from 0", ylim=(0, 1.25 * max(top, default=1.0)))
    left.legend(loc="upper right", ncols=3)
    shares = {int(turns): share for turns, share in report["turns"]["percent"].items()}
    _histogram(right, shares, "{:.3g} %", _GREEN)
    right.set(title="Trajectories by their number of turns", xlabel="turns")
    _format(left, x_integers=True)
    _format(right, y_percent=True, x_integers=True)
    return figure


def _steps_caption(report: Report) -> str:
    durations, outliers, rule = (report["steps"][key] for key in ("durations", "outliers", "rule"))
    if durations is None:
        return ""
    text = f"The median step takes {seconds(durations['median'])}, the longest {seconds(durations['max'])}. "
    if not outliers:
        return text + f"None stands out ({rule})."
    names = ", ".join(str(row["step"]) for row in outliers[:8])
    verb = "stands" if len(outliers) == 1 else "stand"
    return text + f"{count(len(outliers), 'step')} {verb} out: {names} ({rule}). Causes are below."


def _draw_steps(report: Report) -> Figure:
    figure, axes = _subplots(height=3.9)
    rows, threshold = report["steps"]["by_step"], report["steps"]["threshold_s"]
    parts = zip(rows[0]["parts"], _PART_COLOURS, strict=True)
    _stacked_bars(
        axes,
        [row["step"] for row in rows],
        [(name, colour, [row["parts"][name] for row in rows]) for name, colour in parts],
    )
    axes.axhline(threshold, color="#444444", linestyle="--", linewidth=1)
    highest = max([threshold, *(row["duration_s"] for row in rows)])
    outliers = [(row["step"], row["duration_s"] + 0.04 * highest) for row in rows if row["outlier"]]
    if outliers:
        axes.scatter(*zip(*outliers, strict=True), marker="v", color=_RED, zorder=4, label="stands out")
    axes.set(xlabel="step (dashed: longer ones stand out)", ylabel="seconds", ylim=(0, 1.1 * highest or 1))
    _format(axes, x_integers=True, legend_beside=True)
    return figure


def _idle_caption(report: Report) -> str:
    idle = report["idle"]
    if idle["wall_s"] <= 0:
        return ""
    trainer, rollouter = idle["trainer"], idle["rollouter"]
    text = (
        f"The Trainer waited for samples for {percent(trainer['share'])} of the run ({seconds(trainer['idle_s'])}, "
        f"at most {seconds(trainer['longest_s'])} at once)"
    )
    if idle["first_wait_s"] is not None:
        text += f"; its first wait, before anything was generated, is {seconds(idle['first_wait_s'])} of that"
    if rollouter is not None:
        text += (
            f". Nothing was in generation, neither samples nor the validation set, for {percent(rollouter['share'])} "
            f"({seconds(rollouter['idle_s'])}, at most {seconds(rollouter['longest_s'])} at once)"
        )
    is_known = not any(None in side["strip"] for side in (trainer, rollouter) if side is not None)
    return text + f". The darker, the more of that moment was idle.{'' if is_known else ' Grey: not known.'}"


def _draw_idle(report: Report) -> Figure:
    idle = report["idle"]
    sides = {"Trainer waits for samples": idle["trainer"], "nothing in generation": idle["rollouter"]}
    strips = {name: side["strip"] for name, side in sides.items() if side is not None}
    if idle["down_s"]:
        strips["run was down"] = idle["down"]
    figure, axes = _subplots(height=0.9 + 0.55 * len(strips))
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
    return figure


# ---------------------------------------------------------------------------------------------- versions and waste


def _staleness_caption(report: Report) -> str:
    staleness, spans = report["staleness"]["staleness"], report["staleness"]["version_span"]["histogram"]
    if not staleness["histogram"]:
        return ""
    mixed = sum(number for span, number in spans.items() if span != "0") / max(1, sum(spans.values()))
    return (
        f"Trained samples are {staleness['mean']:.2f} versions old on average, {staleness['max']:.0f} at most; "
        f"{percent(mixed)} of them were sampled by more than one version."
    )


def _draw_staleness(report: Report) -> Figure:
    figure, axes = _subplots(2, height=3.2)
    titles = ("Versions behind when trained", "Newest minus oldest version that sampled it")
    for each, name, title, colour in zip(axes, ("staleness", "version_span"), titles, (_BLUE, _PURPLE), strict=True):
        samples = {int(value): number for value, number in report["staleness"][name]["histogram"].items()}
        _histogram(each, samples, "{:,}", colour)
        each.set(title=title, xlabel="versions", ylabel="samples")
        _format(each, x_integers=True)
    return figure


def _weight_sync_caption(report: Report) -> str:
    phases = {row["phase"]: row for row in report["weight_sync"]["phases"]}
    text = []
    if applied := phases.get("sync.apply"):
        text.append(
            f"Of {count(applied['count'], 'sync')}, half reach all replicas within {seconds(applied['median'])}, the "
            f"slowest took {seconds(applied['max'])}."
        )
    if paused := phases.get("sync.pause"):
        text.append(
            f"A replica stands still for {seconds(paused['median'])}, at most {seconds(paused['max'])}: "
            f"{percent(report['weight_sync']['paused_share'])} of the replicas' lifetimes."
        )
    return " ".join(text) or ("The duration of each phase of the weight syncs." if phases else "")


def _draw_weight_sync(report: Report) -> Figure:
    rows = report["weight_sync"]["phases"][::-1]
    figure, axes = _subplots(height=1.0 + 0.42 * len(rows))
    places = np.arange(len(rows))
    axes.barh(places, [1000 * row["median"] for row in rows], color=_BLUE, height=0.6, label="median")
    axes.scatter([1000 * row["p95"] for row in rows], places, color=_ORANGE, zorder=3, label="95th percentile")
    axes.scatter([1000 * row["max"] for row in rows], places, color=_RED, marker="|", s=140, zorder=3, label="longest")
    axes.set_yticks(places, [row["meaning"] for row in rows])
    axes.set(xlabel="milliseconds")
    axes.grid(axis="y", visible=False)
    _format(axes, x_max=max(1000 * row["max"] for row in rows), legend_beside=True)
    return figure


def _waste_caption(report: Report) -> str:
    waste = report["waste"]
    aborted = waste["aborted"]
    if not waste["sampled_tokens"] or not (waste["wasted_tokens"] or aborted["attempts"]):
        return ""
    reasons = ", ".join(f"{tokens:,.0f} {reason}" for reason, tokens in waste_by_reason(waste))
    return (
        f"{waste['wasted_tokens']:,.0f} of {waste['sampled_tokens']:,.0f} sampled tokens ({percent(waste['share'])}) "
        f"were wasted{f' ({reasons})' if reasons else ''}. Weight syncs or callers aborted "
        f"{count(aborted['attempts'], 'attempt')} with {aborted['tokens']:,.0f} tokens; {aborted['resumed']} were "
        f"resumed, for {seconds(aborted['prefill_again_s'])} of repeated prefill."
    )


def _draw_waste(report: Report) -> Figure:
    waste = report["waste"]
    rows = [(reason, tokens, _RED) for reason, tokens in waste_by_reason(waste)]
    rows.append(("cut as surplus, and resumed", waste["cut"]["kept_tokens"], _GREEN))
    rows.append(("in aborted attempts", waste["aborted"]["tokens"], _ORANGE))
    rows = [row for row in rows if row[1]] or rows[-1:]
    figure, axes = _subplots(height=1.0 + 0.42 * len(rows))
    sampled = max(1.0, waste["sampled_tokens"])
    labels = [f"{tokens:,.0f}  ({100 * tokens / sampled:.3g} %)" for _, tokens, _ in rows]
    _labelled_bars(
        axes, [row[0] for row in rows], [row[1] for row in rows], labels, [row[2] for row in rows], height=0.6
    )
    axes.set(xlabel=f"tokens, of {sampled:,.0f} sampled", xlim=(0, 1.25 * max(row[1] for row in rows) or 1))
    return figure


def _limits_caption(report: Report) -> str:
    limits = report["lower_limits"]
    if not limits["limits"]:
        return ""
    number = count(limits["trajectories"], "response")
    text = f"The longest of {number} has {limits['longest']:.0f} tokens, tools' answers included. "
    rows = [row for row in limits["limits"] if row["cut_share"] > 0]
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
        return text + f"Rewards are {limits['reward_from']}; a response that is cut is worth nothing."
    why = "no event has a reward" if limits["reward_from"] is None else "no reward is worth more than another"
    return text + f"Its cost is unknown: {why}."


def _draw_limits(report: Report) -> Figure:
    figure, axes = _subplots(height=3.6)
    rows = report["lower_limits"]["limits"]
    for key, label, colour, marker in (
        ("longest_trajectory_saved_share", "saved of each step's longest trajectory", _BLUE, "o"),
        ("decode_saved_share", "saved of all decoding", _SKY, "s"),
        ("reward_lost_share", "reward lost", _RED, "v"),
        ("cut_share", "trajectories cut", _GREY, "x"),
    ):
        if all(row[key] is not None for row in rows):
            limits, shares = [row["limit"] for row in rows], [100 * row[key] for row in rows]
            axes.plot(limits, shares, color=colour, marker=marker, label=label)
    axes.set(xlabel="limit of the response, tokens", ylim=(0, None))
    _format(axes, y_percent=True, legend_beside=True)
    return figure


# ---------------------------------------------------------------------------------------------- parts of plots


def _subplots(columns: int = 1, height: float = 3.7, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, **options)


def _format(
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
    """Draw layers of name, colour and heights; returns their total heights."""
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


class Plot(NamedTuple):
    id: str
    """The name of its PNG, and of its anchor on the page."""
    section: str
    title: str
    caption: Callable[[Report], str]
    draw: Callable[[Report], Figure]


PLOTS = (
    Plot("request_times", "Requests", "How long requests take, by step", _request_times_caption, _draw_request_times),
    Plot("request_times_by_replica", "Requests", "How long requests take, by replica",
         _replica_times_caption, _draw_replica_times),
    Plot("response_lengths", "Requests", "How long responses are", _lengths_caption, _draw_lengths),
    Plot("event_shares", "Where the time goes", "Where a trajectory's time goes", _shares_caption, _draw_shares),
    Plot("event_shares_by_step", "Where the time goes", "The same, over the run",
         _shares_by_step_caption, _draw_shares_by_step),
    Plot("lifetime", "Where the time goes", "The lifetime of a sample", _lifetimes_caption, _draw_lifetimes),
    Plot("turns", "Turns", "Turns: what each costs, and how many there are", _turns_caption, _draw_turns),
    Plot("steps", "Steps", "How long steps take", _steps_caption, _draw_steps),
    Plot("idle", "Idle time", "When a side was idle", _idle_caption, _draw_idle),
    Plot("staleness", "Weight versions", "How stale samples are", _staleness_caption, _draw_staleness),
    Plot("weight_sync", "Weight versions", "How long a weight sync takes", _weight_sync_caption, _draw_weight_sync),
    Plot("waste", "Waste", "Wasted tokens", _waste_caption, _draw_waste),
    Plot("lower_limits", "Waste", "What a lower response limit would do", _limits_caption, _draw_limits),
)  # fmt: skip
