"""The page and the table of an evaluation (`asyncrl eval`), made from evaluation.json and the answers. Blocking."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from rich.table import Table

from asyncrl.observe.report.page import data_url, templates
from asyncrl.observe.report.plots import CYCLE, DPI, STYLE, format_axes, subplots
from asyncrl.observe.report.statistics import evenly_spaced
from asyncrl.storage.answer_files import AnsweredPrompt
from asyncrl.storage.run_dir import replace_file, replacing

PAGE, PLOT = "index.html", "figures.png"
MAX_PROMPTS = 40
"""Prompts whose answers are on the page, from the lowest to the highest mean reward."""
MAX_CHARS = 2000
MAX_COLUMNS = 6
"""Data sources in the terminal; the page has all."""
MEANINGS = {
    "mean": "mean reward",
    "pass": "share of prompts with a correct answer among k",
    "best": "mean of the greatest reward among k",
    "maj": "share of prompts whose most frequent answer among k is correct",
}


def groups_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures by name: those of all prompts, if there are several data sources, and those of each source."""
    sources: dict[str, Any] = dict(found["sources"])
    return {"all prompts": found["all"], **sources} if len(sources) > 1 else sources


def estimate_text(estimate: Mapping[str, Any] | None) -> str:
    """Return a figure with its interval: `0.612 [0.55, 0.67]`."""
    if estimate is None:
        return "-"
    interval = "" if estimate["low"] is None else f" [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return f"{estimate['value']:.3f}{interval}"


def summary_table(found: Mapping[str, Any]) -> Table:
    """Return the figures for the terminal."""
    groups = groups_of(found)
    shown = dict(list(groups.items())[:MAX_COLUMNS])
    title = f"{found['model']}: {found['answered']:,} of {found['prompts']:,} prompts answered"
    table = Table(title=title, title_justify="left")
    table.add_column("95 % intervals over prompts")
    for name in shown:
        table.add_column(name, justify="right")
    for figure in _figure_names(groups):
        table.add_row(figure, *(estimate_text(one["figures"].get(figure)) for one in shown.values()))
    table.add_section()
    table.add_row("prompts", *(f"{one['prompts']:,}" for one in shown.values()))
    table.add_row("tokens of an answer", *(f"{one['tokens']['mean']:.1f}" for one in shown.values()))
    table.add_row("end of an answer", *(", ".join(_shares(one)) for one in shown.values()))
    if len(groups) > len(shown):
        table.caption = f"and {len(groups) - len(shown)} more data sources on the page"
    return table


def write_page(found: Mapping[str, Any], answers: Mapping[int, AnsweredPrompt], directory: Path) -> None:
    """Write index.html, which is self-contained, and figures.png. Raises `OSError`."""
    groups = groups_of(found)
    with tempfile.TemporaryDirectory(prefix=".page-", dir=directory) as name:
        plot = Path(name) / PLOT
        _draw(groups, plot)
        text = templates().get_template("evaluation.html.jinja").render(
            found=found,
            groups=groups,
            figure_names=_figure_names(groups),
            meanings=MEANINGS,
            estimate_text=estimate_text,
            shares={name: list(_shares(one)) for name, one in groups.items()},
            image=data_url(plot),
            prompts=list(_examples(answers)),
        )  # fmt: skip
        with replacing(directory / PLOT) as file:
            file.write(plot.read_bytes())
    replace_file(directory / PAGE, text)


def _figure_names(groups: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for one in groups.values() for name in one["figures"]))


def _shares(group: Mapping[str, Any]) -> Iterator[str]:
    for reason, count in group["finish_reasons"].items():
        yield f"{100 * count / group['answers']:.3g} % {reason}"


def _draw(groups: Mapping[str, Any], file: Path) -> None:
    """Draw pass@k, best@k and maj@k over k, with their intervals."""
    names = _figure_names(groups)
    kinds = [kind for kind in MEANINGS if kind != "mean" and any(name.startswith(f"{kind}@") for name in names)]
    with matplotlib.rc_context(STYLE):
        figure, axes = subplots(len(kinds), squeeze=False)
        for kind, own in zip(kinds, axes[0], strict=True):
            for colour, (name, group) in zip(CYCLE, groups.items(), strict=False):
                points = _points(group["figures"], kind)
                sizes = [k for k, _ in points]
                own.plot(sizes, [one["value"] for _, one in points], color=colour, marker="o", markersize=4, label=name)
                if points and points[0][1]["low"] is not None:
                    low, high = ([one[end] for _, one in points] for end in ("low", "high"))
                    own.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            own.set(title=f"{kind}@k", xlabel="k")
            own.set_xscale("log", base=2)
            sizes = sorted({k for group in groups.values() for k, _ in _points(group["figures"], kind)})
            own.set_xticks(sizes, [str(k) for k in sizes])
        format_axes(axes[0][-1], legend_beside=True)
        figure.savefig(file, dpi=DPI)


def _points(figures: Mapping[str, Any], kind: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the estimates of one kind by k; best@1 and maj@1 are mean@n and pass@1."""
    found = {int(name.partition("@")[2]): one for name, one in figures.items() if name.startswith(f"{kind}@")}
    first = {"best": "mean@", "maj": "pass@1"}.get(kind)
    if first is not None:
        found.setdefault(1, next(one for name, one in figures.items() if name.startswith(first)))
    return sorted(found.items())


def _examples(answers: Mapping[int, AnsweredPrompt]) -> Iterator[dict[str, Any]]:
    scored = [(fmean(each.reward for each in one.answers), one) for one in answers.values() if one.answers]
    for reward, one in evenly_spaced(sorted(scored, key=lambda row: row[0]), MAX_PROMPTS):
        yield {
            "number": one.number,
            "data_source": one.data_source,
            "prompt": _text(one.prompt),
            "ground_truth": _clip(str(one.ground_truth)),
            "reward": reward,
            "answers": [{"one": each, "text": _clip(_text(each.messages) or each.text)} for each in one.answers],
        }


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return _clip("\n".join(f"{one.get('role', '')}: {one.get('content', '')}" for one in messages))


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(text):,} characters)"
