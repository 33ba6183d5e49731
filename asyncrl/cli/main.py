"""The `asyncrl` command. Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 130 interrupted.

Nothing here imports torch, Ray or vLLM, so that a bad configuration is reported before they are loaded. Commands that
only read a run do not load the configuration's schema either.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import asyncrl
from asyncrl.cli.skip import skip
from asyncrl.core.failures import AsyncRLError, ConfigError

if TYPE_CHECKING:
    from asyncrl.config.compose import CheckedConfig, Mode
    from asyncrl.config.problems import ConfigProblem
    from asyncrl.config.schema import Config

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_ARGUMENTS = "[CONFIG] [KEY=VALUE | GROUP=OPTION]..."


@click.group(
    context_settings=_SETTINGS,
    epilog="All keys: docs/config.md. Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 130 interrupted.",
)
@click.version_option(asyncrl.__version__, prog_name="asyncrl")
def cli() -> None:
    """Train language models by reinforcement learning, generation and training fully asynchronous.

    \b
    asyncrl launch fully_async                      train the shipped model, as a first look
    asyncrl launch fully_async my.yaml              train yours
    asyncrl launch sync my.yaml                     the same run with a barrier: the baseline to compare with
    asyncrl serve my.yaml                           only serve its model, OpenAI-compatible
    asyncrl status                                  the state of the newest run, live or dead
    asyncrl why                                     what it is blocked on, down to the cause
    asyncrl show quickstart sample_0_42             a conversation, with versions, tool calls and rewards
    asyncrl report                                  where its time went, and what cost most of it
    asyncrl timeline quickstart                     its requests over time, in the browser
    asyncrl skip ls ~/.asyncrl/skip                 the records of skipped stages
    """


cli.add_command(skip)


@cli.command(short_help="Train a model.")
@click.argument("mode", type=click.Choice(["fully_async", "sync"]))
@click.argument("arguments", nargs=-1, metavar=_ARGUMENTS)
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and the resource plan; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@click.option("-m", "--multirun", is_flag=True, hidden=True)
def launch(mode: Mode, arguments: tuple[str, ...], dry_run: bool, as_json: bool, multirun: bool) -> int:
    """Train a model. CONFIG is a YAML file or a shipped recipe; without one the quickstart runs.

    \b
    Examples:
      asyncrl launch fully_async
      asyncrl launch fully_async my.yaml --dry-run
      asyncrl launch fully_async my.yaml trainer.optim.lr=1e-5 rollout.n=16
      asyncrl launch fully_async my.yaml algorithm=grpo_kl async_training=mode_b
      asyncrl launch fully_async mode_c_async_stale trainer.total_training_steps=40
      asyncrl launch fully_async run_dir=runs/quickstart/20260101-120000 resume=auto
      asyncrl launch sync my.yaml
      asyncrl launch fully_async 'data.train_files=[a.parquet,b.jsonl]' reward.function=rewards.py:score

    A launch reads the configuration, checks it whole, then starts Ray, the engines, the Rollouter and the Trainer.
    Ctrl-C once stops cleanly, with a checkpoint; twice, at once.
    """
    if multirun:
        raise click.UsageError(
            "--multirun is not supported: a launch is one run and takes the machine. Run the command once for each "
            "value, e.g. `for lr in 1e-5 1e-6; do asyncrl launch ... trainer.optim.lr=$lr; done`"
        )
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run; a run writes summary.json into its run directory")
    from asyncrl.config.compose import check_config

    outcome = check_config(*_split(arguments), mode=mode)
    if dry_run:
        return _show_plan(outcome, as_json)
    config = _checked(outcome)
    from asyncrl.driver.launch import launch as launch_run

    return launch_run(config)


@cli.command(short_help="Serve a model over HTTP, without training.")
@click.argument("arguments", nargs=-1, metavar=_ARGUMENTS)
def serve(arguments: tuple[str, ...]) -> int:
    """Serve the configured model with an OpenAI-compatible HTTP API, on loopback unless serve.host says otherwise.

    \b
    Examples:
      asyncrl serve
      asyncrl serve my.yaml serve.port=9000 rollout.num_replicas=2
      KEY=secret asyncrl serve my.yaml serve.host=0.0.0.0 serve.api_key_env=KEY
    """
    from asyncrl.config.compose import check_config

    config = _checked(check_config(*_split(arguments), serve_only=True))
    from asyncrl.driver.launch import serve as serve_until_interrupted

    return serve_until_interrupted(config)


@cli.command(short_help="Show the state of a run, live or dead.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("-w", "--watch", is_flag=True, help="Refresh every second, until the run ends or Ctrl-C.")
def status(run: str | None, as_json: bool, watch: bool) -> int:
    """Show the state of a run: its sample counts, versions, staleness, restarts, drops, replicas, checkpoints and
    journal.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl status
      asyncrl status quickstart --watch
      asyncrl status runs/quickstart/20260101-120000 --json

    It reads files only, so it works while the run is live, after it has ended, and after it was killed. Exit code 0,
    also for a failed run; 2 if there is no such run.
    """
    if watch and as_json:
        raise click.UsageError("--watch shows a page; for JSON, run status --json repeatedly")
    from asyncrl.cli import status as inspect

    return inspect.status(run, as_json=as_json, watch=watch)


@cli.command(short_help="Explain what a run is blocked on, down to the cause.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the chain as JSON.")
def why(run: str | None, as_json: bool) -> int:
    """Explain what a run is blocked on, from the Trainer down to the cause; of a dead run, how it ended, too.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl why
      asyncrl why runs/quickstart/20260101-120000
      asyncrl why quickstart --json

    Each line is blocked on the next one:

    \b
      Trainer is blocked on samples for 95 s (30 of up to 32 are READY, 0 RUNNING)
        ◀ Rollouter is blocked on the staleness gate for 94 s (...)
        ◀ version 12 is not applied
        ◀ replica 1 is paused for 94 s (...)
    """
    from asyncrl.cli import status as inspect

    return inspect.why(run, as_json=as_json)


@cli.command(short_help="Print one conversation of a run.")
@click.argument("arguments", nargs=-1, required=True, metavar="[RUN] SAMPLE")
@click.option(
    "-t", "--trajectory", type=click.IntRange(0), metavar="K", help="Number of the trajectory in the sample, from 0."
)
@click.option("--tokens", is_flag=True, help="Token by token: id, mask, version, log-prob, text.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print it as it was dumped, as a JSON array; with --trajectory, one object."
)
@click.option("--no-color", is_flag=True, help="Plain text, also on a terminal.")
def show(arguments: tuple[str, ...], trajectory: int | None, tokens: bool, as_json: bool, no_color: bool) -> int:
    """Print a conversation: messages, tool calls, weights versions, speeds and rewards.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.
    SAMPLE is its id, or the last number of that.

    \b
    Examples:
      asyncrl show quickstart sample_0_42
      asyncrl show runs/quickstart/20260101-120000 42 --trajectory 3
      asyncrl show 42 --trajectory 3 --tokens
      asyncrl show quickstart 42 --json

    Runs keep their conversations with rollout.dump_dir=DIR. Without it, a sample can be shown as long as its payload is
    in the run directory. Sampled text is coloured, with alternating shades for versions; all other text is dim. Without
    --trajectory: a table of all trajectories, and the first one. No such run or sample: exit code 2.
    """
    if len(arguments) > 2:
        raise click.UsageError(f"expected [RUN] SAMPLE, got {len(arguments)} arguments: {' '.join(arguments)}")
    if as_json and tokens:
        raise click.UsageError("--json has all tokens; leave --tokens out")
    from asyncrl.cli.show import show as show_sample

    *run, sample = arguments
    return show_sample(
        run[0] if run else None,
        sample,
        trajectory=trajectory,
        tokens=tokens,
        print_json=as_json,
        use_colour=not no_color,
    )


@cli.command(short_help="Show the requests and steps of a run over time.")
@click.argument("run", required=False)
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE", help="Write a trace for Perfetto instead.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Serve the page there; by default, a free port.")
@click.option("--open/--no-open", "opened", default=None, help="Open a browser; by default, if there is a display.")
def timeline(run: str | None, trace: str | None, port: int, opened: bool | None) -> int:
    """Serve a page on loopback with the events of a run over time, live or afterwards; or write them as a trace.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl timeline
      asyncrl timeline quickstart --port 8700 --no-open
      asyncrl timeline runs/quickstart/20260101-120000 --trace quickstart.json.gz

    The Trainer, its ranks, the Rollouter and every replica have a track. A request is a bar with a colour for each of
    its phases; click it for its conversation, if rollout.dump_dir keeps those. The page follows a live run. Events are
    recorded with profiler.level=summary (the default) or full; a run without events: exit code 2. Ctrl-C ends the
    page, with exit code 0. The trace is JSON for https://ui.perfetto.dev, compressed if FILE ends in .gz.
    """
    if trace and opened:
        raise click.UsageError("--trace writes a file and serves no page that --open could open: leave one of them out")
    from asyncrl.cli.timeline import timeline as show_timeline

    if opened is None:
        opened = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return show_timeline(run, trace=Path(trace) if trace else None, port=port, open_browser=opened)


@cli.command(short_help="Show where a run's time went, as a page.")
@click.argument("run", required=False)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Directory of the report.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json; write nothing.")
def report(run: str | None, out: Path | None, as_json: bool) -> int:
    """Show where a run's time went: requests, turns, steps, weight syncs, idle time, and what cost most of it.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl report
      asyncrl report quickstart
      asyncrl report runs/quickstart/20260101-120000 --out report
      asyncrl report quickstart --json | jq '.findings[0]'

    It writes report/ in the run directory: index.html, a self-contained page, its figures as PNGs, and all their
    numbers in report.json. The findings are ranked by the seconds lost in comparison with a replica's peers, or with
    the median of the same calls. They are printed here, too.

    It reads files only, so it works while the run is live, after it has ended, and after it was killed. It needs the
    events that a run records with profiler.level=summary (the default) or full; a run without them: exit code 2.
    """
    from asyncrl.cli.report import report as make_report

    return make_report(run, out=out, as_json=as_json)


def _split(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the config, if the first argument is one, and the overrides."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("~"):
        return arguments[0], tuple(arguments[1:])
    return None, tuple(arguments)


def _checked(outcome: CheckedConfig) -> Config:
    config = outcome.require()
    _warn(outcome.warnings)
    return config


def _warn(warnings: Sequence[ConfigProblem]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _show_plan(outcome: CheckedConfig, as_json: bool) -> int:
    from asyncrl.config import plan
    from asyncrl.config.compose import to_yaml
    from asyncrl.config.environment import num_prompts
    from asyncrl.config.model_files import num_parameters
    from asyncrl.driver.cluster import detect_machine

    try:
        config = outcome.require()
        resources = plan.make_plan(
            config,
            detect_machine(),
            num_parameters=num_parameters(config.model.path),
            num_prompts=num_prompts(config),
        )
    except ConfigError as error:
        if not as_json:
            raise
        found = [asdict(problem) for problem in outcome.problems]
        click.echo(json.dumps({"error": error.message, "problems": found}, indent=2, default=str))
        return BAD_CONFIG
    warnings = [*outcome.warnings, *plan.shortages(resources)]
    if as_json:
        answer: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "plan": resources.as_json(),
            "warnings": [asdict(warning) for warning in warnings],
        }
        click.echo(json.dumps(answer, indent=2, default=str))
        return 0
    click.echo(to_yaml(config))
    click.echo(_table([("part", "count", "threads", "GPUs", "memory"), *plan.process_rows(resources)]))
    click.echo("\n" + _table(plan.quantity_rows(resources)))
    _warn(warnings)
    return 0


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        return int(cli.main(args=arguments, prog_name="asyncrl", standalone_mode=False) or 0)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        click.echo(f"error: {error.brief}", err=True)
        return BAD_CONFIG
    except AsyncRLError as error:
        click.echo(f"error: {error}", err=True)
        return FAILED


def entry() -> NoReturn:
    """The console script. It does not wait for threads, which may be stuck in a call to a dead Ray."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
