"""`asyncrl skip`: what is recorded, one record readable, checks, clean-up, and archives. No Ray, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _Directory(click.Path):
    """Not an empty one, as a variable that is not set gives it: that would be where you are."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("DIR is empty", parameter, context)
        return super().convert(value, parameter, context)  # type: ignore[arg-type]


_dir = click.argument("directory", metavar="DIR", type=_Directory(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(short_help="Look at recorded stages, check and clean them up.")
def skip() -> None:
    """Look at the records of skipped stages (skip.<role>.enable), check them, clean them up, carry them elsewhere.

    DIR is a dump_dir (by default ~/.asyncrl/skip), or a project, an experiment, a role or one record in it.

    \b
    Examples:
      asyncrl skip ls ~/.asyncrl/skip
      asyncrl skip show ~/.asyncrl/skip/asyncrl/quickstart/async_rollout/12
      asyncrl skip verify ~/.asyncrl/skip
      asyncrl skip gc ~/.asyncrl/skip --older-than 14d --max-bytes 10G --dry-run
      asyncrl skip export ~/.asyncrl/skip/asyncrl/quickstart quickstart.tar
      asyncrl skip import quickstart.tar ~/.asyncrl/skip/asyncrl/quickstart
      asyncrl skip diff runs/quickstart/before runs/quickstart/after
    """


@skip.command("ls", short_help="What is there, by role.")
@_dir
@_json
def list_(directory: Path, as_json: bool) -> int:
    """What is there: for each role its steps, how many records, their bytes and age."""
    from asyncrl.cli import records

    return records.list_records(directory, as_json)


@skip.command(short_help="One record, readable.")
@_dir
@click.option(
    "--tokenizer", metavar="PATH", help="To show texts with; by default the recorded one, where it is on this machine."
)
@_json
def show(directory: Path, tokenizer: str | None, as_json: bool) -> int:
    """One record, readable: what it is of, what made it, and its prompts, responses and rewards.

    DIR is the directory of the record, .../<role>/<step>.
    """
    from asyncrl.cli import records

    return records.show(directory, tokenizer, as_json)


@skip.command(short_help="Check every record.")
@_dir
@_json
def verify(directory: Path, as_json: bool) -> int:
    """Read every record and check every byte. Exit code 1 if one is torn, damaged or not a record at all."""
    from asyncrl.cli import records

    return records.verify(directory, as_json)


@skip.command(short_help="Remove records by age, size, step or damage.")
@_dir
@click.option("--older-than", metavar="AGE", help="Those written longer ago: 90s, 30m, 12h, 14d, 2w.")
@click.option("--max-bytes", metavar="SIZE", help="The oldest, until the rest is no more than this: 500M, 10G, 1Gi.")
@click.option("--steps", metavar="STEPS", help="Those of these steps: 12, 1-128,200, all.")
@click.option("--damaged", is_flag=True, help="Those that are torn or damaged, and what dead writers left.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@_json
def gc(
    directory: Path,
    older_than: str | None,
    max_bytes: str | None,
    steps: str | None,
    damaged: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove records: each option adds those that it is about. At least one is needed."""
    from asyncrl.cli import records

    return records.collect(directory, older_than, max_bytes, steps, damaged, dry_run, as_json)


@skip.command("export", short_help="Records as one archive.")
@_dir
@click.argument("archive", type=click.Path(path_type=Path))
@_json
def export(directory: Path, archive: Path, as_json: bool) -> int:
    """Write all whole records of DIR into ARCHIVE, a tar file."""
    from asyncrl.cli import records

    return records.export(directory, archive, as_json)


@skip.command("import", short_help="Records out of an archive.")
@click.argument("archive", type=click.Path(path_type=Path))
@_dir
@click.option("--replace", is_flag=True, help="Also where there is a record already.")
@_json
def import_(archive: Path, directory: Path, replace: bool, as_json: bool) -> int:
    """Put the records of ARCHIVE below DIR. Those that are there already stay."""
    from asyncrl.cli import records

    return records.restore(archive, directory, replace, as_json)


@skip.command(short_help="Where two runs over the same samples part.")
@click.argument("one", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    metavar="SHARE",
    type=click.FloatRange(0),
    default=0.0,
    help="Relative; by default numbers are equal to the last bit.",
)
@_json
def diff(one: Path, other: Path, tolerance: float, as_json: bool) -> int:
    """Compare two runs step by step: rewards, staleness, loss, gradient norm. Exit code 1 if a common step differs.

    Both have to be trained on the same samples in the same order: replayed, with async_training.deterministic=true.
    Then the first step that differs is where the code or the settings began to matter; made for `git bisect run`.
    """
    from asyncrl.cli import compare

    return compare.diff(one, other, tolerance, as_json)
