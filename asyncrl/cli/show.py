"""`asyncrl show`: the trajectories of one sample, from `rollout.dump_dir` or from its payload in the run directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from asyncrl.core.failures import ConfigError
from asyncrl.core.types import SampleId
from asyncrl.observe.kept_samples import ConfiguredRun, describe_fate, find_sample
from asyncrl.observe.terminal import conversation
from asyncrl.storage.run_dir import find_run
from asyncrl.storage.trajectory_files import DumpedTrajectory
from asyncrl.storage.trajectory_files import as_json as dumped


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="[RUN] SAMPLE")
@click.option(
    "-t", "--trajectory", type=click.IntRange(0), metavar="K", help="Number of the trajectory in the sample, from 0."
)
@click.option("--tokens", is_flag=True, help="Print the id, mask, version, log-prob and text of each token.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the trajectories as a JSON array; with --trajectory, only that one."
)
@click.option("--no-color", is_flag=True, help="Print plain text, also on a terminal.")
def show(arguments: tuple[str, ...], trajectory: int | None, tokens: bool, as_json: bool, no_color: bool) -> int:
    """Print a conversation: messages, tool calls, weights versions, speeds and rewards.

    RUN is a run directory, or the name of an experiment, which selects its newest run. The default is the newest run in
    runs/.
    SAMPLE is the id of a sample, such as sample_0_42, or the last number of the id, such as 42.

    \b
    Examples:
      asyncrl show quickstart sample_0_42
      asyncrl show runs/quickstart/20260101-120000 42 --trajectory 3
      asyncrl show 42 --trajectory 3 --tokens
      asyncrl show quickstart 42 --json

    A run keeps its conversations if rollout.dump_dir is set. Otherwise, a sample can be shown as long as its payload is
    in the run directory. Sampled text is coloured, with alternating shades for versions; all other text is dim. Without
    --trajectory, the command prints a table of all trajectories, then the first trajectory. The exit code is 2 if the
    run or the sample does not exist.
    """
    if len(arguments) > 2:
        raise click.UsageError(f"expected [RUN] SAMPLE, got {len(arguments)} arguments: {' '.join(arguments)}")
    if as_json and tokens:
        raise click.UsageError("--json includes all tokens: leave --tokens out")
    *run, sample = arguments
    sample_id, index = _parse(sample)
    configured = ConfiguredRun(find_run(run[0] if run else None))
    kept = find_sample(configured, index, f"sample {index}" if sample_id is None else str(sample_id))
    trajectories = kept.trajectories
    if sample_id not in (None, trajectories[0].sample_id):
        raise ConfigError(
            f"the run has no {sample_id}: the sample with this feed index is {trajectories[0].sample_id}; show that one"
        )
    one = _select(trajectories, trajectory)
    for note in kept.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        lines = [
            json.dumps(dumped(each), ensure_ascii=False) for each in trajectories if trajectory in (None, each.number)
        ]
        text = lines[0] if trajectory is not None else "[\n" + ",\n".join(lines) + "\n]"
        click.echo(text.encode("utf-8", "backslashreplace").decode())
        return 0
    # Load the tokenizer before anything is printed, because it may be missing.
    decode_token = configured.decode_token() if tokens else None
    console = Console(highlight=False, soft_wrap=True, color_system=None if no_color else "auto")
    if trajectory is None and len(trajectories) > 1:
        console.print(conversation.overview(trajectories))
        console.print()
    for line in _lines(one, trajectories, configured.path, decode_token):
        console.print(line)
    return 0


def _lines(
    one: DumpedTrajectory,
    trajectories: Sequence[DumpedTrajectory],
    run_dir: Path,
    decode_token: Callable[[int], str] | None,
) -> Iterator[Text]:
    yield conversation.title(one)
    yield from conversation.conversation(one) if decode_token is None else conversation.tokens(one, decode_token)
    yield Text()
    oldest = min((version for each in trajectories for version in each.trajectory.versions), default=0)
    yield from conversation.closing(one, describe_fate(run_dir, one.sample_id, oldest))


def _parse(sample: str) -> tuple[SampleId | None, int]:
    """Return the sample's id, or None for a number alone, and its feed index, which is unique in a run."""
    if re.fullmatch(r"[1-9]\d*", sample, re.ASCII):
        return None, int(sample)
    try:
        sample_id = SampleId.parse(sample)
    except ValueError as error:
        raise ConfigError(f"SAMPLE={sample}: {error}, or only its last number") from None
    return sample_id, sample_id.index


def _select(trajectories: Sequence[DumpedTrajectory], number: int | None) -> DumpedTrajectory:
    if number is None:
        return trajectories[0]
    for one in trajectories:
        if one.number == number:
            return one
    numbers = ", ".join(str(one.number) for one in trajectories)
    raise ConfigError(f"--trajectory={number}: {trajectories[0].sample_id} has no such trajectory; it has {numbers}")
