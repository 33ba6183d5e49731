"""Resume over aborts and crashes, retry budget: against a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.failures import BugError, DataError, EngineCrashError, InfraError, PoisonError
from asyncrl.ports import GenerateRequest
from asyncrl.types import FinishReason, Span, Turn, versions_per_token
from rollouter.client import generate
from rollouter.serving.pieces import Piece, cut

STOP_AT = 37
"""A response to prompt `p` stops at its first token that is a multiple of this."""


def token(prompt: int, place: int) -> int:
    return (prompt * 31 + place * 7) % 200 + 1


def version_of(place: int) -> int:
    return place // 5


def whole(request: GenerateRequest) -> Turn:
    """What an engine that nothing ever happens to makes of it."""
    prompt = int(request.prompt_ids[0])
    ids: list[int] = []
    finish = FinishReason.LENGTH
    while len(ids) < request.sampling["max_tokens"]:
        ids.append(token(prompt, len(ids)))
        if ids[-1] % STOP_AT == 0:
            finish = FinishReason.STOP
            break
    log_probs = [-index - ids[index] / 1000 for index in range(len(ids))]
    starts = [(str(version_of(place)), place) for place in range(0, len(ids), 5)]
    return cut(ids, log_probs, starts, 0, finish)


@dataclass
class Play:
    """What one call does: how many tokens of each piece it tells, and how it ends."""

    steps: list[dict[int, int]] = field(default_factory=list)
    """Requests by place (modulo how many there are), and how many tokens of each come next."""
    end: str = "whole"
    """`whole`: every response runs to its end; `abort`; or an error: `crash`, `infra`."""


class ScriptedEngine:
    """Makes the tokens of `whole`, from where `so_far` ends. Past its script everything runs to its end."""

    def __init__(self, plays: Sequence[Play] = ()) -> None:
        self.plays = list(plays)
        self.calls: list[list[GenerateRequest]] = []
        self.closed = 0

    async def __call__(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Sequence[Piece], None]:
        assert session == "s"
        self.calls.append(list(requests))
        play = self.plays.pop(0) if self.plays else Play()
        told = [0] * len(requests)
        left = set(range(len(requests)))
        try:
            for step in play.steps:
                pieces = [
                    self._piece(requests, place % len(requests), told, left, count) for place, count in step.items()
                ]
                yield [piece for piece in pieces if piece is not None]
            if play.end == "crash":
                raise EngineCrashError("the engine died", "its traceback")
            if play.end == "infra":
                raise InfraError("no answer", "its traceback")
            last = sorted(left)
            yield [
                Piece(number, self._turn(requests[number], told[number], 0, FinishReason.ABORTED), True)
                if play.end == "abort"
                else Piece(number, self._turn(requests[number], told[number], None, None), True)
                for number in last
            ]
        finally:
            self.closed += 1

    def _piece(
        self, requests: Sequence[GenerateRequest], number: int, told: list[int], left: set[int], count: int
    ) -> Piece | None:
        if number not in left:
            return None
        turn = self._turn(requests[number], told[number], count, None)
        told[number] += len(turn.response_ids)
        if done := turn.finish_reason is not FinishReason.ABORTED:
            left.discard(number)
        return Piece(number, turn, done)

    def _turn(self, request: GenerateRequest, told: int, count: int | None, finish: FinishReason | None) -> Turn:
        """`count` tokens behind what was told; None: all that are left."""
        full = whole(request)
        first = told + (0 if request.so_far is None else len(request.so_far.response_ids))
        end = len(full.response_ids) if count is None else min(first + count, len(full.response_ids))
        at_end = end == len(full.response_ids)
        return head(full, end, first, finish or (full.finish_reason if at_end else FinishReason.ABORTED))


def head(full: Turn, end: int, first: int, finish: FinishReason) -> Turn:
    """Tokens `first` to `end` of a whole turn."""
    starts = [(str(span.version), span.first_token) for span in full.spans if span.first_token < end]
    return cut(full.response_ids[:end].tolist(), full.rollout_log_probs[:end].tolist(), starts, first, finish)


def request(name: str, max_tokens: int, prompt: int = 3, so_far: Turn | None = None) -> GenerateRequest:
    return GenerateRequest(name, np.asarray([prompt], dtype=np.int32), {"max_tokens": max_tokens}, so_far)


def same(turn: Turn, other: Turn) -> bool:
    return (
        turn.response_ids.tolist() == other.response_ids.tolist()
        and turn.rollout_log_probs.tolist() == other.rollout_log_probs.tolist()
        and turn.spans == other.spans
        and turn.finish_reason is other.finish_reason
    )


class Sleeps:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


plays = st.builds(
    Play,
    st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, 9), max_size=4), max_size=5),
    st.sampled_from(["whole", "abort", "crash", "infra"]),
)


@given(
    script=st.lists(plays, max_size=6),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    begun=st.integers(0, 10),
)
def test_whatever_happens_on_the_way_the_turns_are_those_of_an_undisturbed_run(
    script: list[Play], lengths: list[int], begun: int
) -> None:
    requests = [request(f"r{number}", length, prompt=number) for number, length in enumerate(lengths)]
    # Something is there already, as after a restart of the Rollouter; with few tokens it may be all of it.
    full = whole(requests[0])
    if begun > 0:
        count = min(begun, len(full.response_ids))
        finish = full.finish_reason if count == len(full.response_ids) else FinishReason.ABORTED
        requests[0] = request("r0", lengths[0], prompt=0, so_far=head(full, count, 0, finish))
    engine = ScriptedEngine(script)
    told: list[int] = []
    crashes: list[EngineCrashError] = []

    async def on_turn(number: int, turn: Turn) -> None:
        assert same(turn, whole(requests[number]))
        told.append(number)

    async def on_crash(error: EngineCrashError) -> None:
        crashes.append(error)

    async def run() -> list[Turn]:
        return await generate(
            engine, requests, session="s", max_attempts=9, on_turn=on_turn, on_crash=on_crash, sleep=Sleeps()
        )

    turns = anyio.run(run)
    assert all(same(turn, whole(request)) for turn, request in zip(turns, requests, strict=True))
    given_whole = {0} if begun >= len(full.response_ids) and begun > 0 else set()
    assert sorted(told) == sorted(set(range(len(requests))) - given_whole)
    assert engine.closed == len(engine.calls)
    # No token is asked for twice, under no id that was used before.
    ids = [one.request_id for call in engine.calls for one in call]
    assert len(ids) == len(set(ids))


async def test_aborted_turns_go_on_with_their_tokens_and_budget() -> None:
    engine = ScriptedEngine([Play([{0: 4, 1: 4}], "abort"), Play([{0: 4}], "abort")])
    short, long = await generate(engine, [request("a", 3), request("b", 10)], session="s", max_attempts=1)
    assert len(short.response_ids) == 3
    assert same(long, whole(request("b", 10)))
    assert versions_per_token(long.spans, 10).tolist() == [0] * 5 + [1] * 5
    # Only what is unfinished is sent again, under another id.
    assert [[call.request_id for call in calls] for calls in engine.calls] == [["a-1", "b-1"], ["b-2"], ["b-3"]]


async def test_aborts_without_a_token_cost_nothing() -> None:
    engine = ScriptedEngine([Play(end="abort")] * 50)
    (turn,) = await generate(engine, [request("a", 8)], session="s", max_attempts=1)
    assert same(turn, whole(request("a", 8)))


async def test_an_abort_after_the_last_token_is_an_end_by_length() -> None:
    full = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Piece], None]:
        yield [Piece(0, full, True)]

    (turn,) = await generate(call, [request("a", 5)], session="s", max_attempts=1)
    assert turn.finish_reason is FinishReason.LENGTH


async def test_failures_back_off_and_keep_the_tokens() -> None:
    sleep = Sleeps()
    engine = ScriptedEngine([Play([{0: 4}], "infra"), Play(end="infra"), Play(end="infra")])
    (turn,) = await generate(engine, [request("a", 6)], session="s", max_attempts=3, sleep=sleep)
    assert same(turn, whole(request("a", 6)))
    # The first one had brought tokens: it is no failure without a token.
    assert sleep.seconds == [1.0, 1.0, 2.0]
    assert [len(calls[0].so_far.response_ids) if calls[0].so_far else 0 for calls in engine.calls] == [0, 4, 4, 4]


async def test_a_spent_budget_says_so_and_keeps_the_cause() -> None:
    sleep = Sleeps()
    engine = ScriptedEngine([Play(end="infra")] * 3)
    with pytest.raises(InfraError, match="failed 3 times in a row, the last time: no answer") as raised:
        await generate(engine, [request("a", 6)], session="s", max_attempts=3, sleep=sleep)
    assert raised.value.cause == "its traceback"
    assert sleep.seconds == [1.0, 2.0]


async def test_crashes_count_only_where_nobody_judges_them() -> None:
    with pytest.raises(InfraError, match="failed 2 times in a row, the last time: the engine died"):
        await generate(
            ScriptedEngine([Play(end="crash")] * 9), [request("a", 6)], session="s", max_attempts=2, sleep=Sleeps()
        )
    crashes: list[str] = []

    async def on_crash(error: EngineCrashError) -> None:
        crashes.append(error.message)
        if len(crashes) == 5:
            raise PoisonError("that is enough")

    with pytest.raises(PoisonError, match="that is enough"):
        await generate(
            ScriptedEngine([Play(end="crash")] * 9),
            [request("a", 6)],
            session="s",
            max_attempts=2,
            on_crash=on_crash,
            sleep=Sleeps(),
        )
    assert crashes == ["the engine died"] * 5


async def test_a_crash_behind_the_last_token_of_all_is_none() -> None:
    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Piece], None]:
        turn = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)
        yield [Piece(0, turn, False)]
        raise EngineCrashError("the engine died")

    async def on_crash(error: EngineCrashError) -> None:
        raise AssertionError("nothing of it was lost")

    told: list[FinishReason] = []

    async def on_turn(number: int, turn: Turn) -> None:
        told.append(turn.finish_reason)

    (turn,) = await generate(
        call, [request("a", 5)], session="s", max_attempts=1, on_turn=on_turn, on_crash=on_crash, sleep=Sleeps()
    )
    assert turn.finish_reason is FinishReason.LENGTH
    assert told == [FinishReason.LENGTH]


@pytest.mark.parametrize("error", [DataError("too long"), BugError("books")])
async def test_other_errors_are_not_tried_again(error: Exception) -> None:
    calls = 0

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Piece], None]:
        nonlocal calls
        calls += 1
        raise error
        yield []

    with pytest.raises(type(error)):
        await generate(call, [request("a", 6)], session="s", max_attempts=3)
    assert calls == 1


async def test_what_ends_the_call_ends_the_replicas_part_of_it() -> None:
    engine = ScriptedEngine([Play([{0: 100}, {1: 1}])])

    async def on_turn(number: int, turn: Turn) -> None:
        raise InfraError("the turn log is full")

    with pytest.raises(InfraError, match="the turn log is full"):
        await generate(
            engine, [request("a", 3), request("b", 9)], session="s", max_attempts=1, on_turn=on_turn, sleep=Sleeps()
        )
    assert engine.closed == 1


async def test_a_replica_that_answers_short_is_a_bug() -> None:
    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Piece], None]:
        return
        yield []

    with pytest.raises(BugError, match="of 1 without the end of 1"):
        await generate(call, [request("a", 6)], session="s", max_attempts=3)
