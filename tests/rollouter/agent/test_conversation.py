"""The state machine and the tokens of one conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.core.failures import BugError
from asyncrl.core.types import FinishReason, Span, Turn, versions_per_token
from rollouter.agent.conversation import (
    LIVE,
    ConversationTokens,
    TrajectoryLimits,
    TrajectoryPhase,
    TrajectoryStateMachine,
)


def turn(ids: list[int], *spans: tuple[int, int]) -> Turn:
    return Turn(
        np.array(ids, dtype=np.int32),
        -np.arange(1, len(ids) + 1, dtype=np.float32),
        tuple(Span(*span) for span in spans),
        FinishReason.STOP,
    )


def test_turns_and_the_messages_between_them_make_one_row() -> None:
    tokens = ConversationTokens(np.array([1, 2], dtype=np.int32))
    assert tokens.add_turn(turn([3, 4], (0, 7))) == (0, 0)
    tokens.add_unsampled([5, 6, 7])
    assert tokens.context.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tokens.add_turn(turn([8, 9], (0, 7), (1, 8))) == (0, 5)
    (row,) = tokens.rows()
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert row.response_mask.tolist() == [True, True, False, False, False, True, True]
    assert row.rollout_log_probs.tolist() == [-1, -2, 0, 0, 0, -1, -2]
    assert row.spans == (Span(0, 7), Span(6, 8))
    assert (row.response_ids.dtype, row.response_mask.dtype, row.rollout_log_probs.dtype) == ("int32", "bool", "f4")


def test_rewritten_history_starts_another_row() -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    tokens.add_turn(turn([2, 3], (0, 4)))
    tokens.fork([1, 9])
    assert tokens.context.tolist() == [1, 9]
    assert tokens.add_turn(turn([5], (0, 6))) == (1, 0)
    first, second = tokens.rows()
    assert (first.prompt_ids.tolist(), first.response_ids.tolist(), first.spans) == ([1], [2, 3], (Span(0, 4),))
    assert (second.prompt_ids.tolist(), second.response_ids.tolist(), second.spans) == ([1, 9], [5], (Span(0, 6),))


steps = st.tuples(st.sampled_from(["turn", "message", "fork"]), st.lists(st.integers(0, 99), min_size=1, max_size=5))


@given(st.lists(steps, max_size=8))
def test_every_sampled_token_is_at_its_reported_place(course: list[tuple[str, list[int]]]) -> None:
    tokens = ConversationTokens(np.array([1], dtype=np.int32))
    places = []
    for version, (what, ids) in enumerate([("turn", [0]), *course]):
        match what:
            case "turn":
                places.append((tokens.add_turn(turn(ids, (0, version))), ids, version))
            case "message":
                tokens.add_unsampled(ids)
            case "fork" if places[-1][0][0] == len(tokens._rows) - 1:  # only the last row may have no turn
                tokens.fork(ids)
    rows = tokens.rows()
    assert sum(int(row.response_mask.sum()) for row in rows) == sum(len(ids) for _, ids, _ in places)
    for (row, first), ids, version in places:
        here = slice(first, first + len(ids))
        assert rows[row].response_ids[here].tolist() == ids
        assert rows[row].response_mask[here].all()
        assert set(versions_per_token(rows[row].spans, len(rows[row].response_ids))[here]) == {version}
    for row in rows:
        assert row.response_mask[-1]
        assert not row.rollout_log_probs[~row.response_mask].any()


LIMITS = TrajectoryLimits(max_assistant_turns=3, max_user_turns=1, max_model_len=100, max_response_tokens=50)
PLAYED = replace(LIMITS, has_environment=True)


def running(limits: TrajectoryLimits = LIMITS) -> TrajectoryStateMachine:
    machine = TrajectoryStateMachine(limits)
    machine.start(10)
    return machine


def calling(limits: TrajectoryLimits = LIMITS) -> TrajectoryStateMachine:
    machine = running(limits)
    machine.sampled(5, FinishReason.STOP, num_calls=1)
    return machine


def interacting() -> TrajectoryStateMachine:
    machine = running(PLAYED)
    machine.sampled(5, FinishReason.STOP, num_calls=0)
    return machine


def completed() -> TrajectoryStateMachine:
    machine = running()
    machine.sampled(5, FinishReason.STOP, num_calls=0)
    return machine


def failed() -> TrajectoryStateMachine:
    machine = running()
    machine.fail()
    return machine


STATES: dict[TrajectoryPhase, Callable[[], TrajectoryStateMachine]] = {
    TrajectoryPhase.PENDING: lambda: TrajectoryStateMachine(LIMITS),
    TrajectoryPhase.RUNNING: running,
    TrajectoryPhase.TOOL_CALLING: calling,
    TrajectoryPhase.INTERACTING: interacting,
    TrajectoryPhase.COMPLETED: completed,
    TrajectoryPhase.FAILED: failed,
}
EVENTS: dict[str, tuple[Callable[[TrajectoryStateMachine], object], frozenset[TrajectoryPhase]]] = {
    "start": (lambda m: m.start(1), frozenset({TrajectoryPhase.PENDING})),
    "sampled": (lambda m: m.sampled(1, FinishReason.STOP, num_calls=0), frozenset({TrajectoryPhase.RUNNING})),
    "answered": (lambda m: m.answered(1), frozenset({TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING})),
    "end": (lambda m: m.end(), frozenset({TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING})),
    "time_out": (lambda m: m.time_out(), LIVE),
    "abort": (lambda m: m.abort(), frozenset(TrajectoryPhase)),
    "fail": (lambda m: m.fail(), frozenset(TrajectoryPhase)),
}


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_legal_in_its_phases_and_raises_in_all_others(phase: TrajectoryPhase, event: str) -> None:
    machine = STATES[phase]()
    assert machine.phase is phase
    do, legal = EVENTS[event]
    if phase in legal:
        do(machine)
        assert machine.phase is not phase or (phase, event) in (
            (TrajectoryPhase.FAILED, "abort"),
            (TrajectoryPhase.FAILED, "fail"),
        )
    else:
        with pytest.raises(BugError, match=f"a trajectory that is {phase}"):
            do(machine)
        assert machine.phase is phase


@pytest.mark.parametrize(
    ("limits", "turns", "tokens", "finish", "calls", "phase", "reason"),
    [
        (LIMITS, 1, 5, FinishReason.STOP, 0, TrajectoryPhase.COMPLETED, FinishReason.STOP),
        (LIMITS, 1, 5, FinishReason.STOP, 2, TrajectoryPhase.TOOL_CALLING, None),
        (LIMITS, 3, 5, FinishReason.STOP, 1, TrajectoryPhase.COMPLETED, FinishReason.MAX_TURNS),
        (LIMITS, 3, 5, FinishReason.STOP, 0, TrajectoryPhase.COMPLETED, FinishReason.STOP),
        (LIMITS, 1, 5, FinishReason.LENGTH, 1, TrajectoryPhase.COMPLETED, FinishReason.LENGTH),
        (PLAYED, 1, 5, FinishReason.STOP, 0, TrajectoryPhase.INTERACTING, None),
        (PLAYED, 1, 5, FinishReason.STOP, 1, TrajectoryPhase.TOOL_CALLING, None),
        (PLAYED, 3, 5, FinishReason.STOP, 0, TrajectoryPhase.INTERACTING, None),  # the environment gets the last answer
        (PLAYED, 1, 50, FinishReason.LENGTH, 0, TrajectoryPhase.INTERACTING, None),  # the environment gets cut answers
        (PLAYED, 1, 50, FinishReason.LENGTH, 1, TrajectoryPhase.COMPLETED, FinishReason.LENGTH),
    ],
)
def test_the_phase_after_a_turn(
    limits: TrajectoryLimits,
    turns: int,
    tokens: int,
    finish: FinishReason,
    calls: int,
    phase: TrajectoryPhase,
    reason: FinishReason | None,
) -> None:
    machine = running(limits)
    for _ in range(turns - 1):
        machine.sampled(1, FinishReason.STOP, num_calls=1)
        assert machine.answered(1)
    machine.sampled(tokens, finish, num_calls=calls)
    assert (machine.phase, machine.finish_reason) == (phase, reason)


@pytest.mark.parametrize("finish", [FinishReason.ABORTED, FinishReason.TOOL_CALL])
def test_a_turn_that_is_not_complete_is_a_bug(finish: FinishReason) -> None:
    with pytest.raises(BugError, match="not complete"):
        running().sampled(1, finish, num_calls=0)


@pytest.mark.parametrize(
    ("made", "tokens", "rewritten", "continues", "phase", "reason"),
    [
        (calling, 5, False, True, TrajectoryPhase.RUNNING, None),
        (calling, 44, False, True, TrajectoryPhase.RUNNING, None),
        (calling, 45, False, False, TrajectoryPhase.COMPLETED, FinishReason.LENGTH),  # the response has no room left
        (calling, 99, True, True, TrajectoryPhase.RUNNING, None),
        # The rewritten prompt fills the context.
        (calling, 100, True, False, TrajectoryPhase.COMPLETED, FinishReason.LENGTH),
        (interacting, 5, False, True, TrajectoryPhase.RUNNING, None),
    ],
)
def test_a_message_must_leave_room_for_another_turn(
    made: Callable[[], TrajectoryStateMachine],
    tokens: int,
    rewritten: bool,
    continues: bool,
    phase: TrajectoryPhase,
    reason: FinishReason | None,
) -> None:
    machine = made()
    assert machine.answered(tokens, rewritten=rewritten) is continues
    assert (machine.phase, machine.finish_reason) == (phase, reason)


def test_the_context_limit_applies_besides_the_response_limit() -> None:
    machine = TrajectoryStateMachine(LIMITS)
    machine.start(94)
    assert machine.room == 6
    machine.sampled(5, FinishReason.STOP, num_calls=1)
    assert not machine.answered(1)
    assert machine.finish_reason is FinishReason.LENGTH


def test_a_rewritten_history_counts_in_the_context_and_not_in_the_response() -> None:
    machine = calling()
    assert machine.answered(30, rewritten=True)
    assert (machine.context_tokens, machine.response_tokens, machine.room) == (30, 5, 45)


def test_max_user_turns_ends_the_trajectory() -> None:
    machine = interacting()
    assert machine.answered(1)
    machine.sampled(1, FinishReason.STOP, num_calls=0)
    assert machine.phase is TrajectoryPhase.INTERACTING
    assert not machine.answered(1)
    assert machine.finish_reason is FinishReason.MAX_TURNS


@pytest.mark.parametrize("answer", [lambda m: m.answered(1), lambda m: m.end()])
def test_a_truncated_turn_goes_to_the_environment_and_ends_the_trajectory(
    answer: Callable[[TrajectoryStateMachine], object],
) -> None:
    machine = running(PLAYED)
    machine.sampled(50, FinishReason.LENGTH, num_calls=0)
    assert not answer(machine)
    assert (machine.phase, machine.finish_reason) == (TrajectoryPhase.COMPLETED, FinishReason.LENGTH)


@pytest.mark.parametrize(("made", "reason"), [(calling, FinishReason.TOOL_CALL), (interacting, FinishReason.STOP)])
def test_a_tool_or_an_environment_may_end_the_trajectory(
    made: Callable[[], TrajectoryStateMachine], reason: FinishReason
) -> None:
    machine = made()
    machine.end()
    assert (machine.phase, machine.finish_reason) == (TrajectoryPhase.COMPLETED, reason)


@pytest.mark.parametrize(("made", "phase"), [(running, TrajectoryPhase.FAILED), (calling, TrajectoryPhase.COMPLETED)])
def test_a_timeout_keeps_completed_turns(made: Callable[[], TrajectoryStateMachine], phase: TrajectoryPhase) -> None:
    machine = made()
    machine.time_out()
    assert (machine.phase, machine.finish_reason) == (phase, FinishReason.TIMEOUT)


class AnyCourse(RuleBasedStateMachine):
    """Events in any order: the trajectory respects its limits, and does not change once it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = TrajectoryStateMachine(PLAYED)
        self.machine.start(10)

    @precondition(lambda self: self.machine.phase is TrajectoryPhase.RUNNING)
    @rule(share=st.floats(0.01, 1), calls=st.integers(0, 2))
    def sample(self, share: float, calls: int) -> None:
        room = self.machine.room
        assert room >= 1
        tokens = max(1, int(room * share))
        finish = FinishReason.LENGTH if tokens == room else FinishReason.STOP
        self.machine.sampled(tokens, finish, num_calls=calls)

    @precondition(lambda self: self.machine.phase in (TrajectoryPhase.TOOL_CALLING, TrajectoryPhase.INTERACTING))
    @rule(tokens=st.integers(0, 120), rewritten=st.booleans())
    def answer(self, tokens: int, rewritten: bool) -> None:
        continues = self.machine.answered(tokens, rewritten=rewritten)
        assert continues == (self.machine.phase is TrajectoryPhase.RUNNING)

    @precondition(lambda self: self.machine.phase not in LIVE)
    @rule()
    def another(self) -> None:
        self.machine = TrajectoryStateMachine(PLAYED)
        self.machine.start(10)

    @invariant()
    def within_limits(self) -> None:
        machine = self.machine
        assert machine.assistant_turns <= PLAYED.max_assistant_turns
        assert machine.user_turns <= PLAYED.max_user_turns
        assert machine.response_tokens <= PLAYED.max_response_tokens
        assert machine.context_tokens <= PLAYED.max_model_len
        assert (machine.finish_reason is None) == (machine.phase in LIVE)


TestAnyCourse = AnyCourse.TestCase
