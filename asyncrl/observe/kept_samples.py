"""Find the samples that a run still has: in its dump, in `kept/` of its directory, or as payloads. For `asyncrl show`
and the timeline.

Blocking; read-only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.assets import resolve
from asyncrl.core.failures import AsyncRLError, ConfigError
from asyncrl.core.ports import Score
from asyncrl.core.text import encodable
from asyncrl.core.trajectory import TokenRow, Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, Row, Sample, SampleId, TokenIds
from asyncrl.observe.formats import timestamp
from asyncrl.queue.journal_reader import SampleRecord, read_queue_state, read_samples
from asyncrl.storage.array_bytes import DamageError, decode
from asyncrl.storage.recent_samples import KeptRewards, list_recent, ranked, read_recent, recent_names
from asyncrl.storage.run_dir import JOURNAL, KEPT, SAMPLES, RunDir, SavedConfig
from asyncrl.storage.sample_bytes import FileRef, PackedBlob
from asyncrl.storage.segments import read_segment
from asyncrl.storage.trained_steps import read_trained, surviving_steps
from asyncrl.storage.trajectory_files import PROMPT_ROLE, Decode, DumpedTrajectory, find, mask_runs, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL_JOURNAL_BYTES = 8 << 20
"""A journal up to this size is read within a second."""
_TOKENS_SHOWN = 64
"""Largest number of ids shown for a text that cannot be decoded."""


class KeptSample(NamedTuple):
    """The available trajectories of a sample, with notes about them."""

    trajectories: Sequence[DumpedTrajectory]
    notes: Sequence[str]


def find_sample(run: ConfiguredRun, index: int, name: str) -> KeptSample:
    """Return a sample from the dump, or else from `kept/`, or else from its payload.

    Args:
        run: the run to search.
        index: the sample's feed index.
        name: the name of the sample in messages.

    Raises:
        ConfigError: the run has none of them; the message explains the state of the sample, and how to keep samples.
    """
    notes: list[str] = []
    for directory in run.dump_dirs:
        try:
            found = find(directory, index, run.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(
                f"{error.filename or directory} cannot be read: {error.strerror}. The trajectories of {name} may be "
                "in it"
            ) from None
        notes += found.notes
        if found.trajectories:
            return KeptSample(found.trajectories, notes)
    for kept in recent_names(run.path / KEPT, {index}):
        try:
            recent = read_recent(run.path / KEPT, kept)
        except (OSError, DamageError, ValueError) as error:
            notes.append(f"{run.path / KEPT / kept} cannot be read: {error}")
            continue
        decode, problems = run.decode()
        return KeptSample(recent.with_texts(decode), [*notes, *problems])
    payload = read_payload(run.path, index)
    if payload.sample is not None:
        decode, problems = run.decode()
        notes.append("the sample is not in a dump; its turns and messages are derived from the tokens of its payload")
        return KeptSample(to_dumped(payload.sample, run.path, decode), [*notes, *problems])
    raise ConfigError(_not_kept(run, index, name, [*notes, *([payload.problem] if payload.problem else [])]))


def has_samples(run: ConfiguredRun) -> bool:
    """Return whether the run has anything to show."""
    if recent_names(run.path / KEPT):
        return True
    places = [*run.dump_dirs, run.path / SAMPLES]
    return any(place.is_dir() and any(place.iterdir()) for place in places)


def chosen_sample(run: ConfiguredRun, choice: str) -> KeptRewards:
    """Return the sample in `kept/` that comes first in a choice of `recent_samples.CHOICES`.

    Raises:
        ConfigError: there is none.
    """
    try:
        found = list_recent(run.path / KEPT)
    except OSError:
        found = []
    if not found and run.value("mode") == "sft":
        raise ConfigError(
            f"{run.path.name} is a supervised run, which samples nothing: it learns the rows of data.train_files. "
            "asyncrl report shows its losses"
        )
    if not found:
        raise ConfigError(
            f"{run.path.name} has no samples in {KEPT}/ to choose the {choice} of: no sample was scored, the run kept "
            "none (rollout.kept_samples=0), or it is of an earlier version. Name a sample: asyncrl show RUN SAMPLE"
        )
    return ranked(found, choice)[0]


def _not_kept(run: ConfiguredRun, index: int, name: str, notes: Sequence[str]) -> str:
    fate = read_fate(run.path, index)
    parts = [f"there are no trajectories of {name} to show in {run.path.name}: {fate.text}", *notes]
    record = run.skip_record(index)
    if fate.scored:
        where = f"rollout.dump_dir={run.dump_dir}" if run.dump_dir else f"the samples that are kept ({KEPT}/)"
        parts.append(f"It is not in {where}, and the sample's payload is not (or no longer) in the run directory")
    elif fate.record is not None:
        parts.append("None of its trajectories was scored, so none was kept")
    if record is not None:
        parts.append(f"Its generation was recorded: asyncrl skip show {record}")
    elif fate.scored and not run.dump_dir:
        parts.append(
            "Launch with rollout.dump_dir=DIR to keep every trajectory, with a larger rollout.kept_samples, or with "
            "skip.async_rollout.enable=true to record what is generated"
        )
    return ". ".join(parts)


class ConfiguredRun(SavedConfig):
    """A run directory, and the files that its configuration names."""

    @property
    def dump_dir(self) -> str | None:
        named = self.value("rollout", "dump_dir")
        return str(named) if named else None

    @property
    def dump_dirs(self) -> list[Path]:
        """Return the directories in which the dump may be."""
        return list(self._places(self.dump_dir)) if self.dump_dir else []

    def skip_record(self, index: int) -> Path | None:
        """Return the record of the sample's generation, if there is one."""
        names = (self.value("skip", "async_rollout", "dump_dir"), self.value("project_name"))
        experiment = self.value("experiment_name")
        if not (all(names) and experiment and self.value("skip", "async_rollout", "enable")):
            return None
        below = Path(str(names[1])) / str(experiment) / "async_rollout" / str(index)
        found = (place / below for place in self._places(str(names[0])))
        return next((path for path in found if os.path.isdir(path)), None)

    def decode_token(self) -> Callable[[int], str]:
        """Return a function that decodes one token. Raises `ConfigError`: no tokenizer can be loaded."""
        tokenizer = self._tokenizer
        return lambda token: str(tokenizer.decode([token]))

    def decode(self) -> tuple[Callable[[TokenIds], str], Sequence[str]]:
        """Return a function that decodes tokens, and problems. Without a tokenizer, the function returns ids."""
        try:
            tokenizer = self._tokenizer
        except ConfigError as error:
            return format_ids, [error.message]
        return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)), []

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        key = "model.tokenizer_path" if self.value("model", "tokenizer_path") else "model.path"
        name = self.value(*key.split("."))
        if not isinstance(name, str):
            raise ConfigError(f"{RunDir(self.path).config} names no model.path, so tokens cannot be decoded")
        from transformers import AutoTokenizer

        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            local = next((str(path) for path in self._places(resolve(name)) if path.is_dir()), name)
            # Code is not run because the config.yaml of a run directory, which anybody may have written, says so.
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                local, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # the library raises errors of many types for damaged files
            raise ConfigError.wrap(
                f"{key}: no tokenizer can be loaded from {name!r} on this machine, so tokens cannot be decoded",
                error,
            ) from error
        return loaded

    def _places(self, name: str) -> Iterator[Path]:
        """Yield the places to which a path of the configuration may refer. A relative path starts from the directory in
        which the run was launched: perhaps the working directory, perhaps a parent of the run directory."""
        if "\0" in name or encodable(name) != name:  # no path has these characters
            return
        path = Path(name)
        with suppress(RuntimeError):  # there is no user of that name
            path = path.expanduser()
        if path.is_absolute():
            yield path
            return
        yielded = set()
        for start in (Path.cwd(), *self.path.parents):
            with suppress(OSError):
                if (place := (start / path).resolve()) not in yielded:
                    yielded.add(place)
                    yield place


