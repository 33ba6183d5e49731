"""The report of a supervised run (`asyncrl sft`): losses, speed and time of its steps, from metrics.jsonl. Blocking.

Such a run has no requests, samples and versions, so it has a page of its own, in the directory of a report like others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
from rich.text import Text

from asyncrl.core.failures import ConfigError
from asyncrl.core.text import parse_json
from asyncrl.observe.formats import count, number, percent, seconds
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.report.analysis import FORMAT
from asyncrl.observe.report.page import MAX_STEPS, data_url, templates
from asyncrl.observe.report.plots import CYCLE, DPI, STYLE, format_axes, subplots
from asyncrl.observe.report.statistics import to_json
from asyncrl.storage.run_dir import RunDir, read_lines

_COLUMNS = {
    "loss": "sft/loss",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "tokens": "tokens/trained",
    "tokens_per_s": "sft/tokens_per_s",
    "duration_s": "timing/step_s",
}
"""Metrics of a step by their names in report.json."""
_FIGURES = {"loss": "Loss", "speed": "Speed"}


def analyse_supervised(run_dir: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return report.json of a supervised run. `about`: as for `analysis.analyse`, with `total_steps`.

    Raises:
        ConfigError: it has no step yet.
    """
    rows = list(_rows(RunDir(run_dir).metrics))
    steps: list[dict[str, Any]] = [
        {"step": row.step, "time_s": row.time_s, **{name: row.metrics.get(key) for name, key in _COLUMNS.items()}}
        for row in rows
        if row.kind == "step"
    ]
    if not steps:
        raise ConfigError(
            f"{run_dir} has no steps to report: the supervised run is starting, or ended before its first"
        )
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    tenth = max(1, len(losses) // 10)
    ends = {"first": fmean(losses[:tenth]), "last": fmean(losses[-tenth:])} if losses else {"first": None, "last": None}
    train_s, tokens = (math.fsum(row[name] or 0.0 for row in steps) for name in ("duration_s", "tokens"))
    wall_s = max(row.time_s for row in rows)
    run = {
        **about,
        "steps": len(steps),
        "last_step": steps[-1]["step"],
        "tokens": tokens,
        "tokens_per_s": tokens / train_s if train_s else None,
        "wall_s": wall_s,
        "train_share": min(1.0, train_s / wall_s) if wall_s else None,
        "median_step_s": median(row["duration_s"] or 0.0 for row in steps),
    }
    validations = [
        {"step": row.step, "loss": row.metrics.get("validation/loss")} for row in rows if row.kind == "validation"
    ]
    figures = [{"id": name, "png": f"{name}.png", "title": title} for name, title in _FIGURES.items()]
    content = {"run": run, "loss": ends, "validations": validations, "steps": steps, "figures": figures}
    return to_json({"format": FORMAT, "kind": "sft", **content})


def _rows(path: Path) -> Iterator[MetricsRow]:
    """Yield the rows of metrics.jsonl; damaged lines, and the unfinished last one of a live run, are left out."""
    if not path.is_file():
        return
    for line in read_lines(path):
        try:
            yield MetricsRow.from_json(parse_json(line, finite=True))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue


def supervised_lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the lines for the terminal."""
    run, loss, points = found["run"], found["loss"], found["validations"]
    of = f" of {run['total_steps']:,}" if run["total_steps"] else ""
    yield Text.assemble(
        (str(run["name"]), "bold"),
        f": a supervised run, {run['status']}: {run['steps']:,}{of} steps, {run['tokens']:,.0f} tokens at "
        f"{number(run['tokens_per_s'], ',.0f')}/s in steps, which are {percent(run['train_share'])} of "
        f"{seconds(run['wall_s'])}",
    )
    yield Text(f"loss {number(loss['first'], '.4g')} → {number(loss['last'], '.4g')}{_validation_text(points)}")


def _validation_text(points: Sequence[Mapping[str, Any]]) -> str:
    if not points:
        return ""
    return f", validation loss {number(points[0]['loss'], '.4g')} → {number(points[-1]['loss'], '.4g')}"


def render_supervised(found: Mapping[str, Any], plots_dir: Path) -> str:
    """Return the page."""
    validated = {row["step"]: row["loss"] for row in found["validations"]}
    return (
        templates()
        .get_template("supervised.html.jinja")
        .render(
            report=found,
            run=found["run"],
            images={each["id"]: data_url(plots_dir / each["png"]) for each in found["figures"]},
            steps=[{**row, "validation": validated.get(row["step"])} for row in found["steps"][-MAX_STEPS:]],
            number=number,
            of_steps=count(len(found["steps"]), "step"),
        )
    )


def draw_supervised(found: Mapping[str, Any], directory: Path, progress: Callable[[str], None]) -> None:
    """Write the PNG of each figure. Raises `OSError`."""
    numbers = [row["step"] for row in found["steps"]]
    with matplotlib.rc_context(STYLE):
        figure, axes = subplots()
        axes.plot(numbers, [row["loss"] for row in found["steps"]], color=CYCLE[0], linewidth=1, label="training")
        points = [row for row in found["validations"] if row["loss"] is not None]
        if points:
            style: dict[str, Any] = {"color": CYCLE[1], "marker": "o", "markersize": 4, "label": "validation"}
            axes.plot([row["step"] for row in points], [row["loss"] for row in points], **style)
        axes.set(title="Cross-entropy, nats per token", xlabel="step")
        format_axes(axes, x_integers=True, legend_beside=True)
        figure.savefig(directory / "loss.png", dpi=DPI)
        progress(_FIGURES["loss"])
        figure, (left, right) = subplots(2)
        for own, name, title in (
            (left, "tokens_per_s", "Tokens per second"),
            (right, "duration_s", "Seconds of a step"),
        ):
            own.plot(numbers, [row[name] for row in found["steps"]], color=CYCLE[0], linewidth=1)
            own.set(title=title, xlabel="step", ylim=(0, None))
            format_axes(own, x_integers=True)
        figure.savefig(directory / "speed.png", dpi=DPI)
        progress(_FIGURES["speed"])
