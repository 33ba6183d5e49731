"""Budgets of restarts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import DeadlineError, DiskFullError, InfraError
from asyncrl.core.retry import RestartBudget


def test_past_the_budget_the_last_cause_is_told() -> None:
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


def test_a_part_that_gets_no_further_is_out_of_budget_however_slowly_it_fails() -> None:
    budget = RestartBudget("Trainer", 2, 100.0)
    now_s = 0.0
    for _ in range(2):
        for step in (41, 42, 43, 44):  # from its checkpoint up to where it fails
            budget.reached(step)
        now_s += 1000.0
        assert budget.spend(now_s, InfraError("step 45 fails")) == 1
    budget.reached(44)
    with pytest.raises(
        InfraError, match=r"failed 3 times in a row and the run did not get past step 44 .*: step 45 fails"
    ):
        budget.spend(now_s + 1000.0, InfraError("step 45 fails"))


def test_a_part_that_never_gets_anywhere_is_out_of_budget_too() -> None:
    budget = RestartBudget("Trainer", 1, 100.0)
    assert budget.spend(0.0, InfraError("no step")) == 1
    with pytest.raises(InfraError, match=r"failed 2 times in a row before any step"):
        budget.spend(1000.0, InfraError("no step"))


def test_failures_that_were_not_its_own_are_given_back_and_also_those_that_are_told_of_later() -> None:
    budget = RestartBudget("replicas", 2, 100.0)
    for at_s in (0.0, 1.0):
        budget.spend(at_s, InfraError("an engine died"))
    budget.excuse(3)  # of two that were charged, and one whose successor has not reported yet
    assert budget.spend(2.0, InfraError("an engine died")) == 0
    assert [budget.spend(at_s, InfraError("an engine died")) for at_s in (3.0, 4.0)] == [1, 2]
    with pytest.raises(InfraError, match="failed 3 times within 100 s"):
        budget.spend(5.0, InfraError("an engine died"))


@given(steps=st.lists(st.integers(0, 5), max_size=40), max_restarts=st.integers(1, 4))
def test_in_vain_is_what_follows_the_furthest_step(steps: list[int], max_restarts: int) -> None:
    """Each failure is after one step; far apart, so that the rate never counts."""
    budget = RestartBudget("Trainer", max_restarts, 1.0)
    for number, step in enumerate(steps):
        budget.reached(step)
        furthest = max(steps[: number + 1])
        in_vain = number - steps.index(furthest) + 1
        if in_vain > max_restarts:
            with pytest.raises(InfraError, match=f"failed {in_vain} times .* did not get past step {furthest}"):
                budget.spend(number * 10.0, InfraError("again"))
            break
        assert budget.spend(number * 10.0, InfraError("again")) == 1


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