def format_ids(ids: TokenIds) -> str:
    shown = " ".join(map(str, ids[:_TOKENS_SHOWN].tolist()))
    return shown + (f" … ({len(ids)} in all)" if len(ids) > _TOKENS_SHOWN else "")


# ------------------------------------------------------------------------------------------------ state of a sample


class SampleFate(NamedTuple):
    """The state of a sample according to the journal."""

    record: SampleRecord | None
    """None if the sample was never generated, or if the journal cannot be read."""
    text: str
    """The state in words."""
    scored: bool = True


def read_fate(run_dir: Path, index: int) -> SampleFate:
    """Read the whole journal for one sample."""
    if not (run_dir / JOURNAL).exists():
        return SampleFate(None, "the run has no journal (yet), so the state of the sample is not known")
    newest = 0
    try:
        for record in read_samples(run_dir):
            newest = record.sample_id.index
            if newest == index:
                return SampleFate(record, _describe_state(record), scored=record.ready_at > 0)
        state = read_queue_state(run_dir)
        if state.was_fed(state.id_of(index)):
            return SampleFate(None, _describe_forgotten(run_dir, state.id_of(index)))
    except AsyncRLError as error:
        return SampleFate(None, f"the state of the sample is not known: {error.message}")
    last = f"the newest sample is {newest}" if newest else "the run has no samples"
    return SampleFate(None, f"its generation never began; {last}", scored=False)


