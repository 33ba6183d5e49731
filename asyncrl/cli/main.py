"""The `asyncrl` command. Exit codes: 0 ok, 1 failed, 2 bad configuration or usage, 130 interrupted.

Nothing here imports torch, Ray or vLLM: a bad configuration is told before they are loaded. Looking at a run does not
load the configuration's schema either.
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
from asyncrl.failures import AsyncRLError, ConfigError

if TYPE_CHECKING:
    from asyncrl.config.compose import Mode, Outcome
    from asyncrl.config.problems import Problem
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
    asyncrl status                                  how the newest run stands, live or dead
    asyncrl why                                     what it waits on, down to the cause
    asyncrl show quickstart sample_0_42             what was said, by which version, and what it was worth
    asyncrl report                                  where its time went, and what lost most of it
    asyncrl timeline quickstart                     where the time went, request by request, in the browser
    asyncrl skip ls ~/.asyncrl/skip                 what is recorded of skipped stages
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
    from asyncrl.config.compose import examine

    outcome = examine(*_split(arguments), mode=mode)
    if dry_run:
        return _show_plan(outcome, as_json)
    config = _checked(outcome)
    from asyncrl.cli.launch import launch as launch_run

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
    from asyncrl.config.compose import examine

    config = _checked(examine(*_split(arguments), serve_only=True))
    from asyncrl.cli.serve import serve as serve_until_interrupted

    return serve_until_interrupted(config)


@cli.command(short_help="Show how a run stands, live or dead.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("-w", "--watch", is_flag=True, help="Print it anew every second, until the run ends or Ctrl-C.")
def status(run: str | None, as_json: bool, watch: bool) -> int:
    """Show how a run stands: its books, versions, staleness, restarts, drops, replicas, checkpoints and journal.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl status
      asyncrl status quickstart --watch
      asyncrl status runs/quickstart/20260101-120000 --json

    It reads files only, so it works while the run lives, after it has ended, and after it was killed. A failed run is
    an answer too: exit code 0. No such run: 2.
    """
    if watch and as_json:
        raise click.UsageError("--watch shows a page; for JSON, run status --json as often as you like")
    from asyncrl.cli import inspect

    return inspect.status(run, as_json=as_json, watch=watch)


@cli.command(short_help="Say what a run waits on, down to the cause.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the chain as JSON.")
def why(run: str | None, as_json: bool) -> int:
    """Say what a run waits on, from the Trainer down to the cause; of a dead run, how it ended and what it waited on.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl why
      asyncrl why runs/quickstart/20260101-120000
      asyncrl why quickstart --json

    Each line waits on the next one:

    \b
      Trainer waits for samples for 95 s (30 of up to 32 are READY, 0 RUNNING)
        ◀ Rollouter waits on staleness gate for 94 s (...)
        ◀ version 12 not applied
        ◀ replica 1 in pause for 94 s (...)
    """
    from asyncrl.cli import inspect

    return inspect.why(run, as_json=as_json)


@cli.command(short_help="Print one conversation of a run.")
@click.argument("arguments", nargs=-1, required=True, metavar="[RUN] SAMPLE")
@click.option("-t", "--trajectory", type=click.IntRange(0), metavar="K", help="This one of the sample; from 0.")
@click.option("--tokens", is_flag=True, help="Token by token: id, mask, version, log-prob, text.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print it as it was dumped, as a JSON array; with --trajectory, one object."
)
@click.option("--no-color", is_flag=True, help="Plain text, also on a terminal.")
def show(arguments: tuple[str, ...], trajectory: int | None, tokens: bool, as_json: bool, no_color: bool) -> int:
    """Print a conversation: messages, tool calls, who sampled what and how fast, and rewards.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.
    SAMPLE is its id, or the last number of that.

    \b
    Examples:
      asyncrl show quickstart sample_0_42
      asyncrl show runs/quickstart/20260101-120000 42 --trajectory 3
      asyncrl show 42 --trajectory 3 --tokens
      asyncrl show quickstart 42 --json

    Runs keep their conversations with rollout.dump_dir=DIR. Without, a sample can be shown for as long as its payload
    is in the run directory. What the policy sampled is in colour, a shade for every other version; what it was told is
    dim. Without --trajectory: all trajectories in a table, and the first one. No such run or sample: exit code 2.
    """
    if len(arguments) > 2:
        raise click.UsageError(f"expected [RUN] SAMPLE, got {len(arguments)} arguments: {' '.join(arguments)}")
    if as_json and tokens:
        raise click.UsageError("--json has all tokens; leave --tokens out")
    from asyncrl.cli.show import Wanted
    from asyncrl.cli.show import show as show_sample

    *run, sample = arguments
    wanted = Wanted(sample, trajectory, tokens=tokens, as_json=as_json, colour=not no_color)
    return show_sample(run[0] if run else None, wanted)


@cli.command(short_help="Show where the time of a run went, request by request.")
@click.argument("run", required=False)
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE", help="Write a trace for Perfetto and end.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Serve the page there; by default, a free port.")
@click.option("--open/--no-open", "opened", default=None, help="Open a browser; by default, if there is a display.")
def timeline(run: str | None, trace: str | None, port: int, opened: bool | None) -> int:
    """Serve a page on loopback that shows the events of a run in time, live or afterwards; or write them as a trace.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl timeline
      asyncrl timeline quickstart --port 8700 --no-open
      asyncrl timeline runs/quickstart/20260101-120000 --trace quickstart.json.gz

    There are lanes for the Trainer, its ranks, the Rollouter and every replica. A request is a bar in the colours of
    what it was doing; click it for its conversation, if rollout.dump_dir keeps those. A live run is followed. Events
    are recorded with profiler.level=summary (the default) or full; a run without any: exit code 2. Ctrl-C ends the
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
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write it there.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json; write nothing.")
def report(run: str | None, out: Path | None, as_json: bool) -> int:
    """Show where a run's time went: requests, turns, steps, weight syncs, idle time, and what lost most of it.

    RUN is a run directory, or an experiment's name for its newest run; without it, the newest run of all in runs/.

    \b
    Examples:
      asyncrl report
      asyncrl report quickstart
      asyncrl report runs/quickstart/20260101-120000 --out report
      asyncrl report quickstart --json | jq '.findings[0]'

    It writes report/ in the run directory: index.html, one page that needs no network, its figures as PNGs, and every
    number of them in report.json. The findings are ranked by the seconds that they lost against what is normal: against
    a replica's peers, or against the same calls' own median. They are printed here, too.

    It reads files only, so it works while the run lives, after it has ended, and after it was killed. It is made of the
    events that a run records with profiler.level=summary (the default) or full; a run without them: exit code 2.
    """
    from asyncrl.cli.report import report as make_report

    return make_report(run, out=out, as_json=as_json)


