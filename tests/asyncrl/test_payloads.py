"""Packing is lossless, whatever the samples are packed with."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.payloads import pack, unpack
from asyncrl.types import FinishReason, Sample, SampleId, Span, Trajectory

rewards = st.floats(allow_nan=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt, response = draw(st.integers(0, 5)), draw(st.integers(0, 7))
    ids = st.integers(0, 2**31 - 1)
    starts = sorted(draw(st.sets(st.integers(1, response - 1)))) if response > 1 else []
    return Trajectory(
        prompt_ids=np.array(draw(st.lists(ids, min_size=prompt, max_size=prompt)), dtype=np.int32),
        response_ids=np.array(draw(st.lists(ids, min_size=response, max_size=response)), dtype=np.int32),
        response_mask=np.array(draw(st.lists(st.booleans(), min_size=response, max_size=response)), dtype=np.bool_),
        rollout_log_probs=np.linspace(-3, 0, response, dtype=np.float32),
        spans=tuple(Span(start, version) for version, start in enumerate([0, *starts])) if response else (),
        finish_reason=draw(st.sampled_from(FinishReason)),
        reward=draw(rewards),
        reward_extra=draw(st.dictionaries(st.text(max_size=3), rewards, max_size=2)),
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    return Sample(
        SampleId(draw(st.integers(0, 9)), draw(st.integers(1, 99))),
        tuple(draw(st.lists(trajectories(), min_size=1, max_size=3))),
        data_source=draw(st.text(max_size=5)),
        generate_s=draw(rewards),
        reward_s=draw(rewards),
        baseline_reward=draw(st.none() | rewards),
    )


@given(st.lists(samples(), min_size=1, max_size=4))
def test_what_was_packed_comes_back(originals: list[Sample]) -> None:
    packed = pickle.loads(pickle.dumps(pack(originals), protocol=5))
    for position, original in enumerate(originals):
        sample = unpack(packed, position)
        assert sample.sample_id == original.sample_id
        for field in ("data_source", "generate_s", "reward_s", "baseline_reward"):
            assert getattr(sample, field) == getattr(original, field)
        for row, expected in zip(sample.trajectories, original.trajectories, strict=True):
            assert (row.spans, row.finish_reason, row.reward, row.reward_extra) == (
                expected.spans,
                expected.finish_reason,
                expected.reward,
                expected.reward_extra,
            )
            assert isinstance(row.finish_reason, FinishReason)
            for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
                ours, theirs = getattr(row, name), getattr(expected, name)
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)


def test_an_array_of_another_kind_is_refused() -> None:
    ones = np.ones(2, dtype=np.int32)
    row = Trajectory(ones, ones, ones, np.zeros(2, np.float32), (Span(0, 0),), FinishReason.STOP, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bool"):
        pack([Sample(SampleId(0, 1), (row,))])