def _describe_state(record: SampleRecord) -> str:
    at = f"at {timestamp(record.ended_at or record.leased_at or record.ready_at or record.fed_at)}"
    return {
        "running": f"its generation began {at} and is not finished",
        "ready": f"it became READY {at} and waits to be trained on",
        "leased": f"the Trainer leased it at {timestamp(record.leased_at)}",
        "trained": f"it was trained on {at}",
        "dropped": f"it was dropped ({record.reason}) {at}",
    }.get(record.state, "it waits to be generated again")


def _describe_forgotten(run_dir: Path, sample_id: SampleId) -> str:
    """Describe a sample that ended before the journal begins."""
    if (step := _trained_in(run_dir, sample_id)) is not None:
        return f"it was trained on in step {step['step']}"
    return "it was dropped before the oldest checkpoint that was kept, and the journal has forgotten why"


def describe_fate(run_dir: Path, sample_id: SampleId, oldest_version: int) -> str:
    """Describe the sample's state; empty if reading a large journal would take long.

    `oldest_version`: the oldest version of any of its tokens.
    """
    files = [run_dir / file for file in (JOURNAL, f"{JOURNAL}-wal")]
    num_bytes = sum(file.stat().st_size for file in files if file.exists())
    fate = read_fate(run_dir, sample_id.index) if 0 < num_bytes <= SMALL_JOURNAL_BYTES else None
    # The journal knows of a rewind before the Trainer's record, if the run ends between the two.
    may_be_trained = fate is None or fate.record is None or fate.record.state == "trained"
    if may_be_trained and (step := _trained_in(run_dir, sample_id)) is not None:
        staleness = step["version"] - oldest_version
        return f"trained in step {step['step']}, which began from v{step['version']}: staleness {staleness}"
    return "" if fate is None else fate.text


def _trained_in(run_dir: Path, sample_id: SampleId) -> Mapping[str, int] | None:
    """Return `step` and `version` of the last surviving step that trained on the sample; None: the Trainer's record has
    none, or cannot be read."""
    name = str(sample_id)
    try:
        lines = (line for line in read_trained(run_dir) if "rewound_to_step" in line or name in line["samples"])
        steps = [{key: int(line[key]) for key in ("step", "version")} for line in surviving_steps(lines)]
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError, OSError):
        return None
    return steps[-1] if steps else None


