"""`asyncrl status` and `asyncrl why`: the state of a run, and what it is blocked on."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from asyncrl.observe.metrics.rows import finite
from asyncrl.observe.status.run_files import read_run, status_report, wait_chain, wait_chain_as_json
from asyncrl.observe.terminal.status_page import status_page
from asyncrl.storage.run_dir import find_run

WATCH_S = 1.0


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("-w", "--watch", is_flag=True, help="Refresh every second, until the run ends or Ctrl-C.")
def status(run: str | None, as_json: bool, watch: bool) -> int:
    """Show the state of a run: its sample counts, versions, staleness, restarts, drops, replicas, checkpoints and
    journal.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.

    \b
    Examples:
      asyncrl status
      asyncrl status quickstart --watch
      asyncrl status runs/quickstart/20260101-120000 --json

    It reads files only, so it works while the run is live, after it has ended, and after it was killed. The exit code
    is 0, also for a failed run, and 2 if the run does not exist.
    """
    if watch and as_json:
        raise click.UsageError("--watch shows a page; for JSON, run status --json repeatedly")
    run_dir = find_run(run)
    if as_json:
        _print_json(status_report(read_run(run_dir)))
        return 0
    console = Console(highlight=False)
    if not watch:
        console.print(status_page(status_report(read_run(run_dir)), run_dir.name))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            report = status_report(read_run(run_dir))
            live.update(status_page(report, run_dir.name), refresh=True)
            if not report["live"]:
                break
            time.sleep(WATCH_S)  # the interval at which the driver writes its state
    return 0


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the chain as JSON.")
def why(run: str | None, as_json: bool) -> int:
    """Explain what a run is blocked on, from the Trainer down to the cause; for a dead run, also how it ended.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.

    \b
    Examples:
      asyncrl why
      asyncrl why runs/quickstart/20260101-120000
      asyncrl why quickstart --json

    Each line shows what the one above is blocked on:

    \b
      Trainer is blocked on samples for 95 s (30 of up to 32 are READY, 0 RUNNING)
        ◀ Rollouter is blocked on the staleness gate for 94 s (...)
        ◀ version 12 is not applied
        ◀ replica 1 is paused for 94 s (...)
    """
    run_dir = find_run(run)
    files = read_run(run_dir)
    links = wait_chain(files)
    if as_json:
        _print_json({"run_dir": str(run_dir), "live": files.is_live, **wait_chain_as_json(links)})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    indent = ""
    if links[0].cause and len(links) > 1:
        console.print(f"{links[0].text}\nat that time:", markup=False)
        links, indent = links[1:], "  "
    for number, link in enumerate(links):
        console.print(f"{indent}  ◀ {link.text}" if number else f"{indent}{link.text}", markup=False)
    return 0


def _print_json(content: Any) -> None:
    click.echo(json.dumps(finite(content), indent=2, default=str, ensure_ascii=False))
