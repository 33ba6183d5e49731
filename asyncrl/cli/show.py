"""`asyncrl show`: the trajectories of one sample, out of `rollout.dump_dir` or of what the run directory has of it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import yaml
from rich.console import Console
from rich.text import Text

from asyncrl.assets import resolve
from asyncrl.cli import conversation
from asyncrl.cli.inspect import find_run
from asyncrl.cli.kept_samples import describe, fate, life_of, payload_of
from asyncrl.failures import ConfigError
from asyncrl.run_dir import RunDir
from asyncrl.trajectory_files import find
from asyncrl.trajectory_lines import DumpedTrajectory, as_json
from asyncrl.types import SampleId, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS_SHOWN = 64
"""Ids shown of a text that cannot be decoded."""


class Wanted(NamedTuple):
    """What is asked for."""

    sample: str
    trajectory: int | None = None
    """None: all of them, and the conversation of the first."""
    tokens: bool = False
    as_json: bool = False
    colour: bool = True


def show(run: str | None, wanted: Wanted) -> int:
    """Print what there is of a sample; returns the exit code.

    Raises:
        ConfigError: there is no such run, sample or trajectory, nothing is left of it, or no tokenizer for `tokens`.
    """
    sample_id, index = _parse(wanted.sample)
    run_files = _RunFiles(find_run(run))
    shown = _look(run_files, index, f"sample {index}" if sample_id is None else str(sample_id))
    trajectories = shown.trajectories
    if sample_id not in (None, trajectories[0].sample_id):
        raise ConfigError(
            f"the run has no {sample_id}: its sample of this feed index is {trajectories[0].sample_id}; show that one"
        )
    one = _chosen(trajectories, wanted.trajectory)
    for note in shown.notes:
        click.echo(f"note: {note}", err=True)
    if wanted.as_json:
        chosen = trajectories if wanted.trajectory is None else [one]
        lines = [json.dumps(as_json(each), ensure_ascii=False) for each in chosen]
        text = lines[0] if wanted.trajectory is not None else "[\n" + ",\n".join(lines) + "\n]"
        click.echo(text.encode("utf-8", "backslashreplace").decode())
        return 0
    # Asked for before anything is printed: it may not be there.
    decode_token = run_files.decode_token() if wanted.tokens else None
    console = Console(highlight=False, soft_wrap=True, color_system="auto" if wanted.colour else None)
    if wanted.trajectory is None and len(trajectories) > 1:
        console.print(conversation.overview(trajectories))
        console.print()
    for line in _lines(one, trajectories, run_files.path, decode_token):
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
    yield from conversation.closing(one, fate(run_dir, one.sample_id, oldest))


def _parse(sample: str) -> tuple[SampleId | None, int]:
    """The id, if it is one, and the feed index, which alone names a sample of a run."""
    if re.fullmatch(r"[1-9]\d*", sample, re.ASCII):
        return None, int(sample)
    try:
        sample_id = SampleId.parse(sample)
    except ValueError as error:
        raise ConfigError(f"SAMPLE={sample}: {error}, or its last number alone") from None
    return sample_id, sample_id.index


def _chosen(trajectories: Sequence[DumpedTrajectory], number: int | None) -> DumpedTrajectory:
    if number is None:
        return trajectories[0]
    for one in trajectories:
        if one.number == number:
            return one
    there = ", ".join(str(one.number) for one in trajectories)
    raise ConfigError(f"--trajectory={number}: {trajectories[0].sample_id} has no such trajectory; there are {there}")


# ------------------------------------------------------------------------------------------------ where it is


class Shown(NamedTuple):
    """What is left of a sample."""

    trajectories: Sequence[DumpedTrajectory]
    notes: Sequence[str]
    """What is to be known of them."""


def kept(run_dir: Path, sample_id: SampleId) -> Shown:
    """What can be shown of a sample.

    Raises:
        ConfigError: nothing; the message says what is known of the sample and what helps.
    """
    return _look(_RunFiles(run_dir), sample_id.index, str(sample_id))


def _look(run: _RunFiles, index: int, name: str) -> Shown:
    """The dump, or else the payload.

    Raises:
        ConfigError: there is neither; the message says what is known of the sample and what helps.
    """
    notes: list[str] = []
    for directory in run.dump_dirs:
        try:
            found = find(directory, index, run.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(
                f"{error.filename or directory} cannot be read: {error.strerror}. What rollout.dump_dir holds of "
                f"{name} is in there"
            ) from None
        notes += found.notes
        if found.trajectories:
            return Shown(found.trajectories, notes)
    payload = payload_of(run.path, index)
    if payload.sample is not None:
        decode, told = run.decode()
        notes.append("it is not in a dump; this is its payload, so turns and what was said are told from its tokens")
        return Shown(describe(payload.sample, run.path, decode), [*notes, *told])
    raise ConfigError(_nothing(run, index, name, [*notes, *([payload.told] if payload.told else [])]))


def _nothing(run: _RunFiles, index: int, name: str, notes: Sequence[str]) -> str:
    life = life_of(run.path, index)
    parts = [f"there are no trajectories of {name} to show in {run.path.name}: {life.told}", *notes]
    record = run.skip_record(index)
    if life.scored:
        dump = (
            f"Nothing of it is in rollout.dump_dir={run.dump_dir}" if run.dump_dir else "The run dumps no trajectories"
        )
        parts.append(f"{dump}, and there is no payload of it (any more)")
    elif life.record is not None:
        parts.append("No trajectory of it has been scored, so there is none to keep")
    if record is not None:
        parts.append(f"What was generated is recorded: asyncrl skip show {record}")
    elif life.scored and not run.dump_dir:
        parts.append(
            "Launch with rollout.dump_dir=DIR to keep every trajectory, or with skip.async_rollout.enable=true to "
            "record what is generated"
        )
    return ". ".join(parts)


class _RunFiles:
    """A run directory, and what its configuration names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            read = yaml.safe_load(RunDir(path).config.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            read = None
        self._config: Mapping[str, Any] = read if isinstance(read, dict) else {}

    def value(self, *keys: str) -> Any:
        """None: there is no such key."""
        found: Any = self._config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @property
    def dump_dir(self) -> str | None:
        named = self.value("rollout", "dump_dir")
        return str(named) if named else None

    @property
    def dump_dirs(self) -> list[Path]:
        """Where the dump may be; empty: nowhere."""
        return list(self._places(self.dump_dir)) if self.dump_dir else []

    def skip_record(self, index: int) -> Path | None:
        """The record of what was generated for the sample, if there is one."""
        names = (self.value("skip", "async_rollout", "dump_dir"), self.value("project_name"))
        experiment = self.value("experiment_name")
        if not (all(names) and experiment and self.value("skip", "async_rollout", "enable")):
            return None
        below = Path(str(names[1])) / str(experiment) / "async_rollout" / str(index)
        found = (place / below for place in self._places(str(names[0])))
        return next((path for path in found if path.is_dir()), None)

    def decode_token(self) -> Callable[[int], str]:
        """Raises `ConfigError`: no tokenizer can be loaded."""
        tokenizer = self._tokenizer
        return lambda token: str(tokenizer.decode([token]))

    def decode(self) -> tuple[Callable[[TokenIds], str], Sequence[str]]:
        """Text of tokens, and what is to be known of that: without a tokenizer it is their ids."""
        try:
            tokenizer = self._tokenizer
        except ConfigError as error:
            return _ids, [error.message]
        return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)), []

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        key = "model.tokenizer_path" if self.value("model", "tokenizer_path") else "model.path"
        name = self.value(*key.split("."))
        if not isinstance(name, str):
            raise ConfigError(f"{RunDir(self.path).config} names no model.path, so there is no tokenizer for texts")
        from transformers import AutoTokenizer

        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            local = next((str(path) for path in self._places(resolve(name)) if path.is_dir()), name)
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                local, trust_remote_code=bool(self.value("model", "trust_remote_code")), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError.wrap(
                f"{key}: no tokenizer can be loaded from {name!r} on this machine, so there are no texts of tokens",
                error,
            ) from error
        return loaded

    def _places(self, name: str) -> Iterator[Path]:
        """A relative path was meant from where the run was started: from here, or from above the run directory."""
        path = Path(name).expanduser()
        if path.is_absolute():
            yield path
            return
        seen = set()
        for start in (Path.cwd(), *self.path.parents):
            with suppress(OSError):
                if (place := (start / path).resolve()) not in seen:
                    seen.add(place)
                    yield place


def _ids(ids: TokenIds) -> str:
    shown = " ".join(map(str, ids[:_TOKENS_SHOWN].tolist()))
    return shown + (f" … ({len(ids)} in all)" if len(ids) > _TOKENS_SHOWN else "")
