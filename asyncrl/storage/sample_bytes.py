"""Packs samples into few arrays for shared memory or a file, and unpacks them. Pure.

A group of 8 trajectories is 32 small arrays in 9 objects, and pickling those costs several times what moving the bytes
of a 100 KB sample does. Packed, any number of small samples is four arrays end to end and plain values; large arrays
travel as they are. Unpacking makes views. Through shared memory, pickle protocol 5 carries the arrays out of band; in a
file (`asyncrl.storage.array_bytes`) the plain values are JSON, because nothing on disk is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.types import FinishReason, LogProbs, Mask, Media, Replay, Row, Sample, SampleId, Span, TokenIds
from asyncrl.storage.array_bytes import Blob


class FileRef(NamedTuple):
    """A payload in a file: the name in `samples/` of the run directory, and the sample's position in that file."""

    file: str
    position: int


JOIN_BELOW_TOKENS = 16_384
"""Longer responses are not joined: allocating memory for a copy costs more than sending four more arrays."""

_Row = tuple[
    int, int, int, int, int, tuple[tuple[int, int], ...], str, int, tuple[tuple[int, float], ...], float,
    Mapping[str, float],
]  # fmt: skip
"""A row: its chunk; start and number of its prompt tokens there, then of its response tokens; spans, finish reason,
trajectory, turn_rewards, reward, reward_extra. A plain tuple: a named one takes three times as long to pickle."""


_Replay = tuple[int, bool, tuple[tuple[tuple[int, int], ...], ...]]
"""`types.Replay` as a plain tuple."""


class PackedSample(NamedTuple):
    sample_id: tuple[int, int]
    rows: tuple[_Row, ...]
    data_source: str
    generate_s: float
    reward_s: float
    baseline_reward: float | None
    replay: _Replay | None
    media: tuple[Media, ...] = ()
    asked: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """The arrays of one or more trajectories, end to end."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: Mask
    rollout_log_probs: LogProbs


class Packed(NamedTuple):
    samples: tuple[PackedSample, ...]
    chunks: tuple[Chunk, ...]


def pack(samples: Sequence[Sample]) -> Packed:
    """Pack any number of samples into one value that is cheap to pickle.

    Raises:
        TypeError: an array's dtype cannot be cast to the one in `types` without changing its kind.
    """
    packer = _Packer()
    packed = tuple(
        PackedSample(
            (sample.sample_id.epoch, sample.sample_id.index),
            tuple(packer.add(row) for row in sample.rows),
            sample.data_source,
            sample.generate_s,
            sample.reward_s,
            sample.baseline_reward,
            _pack_replay(sample.replay),
            sample.media,
            sample.asked,
        )
        for sample in samples
    )
    return Packed(packed, packer.chunks())


def unpack(packed: Packed, position: int) -> Sample:
    """Return the sample at `position`; its arrays are views, read-only if the packed ones are."""
    return _unpack(packed.samples[position], packed.chunks)


def _unpack(sample: PackedSample, chunks: Sequence[Chunk] | Mapping[int, Chunk]) -> Sample:
    rows = tuple([_unpack_row(row, chunks[row[0]]) for row in sample.rows])
    return Sample(
        SampleId(*sample.sample_id),
        rows,
        sample.data_source,
        sample.generate_s,
        sample.reward_s,
        sample.baseline_reward,
        _unpack_replay(sample.replay),
        sample.media,
        sample.asked,
    )


def to_blob(packed: Packed) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Convert `packed` for a file: named arrays, and JSON texts that map their ranges to samples."""
    arrays = {
        f"{field}.{number}": array
        for number, chunk in enumerate(packed.chunks)
        for field, array in zip(Chunk._fields, chunk, strict=True)
    }
    stored: dict[bytes, int] = {}
    samples = [
        {
            "sample_id": sample.sample_id,
            "data_source": sample.data_source,
            "generate_s": float(sample.generate_s),
            "reward_s": float(sample.reward_s),
            "baseline_reward": None if sample.baseline_reward is None else float(sample.baseline_reward),
            "replay": sample.replay,
            "rows": [
                (
                    *row[:-3],
                    [(token, float(reward)) for token, reward in row[-3]],
                    float(row[-2]),
                    {key: float(value) for key, value in row[-1].items()},
                )
                for row in sample.rows
            ],
            **_media_data(sample, stored),
            **({"asked": sample.asked} if sample.asked else {}),
        }
        for sample in packed.samples
    ]
    arrays |= {f"media.{number}": np.frombuffer(data, np.uint8) for data, number in stored.items()}
    return arrays, {"trajectory": _ROW_FIELDS, "samples": json.dumps(samples, separators=(",", ":"))}


