"""Scored trajectories in files of `rollout.dump_dir`, as lines of JSON for users and their scripts. Reading blocks.

    trajectories-1-1000.jsonl      a thousand samples by feed index; each line is a trajectory

    {"sample_id": "sample_0_42", "trajectory": 0, "num_trajectories": 8, "run": …, …,
     "messages": [{"role": "user", …}, …],
     "turns": [{"row": 0, "first_token": 0, "num_tokens": 34, "calls": [{"name": …}], "text": [[version, text]], …}],
     "rows": [{"prompt_ids": […], "response_ids": […], "response_mask": [[1, 34], [0, 12]], "spans": [[0, 3]], …}]}

`response_mask` is stored as run lengths, and `rollout_log_probs` are rounded. All trajectories of a sample are appended
in one write. A sample that is generated again after a restart is appended again, and its last lines count. Several runs
may write into one directory, because each line names its run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import aiofiles
import aiofiles.os
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from asyncrl.core.ports import Score
from asyncrl.core.text import MAX_DIGITS, safe_repr
from asyncrl.core.trajectory import TokenRow, ToolCall, Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, LogProbs, SampleId, Span, TokenIds, versions_per_token
from asyncrl.storage.run_dir import read_lines
from asyncrl.storage.sample_bytes import spans_from_json

Decode = Callable[[TokenIds], str]

PROMPT_ROLE = "prompt"
"""Role of the message that represents a prompt if only its tokens are known."""
LOG_PROB_DIGITS = 5
MAX_REPR = 2000
"""Maximum length of the repr of a value that JSON does not support."""
MAX_DEPTH = 32
"""Maximum nesting; deeper values become their repr."""
NO_SUCH_LINE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors that JSON of another format raises."""
_TOO_LONG = 10**MAX_DIGITS
"""The smallest integer that Python does not convert to text."""
_TURN: TypeAdapter[TurnInfo] = TypeAdapter(TurnInfo)
_MEASURED = ("generate_s", "user_s", "duration_s", "wait_s", "reward")


class VersionedText(NamedTuple):
    """Text that one version of the weights sampled."""

    version: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class DumpedTrajectory:
    """One line: a trajectory, its reward and its origin."""

    sample_id: SampleId
    number: int
    """Its number within the sample, from 0."""
    num_trajectories: int
    run: str
    """The run's directory."""
    at: float
    """When it was written, wall clock (`time.time`); the same for all trajectories of a write."""
    trajectory: Trajectory
    """Its messages are the whole conversation, even if there is only one turn; its spans are those used for
    training."""
    score: Score
    texts: tuple[tuple[VersionedText, ...], ...] = ()
    """The sampled text of each turn, without special tokens."""
    data_source: str = "default"
    ground_truth: Any = None
    generate_s: float = 0.0
    """Time to generate the whole sample; `reward_s` is the time to score it."""
    reward_s: float = 0.0
    baseline_reward: float | None = None
    replayed_from: int | None = None
    """The step of the record that it was replayed from; None: it was generated."""
    substituted: bool = False
    recorded_spans: tuple[tuple[Span, ...], ...] = ()
    """Recorded spans of each row, if they differ from those used for training."""

    @property
    def asked(self) -> int:
        """The number under which it was requested, which events use. It differs from `number` if surplus
        trajectories were requested."""
        return self.number if self.trajectory.number is None else self.trajectory.number


def pieces(row: TokenRow, turn: TurnInfo, decode: Decode) -> tuple[VersionedText, ...]:
    """Split the text of a turn by the versions that sampled it."""
    end = turn.first_token + turn.num_tokens
    ids = row.response_ids[turn.first_token : end]
    versions = versions_per_token(row.spans, len(row.response_ids))[turn.first_token : end]
    ends = (np.flatnonzero(np.diff(versions)) + 1).tolist()
    found, before = [], ""
    for first, last in zip([0, *ends], [*ends, len(ids)], strict=True):
        if last > first:
            text = _text(ids[:last], decode, whole=last == len(ids))
            # Decoded together with the preceding tokens, because a token's text may depend on them.
            found.append(VersionedText(int(versions[first]), text[len(before) :]))
            before = text
    return tuple(found)


