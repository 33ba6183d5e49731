"""Pacing, the bound and the token mask, on plain integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.failures import BugError
from asyncrl.staleness import Pacing, judge, stale_token_mask, staleness
from asyncrl.types import Span


def test_on_policy_pacing_admits_one_version_at_a_time() -> None:
    pacing = Pacing(samples_per_version=8, staleness_threshold=0)
    assert pacing.permits(fed=0, dropped=0, version=0) == 8
    assert pacing.permits(fed=8, dropped=0, version=0) == 0
    assert pacing.permits(fed=8, dropped=0, version=1) == 8
    assert pacing.permits(fed=8, dropped=3, version=0) == 3


def test_the_threshold_is_the_decimal_that_was_written() -> None:
    assert Pacing(10, 0.1).limit(0) == 11  # in binary, (1 + 0.1) * 10 is above 11
    assert Pacing(10, 0.25).limit(0) == 13  # fed - dropped < 12.5
    assert Pacing(3, 1.0).limit(2) == 12


def test_the_total_counts_what_is_not_dropped() -> None:
    pacing = Pacing(8, 1, total_samples=10)
    assert pacing.permits(fed=0, dropped=0, version=0) == 10
    assert pacing.permits(fed=10, dropped=0, version=9) == 0
    assert pacing.is_complete(10, 0)
    assert pacing.permits(fed=10, dropped=2, version=9) == 2
    assert not pacing.is_complete(10, 2)
    assert not Pacing(8, 1).is_complete(10**9, 0)


@given(
    size=st.integers(1, 100),
    threshold=st.one_of(st.integers(0, 5).map(float), st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.7])),
    version=st.integers(0, 100),
    fed=st.integers(0, 2000),
    dropped=st.integers(0, 500),
)
def test_permits_are_exactly_those_that_keep_the_rule(
    size: int, threshold: float, version: int, fed: int, dropped: int
) -> None:
    """Feeding one at a time while `fed - dropped < (version + 1 + threshold) * S` stops after as many."""
    pacing = Pacing(size, threshold)
    permits = pacing.permits(fed, dropped, version)
    tenths = round((version + 1 + threshold) * size * 100)  # all thresholds above have at most two decimals
    one_by_one = 0
    while (fed + one_by_one - dropped) * 100 < tenths:
        one_by_one += 1
    assert permits == one_by_one


def test_the_bound() -> None:
    assert staleness(5, 3) == 2
    assert judge(5, 3, max_staleness=None, stale_action="drop") == "keep"
    assert judge(5, 3, max_staleness=2, stale_action="drop") == "keep"
    for action in ("drop", "mask", "keep"):
        assert judge(5, 2, max_staleness=2, stale_action=action) == action


def test_a_token_from_the_future_is_a_bug() -> None:
    with pytest.raises(BugError, match="version 4, but the trainer is at version 3"):
        judge(3, 4, max_staleness=None, stale_action="keep")


def test_stale_tokens_are_those_of_the_old_spans() -> None:
    spans = (Span(0, 1), Span(2, 3), Span(5, 4))
    stale = stale_token_mask(spans, 6, trainer_version=4, max_staleness=1)
    assert stale.dtype == np.bool_
    assert stale.tolist() == [True, True, False, False, False, False]
    assert stale_token_mask(spans, 6, trainer_version=4, max_staleness=0).tolist() == [True] * 5 + [False]
    assert not stale_token_mask(spans, 6, trainer_version=4, max_staleness=None).any()
    assert stale_token_mask((), 0, trainer_version=4, max_staleness=0).shape == (0,)
