"""Packs samples into few arrays for shared memory or a file, and unpacks them. Pure.

A group of 8 trajectories is 32 small arrays in 9 objects, and pickling those takes several times as long as moving the
bytes of a 100 KB sample. Packed, any number of small samples becomes four concatenated arrays and plain values; large
arrays stay separate. Unpacking makes views. Through shared memory, pickle protocol 5 carries the arrays out of band; in
a file (`asyncrl.storage.array_bytes`) the plain values are JSON, because nothing on disk is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, Strict, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from asyncrl.core.types import FinishReason, LogProbs, Mask, Media, Replay, Row, Sample, SampleId, Span, TokenIds
from asyncrl.storage.array_bytes import Blob


class FileRef(NamedTuple):
    """A payload in a file: the name in `samples/` of the run directory, and the sample's position in that file."""

    file: str
    position: int


JOIN_BELOW_TOKENS = 16_384
"""Longer responses are not joined: allocating memory for a copy costs more than sending four more arrays."""

_Count = Annotated[int, Strict(), Field(ge=0)]
_Spans = tuple[tuple[_Count, StrictInt], ...]
_Row = tuple[
    _Count, _Count, _Count, _Count, _Count, _Spans, StrictStr, _Count, tuple[tuple[_Count, StrictFloat], ...],
    StrictFloat, dict[str, StrictFloat],
]  # fmt: skip
"""A row: its chunk; start and number of its prompt tokens there, then of its response tokens; spans, finish reason,
trajectory, turn_rewards, reward, reward_extra. A plain tuple: a named one takes three times as long to pickle."""
_ROW_FIELDS = (
    "arrays, first of prompt_ids, number of prompt_ids, first of response_ids, number of response_ids, "
    "[[first token, version], ...], finish_reason, trajectory, [[token, reward], ...], reward, reward_extra"
)


class PackedSample(NamedTuple):
    """A sample without its arrays and media. In a file, it is a JSON object with these keys."""

    sample_id: tuple[_Count, Annotated[int, Strict(), Field(ge=1)]]
    data_source: StrictStr
    generate_s: StrictFloat
    reward_s: StrictFloat
    baseline_reward: StrictFloat | None
    replay: tuple[StrictInt, StrictBool, tuple[_Spans, ...]] | None
    rows: tuple[_Row, ...]
    media: tuple[tuple[Literal["image", "video"], _Count], ...] = ()
    """Kinds and positions in `PackedBatch.media`. A file omits this key and `asked` if they are empty."""
    asked: tuple[_Count, ...] = ()


_SAMPLE: TypeAdapter[PackedSample] = TypeAdapter(PackedSample)
_SPANS: TypeAdapter[_Spans] = TypeAdapter(_Spans)


