"""`asyncrl report`: where the time of a run went, as a page, PNGs and report.json."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import seconds
from asyncrl.observe.status.run_files import events_level, explain_missing_events, read_liveness
from asyncrl.observe.status.run_status import read_readable_state
from asyncrl.observe.status.summary import read_readable_summary
from asyncrl.profiling.files import is_number
from asyncrl.storage.run_dir import SavedConfig, find_run

DIRECTORY = "report"


@click.command()
@click.argument("run", required=False)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Directory of the report.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json; write no files.")
def report(run: str | None, out: Path | None, as_json: bool) -> int:
    """Show where a run's time went: requests, turns, steps, weight syncs, idle time, and what cost the most.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.

    \b
    Examples:
      asyncrl report
      asyncrl report quickstart
      asyncrl report runs/quickstart/20260101-120000 --out report
      asyncrl report quickstart --json | jq '.findings[0]'

    It writes report/ in the run directory: index.html, a self-contained page, its figures as PNGs, and all their
    numbers in report.json. It also prints the findings, alarms before hints, and those that cost the run the most
    seconds first. A slow replica is compared with its peers, a slow call with the median of the same calls.

    It reads files only, so it works while the run is live, after it has ended, and after it was killed. It needs the
    events that a run records with profiler.level=summary (the default) or full; without events, the exit code is 2.
    The report of a supervised run (asyncrl sft) has the losses and the speed of its steps, and needs no events.
    """
    if as_json and out is not None:
        raise click.UsageError("--json prints report.json and writes no files, so it cannot be combined with --out")
    # Imported late, because importing pandas and matplotlib takes over a second, and `--help` needs neither.
    from asyncrl.observe.report.analysis import analyse
    from asyncrl.observe.report.load import load
    from asyncrl.observe.report.page import check_directory, summary_lines, write_report
    from asyncrl.observe.report.plots import figures

    run_dir = find_run(run)
    state = read_readable_state(run_dir)
    mode = SavedConfig(run_dir).value("mode") if state is None else state.mode
    if mode == "eval":
        raise ConfigError(f"{run_dir} is an evaluation, whose figures are in its index.html and evaluation.json")
    directory = out or run_dir / DIRECTORY
    if not as_json:
        check_directory(directory)
    console = Console(highlight=False, stderr=as_json)
    if mode == "sft":
        return _report_supervised(run_dir, directory, console, as_json=as_json)
    began = time.monotonic()
    with _progress(console) as advance:
        events = load(run_dir, lambda done, total: advance("reading events", done, total))
        facts = about(run_dir)
        if not events.num_events or not events.frames:
            raise ConfigError(
                explain_missing_events(run_dir, num_files=events.num_files, num_unknown=events.num_unknown)
            )
        advance("computing the figures", 0, 1)
        found = analyse(events, facts, read_readable_summary(run_dir))
        found["figures"] = figures(found)
        del events
        if not as_json:
            drawn = count(1)
            page = write_report(
                found, directory, lambda title: advance(f"drawing: {title}", next(drawn), len(found["figures"]))
            )
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2))
        return 0
    for line in summary_lines(found):
        console.print(line)
    console.print(
        f"{page}\n[dim]with report.json and {len(found['figures'])} PNGs; "
        f"{found['run']['events']:,} events in {seconds(time.monotonic() - began)}[/]",
        soft_wrap=True,
    )
    return 0


def _report_supervised(run_dir: Path, directory: Path, console: Console, *, as_json: bool) -> int:
    from asyncrl.observe.report import supervised
    from asyncrl.observe.report.page import write_report

    found = supervised.analyse_supervised(run_dir, about(run_dir))
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2))
        return 0
    with _progress(console) as advance:
        page = write_report(
            found,
            directory,
            lambda title: advance(f"drawing: {title}", 1, len(found["figures"])),
            draw=supervised.draw_supervised,
            render=supervised.render_supervised,
        )
    for line in supervised.supervised_lines(found):
        console.print(line)
    console.print(f"{page}\n[dim]with report.json and {len(found['figures'])} PNGs[/]", soft_wrap=True)
    return 0


def about(run_dir: Path) -> dict[str, Any]:
    """Return facts about the run from its configuration and its state; unknown ones are None."""
    from asyncrl.observe.report.analysis import LIVE

    config = SavedConfig(run_dir)
    experiment = config.value("experiment_name", resolve=False)
    response_length = config.value("rollout", "response_length")
    liveness = read_liveness(run_dir)
    ends = {"live": LIVE, "unknown": "unknown how it ended"}
    return {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "experiment": experiment if isinstance(experiment, str) else None,
        "status": ends.get(liveness.how, liveness.phase),
        "started_at": liveness.state.started_at if liveness.state is not None else None,
        "total_steps": liveness.state.total_steps if liveness.state is not None else None,
        "level": events_level(run_dir),
        "response_length": response_length if is_number(response_length) else None,
    }


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading events", total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