def _media_data(sample: PackedSample, stored: dict[bytes, int]) -> dict[str, Any]:
    """Describe a sample's media: their kinds and the names of their arrays. Media that several samples share are
    stored once."""
    if not sample.media:
        return {}
    return {"media": [(kind, stored.setdefault(data, len(stored))) for kind, data in sample.media]}


_ROW_FIELDS = (
    "arrays, first of prompt_ids, number of prompt_ids, first of response_ids, number of response_ids, "
    "[[first token, version], ...], finish_reason, trajectory, [[token, reward], ...], reward, reward_extra"
)
_ROW_TYPES = [int, int, int, int, int, list, str, int, list, float, dict]


class PackedBlob:
    """The content of a file that `to_blob` produced. Only the arrays of requested samples are read."""

    def __init__(self, blob: Blob) -> None:
        """
        Raises:
            ValueError: the blob has no list of samples.
        """
        self._blob = blob
        self._samples = json.loads(blob.texts.get("samples", ""))
        if not isinstance(self._samples, list):
            raise ValueError("it has no list of samples")
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def unpack(self, position: int) -> Sample:
        """Return the sample at `position`; its arrays are read-only views of the file's bytes.

        Raises:
            DamageError: the checksum of an array differs.
            ValueError: there is no such sample, or its description is invalid or does not fit the arrays.
        """
        if position not in range(len(self._samples)):
            raise ValueError(f"it has {len(self._samples)} samples and none at {position}")
        description = self._samples[position]
        sample = _parse(description)
        if "media" in description:
            sample = sample._replace(media=self._media(description["media"]))
        for row in sample.rows:
            _check_row(row, self._chunk(row[0]))
        return _unpack(sample, self._chunks)

    def _media(self, description: Any) -> tuple[Media, ...]:
        match description:
            case [*pairs] if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                if all(kind in ("image", "video") and type(number) is int for kind, number in pairs):
                    return tuple(
                        [Media(kind, self._blob.array(f"media.{at}", np.uint8).tobytes()) for kind, at in pairs]
                    )
        raise ValueError("the description of a sample's media is invalid")

    def _chunk(self, number: int) -> Chunk:
        if number not in self._chunks:
            self._chunks[number] = Chunk(
                self._blob.array(f"prompt_ids.{number}", np.int32),
                self._blob.array(f"response_ids.{number}", np.int32),
                self._blob.array(f"response_mask.{number}", np.bool_),
                self._blob.array(f"rollout_log_probs.{number}", np.float32),
            )
        return self._chunks[number]


def spans_from_json(value: Any) -> tuple[tuple[int, int], ...]:
    """Parse pairs of integers. The Trainer checks whether they fit the tokens.

    Raises:
        ValueError: the value is anything else.
    """
    try:
        spans = tuple([(first, version) for first, version in value])
    except TypeError as error:
        raise ValueError("spans are not a list of pairs") from error
    if not all([type(first) is type(version) is int and first >= 0 for first, version in spans]):
        raise ValueError("spans are not pairs of a token's position and a version")
    return spans


def _parse(description: Any) -> PackedSample:
    match description:
        case {
            "sample_id": [int(epoch), int(index)],
            "data_source": str(data_source),
            "generate_s": float(generate_s),
            "reward_s": float(reward_s),
            "baseline_reward": float() | None as baseline_reward,
            "replay": [*_] | None as replay,
            "rows": [*rows],
        } if epoch >= 0 and index >= 1:
            parsed = tuple([_parse_row(row) for row in rows])
            parsed_replay = None if replay is None else _parse_replay(replay)
            asked = _parse_asked(description.get("asked", []))
            return PackedSample(
                (epoch, index), parsed, data_source, generate_s, reward_s, baseline_reward, parsed_replay, asked=asked
            )
    raise ValueError("the description of a sample is invalid")


def _parse_asked(numbers: Any) -> tuple[int, ...]:
    if not (isinstance(numbers, list) and all([type(number) is int and number >= 0 for number in numbers])):
        raise ValueError("the request numbers of a sample's trajectories are not a list of numbers")
    return tuple(numbers)


