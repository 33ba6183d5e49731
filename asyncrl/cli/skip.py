"""`asyncrl skip`: list, show, check, remove and transfer records, without Ray and without a model."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrl.config.sections.skip import StepSet
from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import duration, timestamp
from asyncrl.observe.kept_samples import format_ids
from asyncrl.storage.array_bytes import DamageError
from skip import archive as archives
from skip.record import Record
from skip.run_diff import compare_runs
from skip.store import StoredRecord, find, find_roles, select_for_removal

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MAX_STEPS_SHOWN = 40


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

    DIR is a directory of records (skip.<role>.dump_dir, ~/.asyncrl/skip unless the run sets it), or that of a project,
    an experiment, a role or one record in it.

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
    by_role: dict[Path, list[StoredRecord]] = {}
    for record in _find(directory):
        by_role.setdefault(record.files.root, []).append(record)
    found = [_summarize(root, records) for root, records in by_role.items()]
    if as_json:
        _print_json(found)
        return 0
    if not found:
        click.echo(f"no records below {directory}")
        return 0
    table = Table(box=None)
    table.add_column("role", overflow="fold", min_width=max(len(_name(role, directory)) for role in found))
    for column in ("steps", "records", "bytes", "oldest", "newest"):
        table.add_column(column, overflow="fold")
    now = time.time()
    for role in found:
        ages = (duration(now - role[key]) for key in ("oldest_at", "newest_at"))
        table.add_row(
            _name(role, directory), _brief_steps(role["steps"]), f"{role['records']:,}", _size(role["bytes"]), *ages
        )
    Console(highlight=False, soft_wrap=True).print(table)
    return 0


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
    records = _find(directory)
    if len(records) != 1:
        raise ConfigError(f"{directory}: it has {len(records)} records; give the directory of one, .../<role>/<step>")
    [stored] = records
    try:
        record = stored.read()
    except DamageError as error:
        raise ConfigError(f"{directory}: the record counts as absent: {error}; see asyncrl skip verify") from error
    try:
        described = _describe(record, _decoder(tokenizer, record))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory}: the record is intact, but it does not contain what a record of {record.role} contains "
            f"({type(error).__name__}: {error}), so it cannot be shown or replayed; asyncrl skip gc removes it"
        ) from error
    content = {**described, "note": stored.files.read_note(stored.name)}
    if as_json:
        _print_json(content)
    else:
        _print_record(content)
    return 0


@skip.command(short_help="Check every record.")
@_dir
@_json
def verify(directory: Path, as_json: bool) -> int:
    """Read every record and check every byte. The exit code is 1 if any is torn, damaged or not a record."""
    found = _find(directory)
    wrong = {str(one.path): reason for one in found if (reason := one.damage())}
    if as_json:
        _print_json({"records": len(found), "bytes": sum(one.num_bytes for one in found), "damaged": wrong})
    else:
        for path, reason in wrong.items():
            click.echo(f"{path}: {reason}")
        click.echo(f"{len(found)} records, {len(wrong)} damaged")
        if wrong:
            click.echo(
                f"they count as absent and are recorded again; asyncrl skip gc {directory} --damaged removes them"
            )
    return 1 if wrong else 0


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
    if older_than is None and max_bytes is None and steps is None and not damaged:
        raise click.UsageError("nothing is selected for removal: give --older-than, --max-bytes, --steps or --damaged")
    found = _find(directory)
    selected = select_for_removal(
        found,
        time.time(),
        older_than_s=None if older_than is None else _age(older_than),
        max_bytes=None if max_bytes is None else _bytes(max_bytes),
        steps=None if steps is None else _step_set(steps),
        damaged=[one for one in found if one.damage()] if damaged else (),
    )
    if not dry_run:
        for one in selected:
            try:
                one.files.remove(one.name)
            except OSError as error:
                raise ConfigError(f"{one.path}: it cannot be removed: {error.strerror}") from error
        if damaged:
            for files in find_roles(_place(directory)):
                files.sweep()
    num_bytes = sum(one.num_bytes for one in selected)
    if as_json:
        _print_json({"removed": [str(one.path) for one in selected], "bytes": num_bytes, "dry_run": dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        click.echo(f"{len(selected)} of {len(found)} records {verb}, {_size(num_bytes)}")
    return 0


@skip.command("export", short_help="Write records into an archive.")
@_dir
@click.argument("archive", type=click.Path(path_type=Path))
@_json
def export(directory: Path, archive: Path, as_json: bool) -> int:
    """Write all intact records of DIR into ARCHIVE, a tar file."""
    return _print_transfer(archives.export(_place(directory), archive.expanduser()), "exported", as_json)


@skip.command("import", short_help="Import records from an archive.")
@click.argument("archive", type=click.Path(path_type=Path))
@_dir
@click.option("--replace", is_flag=True, help="Replace existing records.")
@_json
def import_(archive: Path, directory: Path, replace: bool, as_json: bool) -> int:
    """Import the records of ARCHIVE below DIR. Existing records stay, unless --replace is given."""
    return _print_transfer(
        archives.restore(archive.expanduser(), _place(directory), replace=replace), "imported", as_json
    )


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
    steps, names, found = compare_runs(one, other, tolerance)
    if as_json:
        _print_json({"steps": len(steps), "difference": found and found._asdict()})
    elif found is None:
        click.echo(f"{len(steps)} steps are equal, {steps[0]} to {steps[-1]}: {', '.join(names)}")
    else:
        click.echo(f"step {found.step} of {len(steps)} common ones is the first that differs:")
        for name in found.names:
            click.echo(f"  {name:20} {_pair(found.one[name], found.other[name])}")
    return 0 if found is None else 1


# ------------------------------------------------------------------------------------------------ inside


def _place(directory: Path) -> Path:
    """Return the absolute path, because the names of parent directories identify records."""
    return directory.expanduser().absolute()


def _find(directory: Path) -> list[StoredRecord]:
    return find(_place(directory))


def _name(role: Mapping[str, Any], directory: Path) -> str:
    """Return the role's path below `directory`; its name, if `directory` is that of a role or a record."""
    below = os.path.relpath(role["path"], _place(directory))
    return Path(role["path"]).name if below in (os.curdir, os.pardir) else below


