"""Hypothesis strategies for samples and turns, and assertions that two of them are equal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from asyncrl.core.types import FinishReason, Media, Replay, Row, Sample, SampleId, Span, Turn

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")

_rewards = st.floats(allow_nan=False)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    prompt, response = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    ids = st.integers(0, 2**31 - 1)
    return Row(
        prompt_ids=np.array(draw(st.lists(ids, min_size=prompt, max_size=prompt)), dtype=np.int32),
        response_ids=np.array(draw(st.lists(ids, min_size=response, max_size=response)), dtype=np.int32),
        response_mask=np.array(draw(st.lists(st.booleans(), min_size=response, max_size=response)), dtype=np.bool_),
        rollout_log_probs=np.linspace(-3, 0, response, dtype=np.float32),
        spans=_draw_spans(draw, response),
        finish_reason=draw(st.sampled_from(FinishReason)),
        reward=draw(_rewards),
        reward_extra=draw(st.dictionaries(st.text(max_size=3), _rewards, max_size=2)),
        trajectory=draw(st.integers(0, 3)),
        turn_rewards=draw(st.lists(st.tuples(st.integers(0, 9), _rewards), max_size=2).map(tuple)),
    )


_spans = st.lists(st.builds(Span, st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
_replays = st.builds(Replay, st.integers(0, 99), st.booleans(), st.lists(_spans, max_size=3).map(tuple))
_media = st.lists(
    st.builds(Media, st.sampled_from(["image", "video"]), st.binary(min_size=1, max_size=9)), max_size=2
).map(tuple)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    return Sample(
        SampleId(draw(st.integers(0, 9)), draw(st.integers(1, 99))),
        tuple(draw(st.lists(rows(), min_size=1, max_size=3))),
        data_source=draw(st.text(max_size=5)),
        generate_s=draw(_rewards),
        reward_s=draw(_rewards),
        baseline_reward=draw(st.none() | _rewards),
        replay=draw(st.none() | _replays),
        media=draw(_media),
    )


def make_sample(index: int, tokens: int = 8, rows: int = 2) -> Sample:
    """Return a sample that differs from those with another `index`."""
    row = Row(
        prompt_ids=np.arange(index, index + 3, dtype=np.int32),
        response_ids=np.arange(index, index + tokens, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=np.bool_),
        rollout_log_probs=np.linspace(-1, 0, tokens, dtype=np.float32),
        spans=(Span(0, 2),),
        finish_reason=FinishReason.STOP,
        reward=float(index),
    )
    return Sample(SampleId(0, index), tuple(replace(row, trajectory=number) for number in range(rows)))


def make_turn(seed: int, tokens: int = 4) -> Turn:
    ids = np.arange(seed, seed + tokens, dtype=np.int32)
    spans = (Span(0, seed),) if tokens else ()
    return Turn(ids, np.linspace(-1, 0, tokens, dtype=np.float32), spans, FinishReason.STOP)


def assert_same_sample(sample: Sample | None, expected: Sample) -> None:
    assert sample is not None
    for field in ("sample_id", "data_source", "generate_s", "reward_s", "baseline_reward", "replay", "media"):
        assert getattr(sample, field) == getattr(expected, field), field
    assert sample.provenance == expected.provenance
    for row, expected_row in zip(sample.rows, expected.rows, strict=True):
        for field in ("spans", "finish_reason", "reward", "reward_extra", "trajectory", "turn_rewards"):
            assert getattr(row, field) == getattr(expected_row, field), field
        assert isinstance(row.finish_reason, FinishReason)
        for name in ARRAYS:
            ours, theirs = getattr(row, name), getattr(expected_row, name)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


def assert_same_turn(turn: Turn, expected: Turn) -> None:
    np.testing.assert_array_equal(turn.response_ids, expected.response_ids)
    np.testing.assert_array_equal(turn.rollout_log_probs, expected.rollout_log_probs)
    assert (turn.response_ids.dtype, turn.rollout_log_probs.dtype) == (np.int32, np.float32)
    assert (turn.spans, turn.finish_reason) == (expected.spans, expected.finish_reason)


def _draw_spans(draw: st.DrawFn, num_tokens: int) -> tuple[Span, ...]:
    starts = sorted(draw(st.sets(st.integers(1, num_tokens - 1)))) if num_tokens > 1 else []
    return tuple(Span(start, version) for version, start in enumerate([0, *starts])) if num_tokens else ()
