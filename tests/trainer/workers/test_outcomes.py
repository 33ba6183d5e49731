"""The result of a call from the answers of its ranks."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import (
    AsyncRLError,
    BugError,
    ConfigError,
    DataError,
    DeadlineError,
    DivergenceError,
    InfraError,
)
from trainer.workers import outcomes
from trainer.workers.outcomes import (
    CallResult,
    LostRank,
    Outcome,
    find_failure,
    gather_outcomes,
    group_is_usable,
    values_of,
)

GOOD = CallResult(1, None)
DEAD = LostRank(InfraError("died"))


def raised(error: AsyncRLError) -> CallResult:
    return CallResult(None, error)


async def answer(outcome: Outcome, after_s: float = 0.0) -> Outcome:
    await anyio.sleep(after_s)
    return outcome


async def never() -> Outcome:
    await anyio.sleep_forever()
    return GOOD


async def test_all_answers_are_waited_for() -> None:
    found = await gather_outcomes({0: answer(GOOD, 0.02), 1: answer(CallResult(2, None))}, 10)
    assert values_of(found) == {0: 1, 1: 2}
    assert find_failure("actor", "train", range(2), found, 10) is None


async def test_a_death_ends_the_wait_at_once() -> None:
    with anyio.fail_after(5):
        found = await gather_outcomes({0: never(), 1: answer(DEAD)}, 1000)
    assert found == {1: DEAD}
    error = find_failure("critic", "train", range(2), found, 1000)
    assert type(error) is InfraError
    assert error.message == "train: rank 1 of the critic group died"
    assert not group_is_usable(range(2), found, changes_model=False)


async def test_other_ranks_have_a_short_time_to_answer_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "GRACE_S", 0.2)
    broken, agreed = raised(InfraError("peer closed")), raised(DataError("no token"))
    with anyio.fail_after(5):
        found = await gather_outcomes({0: answer(broken), 1: answer(DEAD, 0.05), 2: never()}, 1000)
        assert found == {0: broken, 1: DEAD}
        assert "rank 1 of the actor group died" in str(find_failure("actor", "train", range(3), found, 1000))
        found = await gather_outcomes({0: answer(agreed), 1: never()}, 1000)
        assert found == {0: agreed}
        found = await gather_outcomes({0: answer(agreed), 1: answer(agreed, 0.05)}, 1000)
        assert group_is_usable(range(2), found, changes_model=True)


async def test_missing_answers_are_a_deadline_error() -> None:
    found = await gather_outcomes({0: answer(GOOD), 1: never(), 2: never()}, 0.05)
    error = find_failure("actor", "actor.train_batch", range(3), found, 0.05)
    assert type(error) is DeadlineError
    assert "actor.train_batch: rank 1, 2 of the actor group did not answer within 0.05 s" in error.message
    assert not group_is_usable(range(3), found, changes_model=False)


@pytest.mark.parametrize("error", [DataError("a"), DivergenceError("b"), ConfigError("c")])
def test_a_failure_of_all_ranks_is_raised_unchanged(error: AsyncRLError) -> None:
    found: dict[int, Outcome] = {1: raised(error), 0: raised(type(error)("the same"))}
    assert find_failure("actor", "train", range(2), found, 1) is error
    assert group_is_usable(range(2), found, changes_model=True)
    assert not group_is_usable(range(3), found, changes_model=True)


def test_a_failure_of_one_rank_names_it_and_ends_the_group() -> None:
    error = DataError("no token", "a traceback")
    found: dict[int, Outcome] = {1: raised(error), 0: GOOD}
    failure = find_failure("actor", "train", range(2), found, 1)
    assert type(failure) is DataError
    assert failure.message == (
        "rank 1 of the actor group: no token; the other ranks did not fail in the same way, so the group "
        "cannot be used any more"
    )
    assert failure.cause == "a traceback"
    for changes_model in (True, False):
        assert not group_is_usable(range(2), found, changes_model=changes_model)
        assert not group_is_usable(
            range(2), {0: raised(ConfigError("a")), 1: raised(error)}, changes_model=changes_model
        )


@pytest.mark.parametrize("kind", [InfraError, DeadlineError, BugError])
def test_a_broken_process_group_is_unusable_even_after_a_call_that_only_reads(kind: type[AsyncRLError]) -> None:
    assert not group_is_usable(
        range(2), {0: raised(kind("peer closed")), 1: raised(kind("too late"))}, changes_model=False
    )
    assert not group_is_usable(range(2), {0: GOOD, 1: raised(kind("peer closed"))}, changes_model=False)
    assert group_is_usable(range(1), {0: raised(kind("a lone rank has no peers"))}, changes_model=False)
    assert not group_is_usable(range(1), {0: raised(kind("half a step"))}, changes_model=True)


@pytest.mark.parametrize("kind", [InfraError, DeadlineError, BugError, DataError])
def test_a_local_failure_leaves_the_group_usable(kind: type[AsyncRLError]) -> None:
    found: dict[int, Outcome] = {0: CallResult(None, kind("no room"), local=True), 1: GOOD}
    failure = find_failure("actor", "publishing", range(2), found, 1)
    assert type(failure) is kind
    assert failure.message == "rank 0 of the actor group: no room"
    assert group_is_usable(range(2), found, changes_model=False)
    assert not group_is_usable(range(2), found | {1: raised(InfraError("peer closed"))}, changes_model=False)


def test_other_failures_name_their_rank() -> None:
    for kind in (BugError, InfraError, DeadlineError):
        error = kind("boom", "a traceback")
        found: dict[int, Outcome] = {0: GOOD, 2: raised(error)}
        failure = find_failure("actor", "train", range(3), found, 1)
        assert type(failure) is type(error)
        assert (failure.message, failure.cause) == ("rank 2 of the actor group: boom", "a traceback")


KINDS: list[Any] = [
    GOOD,
    DEAD,
    CallResult(None, InfraError("x"), local=True),
    *(raised(kind("x")) for kind in (DataError, InfraError, DeadlineError, BugError)),
]


@given(st.lists(st.sampled_from([*KINDS, None]), min_size=1, max_size=5), st.booleans())
def test_a_group_stays_usable_only_if_its_models_are_equal(answers: list[Outcome | None], changes_model: bool) -> None:
    found = {rank: outcome for rank, outcome in enumerate(answers) if outcome is not None}
    names = [type(result.error).__name__ if isinstance(result, CallResult) else "LostRank" for result in found.values()]
    fine = [isinstance(outcome, CallResult) and (outcome.error is None or outcome.local) for outcome in found.values()]
    lone = len(answers) == 1 and not changes_model and names != ["LostRank"]
    usable = len(found) == len(answers) and (all(fine) or set(names) == {"DataError"} or lone)
    assert group_is_usable(range(len(answers)), found, changes_model=changes_model) == usable
    assert (find_failure("actor", "train", range(len(answers)), found, 1) is None) == all(
        outcome == GOOD for outcome in answers
    )
