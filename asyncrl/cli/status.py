"""`asyncrl status` and `asyncrl why`: the state of a run, and what it is blocked on."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from asyncrl.observe.metrics.rows import finite
from asyncrl.observe.status.run_files import read_run, status_report, wait_chain, wait_chain_as_json
from asyncrl.observe.terminal.status_page import status_page
from asyncrl.storage.run_dir import find_run

WATCH_S = 1.0


def status(run: str | None, *, as_json: bool, watch: bool) -> int:
    """Print the state of a run; with `watch`, refresh it until the run ends or Ctrl-C.

    Raises:
        ConfigError: there is no such run, or it has no state yet.
    """
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


def why(run: str | None, *, as_json: bool) -> int:
    """Print the chain of waits of a run.

    Raises:
        ConfigError: there is no such run, or it has nothing to show.
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
    Console(highlight=False, soft_wrap=True).print(
        json.dumps(finite(content), indent=2, default=str, ensure_ascii=False), markup=False
    )
