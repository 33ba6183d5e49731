"""The conversion of samples to rows: masks, versions, samples without trained tokens, and refused samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import BugError, DataError
from asyncrl.core.types import DropReason, FinishReason, Sample, SampleId, Span
from asyncrl.observe.metrics.registry import describe
from asyncrl.storage.checkpoint_manifest import Progress
from tests.fakes.trainer_parts import forked, make_sample
from trainer.batches import RowRules, TrainRow, TrainSample, check_row, prepare_sample
from trainer.step_records import MAX_EXTRA_NAMES, StepRecorder, sample_metrics

RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)
VOCAB = 24


def prepared(sample: Sample, *, version: int = 3, rules: RowRules = RULES) -> TrainSample:
    return prepare_sample(sample, lease_id=7, trainer_version=version, rules=rules)


def step_recorder() -> StepRecorder:
    return StepRecorder(Progress(), lineage=0, clock=lambda: 0.0)


def test_a_row_has_masks_versions_and_reward() -> None:
    sample = make_sample(SampleId(0, 5), (0.25, 1.0), spans=[Span(0, 1), Span(3, 2)])
    mask = np.array([True, False, True, True])
    sample = replace(
        sample,
        baseline_reward=0.5,
        rows=tuple(replace(row, response_mask=mask) for row in sample.rows),
    )
    found = prepared(sample)
    assert (found.sample_id, found.lease_id, found.rewards, found.staleness) == (SampleId(0, 5), 7, (0.25, 1.0), 2)
    assert found.untrainable is None
    for row, reward in zip(found.rows, (0.25, 1.0), strict=True):
        assert row.versions.tolist() == [1, 1, 1, 2]
        assert row.response_mask.tolist() == row.loss_mask.tolist() == mask.tolist()
        assert (row.reward, row.baseline_reward) == (reward, 0.5)


@given(
    ages=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    sampled=st.lists(st.booleans(), min_size=8, max_size=8),
    bound=st.none() | st.integers(0, 5),
)
def test_exactly_the_tokens_beyond_the_bound_are_masked(
    ages: list[int], sampled: list[bool], bound: int | None
) -> None:
    versions = sorted(9 - age for age in ages)
    spans = [Span(index, version) for index, version in enumerate(versions)]
    sample = make_sample(SampleId(0, 1), (0.0, 1.0), spans=spans, length=len(ages))
    mask = np.array(sampled[: len(ages)])
    sample = replace(sample, rows=tuple(replace(row, response_mask=mask) for row in sample.rows))
    found = prepared(sample, version=9, rules=replace(RULES, mask_beyond=bound))
    expected = [
        is_sampled and (bound is None or 9 - version <= bound)
        for is_sampled, version in zip(mask, versions, strict=True)
    ]
    assert found.rows[0].loss_mask.tolist() == expected
    assert found.rows[0].response_mask.tolist() == mask.tolist()
    if any(expected):
        assert found.untrainable is None
    else:
        assert found.untrainable is (DropReason.STALE if mask.any() else DropReason.FILTERED)


def test_a_token_of_a_newer_version_is_a_bug() -> None:
    with pytest.raises(BugError, match="version 4"):
        prepared(make_sample(SampleId(0, 1), spans=[Span(0, 4)]))


@pytest.mark.parametrize(
    ("rewards", "filtered"), [((1.0, 1.0, 1.0), True), ((0.0, 0.0), True), ((0.0, 0.0, 0.1), False), ((0.5,), True)]
)
def test_groups_of_equal_rewards_are_filtered_only_if_configured(rewards: tuple[float, ...], filtered: bool) -> None:
    sample = make_sample(SampleId(0, 1), rewards)
    assert prepared(sample).untrainable is None
    with_filter = prepared(sample, rules=replace(RULES, group_filter="equal_rewards"))
    assert with_filter.untrainable is (DropReason.FILTERED if filtered else None)


def make_row() -> TrainRow:
    return prepared(make_sample(SampleId(0, 1))).rows[0]


def test_the_error_for_a_bad_row_names_its_sample_and_the_reason() -> None:
    row = make_row()
    nan = row.rollout_log_probs.copy()
    nan[0] = np.nan
    empty = np.empty(0, dtype=np.int32)
    bad = {
        "prompt of 0": replace(row, prompt_ids=empty),
        "response of 0": replace(row, response_ids=empty),
        "masks": replace(row, response_mask=row.response_mask[:-1]),
        "and 5": replace(row, versions=np.zeros(5, dtype=np.int64)),
        "vocabulary of 24": replace(row, prompt_ids=np.array([VOCAB], dtype=np.int32)),
        "token id -1": replace(row, response_ids=np.array([1, 2, 3, -1], dtype=np.int32)),
        "behaviour log-prob": replace(row, rollout_log_probs=nan),
        "reward of inf": replace(row, reward=float("inf")),
        "baseline nan": replace(row, baseline_reward=float("nan")),
        "turn's reward on token 4 of 4": replace(row, turn_rewards=((4, 1.0),)),
        "turn's reward on token -1": replace(row, turn_rewards=((-1, 1.0),)),
        "token 2 of 4, which the policy did not sample": replace(
            row, response_mask=np.array([True, True, False, True]), turn_rewards=((1, 1.0), (2, 1.0))
        ),
        "turn's reward of nan": replace(row, turn_rewards=((1, float("nan")),)),
    }
    check_row(row, vocab_size=VOCAB)
    for reason, broken in bad.items():
        with pytest.raises(DataError, match=f"sample_0_1 .*{reason}"):
            check_row(broken, vocab_size=VOCAB)
    check_row(bad["vocabulary of 24"], vocab_size=None)
    # tokens that the policy did not sample may have any log-prob
    check_row(replace(row, rollout_log_probs=nan, response_mask=np.zeros_like(row.response_mask)), vocab_size=VOCAB)


def test_a_sample_with_a_bad_row_is_refused() -> None:
    with pytest.raises(DataError, match="sample_0_30 cannot be trained on: token id 33"):
        prepared(make_sample(SampleId(0, 30)), rules=replace(RULES, vocab_size=31))


def test_a_forked_trajectory_counts_once_in_its_sample() -> None:
    sample = forked(make_sample(SampleId(0, 1), (0.25, 1.0)), 0, [1, 1, 0], [1, 1], turn_rewards=[[(1, 0.5)], []])
    found = prepared(sample)
    assert found.rewards == (0.25, 1.0)
    assert [row.trajectory for row in found.rows] == [0, 0, 1]
    assert [row.reward for row in found.rows] == [0.25, 0.25, 1.0]
    assert [row.turn_rewards for row in found.rows] == [((1, 0.5),), (), ()]


@pytest.mark.parametrize(("rewards", "flat"), [((1.0,), True), ((1.0, 1.0), True), ((1.0, 0.0), False)])
def test_equality_of_rewards_is_judged_by_trajectory(rewards: tuple[float, ...], flat: bool) -> None:
    sample = forked(make_sample(SampleId(0, 1), rewards), 0, [1, 1], [1], [0, 1])
    found = prepared(sample, rules=replace(RULES, group_filter="equal_rewards"))
    assert found.untrainable is (DropReason.FILTERED if flat else None)


def test_a_trajectory_without_a_trained_token_stays_in_its_group() -> None:
    """It counts in its group unless the whole sample has no trained token."""
    sample = make_sample(SampleId(0, 1), (0.0, 1.0))
    nothing = forked(sample, 0, [0, 0], [0])
    assert prepared(nothing).untrainable is None
    assert prepared(nothing).rewards == (0.0, 1.0)
    assert prepared(forked(nothing, 1, [0])).untrainable is DropReason.FILTERED


def test_rows_that_do_not_form_trajectories_are_refused() -> None:
    first, second, third = forked(make_sample(SampleId(0, 1), (0.0, 1.0)), 0, [1], [1]).rows
    sample = make_sample(SampleId(0, 1))
    with pytest.raises(DataError, match=r"sample_0_1 .*trajectory 0 have rewards of 0\.0 and 0\.5"):
        prepared(replace(sample, rows=(first, replace(second, reward=0.5), third)))
    with pytest.raises(DataError, match=r"sample_0_1 .*trajectory 0 are not adjacent"):
        prepared(replace(sample, rows=(first, third, second)))


def test_metrics_of_a_step_count_a_response_of_several_rows_once() -> None:
    """Two rows of 3 and 2 tokens are one response of 5 tokens, of which 4 were sampled."""
    sample = forked(make_sample(SampleId(0, 1), (0.5, 1.0)), 0, [1, 1, 0], [1, 1])
    extras: list[dict[str, float]] = [{"format": 1.0}, {"format": 1.0}, {"format": 0.0, "calls": 3.0}]
    # The end of the trajectory with two rows was cut.
    ends = [FinishReason.TOOL_CALL, FinishReason.LENGTH, FinishReason.STOP]
    rows = tuple(
        replace(row, reward_extra=extra, finish_reason=end)
        for row, extra, end in zip(sample.rows, extras, ends, strict=True)
    )
    samples = [prepared(replace(sample, rows=rows)), prepared(make_sample(SampleId(0, 2), (0.0,)))]
    recorder = step_recorder()
    recorder.add_extras(samples)
    found = sample_metrics(samples) | recorder.metrics
    expected = {
        "reward/mean": 0.5,
        "reward/std": np.std([0.5, 1.0, 0.0]),
        "response_tokens/mean": (5 + 4 + 4) / 3,
        "response_tokens/max": 5.0,
        "response_tokens/length_share": 1 / 3,
        "sampled_tokens/mean": 4.0,
        "rows/per_trajectory": 4 / 3,
        "reward/extra/calls": 3.0,
        "reward/extra/format": 0.5,
        "staleness/mean": 3.0,
        "staleness/max": 3.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    for name in found:
        describe(name)


def test_a_new_name_in_every_sample_does_not_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Every process that handles metrics remembers the names, and so do the trackers."""
    recorder, seen = step_recorder(), set[str]()
    for step in range(30):
        samples = []
        for number in range(2):
            sample = make_sample(SampleId(step, number), (0.5,))
            extra = {"format": 1.0} | {f"{step}/{number}/{place}": 0.0 for place in range(MAX_EXTRA_NAMES // 20)}
            samples.append(prepared(replace(sample, rows=(replace(sample.rows[0], reward_extra=extra),))))
        recorder.metrics = {}
        recorder.add_extras(samples)
        assert recorder.metrics["reward/extra/format"] == 1.0
        seen |= recorder.metrics.keys()
    assert len(seen) == MAX_EXTRA_NAMES
    (message,) = caplog.messages
    assert "reward/extra/9/1/49 of sample_9_1 is not reported" in message and str(MAX_EXTRA_NAMES) in message


def test_metrics_of_a_step_equal_their_definitions() -> None:
    samples = [
        prepared(make_sample(SampleId(0, 1), (1.0, 0.0), spans=[Span(0, 0)])),
        prepared(make_sample(SampleId(0, 2), (0.5,), spans=[Span(0, 2)], length=10)),
    ]
    assert sample_metrics(samples) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": np.std([1.0, 0.0, 0.5]),
            "response_tokens/mean": 6.0,
            "response_tokens/max": 10.0,
            "response_tokens/length_share": 0.0,
            "staleness/mean": 2.0,
            "staleness/max": 3.0,
            "staleness/share_0": 0.0,
            "staleness/share_1": 0.5,
            "staleness/share_2": 0.0,
            "staleness/share_3": 0.5,
            "partial/count": 0.0,
            "partial/ratio": 0.0,
            "partial/max_span": 0.0,
            "processing_s/mean": 0.0,
            "processing_s/min": 0.0,
            "processing_s/max": 0.0,
            "processing_s/p50": 0.0,
            "processing_s/p95": 0.0,
            "processing_s/p99": 0.0,
        }
    )


