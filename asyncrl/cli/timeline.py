"""`asyncrl timeline`: the events of a run over time, as a page on loopback or as a trace file."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import click
import uvicorn
from starlette.applications import Starlette

from asyncrl.core.failures import AsyncRLError, ConfigError
from asyncrl.core.types import SampleId
from asyncrl.driver.processes import Interrupts
from asyncrl.observe.kept_samples import ConfiguredRun, find_sample
from asyncrl.observe.status.run_files import events_level, read_liveness
from asyncrl.observe.terminal import conversation
from asyncrl.observe.timeline.details import Conversation
from asyncrl.observe.timeline.server import Timeline, create_app
from asyncrl.observe.timeline.trace import export_trace
from asyncrl.profiling.files import EVENTS_DIRECTORY, event_files
from asyncrl.storage.run_dir import find_run

_STOP_S = 1
"""Time limit for requests in progress at Ctrl-C."""


@click.command()
@click.argument("run", required=False)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a trace for Perfetto instead.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page; by default, a free one.")
@click.option("--open/--no-open", "opened", default=None, help="Open a browser; by default, if there is a display.")
def timeline(run: str | None, trace: Path | None, port: int, opened: bool | None) -> int:
    """Serve a page on loopback with the events of a live or ended run over time, or write them as a trace.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.

    \b
    Examples:
      asyncrl timeline
      asyncrl timeline quickstart --port 8700 --no-open
      asyncrl timeline runs/quickstart/20260101-120000 --trace quickstart.json.gz

    The Trainer, its ranks, the Rollouter and every replica have a track. A request is a bar with a colour for each of
    its phases; click it to see its conversation, if rollout.dump_dir is set. The page follows a live run. Runs record
    events with profiler.level=summary (the default) or full; without events, the exit code is 2. Ctrl-C stops the
    server, with exit code 0. The trace is JSON for https://ui.perfetto.dev, compressed if FILE ends in .gz.
    """
    if trace and opened:
        raise click.UsageError("--trace writes a file and serves no page that could be opened: leave out one of them")
    if trace is not None and port:
        raise click.UsageError(
            f"--trace writes a file and serves no page, so --port={port} would have no effect: leave out one of them"
        )
    run_dir = find_run(run)
    if next(event_files(run_dir), None) is None:
        raise ConfigError(_no_events(run_dir))
    if trace is not None:
        return _export(run_dir, trace)
    name = run_dir.name if run_dir.parent.name in ("", "runs") else f"{run_dir.parent.name}/{run_dir.name}"
    served = create_app(name, Timeline(run_dir, partial(read_liveness, run_dir)), partial(conversation_of, run_dir))
    if opened is None:
        opened = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    with _listening(port) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        click.echo(f"the timeline of {run_dir} is on {url}\nPress Ctrl-C to stop.")
        anyio.run(_serve, served, listening, url if opened else None)
    return 0


def _export(run_dir: Path, target: Path) -> int:
    begun = time.perf_counter()
    try:
        result = export_trace(run_dir, target)
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


def _no_events(run_dir: Path) -> str:
    level = events_level(run_dir)
    if level == "off":
        return (
            f"{run_dir} has no events to show: it was launched with profiler.level=off. Launch with "
            "profiler.level=summary or full"
        )
    setting = f"; its profiler.level is {level}" if level else ""
    return (
        f"{run_dir} has no events to show{setting}. A run with profiler.level=summary or full writes its first "
        "events into events/ of its directory within seconds of its start"
    )


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
        raise ConfigError(
            f"--port={port} {why}: the page cannot be served there. Leave out --port to use a free one, or name another"
        ) from None
    with listening:
        yield listening


class _Server(uvicorn.Server):
    """A server that leaves signals to `Interrupts`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(served: Starlette, listening: socket.socket, to_open: str | None) -> None:
    config = uvicorn.Config(served, log_level="warning", access_log=False, timeout_graceful_shutdown=_STOP_S)
    server = _Server(config)

    async def stop() -> None:
        server.should_exit = True

    interrupts = Interrupts()
    interrupts.on_first = stop
    with interrupts.scope:
        async with anyio.create_task_group() as group:
            await group.start(interrupts.listen)
            if to_open is not None:
                group.start_soon(_open, to_open)
            await server.serve(sockets=[listening])
            group.cancel_scope.cancel()


async def _open(url: str) -> None:
    await anyio.to_thread.run_sync(webbrowser.open, url)


def conversation_of(run_dir: Path, sample: str, trajectory: int | None) -> Conversation:
    """Return a conversation as `asyncrl show` prints it, or the reason why there is none. Blocking."""
    if not re.fullmatch(r"sample_\d+_\d+", sample, re.ASCII):
        return Conversation(notes=["Runs keep the conversations of training samples only, and this is not one."])
    try:
        found = find_sample(ConfiguredRun(run_dir), SampleId.parse(sample).index, sample)
    except (AsyncRLError, ValueError) as error:
        return Conversation(notes=[error.message if isinstance(error, AsyncRLError) else str(error)])
    one = next((each for each in found.trajectories if trajectory is None or each.asked == trajectory), None)
    if one is None:
        return Conversation(notes=[*found.notes, f"Trajectory {trajectory} was not kept; it may have been cancelled."])
    lines = [*conversation.conversation(one), *conversation.closing(one, "")]
    return Conversation([conversation.title(one), *lines], found.notes)
