"""The client of replicas on a scripted engine: resuming after aborts and crashes, and the retry budget."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import BugError, DataError, EngineCrashError, InfraError, PoisonError, ReplicaLeftError
from asyncrl.core.ports import EngineCrashed, GenerateRequest, GenerationEvent, TurnFinished
from asyncrl.core.types import FinishReason, Span, Turn, versions_per_token
from rollouter.serving.client import Delta, cut_delta, generate
from tests.fakes.engine import finished_turns

STOP_AT = 37
"""A response to prompt `p` stops at its first token that is a multiple of this."""


def token(prompt: int, place: int) -> int:
    return (prompt * 31 + place * 7) % 200 + 1


def version_of(place: int) -> int:
    return place // 5


def whole(request: GenerateRequest) -> Turn:
    """Return the response of an engine that is never interrupted."""
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
    return cut_delta(ids, log_probs, starts, 0, finish)


@dataclass
class CallScript:
    """The tokens that one call reports, and the way it ends."""

    steps: list[dict[int, int]] = field(default_factory=list)
    """The next event batches: for each request by position (modulo their number), its number of tokens."""
    end: str = "whole"
    """`whole` if every response is completed, `abort`, or an error: `crash`, `infra` or `left`."""


class ScriptedEngine:
    """Samples the tokens of `whole` from the end of `so_far`. After the end of its script it completes every
    response."""

    def __init__(self, plays: Sequence[CallScript] = ()) -> None:
        self.plays = list(plays)
        self.calls: list[list[GenerateRequest]] = []
        self.closed = 0

    async def __call__(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Sequence[Delta], None]:
        assert session == "s"
        self.calls.append(list(requests))
        play = self.plays.pop(0) if self.plays else CallScript()
        at = [0 if one.so_far is None else len(one.so_far.response_ids) for one in requests]
        left = set(range(len(requests)))

        def delta(number: int, count: int) -> Delta:
            full, first = whole(requests[number]), at[number]
            at[number] = min(first + count, len(full.response_ids))
            finish = FinishReason.ABORTED
            if at[number] == len(full.response_ids):
                finish = full.finish_reason
                left.discard(number)
            return Delta(number, head(full, at[number], first, finish), number not in left)

        try:
            for step in play.steps:
                counts = [(place % len(requests), count) for place, count in step.items()]
                yield [delta(number, count) for number, count in counts if number in left]
            if play.end == "crash":
                raise EngineCrashError("the engine died", "its traceback")
            if play.end == "infra":
                raise InfraError("no answer", "its traceback")
            if play.end == "left":
                raise ReplicaLeftError("the node was preempted")
            if play.end == "abort":
                yield [delta(number, 0)._replace(done=True) for number in sorted(left)]
            else:
                yield [delta(number, 10_000) for number in sorted(left)]
        finally:
            self.closed += 1


def head(full: Turn, end: int, first: int, finish: FinishReason) -> Turn:
    """Return the tokens from `first` to `end` of a whole turn."""
    starts = [(str(span.version), span.first_token) for span in full.spans if span.first_token < end]
    return cut_delta(full.response_ids[:end].tolist(), full.rollout_log_probs[:end].tolist(), starts, first, finish)


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
    CallScript,
    st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, 9), max_size=4), max_size=5),
    st.sampled_from(["whole", "abort", "crash", "infra", "left"]),
)


@given(
    script=st.lists(plays, max_size=6),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    begun=st.integers(0, 10),
)
def test_turns_survive_aborts_and_failures_unchanged(script: list[CallScript], lengths: list[int], begun: int) -> None:
    requests = [request(f"r{number}", length, prompt=number) for number, length in enumerate(lengths)]
    # As after a restart of the Rollouter, the first request already has tokens, possibly its whole response.
    full = whole(requests[0])
    if begun > 0:
        count = min(begun, len(full.response_ids))
        finish = full.finish_reason if count == len(full.response_ids) else FinishReason.ABORTED
        requests[0] = request("r0", lengths[0], prompt=0, so_far=head(full, count, 0, finish))
    engine = ScriptedEngine(script)
    finished: list[int] = []

    def observe(event: GenerationEvent) -> None:
        if isinstance(event, TurnFinished):
            assert same(event.turn, whole(requests[event.number]))
            finished.append(event.number)

    async def run() -> list[Turn]:
        return await finished_turns(generate(engine, requests, session="s", max_attempts=9, sleep=Sleeps()), observe)

    turns = anyio.run(run)
    begun_whole = {0} if begun >= len(full.response_ids) and begun > 0 else set()
    assert sorted(finished) == sorted(set(range(len(requests))) - begun_whole)
    assert len(turns) == len(finished)
    assert engine.closed == len(engine.calls)
    # Every request of a call has a new id.
    ids = [one.request_id for call in engine.calls for one in call]
    assert len(ids) == len(set(ids))


async def test_aborted_turns_resume_with_their_tokens_and_budget() -> None:
    engine = ScriptedEngine([CallScript([{0: 4, 1: 4}], "abort"), CallScript([{0: 4}], "abort")])
    short, long = await finished_turns(
        generate(engine, [request("a", 3), request("b", 10)], session="s", max_attempts=1)
    )
    assert len(short.response_ids) == 3
    assert same(long, whole(request("b", 10)))
    assert versions_per_token(long.spans, 10).tolist() == [0] * 5 + [1] * 5
    # Only unfinished requests are sent again, each with a new id.
    assert [[call.request_id for call in calls] for calls in engine.calls] == [["a-1", "b-1"], ["b-2"], ["b-3"]]


async def test_aborts_without_a_token_do_not_count_as_failures() -> None:
    engine = ScriptedEngine([CallScript(end="abort")] * 50)
    (turn,) = await finished_turns(generate(engine, [request("a", 8)], session="s", max_attempts=1))
    assert same(turn, whole(request("a", 8)))


async def test_an_abort_after_the_last_token_finishes_the_turn_by_length() -> None:
    full = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Delta], None]:
        yield [Delta(0, full, True)]

    (turn,) = await finished_turns(generate(call, [request("a", 5)], session="s", max_attempts=1))
    assert turn.finish_reason is FinishReason.LENGTH


async def test_failures_back_off_and_keep_the_tokens() -> None:
    sleep = Sleeps()
    engine = ScriptedEngine([CallScript([{0: 4}], "infra"), CallScript(end="infra"), CallScript(end="infra")])
    (turn,) = await finished_turns(generate(engine, [request("a", 6)], session="s", max_attempts=3, sleep=sleep))
    assert same(turn, whole(request("a", 6)))
    # The first call reported tokens, so it does not count as a failure.
    assert sleep.seconds == [1.0, 1.0, 2.0]
    assert [len(calls[0].so_far.response_ids) if calls[0].so_far else 0 for calls in engine.calls] == [0, 4, 4, 4]


async def test_the_error_after_the_last_attempt_has_the_cause_of_that_attempt() -> None:
    sleep = Sleeps()
    engine = ScriptedEngine([CallScript(end="infra")] * 3)
    with pytest.raises(InfraError, match="failed 3 times in a row, the last time: no answer") as raised:
        await finished_turns(generate(engine, [request("a", 6)], session="s", max_attempts=3, sleep=sleep))
    assert raised.value.cause == "its traceback"
    assert sleep.seconds == [1.0, 2.0]


async def test_crashes_are_retried_until_the_consumer_ends_the_call() -> None:
    crashes: list[str] = []

    def observe(event: GenerationEvent) -> None:
        if isinstance(event, EngineCrashed):
            crashes.append(event.error.message)
            if len(crashes) == 5:
                raise PoisonError("five crashes")

    engine = ScriptedEngine([CallScript(end="crash")] * 9)
    events = generate(engine, [request("a", 6)], session="s", max_attempts=2, sleep=Sleeps())
    with pytest.raises(PoisonError, match="five crashes"):
        await finished_turns(events, observe)
    assert crashes == ["the engine died"] * 5


async def test_a_crash_after_the_last_token_is_ignored() -> None:
    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Delta], None]:
        turn = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)
        yield [Delta(0, turn, False)]
        raise EngineCrashError("the engine died")

    (turn,) = await finished_turns(generate(call, [request("a", 5)], session="s", max_attempts=1, sleep=Sleeps()))
    assert turn.finish_reason is FinishReason.LENGTH


async def test_a_partial_turn_with_all_its_tokens_is_finished_without_a_call() -> None:
    engine = ScriptedEngine()
    so_far = Turn(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32), (Span(0, 3),), FinishReason.ABORTED)
    (turn,) = await finished_turns(generate(engine, [request("a", 5, so_far=so_far)], session="s", max_attempts=1))
    assert turn.finish_reason is FinishReason.LENGTH and not engine.calls


@pytest.mark.parametrize("error", [DataError("too long"), BugError("counts")])
async def test_other_errors_are_not_retried(error: Exception) -> None:
    calls = 0

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Delta], None]:
        nonlocal calls
        calls += 1
        raise error
        yield []

    with pytest.raises(type(error)):
        await finished_turns(generate(call, [request("a", 6)], session="s", max_attempts=3))
    assert calls == 1


async def test_closing_the_iterator_ends_the_call_to_the_replica() -> None:
    engine = ScriptedEngine([CallScript([{0: 100}, {1: 1}])])
    events = generate(engine, [request("a", 3), request("b", 9)], session="s", max_attempts=1, sleep=Sleeps())
    assert isinstance(await anext(events), TurnFinished)
    await events.aclose()
    assert engine.closed == 1


async def test_a_stream_that_ends_before_its_requests_is_a_bug() -> None:
    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Sequence[Delta], None]:
        return
        yield []

    with pytest.raises(BugError, match="a call of 1 requests before 1 of them ended"):
        await finished_turns(generate(call, [request("a", 6)], session="s", max_attempts=3))


async def test_replicas_that_leave_use_up_no_attempt() -> None:
    engine, sleeps = ScriptedEngine([CallScript(end=end) for end in ("left", "left", "infra", "left")]), Sleeps()
    calls = generate(engine, [request("r", 9)], session="s", max_attempts=2, sleep=sleeps)
    (turn,) = await finished_turns(calls)
    assert same(turn, whole(request("r", 9)))
    assert len(engine.calls) == 5 and sleeps.seconds == [1.0] * 4
