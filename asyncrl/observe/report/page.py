"""Write the directory of a report (index.html, which is self-contained, PNGs, report.json) and its summary. Blocking.

A report replaces only the files of an earlier report, each of them atomically.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich.text import Text

from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import percent, seconds
from asyncrl.observe.report import plots
from asyncrl.storage.run_dir import read_json

PAGE, DATA = "index.html", "report.json"
MAX_STEPS = 2000
"""The page has rows for this many of the newest steps, and for all outliers."""
MOST_SHOWN = 10
"""Findings in the terminal."""
_SCRATCH = ".asyncrl-report-"
_PLOT = re.compile(r"\w+\.png")


def check_directory(directory: Path) -> None:
    """Check that a report may be written there.

    Raises:
        ConfigError: the directory holds something else, it cannot be created, or it is a link.
    """
    if directory.is_symlink():
        raise ConfigError(
            f"--out={directory} is a link to {os.path.realpath(directory)}: nothing is written through a link, because "
            "it may have come with the run directory. Name the directory itself with --out DIR"
        )
    try:
        others = [each.name for each in directory.iterdir() if not each.name.startswith(_SCRATCH)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_writable(directory, error) from error
    if others and _existing_plots(directory) is None:
        raise ConfigError(
            f"--out={directory} holds {len(others)} {'entry' if len(others) == 1 else 'entries'} and no report of "
            "asyncrl: nothing there is overwritten. Name a new or an empty directory with --out DIR"
        )


def write_report(
    report: Mapping[str, Any],
    directory: Path,
    progress: Callable[[str], None],
    *,
    draw: Callable[[Mapping[str, Any], Path, Callable[[str], None]], None] | None = None,
    render: Callable[[Mapping[str, Any], Path], str] | None = None,
) -> Path:
    """Write the report in place of an earlier one, and return the path of its page.

    Args:
        progress: is called with the title of each figure once it is drawn.
        draw: writes the PNG of each of `report["figures"]` into a directory; None: those of a launch.
        render: makes the page of the report and that directory; None: the page of a launch.

    Raises:
        ConfigError: as `check_directory`, or the directory cannot be written.
    """
    check_directory(directory)
    files = [each["png"] for each in report["figures"]]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as name:
            scratch = Path(name)
            (draw or plots.draw)(report, scratch, progress)
            (scratch / PAGE).write_text((render or render_page)(report, scratch), "utf-8")
            (scratch / DATA).write_text(
                json.dumps(report, ensure_ascii=False, allow_nan=False, indent=1) + "\n", "utf-8"
            )
            earlier = _existing_plots(directory) or set()
            # report.json comes first: it marks the directory as that of a report.
            for file in (DATA, *files, PAGE):
                os.replace(scratch / file, directory / file)
        for file in earlier.difference(files):
            (directory / file).unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(directory, error) from error
    return (directory / PAGE).absolute()


def summary_lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the lines for the terminal: the run, the findings, and their remedies."""
    run, replicas = found["run"], len(found["run"]["replicas"])
    yield Text.assemble(
        (str(run["name"]), "bold"),
        f": {run['steps']} steps in {seconds(run['wall_s'])}, {run['requests']:,} requests on "
        f"{replicas} replica{'' if replicas == 1 else 's'}; the Trainer waited "
        f"{percent(found['idle']['trainer']['share'])} of the time",
    )
    for note in found["notes"]:
        yield Text(f"note: {note}", style="dim")
    findings: Sequence[Mapping[str, Any]] = found["findings"]
    if not findings:
        yield Text("Nothing stands out.")
    for place, one in enumerate(findings[:MOST_SHOWN], start=1):
        colour = "bold red" if one["severity"] == "alarm" else "yellow"
        lost = f"{seconds(one['seconds_lost'])}, {percent(one['share_of_run'])} of the run"
        yield Text.assemble(
            f"{place}. ", (f"{one['severity']} ", colour), (f"{one['what']} {one['name']}", "bold"), f" ({lost})"
        )
        yield Text(f"   {one['text']}")
        yield Text(f"   ▸ {one['remedy']}", style="dim")
    if len(findings) > MOST_SHOWN:
        yield Text(f"and {len(findings) - MOST_SHOWN} more on the page", style="dim")


def templates() -> Environment:
    """Return the environment of the pages, which escapes every value."""
    environment = Environment(
        loader=PackageLoader("asyncrl.observe.report", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(s=seconds, share=percent, n=_number, anchor=_anchor)
    return environment


def render_page(report: Mapping[str, Any], plots_dir: Path) -> str:
    severities = [(name, [row for row in report["findings"] if row["severity"] == name]) for name in ("alarm", "hint")]
    steps, outliers = report["steps"]["by_step"], report["steps"]["outliers"]
    # Every request that something on the page refers to.
    requests = [*report["requests"]["slowest"], *(row["request"] for row in outliers if row["request"])]
    return (
        templates()
        .get_template("page.html.jinja")
        .render(
            report=report,
            run=report["run"],
            images={each["id"]: data_url(plots_dir / each["png"]) for each in report["figures"]},
            sections=[(name, list(rows)) for name, rows in groupby(report["figures"], lambda each: each["section"])],
            severities=[(name, rows) for name, rows in severities if rows],
            requests=sorted({row["request"]: row for row in requests}.values(), key=lambda row: -row["duration_s"]),
            shown_steps={row["step"] for row in steps[-MAX_STEPS:]} | {row["step"] for row in outliers},
            shown_replicas={row["replica"] for row in report["requests"]["by_replica"]},
        )
    )


def _existing_plots(directory: Path) -> set[str] | None:
    """Return the file names of the plots of the report in the directory; None if it has no report."""
    try:
        report = read_json(directory / DATA)
        if not isinstance(report["format"], int):
            return None
        names = {str(each["png"]) for each in report["figures"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return set(filter(_PLOT.fullmatch, names))


def _not_writable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out={directory} cannot be written: {error.strerror or error}. Name a writable directory with free space "
        "with --out DIR"
    )


def data_url(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _anchor(name: Any) -> str:
    """Return an id of letters, digits, `-`, `_` and `.`."""
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in str(name))
