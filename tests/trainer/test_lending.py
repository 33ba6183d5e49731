"""When the Trainer lends its GPUs to generation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.ports import QueueStatus, SampleCounts
from trainer.lending import LendingPolicy, SampleWait

TIMES = st.floats(0.0, 1e4)
COUNTS = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("wait", "switch_s", "lends"),
    [
        (SampleWait(10.0, 0, 4, has_permits=True), 0.0, True),
        (SampleWait(9.9, 0, 4, has_permits=True), 0.0, False),  # not long enough
        (SampleWait(10.0, 0, 4, has_permits=False), 0.0, False),  # nothing to generate
        (SampleWait(10.0, 0, 0, has_permits=True), 0.0, False),  # the lease is on its way
        (SampleWait(10.0, 2, 2, has_permits=True), 9.0, True),  # 10 s more
        (SampleWait(10.0, 2, 2, has_permits=True), 10.0, False),  # the switch takes as long
        (SampleWait(30.0, 6, 1, has_permits=True), 6.0, False),  # 5 s more
    ],
)
def test_gpus_are_lent_in_a_long_wait_that_goes_on(wait: SampleWait, switch_s: float, lends: bool) -> None:
    assert LendingPolicy(10.0).lends(wait, switch_s=switch_s) == lends


@given(TIMES, TIMES, COUNTS, COUNTS, TIMES, TIMES)
def test_a_wait_that_lends_also_does_later_with_fewer_samples_and_a_shorter_switch(
    after_s: float, waited_s: float, arrived: int, missing: int, switch_s: float, more_s: float
) -> None:
    policy, wait = LendingPolicy(after_s), SampleWait(waited_s, arrived, missing, has_permits=True)
    if policy.lends(wait, switch_s=switch_s):
        assert waited_s >= after_s and missing > 0
        assert policy.lends(wait._replace(waited_s=waited_s + more_s), switch_s=switch_s)
        assert policy.lends(wait._replace(num_missing=missing + 1), switch_s=switch_s)
        assert policy.lends(wait._replace(num_arrived=max(0, arrived - 1)), switch_s=switch_s)
        assert policy.lends(wait, switch_s=switch_s / 2)
        assert not policy.lends(wait._replace(has_permits=False), switch_s=switch_s)


@pytest.mark.parametrize(
    ("paced_to", "closed", "has_permits"), [(11, False, True), (10, False, False), (11, True, False)]
)
def test_the_wait_follows_from_the_status_of_the_queue(paced_to: int, closed: bool, has_permits: bool) -> None:
    def status(ready: int) -> QueueStatus:
        counts = SampleCounts(fed=12, running=6 - ready, ready=ready, trained=4, dropped={"stale": 2})
        return QueueStatus(counts, 1, False, {}, paced_to=paced_to, closed=closed)

    wait = SampleWait.of(5.0, status(1), status(3), 4)
    assert wait == SampleWait(5.0, 2, 1, has_permits)
    assert wait.rest_s == 2.5
    assert SampleWait.of(5.0, status(3), status(3), 4).rest_s == math.inf
    assert SampleWait.of(5.0, status(1), status(5), 4).rest_s == 0.0
