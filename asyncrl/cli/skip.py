"""`asyncrl skip`: list, show, check, remove and transfer records, without Ray and without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from skip import commands, run_diff


class _Directory(click.Path):
    """A path that must not be empty: an unset shell variable would otherwise mean the working directory."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("DIR is empty", parameter, context)
        return super().convert(value, parameter, context)  # type: ignore[arg-type]


_dir = click.argument("directory", metavar="DIR", type=_Directory(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(short_help="Show, check and remove recorded stages.")
def skip() -> None:
    """Show, check, remove and transfer the records of skipped stages (skip.<role>.enable).

    DIR is a dump_dir (by default ~/.asyncrl/skip), or the directory of a project, an experiment, a role or one record
    in it.

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


@skip.command("ls", short_help="List the records by role.")
@_dir
@_json
def list_(directory: Path, as_json: bool) -> int:
    """List the roles with their steps, number of records, bytes and age."""
    return commands.list_records(directory, as_json)


@skip.command(short_help="Show one record.")
@_dir
@click.option(
    "--tokenizer", metavar="PATH", help="Tokenizer for the texts; by default the recorded one, if this machine has it."
)
@_json
def show(directory: Path, tokenizer: str | None, as_json: bool) -> int:
    """Show one record: its fingerprint, its origin, and its prompts, responses and rewards.

    DIR is the directory of the record, .../<role>/<step>.
    """
    return commands.show(directory, tokenizer, as_json)


@skip.command(short_help="Check every record.")
@_dir
@_json
def verify(directory: Path, as_json: bool) -> int:
    """Read every record and check every byte. The exit code is 1 if any is torn, damaged or not a record."""
    return commands.verify(directory, as_json)


@skip.command(short_help="Remove records by age, size, step or damage.")
@_dir
@click.option("--older-than", metavar="AGE", help="Select records older than this: 90s, 30m, 12h, 14d, 2w.")
@click.option("--max-bytes", metavar="SIZE", help="Select the oldest, until the rest fits into this: 500M, 10G, 1Gi.")
@click.option("--steps", metavar="STEPS", help="Select records of these steps, e.g. 12 or 1-128,200 or all.")
@click.option("--damaged", is_flag=True, help="Select damaged records, and incomplete records of dead processes.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
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
    """Remove the records that any of the options selects; at least one option is required."""
    return commands.collect(directory, older_than, max_bytes, steps, damaged, dry_run, as_json)


@skip.command("export", short_help="Write records into an archive.")
@_dir
@click.argument("archive", type=click.Path(path_type=Path))
@_json
def export(directory: Path, archive: Path, as_json: bool) -> int:
    """Write all intact records of DIR into ARCHIVE, a tar file."""
    return commands.export(directory, archive, as_json)


@skip.command("import", short_help="Import records from an archive.")
@click.argument("archive", type=click.Path(path_type=Path))
@_dir
@click.option("--replace", is_flag=True, help="Replace existing records.")
@_json
def import_(archive: Path, directory: Path, replace: bool, as_json: bool) -> int:
    """Import the records of ARCHIVE below DIR. Existing records stay, unless --replace is given."""
    return commands.restore(archive, directory, replace, as_json)


@skip.command(short_help="Find the first step in which two runs differ.")
@click.argument("one", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--tolerance",
    metavar="SHARE",
    type=click.FloatRange(0),
    default=0.0,
    help="Relative tolerance; by default, numbers must be equal to the last bit.",
)
@_json
def diff(one: Path, other: Path, tolerance: float, as_json: bool) -> int:
    """Compare two runs step by step: rewards, staleness, loss, gradient norm.

    Both runs must train the same samples in the same order, so replay them with async_training.deterministic=true. The
    first step that differs then shows the effect of the code or the settings. The exit code is 1 if a common step
    differs, which suits `git bisect run`.
    """
    return run_diff.diff(one, other, tolerance, as_json)