class Chunk(NamedTuple):
    """The arrays of one or more trajectories, end to end."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: Mask
    rollout_log_probs: LogProbs


_CHUNK_DTYPES = Chunk(np.int32, np.int32, np.bool_, np.float32)  # type: ignore[arg-type]


class PackedBatch(NamedTuple):
    samples: tuple[PackedSample, ...]
    chunks: tuple[Chunk, ...]
    """Chunk 0 joins the short trajectories; each long one is a separate chunk."""
    media: tuple[bytes, ...]
    """Media that several samples share are stored once."""


def pack(samples: Sequence[Sample]) -> PackedBatch:
    """Pack any number of samples into one value that is cheap to pickle.

    Raises:
        TypeError: an array's dtype cannot be cast to the one in `types` without changing its kind.
    """
    short: list[Row] = []
    long: list[Row] = []
    prompt_end = response_end = 0
    media: dict[bytes, int] = {}
    packed: list[PackedSample] = []
    for sample in samples:
        rows: list[_Row] = []
        for row in sample.rows:
            prompt_tokens, response_tokens = len(row.prompt_ids), len(row.response_ids)
            if response_tokens < JOIN_BELOW_TOKENS:
                place = (0, prompt_end, prompt_tokens, response_end, response_tokens)
                prompt_end, response_end = prompt_end + prompt_tokens, response_end + response_tokens
                short.append(row)
            else:
                long.append(row)
                place = (len(long), 0, prompt_tokens, 0, response_tokens)
            turn_rewards = tuple((token, float(reward)) for token, reward in row.turn_rewards)
            extra = {key: float(value) for key, value in row.reward_extra.items()}
            values = (str(row.finish_reason), row.trajectory, turn_rewards, float(row.reward), extra)
            rows.append((*place, _plain(row.spans), *values))
        baseline, replay = sample.baseline_reward, sample.replay
        packed.append(
            PackedSample(
                (sample.sample_id.epoch, sample.sample_id.index),
                sample.data_source,
                float(sample.generate_s),
                float(sample.reward_s),
                None if baseline is None else float(baseline),
                None if replay is None else (replay.step, replay.substituted, tuple(map(_plain, replay.spans))),
                tuple(rows),
                tuple((kind, media.setdefault(data, len(media))) for kind, data in sample.media),
                sample.asked,
            )
        )
    return PackedBatch(tuple(packed), (_join(short), *(_join([row]) for row in long)), tuple(media))


def _plain(spans: Sequence[Span]) -> _Spans:
    return tuple((span.first_token, span.version) for span in spans)


def _join(rows: Sequence[Row]) -> Chunk:
    return Chunk(
        *(_joined([getattr(row, name) for row in rows], dtype) for name, dtype in _CHUNK_DTYPES._asdict().items())
    )


def _joined(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0].astype(dtype, casting="same_kind", copy=False))
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def unpack(packed: PackedBatch, position: int) -> Sample:
    """Return the sample at `position`; its arrays are views, read-only if the packed ones are."""
    return _unpack(packed.samples[position], packed.chunks, packed.media)


def _unpack(
    sample: PackedSample, chunks: Sequence[Chunk] | Mapping[int, Chunk], media: Sequence[bytes] | Mapping[int, bytes]
) -> Sample:
    sample_id, data_source, generate_s, reward_s, baseline_reward, replay, rows, kinds, asked = sample
    if replay is not None:
        step, substituted, spans = replay
    return Sample(
        SampleId(*sample_id),
        tuple([_unpack_row(row, chunks[row[0]]) for row in rows]),
        data_source,
        generate_s,
        reward_s,
        baseline_reward,
        None if replay is None else Replay(step, substituted, tuple(map(_spans, spans))),
        tuple(Media(kind, media[number]) for kind, number in kinds),
        asked,
    )


def _unpack_row(row: _Row, chunk: Chunk) -> Row:
    _, prompt_start, prompt_tokens, response_start, response_tokens = row[:5]
    spans, finish_reason, trajectory, turn_rewards, reward, extra = row[5:]
    response = slice(response_start, response_start + response_tokens)
    return Row(
        prompt_ids=chunk.prompt_ids[prompt_start : prompt_start + prompt_tokens],
        response_ids=chunk.response_ids[response],
        response_mask=chunk.response_mask[response],
        rollout_log_probs=chunk.rollout_log_probs[response],
        spans=_spans(spans),
        finish_reason=FinishReason(finish_reason),
        reward=reward,
        reward_extra=extra,
        trajectory=trajectory,
        turn_rewards=turn_rewards,
    )


def _spans(pairs: _Spans) -> tuple[Span, ...]:
    return tuple([Span(*pair) for pair in pairs])


def spans_from_json(value: Any) -> tuple[Span, ...]:
    """Parse pairs of integers. The Trainer checks whether they fit the tokens.

    Raises:
        ValueError: the value is anything else.
    """
    try:
        return _spans(_SPANS.validate_python(value))
    except ValidationError as error:
        raise ValueError(f"spans are not pairs of a token's position and a version: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """Describe the first of the errors: its place and kind."""
    [first, *_] = error.errors()
    return ".".join(map(str, first["loc"])) + f" {first['msg']}"


def to_blob(packed: PackedBatch) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Convert `packed` for a file: named arrays, and JSON texts that map their ranges to samples."""
    arrays: dict[str, NDArray[Any]] = {
        f"{field}.{number}": array
        for number, chunk in enumerate(packed.chunks)
        for field, array in chunk._asdict().items()
    }
    arrays |= {f"media.{number}": np.frombuffer(data, np.uint8) for number, data in enumerate(packed.media)}
    samples = [
        {key: value for key, value in sample._asdict().items() if value or key not in ("media", "asked")}
        for sample in packed.samples
    ]
    return arrays, {"trajectory": _ROW_FIELDS, "samples": json.dumps(samples, separators=(",", ":"))}


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
        try:
            sample = _SAMPLE.validate_python(self._samples[position])
        except ValidationError as error:
            raise ValueError(f"the description of a sample is invalid: {_first(error)}") from None
        media = {at: self._blob.array(f"media.{at}", np.uint8).tobytes() for _, at in sample.media}
        chunks = {row[0]: self._chunk(row[0]) for row in sample.rows}
        for number, prompt_start, prompt_tokens, response_start, response_tokens, *_ in sample.rows:
            prompt_ids, *response = map(len, chunks[number])
            if prompt_start + prompt_tokens > prompt_ids or response_start + response_tokens > min(response):
                raise ValueError("a row exceeds its arrays")
        return _unpack(sample, chunks, media)

    def _chunk(self, number: int) -> Chunk:
        return Chunk(*(self._blob.array(f"{name}.{number}", dtype) for name, dtype in _CHUNK_DTYPES._asdict().items()))
