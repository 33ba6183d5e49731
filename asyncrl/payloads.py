"""Samples packed for a trip through shared memory, and unpacked again. Pure.

A group of 8 trajectories is 32 small arrays in 9 objects, and pickling those costs several times what moving the bytes
of a 100 KB sample does. Packed, any number of small samples is four arrays end to end and plain values; large arrays
travel as they are. Pickle protocol 5 carries the arrays out of band, and unpacking makes views of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.types import FinishReason, LogProbs, Mask, Sample, SampleId, Span, TokenIds, Trajectory

JOIN_BELOW_TOKENS = 16_384
"""Longer responses are not copied: fresh memory to join them in would cost more than four arrays of their own do."""

_Row = tuple[int, int, int, int, int, tuple[tuple[int, int], ...], str, float, Mapping[str, float]]
"""One trajectory: its chunk; start and number of its prompt tokens there, then of its response tokens; spans, finish
reason, reward, reward_extra. A plain tuple: a named one takes three times as long to pickle."""


class PackedSample(NamedTuple):
    sample_id: tuple[int, int]
    rows: tuple[_Row, ...]
    data_source: str
    generate_s: float
    reward_s: float
    baseline_reward: float | None


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
    """Any number of samples as one value that is cheap to pickle.

    Raises:
        TypeError: an array whose dtype does not become the one `types` gives it without changing its kind.
    """
    packer = _Packer()
    packed = tuple(
        PackedSample(
            (sample.sample_id.epoch, sample.sample_id.index),
            tuple(packer.add(row) for row in sample.trajectories),
            sample.data_source,
            sample.generate_s,
            sample.reward_s,
            sample.baseline_reward,
        )
        for sample in samples
    )
    return Packed(packed, packer.chunks())


def unpack(packed: Packed, position: int) -> Sample:
    """The sample at `position`; its arrays are views, read-only if the packed ones are."""
    sample = packed.samples[position]
    rows = tuple(_unpack_row(row, packed.chunks) for row in sample.rows)
    return Sample(
        SampleId(*sample.sample_id),
        rows,
        sample.data_source,
        sample.generate_s,
        sample.reward_s,
        sample.baseline_reward,
    )


class _Packer:
    """Chunk 0 joins the short trajectories; each long one is a chunk of its own."""

    def __init__(self) -> None:
        self._short: list[Trajectory] = []
        self._long: list[Trajectory] = []
        self._prompt_tokens = 0
        self._response_tokens = 0

    def add(self, row: Trajectory) -> _Row:
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
        return (*place, spans, str(row.finish_reason), row.reward, row.reward_extra)

    def chunks(self) -> tuple[Chunk, ...]:
        return (_join(self._short), *(_join([row]) for row in self._long))


def _join(rows: Sequence[Trajectory]) -> Chunk:
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


def _unpack_row(row: _Row, chunks: Sequence[Chunk]) -> Trajectory:
    number, prompt_start, prompt_tokens, response_start, response_tokens, spans, finish_reason, reward, extra = row
    prompt = slice(prompt_start, prompt_start + prompt_tokens)
    response = slice(response_start, response_start + response_tokens)
    prompt_ids, response_ids, response_mask, rollout_log_probs = chunks[number]
    return Trajectory(
        prompt_ids=prompt_ids[prompt],
        response_ids=response_ids[response],
        response_mask=response_mask[response],
        rollout_log_probs=rollout_log_probs[response],
        spans=tuple([Span(*span) for span in spans]),
        finish_reason=FinishReason(finish_reason),
        reward=reward,
        reward_extra=extra,
    )
