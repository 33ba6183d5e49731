"""`asyncrl migrate`: print a configuration of verl as one of asyncrl, with a comment for each key."""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.main import BAD_CONFIG
from asyncrl.config.from_verl.migration import migrate as translate
from asyncrl.config.problems import errors
from asyncrl.core.failures import ConfigError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, metavar="[VERL.YAML] [KEY=VALUE]...")
@click.option("--config-name", default="", help="The name of verl's configuration, as in its launch scripts.")
@click.option("--config-path", default="", help="Accepted as in verl's launch scripts; only --config-name counts.")
def migrate(arguments: tuple[str, ...], config_name: str, config_path: str) -> int:
    """Print a configuration of verl as one of asyncrl: each key with where it comes from, and what has no counterpart.

    \b
    Examples:
      asyncrl migrate verl.yaml > my.yaml
      asyncrl migrate verl.yaml actor_rollout_ref.rollout.n=8 +data.seed=1 > my.yaml
      asyncrl migrate data.train_files=train.parquet algorithm.adv_estimator=grpo > my.yaml

    In a launch script, replace `python3 -m verl.trainer.main_ppo` by `asyncrl migrate`.
    The exit code is 2 if the result needs a correction before `asyncrl launch` accepts it; what is wrong is on stderr.
    """
    file, overrides = _split(arguments)
    migration = translate(file, overrides, config_name=config_name)
    click.echo(migration.as_yaml(), nl=False)
    for problem in migration.problems:
        click.echo(f"{problem.severity}: {problem}", err=True)
    return BAD_CONFIG if errors(migration.problems) else 0


def _split(arguments: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the file, which is the argument without `=`, and the overrides."""
    files = [one for one in arguments if "=" not in one and not one.startswith("~")]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: it is neither a second file nor key=value; give one file, and overrides")
    if files and not Path(files[0]).is_file():
        raise ConfigError(f"{files[0]}: there is no such file; give a YAML file of verl, or overrides key=value")
    return (Path(files[0]) if files else None), tuple(one for one in arguments if one not in files)