def _split(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The config, if the first argument is one, and the overrides."""
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("~"):
        return arguments[0], tuple(arguments[1:])
    return None, tuple(arguments)


def _checked(outcome: Outcome) -> Config:
    config = outcome.require()
    _warn(outcome.warnings)
    return config


def _warn(warnings: Sequence[Problem]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _show_plan(outcome: Outcome, as_json: bool) -> int:
    from asyncrl.cli.machine import look_at_machine
    from asyncrl.config import checks, model_checks, plan
    from asyncrl.config.compose import to_yaml

    try:
        config = outcome.require()
        resources = plan.make_plan(
            config,
            look_at_machine(),
            num_parameters=model_checks.num_parameters(config.model.path),
            num_prompts=checks.num_prompts(config),
        )
    except ConfigError as error:
        if not as_json:
            raise
        found = [asdict(problem) for problem in outcome.problems]
        click.echo(json.dumps({"error": error.message, "problems": found}, indent=2, default=str))
        return BAD_CONFIG
    warnings = [*outcome.warnings, *plan.problems(resources)]
    if as_json:
        answer: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "plan": resources.as_json(),
            "warnings": [asdict(warning) for warning in warnings],
        }
        click.echo(json.dumps(answer, indent=2, default=str))
        return 0
    click.echo(to_yaml(config))
    click.echo(_table([("part", "count", "threads", "GPUs", "memory"), *plan.part_rows(resources)]))
    click.echo("\n" + _table(plan.rows(resources)))
    _warn(warnings)
    return 0


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
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
    """The console script. It does not wait for threads: after a failure one may sit in a call to a dead Ray."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