def _parse_row(description: Any) -> _Row:
    if not isinstance(description, list) or list(map(type, description)) != _ROW_TYPES:
        raise ValueError("the description of a row is invalid")
    *numbers, spans, finish_reason, trajectory, turn_rewards, reward, extra = description
    if min(*numbers, trajectory) < 0 or not all([type(value) is float for value in extra.values()]):
        raise ValueError("the description of a row is inconsistent")
    number, prompt_start, prompt_tokens, response_start, response_tokens = numbers
    places = (number, prompt_start, prompt_tokens, response_start, response_tokens)
    of_turns = _turn_rewards_from_json(turn_rewards)
    return (*places, spans_from_json(spans), finish_reason, trajectory, of_turns, reward, extra)


def _turn_rewards_from_json(value: list[Any]) -> tuple[tuple[int, float], ...]:
    try:
        rewards = tuple([(token, reward) for token, reward in value])
    except TypeError as error:
        raise ValueError("turn rewards are not a list of pairs") from error
    if not all([type(token) is int and token >= 0 and type(reward) is float for token, reward in rewards]):
        raise ValueError("turn rewards are not pairs of a token's position and a number")
    return rewards


def _parse_replay(description: Any) -> _Replay:
    match description:
        case [int(step), bool(substituted), [*rows]]:
            return step, substituted, tuple([spans_from_json(spans) for spans in rows])
    raise ValueError("the description of a replay is invalid")


def _check_row(row: _Row, chunk: Chunk) -> None:
    _, prompt_start, prompt_tokens, response_start, response_tokens = row[:5]
    longest = min(len(chunk.response_ids), len(chunk.response_mask), len(chunk.rollout_log_probs))
    if prompt_start + prompt_tokens > len(chunk.prompt_ids) or response_start + response_tokens > longest:
        raise ValueError("a row exceeds its arrays")


def _pack_replay(replay: Replay | None) -> _Replay | None:
    if replay is None:
        return None
    spans = tuple([tuple([(span.first_token, span.version) for span in row]) for row in replay.spans])
    return replay.step, replay.substituted, spans


def _unpack_replay(packed: _Replay | None) -> Replay | None:
    if packed is None:
        return None
    step, substituted, rows = packed
    return Replay(step, substituted, tuple([tuple([Span(*span) for span in row]) for row in rows]))


class _Packer:
    """Chunk 0 joins the short trajectories; each long one is a chunk of its own."""

    def __init__(self) -> None:
        self._short: list[Row] = []
        self._long: list[Row] = []
        self._prompt_tokens = 0
        self._response_tokens = 0

    def add(self, row: Row) -> _Row:
        prompt_tokens, response_tokens = len(row.prompt_ids), len(row.response_ids)
        if response_tokens < JOIN_BELOW_TOKENS:
            place = (0, self._prompt_tokens, prompt_tokens, self._response_tokens, response_tokens)
            self._short.append(row)
            self._prompt_tokens += prompt_tokens
            self._response_tokens += response_tokens
        else:
            self._long.append(row)
            place = (len(self._long), 0, prompt_tokens, 0, response_tokens)
        spans = tuple((span.first_token, span.version) for span in row.spans)
        metadata = (str(row.finish_reason), row.trajectory, row.turn_rewards, row.reward, row.reward_extra)
        return (*place, spans, *metadata)

    def chunks(self) -> tuple[Chunk, ...]:
        return (_join(self._short), *(_join([row]) for row in self._long))


def _join(rows: Sequence[Row]) -> Chunk:
    return Chunk(
        _joined([row.prompt_ids for row in rows], np.int32),
        _joined([row.response_ids for row in rows], np.int32),
        _joined([row.response_mask for row in rows], np.bool_),
        _joined([row.rollout_log_probs for row in rows], np.float32),
    )


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0].astype(dtype, casting="same_kind", copy=False))
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _unpack_row(row: _Row, chunk: Chunk) -> Row:
    _, prompt_start, prompt_tokens, response_start, response_tokens, spans, finish_reason = row[:7]
    trajectory, turn_rewards, reward, extra = row[7:]
    prompt = slice(prompt_start, prompt_start + prompt_tokens)
    response = slice(response_start, response_start + response_tokens)
    prompt_ids, response_ids, response_mask, rollout_log_probs = chunk
    return Row(
        prompt_ids=prompt_ids[prompt],
        response_ids=response_ids[response],
        response_mask=response_mask[response],
        rollout_log_probs=rollout_log_probs[response],
        spans=tuple([Span(*span) for span in spans]),
        finish_reason=FinishReason(finish_reason),
        reward=reward,
        reward_extra=extra,
        trajectory=trajectory,
        turn_rewards=turn_rewards,
    )