# ------------------------------------------------------------------------------------------------ payload of a sample


class KeptPayload(NamedTuple):
    sample: Sample | None
    problem: str
    """Why the payload cannot be read; empty if the run directory no longer has it."""


def read_payload(run_dir: Path, index: int) -> KeptPayload:
    """Return the sample, if the run directory still has its payload."""
    path = run_dir / JOURNAL
    if not path.exists():
        return KeptPayload(None, "")
    try:
        state = read_queue_state(run_dir)
    except AsyncRLError as error:
        return KeptPayload(None, f"{path} cannot be read: {error.message}")
    entry = state.entries.get(state.id_of(index))
    if entry is None or not isinstance(entry.payload, FileRef):
        return KeptPayload(None, "")
    file = run_dir / SAMPLES / entry.payload.file
    try:
        return KeptPayload(PackedBlob(decode(read_segment(file))).unpack(entry.payload.position), "")
    except OSError as error:
        return KeptPayload(None, f"its payload {file} cannot be read: {error.strerror or error}")
    except (DamageError, ValueError, RecursionError) as error:
        return KeptPayload(None, f"its payload {file} is damaged: {error}")


def to_dumped(sample: Sample, run_dir: Path, text_of: Decode) -> list[DumpedTrajectory]:
    """Return the trajectories of a payload as if they had been dumped.

    A payload has tokens but no turns and messages, which are derived from the mask.
    """
    rows: dict[int, list[Row]] = {}
    for row in sample.rows:
        rows.setdefault(row.trajectory, []).append(row)
    return [
        _to_dumped(sample, number, own, run_dir=run_dir, num_trajectories=len(rows), text_of=text_of)
        for number, own in rows.items()
    ]


def _to_dumped(
    sample: Sample, number: int, rows: list[Row], *, run_dir: Path, num_trajectories: int, text_of: Decode
) -> DumpedTrajectory:
    last = rows[-1]
    requested = sample.asked[number] if number < len(sample.asked) else None
    token_rows = tuple(
        TokenRow(row.prompt_ids, row.response_ids, row.response_mask, row.rollout_log_probs, row.spans) for row in rows
    )
    rewards: list[float] = []
    turns: list[TurnInfo] = []
    texts = []
    messages: list[Mapping[str, str]] = [{"role": PROMPT_ROLE, "content": text_of(rows[0].prompt_ids)}]
    for place, row in enumerate(rows):
        first, of_token = 0, dict(row.turn_rewards)
        for sampled, num_tokens in mask_runs(row.response_mask):
            end = first + num_tokens
            if sampled:
                turns.append(TurnInfo(place, first, num_tokens, FinishReason.STOP))
                rewards.append(of_token.get(end - 1, 0.0))
                texts.append(pieces(token_rows[place], turns[-1], text_of))
                messages.append({"role": "assistant", "content": "".join(piece.text for piece in texts[-1])})
            else:
                messages.append({"role": "input", "content": text_of(row.response_ids[first:end])})
            first = end
    if not turns:
        turns.append(TurnInfo(0, 0, 0, last.finish_reason))
        texts.append(())
    return DumpedTrajectory(
        sample_id=sample.sample_id,
        number=number,
        num_trajectories=num_trajectories,
        run=str(run_dir),
        at=0.0,
        trajectory=Trajectory(token_rows, tuple(turns), last.finish_reason, tuple(messages), number=requested),
        score=Score(last.reward, last.reward_extra, tuple(rewards) if any(rewards) else ()),
        texts=tuple(texts),
        data_source=sample.data_source,
        generate_s=sample.generate_s,
        reward_s=sample.reward_s,
        baseline_reward=sample.baseline_reward,
        replayed_from=None if sample.replay is None else sample.replay.step,
        substituted=sample.replay is not None and sample.replay.substituted,
    )
