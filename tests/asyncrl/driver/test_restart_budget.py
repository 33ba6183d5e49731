"""Restart budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import DeadlineError, DiskFullError, InfraError
from asyncrl.driver.supervision import RestartBudget


def test_a_spent_budget_raises_the_last_cause() -> None:
    budget = RestartBudget("Rollouter", 2, 100.0)
    assert [budget.spend(now_s, InfraError("early")) for now_s in (0.0, 10.0)] == [1, 2]
    with pytest.raises(InfraError) as caught:
        budget.spend(20.0, DeadlineError("it hangs", "Traceback: there"))
    assert caught.value.message == (
        "the Rollouter failed 3 times within 100 s (recovery.max_restarts=2); the last time: it hangs"
    )
    assert caught.value.cause == "Traceback: there"


def test_without_a_budget_the_first_failure_ends_the_run() -> None:
    with pytest.raises(InfraError) as caught:
        RestartBudget("Trainer", 0, 100.0).spend(0.0, InfraError("gone", "Traceback: there"))
    assert caught.value.message == "the Trainer failed (recovery.max_restarts=0): gone"
    assert caught.value.cause == "Traceback: there"


def test_on_a_full_disk_the_failure_itself_ends_the_run() -> None:
    error = DiskFullError("the disk is full")
    for max_restarts in (0, 5):
        with pytest.raises(InfraError) as caught:
            RestartBudget("Trainer", max_restarts, 100.0).spend(0.0, error)
        assert caught.value is error


def test_failures_before_the_first_step_spend_the_budget() -> None:
    budget = RestartBudget("Trainer", 1, 100.0)
    assert budget.spend(0.0, InfraError("no step")) == 1
    with pytest.raises(InfraError, match=r"failed 2 times in a row before any step"):
        budget.spend(1000.0, InfraError("no step"))


def test_excused_failures_do_not_count_even_if_they_are_reported_later() -> None:
    budget = RestartBudget("replicas", 2, 100.0)
    for at_s in (0.0, 1.0):
        budget.spend(at_s, InfraError("an engine died"))
    budget.excuse(3)  # two were charged, and the successor of the third has not reported yet
    assert budget.spend(2.0, InfraError("an engine died")) == 0
    assert [budget.spend(at_s, InfraError("an engine died")) for at_s in (3.0, 4.0)] == [1, 2]
    with pytest.raises(InfraError, match="failed 3 times within 100 s"):
        budget.spend(5.0, InfraError("an engine died"))


@given(steps=st.lists(st.integers(0, 5), max_size=40), max_restarts=st.integers(1, 4))
def test_failures_without_progress_spend_the_budget(steps: list[int], max_restarts: int) -> None:
    """Each failure follows one step, and failures are so far apart that the limit on their rate never applies."""
    budget = RestartBudget("Trainer", max_restarts, 1.0)
    for number, step in enumerate(steps):
        budget.reached(step)
        furthest = max(steps[: number + 1])
        in_a_row = number - steps.index(furthest) + 1
        if in_a_row > max_restarts:
            with pytest.raises(InfraError, match=f"failed {in_a_row} times .* did not get past step {furthest}"):
                budget.spend(number * 10.0, InfraError("again"))
            break
        assert budget.spend(number * 10.0, InfraError("again")) == 1


@given(
    gaps=st.lists(st.floats(0.0, 50.0), max_size=30),
    max_restarts=st.integers(1, 5),
    window_s=st.floats(1.0, 100.0),
)
def test_the_budget_is_spent_by_more_failures_within_the_window(
    gaps: list[float], max_restarts: int, window_s: float
) -> None:
    budget = RestartBudget("Trainer", max_restarts, window_s)
    now_s, failed_at = 0.0, []
    for step, gap in enumerate(gaps):
        budget.reached(step)
        now_s += gap
        failed_at.append(now_s)
        within = sum(1 for one in failed_at if one > now_s - window_s)
        if within > max_restarts:
            with pytest.raises(InfraError, match=f"failed {within} times"):
                budget.spend(now_s, InfraError("again"))
            break
        assert budget.spend(now_s, InfraError("again")) == within