def _brief_steps(steps: str) -> str:
    ranges = steps.split(",")
    if len(steps) <= MAX_STEPS_SHOWN:
        return steps
    return f"{ranges[0].split('-')[0]} … {ranges[-1].split('-')[-1]}"


def _summarize(root: Path, records: Sequence[StoredRecord]) -> dict[str, Any]:
    return {
        "path": str(root),
        "steps": str(StepSet((record.step, record.step) for record in records)),
        "records": len(records),
        "bytes": sum(record.num_bytes for record in records),
        "oldest_at": min(record.modified_at for record in records),
        "newest_at": max(record.modified_at for record in records),
    }


def _describe(record: Record, decode: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "role": record.role,
        "step": record.step,
        "fingerprint": dict(record.fingerprint),
        "origin": {name: getattr(record.origin, name) for name in type(record.origin).__slots__},
    }
    if record.role in ("async_rollout", "rollout"):
        from skip.generation import from_content

        content["samples"] = [
            {
                "messages": [dict(message) for message in one.prompt.messages],
                "data_source": one.prompt.data_source,
                "ground_truth": one.prompt.ground_truth,
                "prompt": decode(one.prompt.prompt_ids),
                "responses": [
                    {
                        "text": decode(np.concatenate([row.response_ids for row in trajectory.rows])),
                        "tokens": sum(len(row.response_ids) for row in trajectory.rows),
                        "turns": len(trajectory.turns),
                        "finish_reason": str(trajectory.finish_reason),
                        "versions": sorted(trajectory.versions),
                    }
                    for trajectory in one.trajectories
                ],
            }
            for one in from_content(record.content)
        ]
    else:
        content["data"] = dict(record.content.data)
        content["arrays"] = {name: f"{array.dtype} [{len(array)}]" for name, array in record.content.arrays.items()}
    return content


