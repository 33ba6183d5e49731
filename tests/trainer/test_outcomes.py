"""What follows from what the ranks say."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.failures import (
    AsyncRLError,
    BugError,
    ConfigError,
    DataError,
    DeadlineError,
    DivergenceError,
    InfraError,
)
from trainer import outcomes
from trainer.outcomes import Answer, Lost, Outcome, failure, gather, usable, values_of

GOOD = Answer(1, None)
DEAD = Lost(InfraError("died"))


def raised(error: AsyncRLError) -> Answer:
    return Answer(None, error)


async def say(outcome: Outcome, after_s: float = 0.0) -> Outcome:
    await anyio.sleep(after_s)
    return outcome


async def never() -> Outcome:
    await anyio.sleep_forever()
    return GOOD


async def test_all_answers_are_waited_for() -> None:
    found = await gather({0: say(GOOD, 0.02), 1: say(Answer(2, None))}, 10)
    assert values_of(found) == {0: 1, 1: 2}
    assert failure("actor", "train", range(2), found, 10) is None


async def test_a_death_ends_the_wait_at_once() -> None:
    with anyio.fail_after(5):
        found = await gather({0: never(), 1: say(DEAD)}, 1000)
    assert found == {1: DEAD}
    error = failure("critic", "train", range(2), found, 1000)
    assert type(error) is InfraError
    assert error.message == "train: rank 1 of the critic group died"
    assert not usable(range(2), found, changes_model=False)


async def test_a_failure_leaves_the_others_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "GRACE_S", 0.2)
    broken, agreed = raised(InfraError("peer closed")), raised(DataError("no token"))
    with anyio.fail_after(5):
        found = await gather({0: say(broken), 1: say(DEAD, 0.05), 2: never()}, 1000)
        assert found == {0: broken, 1: DEAD}
        assert "rank 1 of the actor group died" in str(failure("actor", "train", range(3), found, 1000))
        found = await gather({0: say(agreed), 1: never()}, 1000)
        assert found == {0: agreed}
        found = await gather({0: say(agreed), 1: say(agreed, 0.05)}, 1000)
        assert usable(range(2), found, changes_model=True)


async def test_silence_is_a_deadline_error() -> None:
    found = await gather({0: say(GOOD), 1: never(), 2: never()}, 0.05)
    error = failure("actor", "actor.train_batch", range(3), found, 0.05)
    assert type(error) is DeadlineError
    assert "actor.train_batch: rank 1, 2 of the actor group did not answer within 0.05 s" in error.message
    assert not usable(range(3), found, changes_model=False)


@pytest.mark.parametrize("error", [DataError("a"), DivergenceError("b"), ConfigError("c")])
def test_what_ranks_agree_on_is_raised_as_it_is(error: AsyncRLError) -> None:
    found: dict[int, Outcome] = {1: raised(error), 0: raised(type(error)("the same"))}
    assert failure("actor", "train", range(2), found, 1) is error
    assert usable(range(2), found, changes_model=True)
    assert not usable(range(3), found, changes_model=True)


def test_other_failures_name_their_rank() -> None:
    for kind in (BugError, InfraError, DeadlineError):
        error = kind("boom", "a traceback")
        found: dict[int, Outcome] = {0: GOOD, 2: raised(error)}
        told = failure("actor", "train", range(3), found, 1)
        assert type(told) is type(error)
        assert (told.message, told.cause) == ("rank 2 of the actor group: boom", "a traceback")


KINDS: list[Any] = [GOOD, DEAD, *(raised(kind("x")) for kind in (DataError, InfraError, DeadlineError, BugError))]


@given(st.lists(st.sampled_from([*KINDS, None]), min_size=1, max_size=5), st.booleans())
def test_a_group_goes_on_only_if_its_models_are_alike(said: list[Outcome | None], changes_model: bool) -> None:
    found = {rank: outcome for rank, outcome in enumerate(said) if outcome is not None}
    names = {type(outcome.error).__name__ if isinstance(outcome, Answer) else "Lost" for outcome in said if outcome}
    alike = names == {"DataError"} if changes_model else "Lost" not in names
    assert usable(range(len(said)), found, changes_model=changes_model) == (len(found) == len(said) and alike)
    assert (failure("actor", "train", range(len(said)), found, 1) is None) == all(outcome == GOOD for outcome in said)
