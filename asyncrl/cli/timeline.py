"""`asyncrl timeline`: the events of a run over time, as a page on loopback or as a trace file."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import click

from asyncrl.core.failures import ConfigError
from asyncrl.observe.status.run_files import explain_missing_events, read_liveness
from asyncrl.observe.timeline.details import conversation_of
from asyncrl.observe.timeline.reader import ALL_STEPS, StepRange
from asyncrl.observe.timeline.server import Timeline, create_app, listen, serve
from asyncrl.observe.timeline.trace import export_trace
from asyncrl.profiling.files import EVENTS_DIRECTORY, event_files
from asyncrl.storage.run_dir import find_run


class StepsOption(click.ParamType[StepRange]):
    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StepRange:
        if isinstance(value, StepRange):
            return value
        first, dash, last = str(value).partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) > int(last or first):
            self.fail(f"{value!r} is no range of steps: give e.g. 100-200, or one step, e.g. 100", param, ctx)
        return StepRange(int(first), int(last or first))


@click.command()
@click.argument("run", required=False)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a trace for Perfetto instead.",
)
@click.option(
    "--steps",
    type=StepsOption(),
    default=ALL_STEPS,
    metavar="FIRST-LAST",
    help="Steps to show or write; by default all, and on the page the newest 64 MiB of events.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page; by default, a free one.")
@click.option("--open/--no-open", "opened", default=None, help="Open a browser; by default, if there is a display.")
def timeline(run: str | None, trace: Path | None, steps: StepRange, port: int, opened: bool | None) -> int:
    """Serve a page on loopback with the events of a live or ended run over time, or write them as a trace.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.

    \b
    Examples:
      asyncrl timeline
      asyncrl timeline quickstart --port 8700 --no-open
      asyncrl timeline runs/quickstart/20260101-120000 --trace quickstart.json.gz
      asyncrl timeline quickstart --steps 100-200

    The Trainer, its ranks, the Rollouter and every replica have a track. A request is a bar with a colour for each of
    its phases; click it to see its conversation, if the run has kept it (asyncrl show). The page follows a live run.
    Runs record events with profiler.level=summary (the default) or full; without events, the exit code is 2. Ctrl-C
    stops the server, with exit code 0. The trace is JSON for https://ui.perfetto.dev, compressed if FILE ends in .gz.
    """
    if trace and opened:
        raise click.UsageError("--trace writes a file and serves no page that could be opened: leave out one of them")
    if trace is not None and port:
        raise click.UsageError(
            f"--trace writes a file and serves no page, so --port={port} would have no effect: leave out one of them"
        )
    run_dir = find_run(run)
    if next(event_files(run_dir), None) is None:
        raise ConfigError(explain_missing_events(run_dir))
    if trace is not None:
        return _export(run_dir, trace, steps)
    name = run_dir.name if run_dir.parent.name in ("", "runs") else f"{run_dir.parent.name}/{run_dir.name}"
    shown = Timeline(run_dir, partial(read_liveness, run_dir), steps)
    served = create_app(name, shown, partial(conversation_of, run_dir))
    if opened is None:
        opened = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    with listen(port) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        click.echo(f"the timeline of {run_dir} is on {url}\nPress Ctrl-C to stop.")
        anyio.run(serve, served, listening, url if opened else None)
    return 0


def _export(run_dir: Path, target: Path, steps: StepRange) -> int:
    begun = time.perf_counter()
    try:
        result = export_trace(run_dir, target, steps)
    except OSError as error:
        raise ConfigError(
            f"--trace={target} cannot be written: {error.strerror or error}. Name a file in an existing directory "
            "with free space"
        ) from None
    took = time.perf_counter() - begun
    click.echo(f"{target}: {result.num_events:,} events, written in {took:.1f} s. Open it in https://ui.perfetto.dev")
    if result.num_damaged:
        click.echo(f"{result.num_damaged:,} damaged lines of {run_dir / EVENTS_DIRECTORY} were left out", err=True)
    for unread in result.unreadable:
        click.echo(f"left out, because it cannot be read: {unread}", err=True)
    return 0
