"""Resume over aborts, retry budget: against a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.failures import BugError, DataError, InfraError
from asyncrl.ports import GenerateRequest
from asyncrl.types import FinishReason, Span, Turn, versions_per_token
from rollouter.client import generate

pytestmark = pytest.mark.asyncio


class CountingEngine:
    """Token `i` of a response is `i`, its log-prob `-i`; every call makes at most `per_call` tokens, then aborts.

    The version goes up with every call, as if a weight sync had caused the abort. `failures` are raised first.
    """

    def __init__(self, per_call: int, failures: Sequence[Exception] = ()) -> None:
        self.per_call = per_call
        self.failures = list(failures)
        self.calls: list[list[GenerateRequest]] = []
        self.version = 0

    async def __call__(self, requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        assert session == "s"
        self.calls.append(list(requests))
        if self.failures:
            raise self.failures.pop(0)
        turns = [self._answer(request) for request in requests]
        self.version += 1
        return turns

    def _answer(self, request: GenerateRequest) -> Turn:
        start = 0 if request.so_far is None else len(request.so_far.response_ids)
        end = min(start + self.per_call, request.sampling["max_tokens"])
        ids = np.arange(start, end, dtype=np.int32)
        done = end == request.sampling["max_tokens"]
        return Turn(
            response_ids=ids,
            rollout_log_probs=-ids.astype(np.float32),
            spans=(Span(0, self.version),) if len(ids) else (),
            finish_reason=FinishReason.LENGTH if done else FinishReason.ABORTED,
        )


def request(name: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(name, np.arange(3, dtype=np.int32), {"max_tokens": max_tokens})


async def test_aborted_turns_go_on_with_their_tokens_and_budget() -> None:
    engine = CountingEngine(per_call=4)
    short, long = await generate(engine, [request("a", 3), request("b", 10)], session="s", max_attempts=1)
    assert short.response_ids.tolist() == [0, 1, 2]
    assert long.response_ids.tolist() == list(range(10))
    assert long.rollout_log_probs.tolist() == [-float(index) for index in range(10)]
    assert long.finish_reason is FinishReason.LENGTH
    assert versions_per_token(long.spans, 10).tolist() == [0] * 4 + [1] * 4 + [2] * 2
    # Only what is unfinished is sent again, under another id.
    assert [[call.request_id for call in calls] for calls in engine.calls] == [["a-1", "b-1"], ["b-2"], ["b-3"]]


async def test_aborts_without_a_token_cost_nothing() -> None:
    engine = CountingEngine(per_call=0)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        turns = await engine(requests, session=session)
        if len(engine.calls) == 50:
            engine.per_call = 100
        return turns

    (turn,) = await generate(call, [request("a", 8)], session="s", max_attempts=1)
    assert turn.response_ids.tolist() == list(range(8))
    assert turn.spans == (Span(0, 50),)


async def test_an_abort_after_the_last_token_is_an_end_by_length() -> None:
    full = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        return [full]

    (turn,) = await generate(call, [request("a", 5)], session="s", max_attempts=1)
    assert turn.finish_reason is FinishReason.LENGTH


async def test_failures_back_off_and_keep_the_tokens() -> None:
    engine = CountingEngine(per_call=4)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        if len(engine.calls) == 1:
            engine.failures = [InfraError("engine died"), InfraError("engine died")]
        return await engine(requests, session=session)

    (turn,) = await generate(call, [request("a", 6)], session="s", max_attempts=3, sleep=sleep)
    assert turn.response_ids.tolist() == list(range(6))
    assert waits == [1.0, 2.0]
    assert [len(calls[0].so_far.response_ids) if calls[0].so_far else 0 for calls in engine.calls] == [0, 4, 4, 4]


async def test_a_spent_budget_says_so_and_keeps_the_cause() -> None:
    engine = CountingEngine(per_call=4, failures=[InfraError("engine died", "its traceback")] * 3)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(InfraError, match="failed 3 times, the last time: engine died") as raised:
        await generate(engine, [request("a", 6)], session="s", max_attempts=3, sleep=sleep)
    assert raised.value.cause == "its traceback"
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize("error", [DataError("too long"), BugError("books")])
async def test_other_errors_are_not_tried_again(error: Exception) -> None:
    engine = CountingEngine(per_call=4, failures=[error])
    with pytest.raises(type(error)):
        await generate(engine, [request("a", 6)], session="s", max_attempts=3)
    assert len(engine.calls) == 1


async def test_a_replica_that_answers_short_is_a_bug() -> None:
    async def call(requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]:
        return []

    with pytest.raises(BugError, match="1 requests with 0 turns"):
        await generate(call, [request("a", 6)], session="s", max_attempts=3)
