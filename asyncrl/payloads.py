"""Samples packed for a trip through shared memory, and unpacked again. Pure.

A group of 8 trajectories is 32 small arrays in 9 objects, and pickling those costs several times what moving the bytes
of a 100 KB sample does. Packed, any number of samples is four arrays end to end and plain values. Pickle protocol 5
carries the four out of band, and unpacking makes views of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.types import FinishReason, LogProbs, Mask, Sample, SampleId, Span, TokenIds, Trajectory

_Spans = tuple[tuple[int, int], ...]
_Row = tuple[int, int, _Spans, str, float, Mapping[str, float]]
"""Prompt tokens, response tokens, spans, finish reason, reward, reward_extra of one trajectory."""


class PackedSample(NamedTuple):
    sample_id: tuple[int, int]
    rows: tuple[_Row, ...]
    first_prompt_token: int
    """Where its tokens begin in the arrays it shares with others."""
    first_response_token: int
    data_source: str
    generate_s: float
    reward_s: float


class Packed(NamedTuple):
    samples: tuple[PackedSample, ...]
    prompt_ids: TokenIds
    """int32, the prompts of all trajectories of all samples end to end."""
    response_ids: TokenIds
    """int32, likewise; `response_mask` (bool) and `rollout_log_probs` (float32) run along with it."""
    response_mask: Mask
    rollout_log_probs: LogProbs


def pack(samples: Sequence[Sample]) -> Packed:
    """Copies every array once.

    Raises:
        TypeError: an array whose dtype does not become the one `types` gives it without changing its kind.
    """
    packed, prompt_tokens, response_tokens = [], 0, 0
    for sample in samples:
        rows = tuple(_row(row) for row in sample.trajectories)
        packed.append(
            PackedSample(
                (sample.sample_id.epoch, sample.sample_id.index),
                rows,
                prompt_tokens,
                response_tokens,
                sample.data_source,
                sample.generate_s,
                sample.reward_s,
            )
        )
        prompt_tokens += sum(row[0] for row in rows)
        response_tokens += sum(row[1] for row in rows)
    all_rows = [row for sample in samples for row in sample.trajectories]
    return Packed(
        tuple(packed),
        np.concatenate([row.prompt_ids for row in all_rows], dtype=np.int32),
        np.concatenate([row.response_ids for row in all_rows], dtype=np.int32),
        np.concatenate([row.response_mask for row in all_rows], dtype=np.bool_),
        np.concatenate([row.rollout_log_probs for row in all_rows], dtype=np.float32),
    )


def unpack(packed: Packed, position: int) -> Sample:
    """The sample at `position`; its arrays are views, read-only if the packed ones are."""
    sample = packed.samples[position]
    prompt, response = sample.first_prompt_token, sample.first_response_token
    trajectories = []
    for prompt_tokens, response_tokens, spans, finish_reason, reward, reward_extra in sample.rows:
        of_prompt = slice(prompt, prompt := prompt + prompt_tokens)
        of_response = slice(response, response := response + response_tokens)
        trajectories.append(
            Trajectory(
                prompt_ids=packed.prompt_ids[of_prompt],
                response_ids=packed.response_ids[of_response],
                response_mask=packed.response_mask[of_response],
                rollout_log_probs=packed.rollout_log_probs[of_response],
                spans=tuple(Span(*span) for span in spans),
                finish_reason=FinishReason(finish_reason),
                reward=reward,
                reward_extra=reward_extra,
            )
        )
    return Sample(
        SampleId(*sample.sample_id),
        tuple(trajectories),
        sample.data_source,
        sample.generate_s,
        sample.reward_s,
    )


def _row(row: Trajectory) -> _Row:
    return (
        len(row.prompt_ids),
        len(row.response_ids),
        tuple((span.first_token, span.version) for span in row.spans),
        str(row.finish_reason),
        row.reward,
        row.reward_extra,
    )