def _decoder(tokenizer: str | None, record: Record) -> Any:
    """Decode with the given tokenizer, or with the record's, if that is a directory on this machine."""
    from asyncrl.assets import resolve

    path = tokenizer or str(record.content.data.get("tokenizer", ""))
    try:
        if not path or (tokenizer is None and not Path(resolve(path)).is_dir()):
            return format_ids
        from transformers import AutoTokenizer

        # Code is not run because a record names its directory.
        loaded = AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=None if tokenizer else False)
    except (OSError, ValueError) as error:
        if tokenizer is None:
            return format_ids
        raise ConfigError(f"--tokenizer={path}: no tokenizer can be loaded from there: {error}") from error
    return lambda ids: loaded.decode(ids.tolist())


def _print_record(content: Mapping[str, Any]) -> None:
    origin = content["origin"]
    click.echo(f"{content['role']}, step {content['step']}")
    when = timestamp(origin["recorded_at"])
    versions = ""
    if origin["oldest_version"] is not None:
        versions = f", by versions {origin['oldest_version']} to {origin['newest_version']} of the policy"
    click.echo(f"recorded {when} on {origin['host']} with asyncrl {origin['code']}{versions}")
    for name, text in content["fingerprint"].items():
        click.echo(f"  {name:12} {text}")
    for sample in content.get("samples", ()):
        click.echo(f"\nprompt ({sample['data_source']}): {sample['prompt']}")
        for message in sample["messages"]:
            click.echo(f"  {message.get('role', '?')}: {message.get('content', '')}")
        if sample["ground_truth"] is not None:
            click.echo(f"  answer: {sample['ground_truth']}")
        for number, response in enumerate(sample["responses"]):
            details = f"{response['tokens']} tokens, {response['finish_reason']}, versions {response['versions']}"
            click.echo(f"response {number} ({details}): {response['text']}")
    for name, value in content["note"].items():
        click.echo(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    for name, value in content.get("data", {}).items():
        click.echo(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    for name, value in content.get("arrays", {}).items():
        click.echo(f"  {name}: {value}")


def _print_transfer(transfer: archives.Transfer, verb: str, as_json: bool) -> int:
    if as_json:
        _print_json(transfer._asdict())
    else:
        for reason in transfer.damaged:
            click.echo(f"left out: {reason}", err=True)
        kept = f", {len(transfer.kept)} existed already" if transfer.kept else ""
        click.echo(f"{transfer.num_records} records {verb}, {_size(transfer.num_bytes)}{kept}")
    return 1 if transfer.damaged else 0


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _quantity(option: str, text: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        raise click.UsageError(f"--{option}={text}: {expected}")
    return float(match[1]) * units[match[2]]


def _age(text: str) -> float:
    return _quantity("older-than", text, _AGES, "not an age; expected a number and s, m, h, d or w, e.g. 14d")


def _bytes(text: str) -> int:
    expected = "not a size; expected a number and K, M, G, T, Ki, Mi, Gi or Ti"
    return int(_quantity("max-bytes", text.lower().removesuffix("b"), _SIZES, expected))


def _step_set(text: str) -> StepSet:
    try:
        return StepSet.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--steps={text}: {error}") from None


def _pair(one: Any, other: Any) -> str:
    """Return both values as text; of lists, the first items that differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
        return f"{one[place]!r} and {other[place]!r}, sample {place + 1} of {len(one)}"
    return f"{_brief_value(one)} and {_brief_value(other)}"


def _brief_value(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list) else "none" if value is None else repr(value)
