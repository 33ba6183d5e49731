"""`asyncrl simulate`: predict step time, idle shares, staleness and drops of a configuration, without starting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from asyncrl.config.compose import split_arguments
from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import count, percent, seconds
from asyncrl.storage.run_dir import find_run

if TYPE_CHECKING:
    from asyncrl.simulate.sweep import Settings, SimulatedSetting
    from asyncrl.simulate.trace import Trace

_SAVED_GROUPS = 400
_FIGURES_WIDTH = 106
"""Columns of the table besides the name of the setting; a narrower terminal wraps its lines."""
_HEADINGS = ("run", "step", "tokens/s", "speed-up", "Trainer waits", "engines idle", "staleness", "dropped", "wasted")


@click.command()
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE | GROUP=OPTION]...")
@click.option("--trace", "source", metavar="RUN|FILE", help="Run or YAML file with speeds; default: the newest run.")
@click.option("--sweep", multiple=True, metavar="KEY=V1,V2", help="Simulate each value; several: all combinations.")
@click.option("--gpus", type=click.IntRange(2), metavar="N", help="Simulate splits of N GPUs between both sides.")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps to simulate; default: as many as take seconds.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of lengths and latencies.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also draw a figure.")
@click.option("--save-trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the speeds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(
    arguments: tuple[str, ...],
    source: str | None,
    sweep: tuple[str, ...],
    gpus: int | None,
    steps: int | None,
    seed: int,
    plot: Path | None,
    save_trace: Path | None,
    as_json: bool,
) -> int:
    """Predict how long a run would take, and what would wait for what, without starting it.

    CONFIG and overrides are those of `asyncrl launch`; `mode=sync` is `asyncrl launch sync`. Files, models and GPUs
    that the configuration names are not needed.

    \b
    Examples:
      asyncrl simulate                                      the quickstart, with the speeds of the newest run
      asyncrl simulate my.yaml --trace runs/my/20260101-120000
      asyncrl simulate my.yaml --trace my --sweep async_training.staleness_threshold=0,0.3,0.5,1
      asyncrl simulate my.yaml --trace my --sweep async_training=mode_a,mode_b,mode_c,mode_d --plot modes.png
      asyncrl simulate my.yaml --trace my --gpus 64 --sweep async_training.staleness_threshold=0.1,0.5
      asyncrl simulate my.yaml --trace my --save-trace speeds.yaml     then edit the file, and give it to --trace
      asyncrl simulate examples/scaling/verl_7b_split.yaml --trace examples/scaling/verl_7b_h20.yaml

    The simulation draws response lengths, lets simulated engines decode them in batches, and sends the samples through
    the queue's own operations, so pacing, over-sampling, staleness and drops are decided as in a run. --trace measures
    lengths, decoding speed by batch size, training speed and costs of weight syncs in the events of a run, or reads
    them from a file. docs/scaling.md shows how exact that is, and how to choose the split of your GPUs.
    """
    from asyncrl.simulate.sweep import (
        as_rows,
        bottleneck,
        configurations,
        limits,
        recommend,
        simulate_settings,
        swept_settings,
    )

    config_file, overrides = split_arguments(arguments)
    swept = bool(sweep or gpus)
    settings = swept_settings(config_file, overrides, sweep, gpus) if swept else _with_baseline(overrides)
    if swept:  # the given configuration comes last
        settings = [*settings, {}]
    configs = configurations(config_file, overrides, settings)
    trace, name = _trace(source)
    if save_trace is not None:
        _save(trace, save_trace)
    console = Console(highlight=False, stderr=as_json)
    with console.status("simulating") as status:
        done = simulate_settings(
            settings, configs, trace, steps=steps, seed=seed,
            progress=lambda number, total: status.update(f"simulating setting {number + 1} of {total}"),
        )  # fmt: skip
    advice = bottleneck(done[-1])
    if swept:
        *done, given = done
        advice = recommend(done, given)[1]
    if plot is not None:
        from asyncrl.simulate.plot import draw

        draw(done, plot)
    if as_json:
        found = {"trace": name, "seed": seed, "settings": as_rows(done), "advice": advice, "limits": limits(done)}
        click.echo(json.dumps(found, indent=2))
        return 0
    console.print(f"speeds and lengths: {name}", soft_wrap=True)
    width = _FIGURES_WIDTH + max(len(one.short_name) for one in done)
    Console(highlight=False, width=max(console.width, width)).print(_table(done))
    if any(one.config.trainer.total_training_steps is None for one in done):
        console.print(
            f"run: the simulated {done[0].total_steps} steps, because trainer.total_epochs sets the length of the run",
            soft_wrap=True,
        )
    for sentence in (advice, *limits(done)):
        console.print(f"{sentence}.", soft_wrap=True)
    return 0


def _with_baseline(overrides: tuple[str, ...]) -> list[Settings]:
    """Return the setting to simulate, after the synchronous run to compare it with."""
    if any(text.startswith("mode=") for text in overrides):
        return [{}]
    return [{"mode": "sync"}, {"mode": "fully_async"}]


def _trace(source: str | None) -> tuple[Trace, str]:
    """Return the trace and its name."""
    from asyncrl.simulate.trace import read_trace

    if source is not None and (file := Path(source).expanduser()).is_file():
        return read_trace(file), str(file)
    try:
        run_dir = find_run(source)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message.rstrip('.')}. The simulation takes its speeds from a run or a file: give --trace "
            "RUN or --trace FILE.yaml, such as examples/scaling/verl_7b_h20.yaml"
        ) from error
    from asyncrl.observe.status.run_files import read_liveness
    from asyncrl.simulate.calibration import calibrate

    trace, phase = calibrate(run_dir), read_liveness(run_dir).phase
    outcome = "" if phase == "completed" else f", {phase}"
    return trace, f"{run_dir} ({count(len(trace.lengths.recorded), 'sample')}{outcome})"


def _save(trace: Trace, file: Path) -> None:
    from asyncrl.simulate.trace import trace_yaml

    try:
        file.write_text(trace_yaml(trace, max_groups=_SAVED_GROUPS), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-trace {file} cannot be written: {error.strerror}. Give another file") from error


def _table(done: list[SimulatedSetting]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("setting")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    first = done[0].tokens_per_s
    for one in done:
        result = one.result
        table.add_row(
            one.short_name,
            seconds(one.run_s),
            seconds(result.step_s),
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / first:.2f}" if first else "-",
            percent(round(result.trainer_waits, 3)),
            percent(round(result.engines_idle, 3)),
            f"{result.mean_staleness:.2f}, max {result.max_staleness}",
            ", ".join(f"{number} {reason}" for reason, number in sorted(result.dropped.items())) or "0",
            percent(round(result.wasted, 3)),
        )
    return table