def _text(ids: TokenIds, decode: Decode, *, whole: bool) -> str:
    text = decode(ids)
    # A character that is split between tokens belongs to the token that completes it.
    return text if whole else text.rstrip("\ufffd")


def as_json(one: DumpedTrajectory) -> dict[str, Any]:
    """Return the content of its line; `sample_id` comes first."""
    recorded = one.recorded_spans or ((),) * len(one.trajectory.rows)
    rows = [_row_as_json(row, spans) for row, spans in zip(one.trajectory.rows, recorded, strict=True)]
    return {**described(one), "rows": rows}


def described(one: DumpedTrajectory) -> dict[str, Any]:
    """Return the content of its line without `rows`."""
    trajectory, score = one.trajectory, one.score
    values: dict[str, Any] = {
        "sample_id": str(one.sample_id),
        "trajectory": one.number,
        "num_trajectories": one.num_trajectories,
        "asked": one.asked,
        "run": one.run,
        "at": one.at,
        "data_source": one.data_source,
        "ground_truth": one.ground_truth,
        "finish_reason": str(trajectory.finish_reason),
        "reward": score.reward,
        "reward_extra": score.extra,
        "turn_rewards": score.turn_rewards,
        "scores": trajectory.scores,
        "metrics": trajectory.metrics,
        "generate_s": one.generate_s,
        "reward_s": one.reward_s,
        "baseline_reward": one.baseline_reward,
        "replayed_from": one.replayed_from,
        "substituted": one.substituted,
        "messages": trajectory.messages,
        "turns": [
            {**_values(turn), "calls": [_values(call) for call in turn.calls], "text": text}
            for turn, text in zip(trajectory.turns, one.texts or ((),) * len(trajectory.turns), strict=True)
        ],
    }
    return {name: plain(value, 1) for name, value in values.items()}


