"""The conditions under which an engine counts as hung."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollouter.serving.replica.liveness import EngineLiveness

LIMIT_S = 5.0


def observe(liveness: EngineLiveness, passed_s: float = 1.0, **seen: Any) -> bool:
    return liveness.observe(
        passed_s, **({"tokens": 0, "busy": False, "paused": False, "ping_answered": False, "ping_open": False} | seen)
    )


def observe_times(liveness: EngineLiveness, count: int, **seen: Any) -> bool:
    """Observe `count` times at intervals of a second, and return the last result: whether the engine hangs."""
    return [observe(liveness, **seen) for _ in range(count)][-1]


def test_a_busy_engine_must_generate_tokens_and_an_idle_one_must_answer() -> None:
    for seen in ({"busy": True}, {"ping_open": True}, {"busy": True, "ping_open": True}):
        liveness = EngineLiveness(LIMIT_S, 2.0)
        assert not observe(liveness, **seen)  # there was no observation before
        assert not observe_times(liveness, 4, **seen)
        assert observe(liveness, **seen)


def test_silence_before_the_first_request_counts() -> None:
    liveness = EngineLiveness(LIMIT_S, 2.0)
    assert not observe_times(liveness, 4, ping_open=True)
    assert observe_times(liveness, 2, busy=True, ping_open=True)


def test_a_token_an_answer_and_a_pause_are_signs_of_life() -> None:
    for sign in ({"tokens": 1, "busy": True}, {"ping_answered": True}, {"paused": True, "busy": True}, {}):
        liveness = EngineLiveness(LIMIT_S, 2.0)
        assert not observe_times(liveness, 5, busy=True)
        assert not observe(liveness, **sign)
        tokens = sign.get("tokens", 0)
        assert not observe_times(liveness, 4, tokens=tokens, busy=True)
        assert observe(liveness, tokens=tokens, busy=True)


def test_long_gaps_between_observations_count_only_partly() -> None:
    liveness = EngineLiveness(LIMIT_S, 2.0)
    observe(liveness)
    assert not observe(liveness, 1000.0, busy=True)
    assert not observe(liveness, 1000.0, busy=True)
    assert observe(liveness, 1000.0, busy=True)


@given(st.lists(st.sampled_from(["token", "answer", "pause", "idle", "busy", "pinged"]), max_size=40))
def test_an_engine_hangs_only_after_the_limit(history: list[str]) -> None:
    liveness, tokens, still = EngineLiveness(LIMIT_S, 2.0), 0, 0
    for number, what in enumerate(history):
        tokens += what == "token"
        silent = what in ("busy", "pinged")
        still = still + 1 if silent and number else 0
        assert observe(
            liveness,
            tokens=tokens,
            busy=what in ("token", "busy", "pause"),
            paused=what == "pause",
            ping_answered=what == "answer",
            ping_open=what == "pinged",
        ) == (still >= LIMIT_S)
