"""`asyncrl report`: where the time of a run went, as a page, PNGs and report.json."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from asyncrl.cli.inspect import Standing, events_level, find_run, standing
from asyncrl.failures import ConfigError
from asyncrl.report import folder
from asyncrl.report.analysis import LIVE, analyse
from asyncrl.report.load import Events, load, read_json
from asyncrl.report.words import figures, percent, seconds

DIRECTORY = "report"
MOST_SHOWN = 10
_SUMMARY = "summary.json"


def report(run: str | None, *, out: Path | None, as_json: bool) -> int:
    """Make the report of a run; with `as_json`, print report.json and write nothing.

    Raises:
        ConfigError: there is no such run, it has no events, or `out` cannot be written, or holds something else.
        click.UsageError: `as_json` with `out`.
    """
    if as_json and out is not None:
        raise click.UsageError("--json prints report.json and writes nothing: leave --out out, or --json")
    run_dir = find_run(run)
    directory = out or run_dir / DIRECTORY
    if not as_json:
        folder.check(directory)
    console = Console(highlight=False, stderr=as_json)
    began = time.monotonic()
    with _progress(console) as tell:
        events = load(run_dir, lambda done, total: tell("reading events", done, total))
        about = _about(run_dir)
        if not events.num_events or not events.frames:
            raise ConfigError(_no_events(run_dir, about, events))
        tell("working out the figures", 0, 1)
        found = analyse(events, about, read_json(run_dir / _SUMMARY))
        found["figures"] = figures(found)
        del events
        page = None if as_json else _write(found, directory, tell)
    if page is None:
        click.echo(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2))
        return 0
    for line in summary_lines(found):
        console.print(line)
    console.print(
        f"{page}\n[dim]beside it report.json and {len(found['figures'])} PNGs; "
        f"{found['run']['events']:,} events in {seconds(time.monotonic() - began)}[/]",
        soft_wrap=True,
    )
    return 0


def summary_lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """What the terminal shows: the run in a line, the findings, what to do."""
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


def _write(found: Mapping[str, Any], directory: Path, tell: Callable[[str, int, int], None]) -> Path:
    count = 0

    def drawn(title: str) -> None:
        nonlocal count
        count += 1
        tell(f"drawing: {title}", count, len(found["figures"]))

    return folder.write(found, directory, drawn)


# ---------------------------------------------------------------------------------------------- the run


def _about(run_dir: Path) -> dict[str, Any]:
    """What the other files say of the run; None for what they do not."""
    config: Any = {}
    with contextlib.suppress(OSError, yaml.YAMLError):
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    config = config if isinstance(config, dict) else {}
    rollout = config.get("rollout") or {}
    seen = standing(run_dir)
    return {
        "name": run_dir.name,
        "run_dir": str(run_dir),
        "experiment": config.get("experiment_name"),
        "status": _status(seen),
        "started_at": seen.state.started_at if seen.state is not None else None,
        "level": events_level(run_dir),
        "response_length": rollout.get("response_length"),
    }


def _status(seen: Standing) -> str:
    """In words: live, how it ended, or that it has left without a word."""
    if seen.how == "live":
        return LIVE
    return "unknown how it ended" if seen.how == "unknown" else seen.phase


def _no_events(run_dir: Path, about: Mapping[str, Any], events: Events) -> str:
    if events.num_files:
        why = (
            f"its {events.num_files} files hold {events.num_unknown or 'no'} readable events of this version of asyncrl"
        )
    elif about["level"] == "off":
        why = "profiler.level was off"
    elif standing(run_dir).how == "live":
        return f"{run_dir} has no events to report of yet: the run lives, and is starting. Ask again in a minute."
    else:
        why = "there is no events/ in it: it recorded none, or ended before it began"
    return (
        f"{run_dir} has no events to report of: {why}. Where its time went cannot be known afterwards. Run with "
        "profiler.level=summary (the default), or profiler.level=full to see inside of steps and between turns; "
        "`asyncrl status` and metrics.jsonl tell what is known of this one."
    )


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading events", total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
