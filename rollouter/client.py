"""A generate call that survives weight syncs and dying engines. Pure but for the calls it is given.

An aborted turn is resubmitted with its tokens, as often as it takes. So is one whose engine failed, with what was told
of it until then; a try that failed without a single token costs one out of a budget, which the next token restores.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import anyio

from asyncrl.failures import BugError, EngineCrashError, InfraError
from asyncrl.ports import GenerateRequest, OnCrash, OnCut, OnPlace, OnTurn
from asyncrl.profiling import Span, profile
from asyncrl.types import FinishReason, Turn, join_turns
from rollouter.request_ids import call_id
from rollouter.serving.pieces import Piece, Taken, Told

FIRST_BACKOFF_S = 1.0


class CallReplica(Protocol):
    """One call to one replica: who has taken it, then what it samples, piece by piece; its end is that of all its
    requests. In between, the replica's events (`profiling`)."""

    def __call__(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Taken | Told | Sequence[Piece], None]: ...


async def generate(
    call: CallReplica,
    requests: Sequence[GenerateRequest],
    *,
    session: str,
    max_attempts: int,
    on_turn: OnTurn | None = None,
    on_place: OnPlace | None = None,
    on_crash: OnCrash | None = None,
    on_cut: OnCut | None = None,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> list[Turn]:
    """Whole turns, in order, with tokens, log-probs and spans of all their parts merged.

    Args:
        call: Reaches a replica.
        requests: Their `max_tokens` counts all tokens of a turn, those of `so_far` included. `so_far` of one that is
            complete is its answer.
        session: Keeps a conversation on its replica.
        max_attempts: Calls in a row that may fail without a token before it is given up. Aborts by a weight sync are
            no failures.
        on_turn: Awaited once for each request that this call completes, as soon as it is known.
        on_place: See `ports.EngineFleet.generate`.
        on_crash: Awaited when an engine died that had requests of this call and had not completed them all. What it
            lets pass is tried again at no cost; what it raises ends the call. Without it a crash is a failure.
        on_cut: See `ports.EngineFleet.generate`.
        sleep: Waits between failed calls: 1 s, 2 s, 4 s, …

    Raises:
        InfraError: the budget is spent.
        DataError: the engine refuses a prompt.
    """
    turns = [request.so_far for request in requests]
    try:
        return await _generate(call, requests, turns, session, max_attempts, on_turn, on_place, on_crash, sleep)
    except anyio.get_cancelled_exc_class():
        for index, turn in enumerate(turns):
            if on_cut is not None and turn is not None and not _done(turn, requests[index]):
                on_cut(index, turn)
        raise


async def _generate(
    call: CallReplica,
    requests: Sequence[GenerateRequest],
    turns: list[Turn | None],
    session: str,
    max_attempts: int,
    on_turn: OnTurn | None,
    on_place: OnPlace | None,
    on_crash: OnCrash | None,
    sleep: Callable[[float], Awaitable[None]],
) -> list[Turn]:
    """See `generate`. `turns` is what each request has so far, at any time."""
    pending = [index for index, turn in enumerate(turns) if not _done(turn, requests[index])]
    failures = 0
    calls = 0
    while pending:
        calls += 1
        failure: InfraError | None = None
        progress = False
        batch = [_resubmission(requests[index], turns[index], calls) for index in pending]
        unended = set(pending)
        replica = ""
        async with _call_span(batch) as span, aclosing(call(batch, session=session)) as told:
            while True:
                try:
                    news = await anext(told, None)
                except InfraError as error:
                    failure = error
                    span.add(error=type(error).__name__)
                    break
                if isinstance(news, Taken):
                    replica = news.replica
                    span.add(replica=replica)
                    if on_place is not None:
                        on_place(replica)
                    continue
                if isinstance(news, Told):
                    profile.take(f"replica-{news.replica}", news.events, sent=news.sent)
                    continue
                if news is None:
                    if unended:
                        raise BugError(f"a replica ended a call of {len(batch)} without the end of {len(unended)}")
                    break
                for piece in news:
                    index = pending[piece.number]
                    turn = join_turns(turns[index], piece.turn)
                    turns[index] = turn
                    progress = progress or len(piece.turn.response_ids) > 0
                    if piece.done:
                        unended.discard(index)
                        if on_turn is not None and _done(turn, requests[index]):
                            await on_turn(index, _finished(turn, requests[index]))
        if isinstance(failure, EngineCrashError):
            failure.replica = failure.replica or replica
        elif on_place is not None:
            on_place("")
        # An engine that failed right behind a turn's last token has not told of its end.
        for index in sorted(unended):
            if on_turn is not None and _done(turns[index], requests[index]):
                await on_turn(index, _finished(turns[index], requests[index]))
        pending = [index for index in pending if not _done(turns[index], requests[index])]
        if failure is None or not pending:
            continue
        if progress:
            failures = 0
        if isinstance(failure, EngineCrashError) and on_crash is not None:
            await on_crash(failure)
        elif not progress:
            failures += 1
            if failures >= max_attempts:
                message = f"generation failed {failures} times in a row, the last time: {failure.message}"
                raise InfraError(message, failure.cause) from failure
        await sleep(FIRST_BACKOFF_S * 2 ** max(0, failures - 1))
    return [_finished(turn, request) for turn, request in zip(turns, requests, strict=True)]


def _call_span(batch: Sequence[GenerateRequest]) -> Span:
    request_id = batch[0].request_id if len(batch) == 1 else None
    return profile.span("generate.call", requests=len(batch), request=request_id)


def _resubmission(request: GenerateRequest, so_far: Turn | None, calls: int) -> GenerateRequest:
    """The request with what it has so far, under an id of its own: an engine may still hold the one before."""
    return replace(request, request_id=call_id(request.request_id, calls), so_far=so_far)


def _done(turn: Turn | None, request: GenerateRequest) -> bool:
    if turn is None:
        return False
    return turn.finish_reason is not FinishReason.ABORTED or len(turn.response_ids) >= request.sampling["max_tokens"]


def _finished(turn: Turn | None, request: GenerateRequest) -> Turn:
    """An abort that hit after the last token of the budget is an end by length."""
    if turn is None:
        raise BugError(f"request {request.request_id} ended without a turn")
    return turn if turn.finish_reason is not FinishReason.ABORTED else replace(turn, finish_reason=FinishReason.LENGTH)