def test_metrics_describe_staleness_versions_and_processing_time() -> None:
    """The Trainer is at version 3. In one sample, the second trajectory continued from version 0 to version 2."""
    whole = make_sample(SampleId(0, 1), spans=[Span(0, 3)])
    mixed = make_sample(SampleId(0, 2), spans=[Span(0, 2)])
    first, second = mixed.rows
    mixed = replace(mixed, rows=(first, replace(second, spans=(Span(0, 0), Span(2, 2)))))
    old = make_sample(SampleId(0, 3), spans=[Span(0, 1), Span(1, 2)])
    made = [
        prepared(replace(sample, generate_s=generate_s, reward_s=reward_s))
        for sample, generate_s, reward_s in [(whole, 1.0, 0.5), (mixed, 3.0, 0.5), (old, 2.0, 1.0), (whole, 8.5, 1.0)]
    ]
    assert [sample.version_span for sample in made] == [0, 2, 1, 0]
    found = sample_metrics(made)
    expected = {
        "staleness/share_0": 0.5,
        "staleness/share_1": 0.0,
        "staleness/share_2": 0.25,
        "staleness/share_3": 0.25,
        "partial/count": 2.0,
        "partial/ratio": 0.5,
        "partial/max_span": 2.0,
        "processing_s/mean": 4.375,
        "processing_s/min": 1.5,
        "processing_s/max": 9.5,
        "processing_s/p50": 3.25,
        "processing_s/p95": np.percentile([1.5, 3.5, 3.0, 9.5], 95),
        "processing_s/p99": np.percentile([1.5, 3.5, 3.0, 9.5], 99),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {name for name in found if name.startswith("staleness/share")} == set(list(expected)[:4])
    for name in found:
        describe(name)
