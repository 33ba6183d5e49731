"""Every transition of a trajectory, legal or not, as a table; and that no course of events breaks its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.failures import BugError
from asyncrl.types import FinishReason
from rollouter.agent.state import LIVE, Limits, Machine, Phase

LIMITS = Limits(max_assistant_turns=3, max_user_turns=1, max_model_len=100, max_response_tokens=50)
PLAYED = replace(LIMITS, has_environment=True)


def running(limits: Limits = LIMITS) -> Machine:
    machine = Machine(limits)
    machine.start(10)
    return machine


def calling(limits: Limits = LIMITS) -> Machine:
    machine = running(limits)
    machine.sampled(5, FinishReason.STOP, num_calls=1)
    return machine


def interacting() -> Machine:
    machine = running(PLAYED)
    machine.sampled(5, FinishReason.STOP, num_calls=0)
    return machine


def completed() -> Machine:
    machine = running()
    machine.sampled(5, FinishReason.STOP, num_calls=0)
    return machine


def failed() -> Machine:
    machine = running()
    machine.fail()
    return machine


STATES: dict[Phase, Callable[[], Machine]] = {
    Phase.PENDING: lambda: Machine(LIMITS),
    Phase.RUNNING: running,
    Phase.TOOL_CALLING: calling,
    Phase.INTERACTING: interacting,
    Phase.COMPLETED: completed,
    Phase.FAILED: failed,
}
EVENTS: dict[str, tuple[Callable[[Machine], object], frozenset[Phase]]] = {
    "start": (lambda m: m.start(1), frozenset({Phase.PENDING})),
    "sampled": (lambda m: m.sampled(1, FinishReason.STOP, num_calls=0), frozenset({Phase.RUNNING})),
    "answered": (lambda m: m.answered(1), frozenset({Phase.TOOL_CALLING, Phase.INTERACTING})),
    "end": (lambda m: m.end(), frozenset({Phase.TOOL_CALLING, Phase.INTERACTING})),
    "time_out": (lambda m: m.time_out(), LIVE),
    "abort": (lambda m: m.abort(), frozenset(Phase)),
    "fail": (lambda m: m.fail(), frozenset(Phase)),
}


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_legal_in_its_phases_and_raises_in_all_others(phase: Phase, event: str) -> None:
    machine = STATES[phase]()
    assert machine.phase is phase
    do, legal = EVENTS[event]
    if phase in legal:
        do(machine)
        assert machine.phase is not phase or (phase, event) in ((Phase.FAILED, "abort"), (Phase.FAILED, "fail"))
    else:
        with pytest.raises(BugError, match=f"a trajectory that is {phase}"):
            do(machine)
        assert machine.phase is phase


@pytest.mark.parametrize(
    ("limits", "turns", "tokens", "finish", "calls", "phase", "reason"),
    [
        (LIMITS, 1, 5, FinishReason.STOP, 0, Phase.COMPLETED, FinishReason.STOP),
        (LIMITS, 1, 5, FinishReason.STOP, 2, Phase.TOOL_CALLING, None),
        (LIMITS, 3, 5, FinishReason.STOP, 1, Phase.COMPLETED, FinishReason.MAX_TURNS),
        (LIMITS, 3, 5, FinishReason.STOP, 0, Phase.COMPLETED, FinishReason.STOP),
        (LIMITS, 1, 5, FinishReason.LENGTH, 1, Phase.COMPLETED, FinishReason.LENGTH),
        (PLAYED, 1, 5, FinishReason.STOP, 0, Phase.INTERACTING, None),
        (PLAYED, 1, 5, FinishReason.STOP, 1, Phase.TOOL_CALLING, None),
        (PLAYED, 3, 5, FinishReason.STOP, 0, Phase.INTERACTING, None),  # its last answer is judged as well
        (PLAYED, 1, 50, FinishReason.LENGTH, 0, Phase.INTERACTING, None),  # as is one that was cut
        (PLAYED, 1, 50, FinishReason.LENGTH, 1, Phase.COMPLETED, FinishReason.LENGTH),
    ],
)
def test_where_a_turn_leads(
    limits: Limits,
    turns: int,
    tokens: int,
    finish: FinishReason,
    calls: int,
    phase: Phase,
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
    ("made", "tokens", "context", "said", "phase", "reason"),
    [
        (calling, 5, None, True, Phase.RUNNING, None),
        (calling, 44, None, True, Phase.RUNNING, None),
        (calling, 45, None, False, Phase.COMPLETED, FinishReason.LENGTH),  # the response is full
        (calling, 0, 99, True, Phase.RUNNING, None),
        (calling, 0, 100, False, Phase.COMPLETED, FinishReason.LENGTH),  # the rewritten prompt fills the context
        (interacting, 5, None, True, Phase.RUNNING, None),
    ],
)
def test_an_answer_needs_room_for_a_turn_behind_it(
    made: Callable[[], Machine], tokens: int, context: int | None, said: bool, phase: Phase, reason: FinishReason | None
) -> None:
    machine = made()
    assert machine.answered(tokens, context_tokens=context) is said
    assert (machine.phase, machine.finish_reason) == (phase, reason)


def test_the_context_is_a_limit_of_its_own() -> None:
    machine = Machine(LIMITS)
    machine.start(94)
    assert machine.room == 6
    machine.sampled(5, FinishReason.STOP, num_calls=1)
    assert not machine.answered(1)
    assert machine.finish_reason is FinishReason.LENGTH


def test_a_rewritten_history_counts_in_the_context_and_not_in_the_response() -> None:
    machine = calling()
    assert machine.answered(0, context_tokens=30)
    assert (machine.context_tokens, machine.response_tokens, machine.room) == (30, 5, 45)


def test_a_user_may_answer_so_often() -> None:
    machine = interacting()
    assert machine.answered(1)
    machine.sampled(1, FinishReason.STOP, num_calls=0)
    assert machine.phase is Phase.INTERACTING
    assert not machine.answered(1)
    assert machine.finish_reason is FinishReason.MAX_TURNS


@pytest.mark.parametrize("answer", [lambda m: m.answered(1), lambda m: m.end()])
def test_a_turn_that_was_cut_is_judged_and_then_it_is_over(answer: Callable[[Machine], object]) -> None:
    machine = running(PLAYED)
    machine.sampled(50, FinishReason.LENGTH, num_calls=0)
    assert not answer(machine)
    assert (machine.phase, machine.finish_reason) == (Phase.COMPLETED, FinishReason.LENGTH)


@pytest.mark.parametrize(("made", "reason"), [(calling, FinishReason.TOOL_CALL), (interacting, FinishReason.STOP)])
def test_a_tool_or_an_environment_may_end_it(made: Callable[[], Machine], reason: FinishReason) -> None:
    machine = made()
    machine.end()
    assert (machine.phase, machine.finish_reason) == (Phase.COMPLETED, reason)


@pytest.mark.parametrize(("made", "phase"), [(running, Phase.FAILED), (calling, Phase.COMPLETED)])
def test_out_of_time_it_is_kept_if_it_has_a_turn(made: Callable[[], Machine], phase: Phase) -> None:
    machine = made()
    machine.time_out()
    assert (machine.phase, machine.finish_reason) == (phase, FinishReason.TIMEOUT)


class AnyCourse(RuleBasedStateMachine):
    """Whatever happens in whatever order: budgets hold, and what has ended stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(PLAYED)
        self.machine.start(10)

    @precondition(lambda self: self.machine.phase is Phase.RUNNING)
    @rule(share=st.floats(0.01, 1), calls=st.integers(0, 2))
    def sample(self, share: float, calls: int) -> None:
        room = self.machine.room
        assert room >= 1
        tokens = max(1, int(room * share))
        finish = FinishReason.LENGTH if tokens == room else FinishReason.STOP
        self.machine.sampled(tokens, finish, num_calls=calls)

    @precondition(lambda self: self.machine.phase in (Phase.TOOL_CALLING, Phase.INTERACTING))
    @rule(tokens=st.integers(0, 60), rewritten=st.none() | st.integers(1, 120))
    def answer(self, tokens: int, rewritten: int | None) -> None:
        said = self.machine.answered(tokens, context_tokens=rewritten)
        assert said == (self.machine.phase is Phase.RUNNING)

    @precondition(lambda self: self.machine.phase not in LIVE)
    @rule()
    def another(self) -> None:
        self.machine = Machine(PLAYED)
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
