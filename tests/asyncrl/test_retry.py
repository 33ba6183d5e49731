"""Budgets of restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.failures import DeadlineError, DiskFullError, InfraError
from asyncrl.retry import RestartBudget


def test_past_the_budget_the_last_cause_is_told() -> None:
    budget = RestartBudget("Rollouter", 2, 100.0)
    assert [budget.spend(now_s, InfraError("early")) for now_s in (0.0, 10.0)] == [1, 2]
    with pytest.raises(InfraError) as caught:
        budget.spend(20.0, DeadlineError("it hangs", "Traceback: there"))
    assert caught.value.message == (
        "the Rollouter failed 3 times within 100 s (recovery.max_restarts=2); the last time: it hangs"
    )
    assert caught.value.cause == "Traceback: there"


def test_without_a_budget_or_on_a_full_disk_the_failure_itself_ends_the_run() -> None:
    for max_restarts, error in ((0, InfraError("gone")), (5, DiskFullError("the disk is full"))):
        with pytest.raises(InfraError) as caught:
            RestartBudget("Trainer", max_restarts, 100.0).spend(0.0, error)
        assert caught.value is error


@given(
    gaps=st.lists(st.floats(0.0, 50.0), max_size=30),
    max_restarts=st.integers(1, 5),
    window_s=st.floats(1.0, 100.0),
)
def test_it_is_spent_exactly_when_more_lie_within_the_window(
    gaps: list[float], max_restarts: int, window_s: float
) -> None:
    budget = RestartBudget("Trainer", max_restarts, window_s)
    now_s, failed_at = 0.0, []
    for gap in gaps:
        now_s += gap
        failed_at.append(now_s)
        within = sum(1 for one in failed_at if one > now_s - window_s)
        if within > max_restarts:
            with pytest.raises(InfraError, match=f"failed {within} times"):
                budget.spend(now_s, InfraError("again"))
            break
        assert budget.spend(now_s, InfraError("again")) == within
