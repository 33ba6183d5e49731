"""`asyncrl launch` and `asyncrl serve`: check the whole configuration, then start. Only the driver loads Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from asyncrl.cli.main import BAD_CONFIG
from asyncrl.cli.preflight import check_machine, preflight
from asyncrl.config.compose import (
    CheckedConfig,
    Mode,
    changed_values,
    check_config,
    split_arguments,
    value_sources,
)
from asyncrl.config.environment import num_parameters
from asyncrl.config.keys import leaves
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.resources import plan
from asyncrl.config.resources.placement import Placement, node_rows
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import num_prompts
from asyncrl.config.sources import commented_yaml, source_of
from asyncrl.core.failures import AsyncRLError
from asyncrl.driver.cluster.connection import detect_machine

ARGUMENTS = "[CONFIG] [KEY=VALUE | GROUP=OPTION]..."


@click.command()
@click.argument("mode", type=click.Choice(["fully_async", "sync"]))
@click.argument("arguments", nargs=-1, metavar=ARGUMENTS)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything, print what differs from the defaults and the plan, on a cluster by node; start nothing.",
)
@click.option("--full", is_flag=True, help="With --dry-run: print all keys, also those with their defaults.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@click.option("-m", "--multirun", is_flag=True, hidden=True)
def launch(mode: Mode, arguments: tuple[str, ...], dry_run: bool, full: bool, as_json: bool, multirun: bool) -> int:
    """Train a model. CONFIG is a YAML file or a shipped recipe; the default is the quickstart.

    \b
    Examples:
      asyncrl launch fully_async
      asyncrl launch fully_async my.yaml --dry-run
      asyncrl launch fully_async my.yaml trainer.optim.lr=1e-5 rollout.n=16
      asyncrl launch fully_async my.yaml algorithm=grpo_kl async_training=mode_b
      asyncrl launch fully_async mode_c_async_stale trainer.total_training_steps=40
      asyncrl launch fully_async run_dir=runs/quickstart/20260101-120000 resume=auto
      asyncrl launch sync my.yaml
      asyncrl launch fully_async my.yaml trainer.total_training_steps=0     validate only, see asyncrl eval
      asyncrl launch fully_async 'data.train_files=[a.parquet,b.jsonl]' reward.function=rewards.py:score

    The command reads and checks the whole configuration, then starts Ray, the engines, the Rollouter and the Trainer.
    Press Ctrl-C once to stop with a checkpoint, twice to stop at once; SIGTERM, which Slurm and Kubernetes send, does
    the same. The exit code is then 130.
    """
    if multirun:
        raise click.UsageError(
            "--multirun is not supported: a launch starts one run, which uses the whole machine. Run the command once "
            "for each value, e.g. `for lr in 1e-5 1e-6; do asyncrl launch ... trainer.optim.lr=$lr; done`"
        )
    if as_json and not dry_run:
        raise click.UsageError("--json requires --dry-run; a run writes summary.json into its run directory")
    if full and not dry_run:
        raise click.UsageError("--full requires --dry-run; a run writes its whole configuration into config.yaml")
    source, overrides = split_arguments(arguments)
    outcome = preflight(check_config(source, overrides, mode=mode), detect_machine())
    if dry_run:
        return _show_plan(outcome, source, overrides, mode, full=full, as_json=as_json)
    config = checked(outcome)
    if config.validates_only:
        from asyncrl.driver.evaluate import evaluate

        return evaluate(config, out=Path(config.run_dir) if config.run_dir is not None else None)
    from asyncrl.driver import launch as driver

    return driver.launch(config)


@click.command()
@click.argument("arguments", nargs=-1, metavar=ARGUMENTS)
def serve(arguments: tuple[str, ...]) -> int:
    """Serve the configured model with an OpenAI-compatible HTTP API, on loopback unless serve.host says otherwise.

    \b
    Examples:
      asyncrl serve
      asyncrl serve my.yaml serve.port=9000 rollout.num_replicas=2
      KEY=secret asyncrl serve my.yaml serve.host=0.0.0.0 serve.api_key_env=KEY
    """
    outcome = check_config(*split_arguments(arguments), scope="serve")
    if outcome.config is not None:
        outcome = outcome.with_problems(check_machine(outcome.config, detect_machine(), trains=False))
    config = checked(outcome)
    from asyncrl.driver import launch as driver

    return driver.serve(config)


def changes(source: str | None, overrides: Sequence[str], config: Config, mode: Mode) -> str:
    """Return the values that differ from the defaults as YAML, each with its source."""
    sources = value_sources(source, overrides, config, mode=mode)
    return commented_yaml({key: (value, source_of(key, sources)) for key, value in changed_values(config).items()})


def checked(outcome: CheckedConfig) -> Config:
    config = outcome.require()
    _warn(outcome.warnings)
    return config


def _warn(warnings: Sequence[ConfigProblem]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _show_plan(
    outcome: CheckedConfig, source: str | None, overrides: Sequence[str], mode: Mode, *, full: bool, as_json: bool
) -> int:
    try:
        config = outcome.require()
        sources = value_sources(source, overrides, config, mode=mode)
        resources = plan.make_plan(
            config,
            detect_machine(),
            num_parameters=num_parameters(config.model.path),
            num_prompts=num_prompts(config),
            teacher_parameters=None if config.teacher.path is None else num_parameters(config.teacher.path),
        )
        placement, attached = (None, None) if config.ray.address is None else _ask_cluster(config)
        continued = _preview_resume(config)
    except AsyncRLError as error:
        if not as_json:
            raise
        found = [asdict(problem) for problem in outcome.problems]
        click.echo(json.dumps({"error": error.message, "problems": found}, indent=2, default=str))
        return BAD_CONFIG
    warnings = outcome.warnings
    code = BAD_CONFIG if placement is not None and placement.lacks and not config.ray.autoscaling else 0
    if as_json:
        answer: dict[str, Any] = {
            "config": config.public_values(),
            "sources": {key: source_of(key, sources) for key in changed_values(config)},
            "plan": resources.as_json(),
            "warnings": [asdict(warning) for warning in warnings],
        }
        if continued:
            answer["resume"] = list(continued)
        if placement is not None:
            answer["placement"] = placement.as_json()
        if attached is not None:
            answer["attached"] = {"application": config.rollout.attach, "replicas": attached}
        click.echo(json.dumps(answer, indent=2, default=str))
        return code
    values = leaves(config.public_values()) if full else changed_values(config)
    click.echo(commented_yaml({key: (value, source_of(key, sources)) for key, value in values.items()}) + "\n")
    click.echo(_table([("part", "count", "threads", "GPUs", "memory"), *plan.process_rows(resources)]))
    click.echo("\n" + _table(plan.quantity_rows(resources)))
    if placement is not None:
        click.echo("\n" + _table([("node", "labels", "CPUs", "GPUs", "processes"), *node_rows(placement)]))
    if attached is not None:
        replicas = ", ".join(f"{number} {state}" for state, number in attached.items()) or "none"
        click.echo(f"\nengines: those of the Serve application {config.rollout.attach} (replicas: {replicas})")
    if continued:
        click.echo("\n" + "\n".join(continued))
    _warn(warnings)
    if placement is not None:
        _report_room(placement, config)
    return code


def _ask_cluster(config: Config) -> tuple[Placement, dict[str, int] | None]:
    """Ask the cluster at `ray.address` for its nodes, and return the plan of the run's processes on them, and how many
    replicas the run attaches to, by their state; None without `rollout.attach`.

    Raises:
        ConfigError: the cluster does not answer, or has no such application.
        DeadlineError: the cluster, or Ray Serve on it, did not answer a question within `timeouts.call_s`.
    """
    from asyncrl.driver.cluster.connection import ask, connected

    in_time = partial(ask, limit_s=config.timeouts.call_s, key="timeouts.call_s")
    assert config.ray.address is not None
    with connected(config.ray.address):
        from asyncrl.driver.cluster.state import plan_placement

        attached = None
        if config.rollout.attach is not None:
            from rollouter.serving.app import count_replicas

            attached = in_time(count_replicas, config.rollout.attach)
        return in_time(plan_placement, config), attached


def _preview_resume(config: Config) -> tuple[str, ...]:
    if config.resume == "none":
        return ()
    from asyncrl.driver import launch as driver

    return driver.preview_resume(config)


def _report_room(placement: Placement, config: Config) -> None:
    for problem in placement.lacks:
        adds = f"the cluster has to add nodes: {problem.consequence}"
        click.echo(adds if config.ray.autoscaling else f"error: {problem}", err=True)
    if placement.unplaced and not placement.lacks:
        left = ", ".join(f"{count} {name}" for name, count in placement.unplaced.items())
        click.echo(f"warning: the nodes may have no room for everything (not placed: {left})", err=True)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
