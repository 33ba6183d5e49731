"""`asyncrl report`: where the time of a run went, as a page, PNGs and report.json."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from asyncrl.core.failures import ConfigError
from asyncrl.observe.status.run_files import events_level, read_liveness
from asyncrl.storage.run_dir import SUMMARY, SavedConfig, find_run

if TYPE_CHECKING:
    from asyncrl.observe.report.load import Events

DIRECTORY = "report"
MOST_SHOWN = 10


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
    """
    if as_json and out is not None:
        raise click.UsageError("--json prints report.json and writes no files, so it cannot be combined with --out")
    # Imported late, because importing pandas and matplotlib takes over a second, and `--help` needs neither.
    from asyncrl.observe.report.analysis import analyse
    from asyncrl.observe.report.load import load, read_json
    from asyncrl.observe.report.page import check_directory, write_report
    from asyncrl.observe.report.plots import figures
    from asyncrl.observe.report.statistics import seconds

    run_dir = find_run(run)
    directory = out or run_dir / DIRECTORY
    if not as_json:
        check_directory(directory)
    console = Console(highlight=False, stderr=as_json)
    began = time.monotonic()
    with _progress(console) as advance:
        events = load(run_dir, lambda done, total: advance("reading events", done, total))
        about = _about(run_dir)
        if not events.num_events or not events.frames:
            raise ConfigError(_no_events(run_dir, about, events))
        advance("computing the figures", 0, 1)
        found = analyse(events, about, read_json(run_dir / SUMMARY))
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


def summary_lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the lines for the terminal: the run, the findings, and their remedies."""
    from asyncrl.observe.report.statistics import percent, seconds

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
        if one["severity"] == "alarm":
            yield Text(f"   ▸ {one['remedy']}", style="dim")
    if len(findings) > MOST_SHOWN:
        yield Text(f"and {len(findings) - MOST_SHOWN} more on the page", style="dim")


def _about(run_dir: Path) -> dict[str, Any]:
    """Return facts about the run from its configuration and its state; unknown ones are None."""
    from asyncrl.observe.report.analysis import LIVE

    config = SavedConfig(run_dir)
    liveness = read_liveness(run_dir)
    ends = {"live": LIVE, "unknown": "unknown how it ended"}
    return {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "experiment": config.value("experiment_name"),
        "status": ends.get(liveness.how, liveness.phase),
        "started_at": liveness.state.started_at if liveness.state is not None else None,
        "level": events_level(run_dir),
        "response_length": config.value("rollout", "response_length"),
    }


def _no_events(run_dir: Path, about: Mapping[str, Any], events: Events) -> str:
    if events.num_files:
        unknown = f", but {events.num_unknown} of another version" if events.num_unknown else ""
        why = f"its {events.num_files} files hold no readable events of this version of asyncrl{unknown}"
    elif about["level"] == "off":
        why = "profiler.level was off"
    elif read_liveness(run_dir).how == "live":
        return f"{run_dir} has no events to report yet: the run is starting. Try again in a minute."
    else:
        why = "it has no events/ directory: the run recorded no events, or ended before its first one"
    return (
        f"{run_dir} has no events to report: {why}. Where its time went cannot be determined afterwards. Launch runs "
        "with profiler.level=summary (the default), or with profiler.level=full to also record the work inside steps "
        "and between turns. `asyncrl status` and metrics.jsonl show what is known about this run."
    )


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading events", total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
