"""Whether an engine lives: what its replica sees of it, second by second."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollouter.serving.pulse import Pulse

LIMIT_S = 5.0


def look(pulse: Pulse, passed_s: float = 1.0, **seen: Any) -> bool:
    return pulse.look(
        passed_s, **({"tokens": 0, "busy": False, "paused": False, "answered": False, "pinged": False} | seen)
    )


def looks(pulse: Pulse, count: int, **seen: Any) -> bool:
    """Whether it hangs, of the last of so many looks, a second apart."""
    return [look(pulse, **seen) for _ in range(count)][-1]


def test_an_engine_with_requests_has_to_make_tokens_and_one_without_has_to_answer() -> None:
    for seen in ({"busy": True}, {"pinged": True}, {"busy": True, "pinged": True}):
        pulse = Pulse(LIMIT_S, 2.0)
        assert not look(pulse, **seen)  # nothing was known of it before
        assert not looks(pulse, 4, **seen)
        assert look(pulse, **seen)


def test_what_it_left_unanswered_before_it_had_requests_counts() -> None:
    pulse = Pulse(LIMIT_S, 2.0)
    assert not looks(pulse, 4, pinged=True)
    assert looks(pulse, 2, busy=True, pinged=True)


def test_a_token_an_answer_and_a_pause_are_signs_of_life() -> None:
    for sign in ({"tokens": 1, "busy": True}, {"answered": True}, {"paused": True, "busy": True}, {}):
        pulse = Pulse(LIMIT_S, 2.0)
        assert not looks(pulse, 5, busy=True)
        assert not look(pulse, **sign)
        tokens = sign.get("tokens", 0)
        assert not looks(pulse, 4, tokens=tokens, busy=True)
        assert look(pulse, tokens=tokens, busy=True)


def test_time_in_which_nobody_looked_counts_little() -> None:
    pulse = Pulse(LIMIT_S, 2.0)
    look(pulse)
    assert not look(pulse, 1000.0, busy=True)
    assert not look(pulse, 1000.0, busy=True)
    assert look(pulse, 1000.0, busy=True)


@given(st.lists(st.sampled_from(["token", "answer", "pause", "idle", "busy", "pinged"]), max_size=40))
def test_it_hangs_only_after_so_long_without_a_sign(history: list[str]) -> None:
    pulse, tokens, still = Pulse(LIMIT_S, 2.0), 0, 0
    for number, what in enumerate(history):
        tokens += what == "token"
        silent = what in ("busy", "pinged")
        still = still + 1 if silent and number else 0
        assert look(
            pulse,
            tokens=tokens,
            busy=what in ("token", "busy", "pause"),
            paused=what == "pause",
            answered=what == "answer",
            pinged=what == "pinged",
        ) == (still >= LIMIT_S)