def to_line(one: DumpedTrajectory) -> bytes:
    """Return its line, newline included."""
    text = json.dumps(as_json(one), ensure_ascii=False, allow_nan=False)
    # A truncated text may contain half a character, which is not valid UTF-8 and therefore escaped.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def parse(line: bytes) -> DumpedTrajectory:
    """Parse a line of `to_line`. Values that JSON does not support come back as their repr.

    Raises:
        ValueError: the line has another format.
    """
    try:
        return _parse(json.loads(line))
    except NO_SUCH_LINE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def plain(value: Any, depth: int = 0) -> Any:
    """Convert `value` to JSON types: numbers that are not finite become null, unsupported values their repr."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.generic):
        return plain(value.item(), depth + 1) if depth < MAX_DEPTH else _shown(value)
    if isinstance(value, int) and abs(value) < _TOO_LONG:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner, depth + 1) for inner in value]
    return _shown(value)


def _shown(value: Any) -> str:
    text = safe_repr(value)
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}… ({len(text):,} characters)"


def _values(value: TurnInfo | ToolCall) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _row_as_json(row: TokenRow, recorded: Sequence[Span]) -> dict[str, Any]:
    values = {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "response_mask": [[int(value), count] for value, count in mask_runs(row.response_mask)],
        "rollout_log_probs": _log_probs_as_json(row.rollout_log_probs),
        "spans": [list(span) for span in row.spans],
    }
    return {**values, "recorded_spans": [list(span) for span in recorded]} if recorded else values


def _log_probs_as_json(log_probs: LogProbs) -> list[float | None]:
    rounded = np.round(log_probs.astype(np.float64), LOG_PROB_DIGITS)
    listed: list[float | None] = rounded.tolist()
    if not np.isfinite(rounded).all():
        return [value if value is not None and math.isfinite(value) else None for value in listed]
    return listed


def mask_runs(mask: NDArray[np.bool_]) -> list[tuple[bool, int]]:
    """Return run lengths: each value, and how often it repeats."""
    if not len(mask):
        return []
    starts = np.flatnonzero(np.concatenate([[True], mask[1:] != mask[:-1]]))
    lengths = np.diff(np.append(starts, len(mask)))
    return list(zip(mask[starts].tolist(), lengths.tolist(), strict=True))


def _parse(raw: Mapping[str, Any]) -> DumpedTrajectory:
    return _parse_line(raw, raw["rows"], tuple(_parse_row(row) for row in raw["rows"]))


def parse_described(raw: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> DumpedTrajectory:
    """Parse `described` and the values of its rows, which are arrays.

    Raises:
        ValueError: a value has another form.
    """
    try:
        return _parse_line(raw, rows, tuple(map(_row_of_arrays, rows)))
    except NO_SUCH_LINE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _parse_line(
    raw: Mapping[str, Any], raw_rows: Sequence[Mapping[str, Any]], rows: tuple[TokenRow, ...]
) -> DumpedTrajectory:
    turns = tuple(_parse_turn(turn, rows) for turn in raw["turns"])
    if not turns:
        raise ValueError("it has no turns")
    recorded = tuple(spans_from_json(row.get("recorded_spans", ())) for row in raw_rows)
    messages = tuple({**message} for message in raw["messages"])
    trajectory = Trajectory(
        rows, turns, FinishReason(raw["finish_reason"]), messages, _numbers(raw["scores"]), _numbers(raw["metrics"]),
        int(raw.get("asked", raw["trajectory"])),
    )  # fmt: skip
    baseline, replayed_from = raw["baseline_reward"], raw["replayed_from"]
    return DumpedTrajectory(
        sample_id=SampleId.parse(raw["sample_id"]),
        number=int(raw["trajectory"]),
        num_trajectories=int(raw["num_trajectories"]),
        run=str(raw["run"]),
        at=float(raw["at"]),
        trajectory=trajectory,
        score=Score(
            _number(raw["reward"]), _numbers(raw["reward_extra"]), tuple(_number(each) for each in raw["turn_rewards"])
        ),
        texts=tuple(
            tuple(VersionedText(int(version), str(text)) for version, text in turn["text"]) for turn in raw["turns"]
        ),
        data_source=str(raw["data_source"]),
        ground_truth=raw["ground_truth"],
        generate_s=_number(raw["generate_s"]),
        reward_s=_number(raw["reward_s"]),
        baseline_reward=None if baseline is None else float(baseline),
        replayed_from=None if replayed_from is None else int(replayed_from),
        substituted=bool(raw["substituted"]),
        recorded_spans=recorded if any(recorded) else (),
    )


def _parse_row(raw: Mapping[str, Any]) -> TokenRow:
    runs = [(bool(value), int(count)) for value, count in raw["response_mask"]]
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite
        log_probs = np.array([_number(value) for value in raw["rollout_log_probs"]], np.float32)
    prompt_ids, response_ids = (np.array(raw[name], np.int32).reshape(-1) for name in ("prompt_ids", "response_ids"))
    if not len(response_ids) == sum(count for _, count in runs) == len(log_probs):
        raise ValueError("a row's tokens, mask and log-probs are of different lengths")
    mask = np.repeat(np.array([value for value, _ in runs], np.bool_), [count for _, count in runs])
    return _checked_row(TokenRow(prompt_ids, response_ids, mask, log_probs, spans_from_json(raw["spans"])))


def _row_of_arrays(raw: Mapping[str, Any]) -> TokenRow:
    arrays = {name: raw[name] for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")}
    return _checked_row(TokenRow(**arrays, spans=spans_from_json(raw["spans"])))


def _checked_row(row: TokenRow) -> TokenRow:
    if len(row.response_ids) and (not row.spans or row.spans[0].first_token):
        raise ValueError("a row's first tokens have no version")
    return row


def _parse_turn(raw: Mapping[str, Any], rows: Sequence[TokenRow]) -> TurnInfo:
    # An unknown field is a TypeError here; pydantic checks the types.
    calls = [asdict(ToolCall(**{**_measured(call), "metrics": _numbers(call["metrics"])})) for call in raw["calls"]]
    turn = _TURN.validate_python({**_measured(raw), "calls": calls})
    end = turn.first_token + turn.num_tokens
    if turn.row not in range(len(rows)) or not 0 <= turn.first_token <= end <= len(rows[turn.row].response_ids):
        raise ValueError("a turn exceeds its row")
    return turn


def _measured(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if name in _MEASURED else value for name, value in raw.items()}


def _number(raw: Any) -> float:
    return math.nan if raw is None else float(raw)


def _numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in raw.items()}


SAMPLES_PER_FILE = 1000


def file_name(index: int) -> str:
    """Return the name of the file for a feed index."""
    first = (index - 1) // SAMPLES_PER_FILE * SAMPLES_PER_FILE + 1
    return f"trajectories-{first}-{first + SAMPLES_PER_FILE - 1}.jsonl"


async def append(directory: Path, index: int, data: bytes, mode: int = 0o700) -> None:
    """Append the lines of one sample, and create the directory with `mode` if necessary. The incomplete line of an
    earlier, interrupted write stays a separate line.

    Raises:
        OSError: some of the bytes could not be written.
    """
    path = directory / file_name(index)
    # `aiofiles` calls the opener in its thread, too.
    try:
        file = await aiofiles.open(path, "ab", buffering=0, opener=open_at_line)
    except FileNotFoundError:
        await aiofiles.os.makedirs(directory, mode, exist_ok=True)
        file = await aiofiles.open(path, "ab", buffering=0, opener=open_at_line)
    try:
        while data:
            data = data[await file.write(data) :]
    finally:
        await file.close()


def open_at_line(path: str, flags: int) -> int:
    """Open a file to append to; end an incomplete last line."""
    descriptor = os.open(path, (flags & ~os.O_WRONLY) | os.O_RDWR, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class DumpedSample(NamedTuple):
    trajectories: tuple[DumpedTrajectory, ...]
    """Trajectories by number; may be empty."""
    notes: tuple[str, ...] = ()
    """Messages about unreadable lines and about other runs in the file."""


def find(directory: Path, index: int, run_dir: Path) -> DumpedSample:
    """Return the newest dump of the sample with feed index `index` in the run of `run_dir`.

    Raises:
        OSError: the file cannot be read; `FileNotFoundError`: there is none.
    """
    path, notes = directory / file_name(index), []
    found: list[DumpedTrajectory] = []
    for number, line in _lines_of(read_lines(path), index):
        try:
            found.append(parse(line))
        except ValueError as error:
            torn = "was cut off" if not line.endswith(b"}\n") else f"is damaged: {error}"
            notes.append(f"line {number} of {path} {torn}")
    of_run = [one for one in found if _same_place(one.run, run_dir)]
    if found and not of_run:
        others = sorted({one.run for one in found})
        if len(others) > 1 or os.path.isdir(others[0]):
            return DumpedSample((), (*notes, f"{path} has this sample of another run only: {', '.join(others)}"))
        of_run = found
        notes.append(f"it was dumped by a run in {others[0]}, which no longer exists; that is assumed to be this run")
    last = {one.number: one for one in of_run if one.at == of_run[-1].at}
    if last and len(last) < of_run[-1].num_trajectories:
        notes.append(f"{len(last)} of the sample's {of_run[-1].num_trajectories} trajectories could be read")
    return DumpedSample(tuple(last[number] for number in sorted(last)), tuple(notes))


def _lines_of(file: Iterable[bytes], index: int) -> Iterator[tuple[int, bytes]]:
    begin = re.compile(rb'\{"sample_id": "sample_\d+_%d"' % index)
    return ((number, line) for number, line in enumerate(file, 1) if begin.match(line))


def _same_place(one: str, other: Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except ValueError:  # no path has such a character
        return False
