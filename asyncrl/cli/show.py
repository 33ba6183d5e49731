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
from asyncrl.observe.kept_samples import ConfiguredRun, chosen_sample, describe_fate, find_sample, has_samples
from asyncrl.observe.terminal import conversation
from asyncrl.storage.recent_samples import CHOICES, chosen_trajectory
from asyncrl.storage.run_dir import find_run, newest_runs
from asyncrl.storage.trajectory_files import DumpedTrajectory
from asyncrl.storage.trajectory_files import as_json as dumped

_SAMPLE = re.compile(r"sample_.*|\d+", re.ASCII)
"""The form of an argument that means a sample, right or wrong."""


@click.command()
@click.argument("arguments", nargs=-1, metavar="[RUN] [SAMPLE]")
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
    runs/ that has something to show.
    SAMPLE is the id of a sample, such as sample_0_42, or the last number of the id, such as 42; or newest, lowest,
    highest or oddest, which choose by reward among the samples that the run has kept. The default is newest. The oddest
    reward is the one furthest from the mean of its group.

    \b
    Examples:
      asyncrl show
      asyncrl show oddest
      asyncrl show quickstart sample_0_42
      asyncrl show runs/quickstart/20260101-120000 42 --trajectory 3
      asyncrl show 42 --trajectory 3 --tokens
      asyncrl show quickstart 42 --json

    A run keeps its newest samples and those with remarkable rewards (rollout.kept_samples), or all of them
    (rollout.dump_dir). Sampled text is coloured, with alternating shades for versions; all other text is dim. Without
    --trajectory, the command prints a table of all trajectories, then the first trajectory, or the one whose reward was
    chosen. The exit code is 2 if the run or the sample does not exist.
    """
    if len(arguments) > 2:
        raise click.UsageError(f"expected [RUN] SAMPLE, got {len(arguments)} arguments: {' '.join(arguments)}")
    if as_json and tokens:
        raise click.UsageError("--json includes all tokens: leave --tokens out")
    run, sample = _split(arguments)
    configured = ConfiguredRun(_newest_with_samples() if run is None else _find(run, alone=len(arguments) == 1))
    best = None
    if sample in CHOICES:
        chosen = chosen_sample(configured, sample)
        best = chosen_trajectory(chosen.rewards, sample)
        sample = chosen.name
    sample_id, index = _parse(sample)
    kept = find_sample(configured, index, f"sample {index}" if sample_id is None else str(sample_id))
    trajectories = kept.trajectories
    if sample_id not in (None, trajectories[0].sample_id):
        raise ConfigError(
            f"the run has no {sample_id}: the sample with this feed index is {trajectories[0].sample_id}; show that one"
        )
    one = _select(trajectories, best if trajectory is None else trajectory)
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


def _split(arguments: Sequence[str]) -> tuple[str | None, str]:
    """Return RUN, None for the default, and SAMPLE. One argument is a SAMPLE if it can be one."""
    if len(arguments) == 2:
        return arguments[0], arguments[1]
    if not arguments or arguments[0] in CHOICES or _SAMPLE.fullmatch(arguments[0]):
        return None, (arguments or ("newest",))[0]
    return arguments[0], "newest"


def _find(run: str, *, alone: bool) -> Path:
    try:
        return find_run(run)
    except ConfigError as error:
        if not alone:
            raise
        known = f"a sample (an id such as sample_0_42, its last number, {', '.join(CHOICES)})"
        raise ConfigError(f"{run!r} is neither {known} nor a run: {error.message}") from None


def _newest_with_samples() -> Path:
    runs = newest_runs()
    return next((run for run in runs if has_samples(ConfiguredRun(run))), runs[0])


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
