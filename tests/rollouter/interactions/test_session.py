"""An environment in a trajectory: the order of calls, limits, checks of results, and closing."""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import ConfigError, DataError, InfraError
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import Reply
from tests.fakes.environments import assistant, context, interaction, load
from tests.fakes.hostile import LONE, LONG_TEXT, messages, texts, values
from tests.fuzz.loop import run


def returns(value: Any, after_s: float = 0.0) -> Callable[[], Awaitable[Any]]:
    async def give() -> Any:
        await anyio.sleep(after_s)
        return value

    return give


def raises(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def fail() -> Any:
        raise error

    return fail


def sleeps(seconds: float) -> Callable[[], Awaitable[Any]]:
    return returns(Reply("late"), seconds)


async def call(session: Any, method: str) -> Any:
    return await getattr(session, method)(*(assistant("22") if method == "step" else ()))


def sessions(calls: list[Any] | None = None, *, does: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a function that makes sessions of one interaction with the name tutor."""
    loaded = load(interaction(name="tutor", config={"does": does, "calls": calls}, **fields))
    return lambda: loaded.session(context())


async def test_the_order_of_calls_in_a_trajectory() -> None:
    calls: list[Any] = []
    metrics = {"anger": np.float32(0.5), "turns": 2}
    reply = Reply("why?", reward=Decimal("0.25"), metrics=metrics)  # type: ignore[arg-type]
    does = {
        "reset": returns([{"role": "user", "content": "hello"}]),
        "step": returns(reply),
        "score": returns(np.float32(1.0)),
    }
    async with sessions(calls, does=does)() as session:
        assert session.name == "tutor"
        assert await session.reset() == ({"role": "user", "content": "hello"},)
        answer = await session.step(*assistant("22"))
        assert answer == Reply("why?", reward=0.25, metrics={"anger": 0.5, "turns": 2.0})
        assert [type(value) for value in (answer.reward, *answer.metrics.values())] == [float] * 3
        assert await session.score() == 1.0
    assert calls == [("reset", "calm", {}), ("step", "22"), "score", "close"]


async def test_the_defaults_of_reset_and_score_return_nothing() -> None:
    async with load(interaction("Picky")).session(context(extra_info={"interaction_kwargs": {"level": 1}})) as session:
        assert await session.reset() == ()
        assert await session.score() is None


@pytest.mark.parametrize("row", [{}, {"levl": 3}])
async def test_kwargs_that_reset_does_not_take_are_refused(row: dict[str, Any]) -> None:
    async with load(interaction("Picky")).session(context(extra_info={"interaction_kwargs": row})) as session:
        with pytest.raises(DataError, match=r"interaction_kwargs: .* does not fit interaction 'default', Picky.*level"):
            await session.reset()


# ------------------------------------------------------------------------------------------------ return values


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("step", "and then?", r"step returned 'and then\?'; expected a rollouter\.interactions\.Reply"),
        ("step", None, "step returned None; expected"),
        ("step", Reply(), "neither a text nor done"),
        ("step", Reply(7), "returned the text 7; expected a str"),  # type: ignore[arg-type]
        ("step", Reply("a", reward=math.nan), "returned the reward nan; expected a finite number"),
        ("step", Reply("a", reward="1"), "returned the reward '1'"),  # type: ignore[arg-type]
        ("step", Reply("a", metrics={"x": math.inf}), "returned the metric x = inf"),
        ("step", Reply("a", metrics={"x": [1, 2]}), r"returned the metric x = \[1, 2\]"),  # type: ignore[dict-item]
        ("score", math.inf, "score returned inf; expected a finite number or None"),
        ("score", "good", "score returned 'good'"),
        ("score", 10**400, "score returned 1000"),
        ("reset", "hello", "reset returned 'hello'; expected a list of messages"),
        ("reset", {"role": "user", "content": "a"}, "expected a list of messages"),
        ("reset", ["hello"], "the message 'hello'; expected a mapping with a role"),
        ("reset", [{"role": "usr", "content": "a"}], "expected a mapping with a role of"),
        ("reset", [{"role": "user"}], "its content must be a text or a list of parts"),
        ("reset", [{"role": "user", "content": ["a"]}], "its content must be"),
    ],
)
async def test_return_values_are_checked(method: str, value: Any, message: str) -> None:
    async with sessions(does={method: returns(value)}, on_error="drop")() as session:
        with pytest.raises(ToolFailedError, match=message) as raised:
            await call(session, method)
        assert raised.value.on_error == "drop"
        assert "interaction 'tutor', Own." in raised.value.message


async def test_a_message_may_consist_of_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}]}]
    async with sessions(does={"reset": returns(parts)})() as session:
        assert await session.reset() == tuple(parts)


async def test_done_needs_no_text() -> None:
    async with sessions(does={"step": returns(Reply(done=True, reward=1.0))})() as session:
        assert await session.step(*assistant("22")) == Reply(done=True, reward=1.0)


# ------------------------------------------------------------------------------------------------ exceptions


@pytest.mark.parametrize("on_error", ["drop", "stop"])
@pytest.mark.parametrize("method", ["reset", "step", "score"])
async def test_exceptions_become_tool_failures(method: str, on_error: Any) -> None:
    calls: list[Any] = []
    async with sessions(calls, does={method: raises(KeyError("lost"))}, on_error=on_error)() as session:
        with pytest.raises(
            ToolFailedError, match=rf"interaction 'tutor', Own\.{method} raised KeyError: 'lost'"
        ) as raised:
            await call(session, method)
    assert "in fail" in raised.value.cause
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.on_error, copy.cause) == (on_error, raised.value.cause)
    assert calls[-1] == "close"


async def test_a_timeout_error_of_the_environment_is_not_reported_as_its_deadline() -> None:
    async with sessions(does={"step": raises(TimeoutError("in its data base"))})() as session:
        with pytest.raises(ToolFailedError, match="raised TimeoutError: in its data base"):
            await session.step(*assistant("22"))


@pytest.mark.parametrize("kind", [DataError, ConfigError])
async def test_data_and_configuration_errors_keep_their_class(kind: Any) -> None:
    async with sessions(does={"reset": raises(kind("no such level", "traceback"))})() as session:
        with pytest.raises(kind, match=r"interaction 'tutor', Own\.reset: no such level") as raised:
            await session.reset()
        assert type(raised.value) is kind
        assert raised.value.cause == "traceback"


async def test_an_endpoint_failure_is_a_failure_of_the_interaction() -> None:
    async with sessions(does={"step": raises(InfraError("it failed 3 times"))}, on_error="drop")() as session:
        with pytest.raises(ToolFailedError, match="step raised it failed 3 times") as raised:
            await session.step(*assistant("22"))
        assert raised.value.on_error == "drop"


async def test_an_environment_whose_constructor_raises_fails_the_interaction() -> None:
    session = load(interaction("Broken")).session(context())
    with pytest.raises(ToolFailedError, match=r"Broken\.__init__ raised RuntimeError: no display"):
        async with session:
            pass


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_each_call_has_its_deadline(method: str) -> None:
    calls: list[Any] = []

    async def main() -> float:
        async with sessions(calls, does={method: sleeps(1000)}, timeout_s=30.0, on_error="drop")() as session:
            with pytest.raises(ToolFailedError, match=rf"Own\.{method} did not return within 30 s.*\[0\]\.timeout_s"):
                await call(session, method)
            return anyio.current_time()

    assert run(main, 0) == 30.0
    assert calls[-1] == "close"


def test_waiting_for_capacity_does_not_use_up_the_deadline() -> None:
    """Four trajectories share a capacity of one call, so the last one waits for three calls before its own."""

    async def main() -> list[float]:
        make = sessions(does={"step": sleeps(20)}, timeout_s=30.0, max_concurrency=1)
        answered: list[float] = []

        async def one() -> None:
            async with make() as session:
                assert (await session.step(*assistant("22"))).text == "late"
                answered.append(anyio.current_time())

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)
        return answered

    assert run(main, 0) == [20.0, 40.0, 60.0, 80.0]


# ------------------------------------------------------------------------------------------------ close


@pytest.mark.parametrize("seed", range(5))
def test_cancellation_closes_the_environment_once(seed: int) -> None:
    """The cancellation arrives during a call, and `close` takes 5 s."""
    calls: list[Any] = []

    async def main() -> float:
        make = sessions(calls, does={"step": sleeps(1000), "close": sleeps(5)})
        with anyio.move_on_after(1):
            async with make() as session:
                await session.step(*assistant("22"))
        return anyio.current_time()

    assert run(main, seed) == 6.0
    assert calls == [("step", "22"), "close"]


@pytest.mark.parametrize(("timeout_s", "bound_s"), [(60.0, 10.0), (3.0, 3.0)])
def test_closing_is_bounded(timeout_s: float, bound_s: float) -> None:
    async def main() -> float:
        with pytest.raises(ToolFailedError, match=rf"Own\.close did not return within {bound_s:g} s"):
            async with sessions(does={"close": sleeps(1000)}, timeout_s=timeout_s)():
                pass
        return anyio.current_time()

    assert run(main, 0) == bound_s


async def test_a_failed_close_is_raised_unless_something_failed_before(caplog: pytest.LogCaptureFixture) -> None:
    make = sessions(does={"step": raises(ValueError("first")), "close": raises(OSError("second"))}, on_error="drop")
    with pytest.raises(ToolFailedError, match=r"Own\.close raised OSError: second") as raised:
        async with make():
            pass
    assert raised.value.on_error == "drop"
    with caplog.at_level(logging.WARNING), pytest.raises(ToolFailedError, match="step raised ValueError: first"):
        async with make() as session:
            await session.step(*assistant("22"))
    assert "close raised OSError: second" in caplog.text


# ------------------------------------------------------------------------------------------------ hostile text


@settings(max_examples=40)
@given(text=texts() | values(), reward=values(), name=texts(), metric=values(), metrics=values())
async def test_replies_of_any_shape_can_be_encoded_or_name_the_environment(
    text: Any, reward: Any, name: str, metric: Any, metrics: Any
) -> None:
    replies = [Reply(text, reward=reward), Reply(text, metrics={name: metric}), Reply(text, metrics=metrics), text]
    replies.append(Reply("a", metrics={10**5000: 1.0}))  # type: ignore[dict-item]
    for reply in replies:
        async with sessions(does={"step": returns(reply), "score": returns(reward)})() as session:
            try:
                answer = await call(session, "step")
                answer.text.encode(), "".join(answer.metrics).encode()
                await call(session, "score")
            except ToolFailedError as error:
                assert "interaction 'tutor', Own." in error.message and error.message.encode()


@settings(max_examples=40)
@given(opening=st.lists(messages(), max_size=3) | values())
async def test_opening_messages_of_any_shape_can_be_encoded_or_name_the_environment(opening: Any) -> None:
    async with sessions(does={"reset": returns(opening)})() as session:
        try:
            json.dumps(await session.reset(), ensure_ascii=False).encode()
        except ToolFailedError as error:
            assert "interaction 'tutor', Own.reset returned" in error.message


@settings(max_examples=40)
@given(given=values(), name=values())
def test_kwargs_of_a_row_of_any_shape_are_used_or_a_data_error(given: Any, name: Any) -> None:
    for kwargs in (given, {"name": name}):
        with suppress(DataError):
            load(interaction(name="tutor")).session(context(extra_info={"interaction_kwargs": kwargs}))


async def test_a_long_reply_is_returned() -> None:
    async with sessions(does={"step": returns(Reply(LONG_TEXT + LONE))})() as session:
        assert (await call(session, "step")).text == LONG_TEXT + "?"
